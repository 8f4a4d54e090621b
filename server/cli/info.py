"""``gemserve info``: what a model is made of and how its cache would be laid out on this machine, without
loading any weights. MODEL may also be a size such as 4b, which needs no checkpoint at all."""

import argparse
import json
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from server.cli.common import add_command, settings_of
from server.settings.settings import Settings, add_arguments

if TYPE_CHECKING:
    from model.interface.kv_cache_spec import KVCacheSpec
    from server.cli.common import Subparsers
    from server.loading.memory_plan import PlanReport

PLAN_SETTINGS = (
    "model",
    "dtype",
    "quantization",
    "device",
    "tensor_parallel_size",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "block_size",
    "kv_cache_memory",
    "prefix_caching",
    "cache_dir",
)


def add_parser(commands: "Subparsers") -> None:
    parser = add_command(
        commands, "info", "show a model's layers, sizes and memory plan without loading its weights", run
    )
    parser.add_argument("--json", action="store_true", help="Print JSON.")
    parser.add_argument(
        "--layouts",
        action="store_true",
        help="Instead: how many requests of --max-model-len tokens (32768 by default) fit --kv-cache-memory "
        "(8GiB by default), for every size, with two cache pools and without.",
    )
    add_arguments(parser, PLAN_SETTINGS)


def run(arguments: argparse.Namespace) -> int:
    if arguments.layouts:
        print(layouts(settings_of(arguments), as_json=arguments.json))
        return 0
    report = report_for(settings_of(arguments))
    print(json.dumps(report.as_dict(), indent=2) if arguments.json else report.text())
    return 0


def layouts(settings: Settings, *, as_json: bool) -> str:
    from model.precision import TYPE_BYTES
    from server.loading.layouts import as_dicts, as_text, compare_layouts

    budget, num_tokens = settings.kv_cache_memory or 8 << 30, settings.max_model_len or 32_768
    rows = compare_layouts(
        budget,
        num_tokens,
        block_size=settings.block_size,
        dtype_size=TYPE_BYTES.get(settings.dtype, TYPE_BYTES["bfloat16"]),
        max_num_batched_tokens=settings.max_num_batched_tokens,
    )
    return json.dumps(as_dicts(rows), indent=2) if as_json else as_text(rows, budget, num_tokens)


def report_for(settings: Settings) -> "PlanReport":
    """Raises ConfigError or CheckpointError for a model that cannot be served, or a cache that is too
    small."""
    from model.config.gemma3_config import SIZES
    from model.interface.kv_cache_spec import ceil_div
    from model.ops.cpu.build import has_kernels
    from model.parallel.split import divided_config
    from model.precision import (
        TYPE_BYTES,
        cache_type,
        compute_type,
        kept_quantization,
        resolve_quantization,
        weight_bytes,
    )
    from server.loading.memory_plan import make_report

    stored_types: Mapping[str, str] = {}
    if settings.model is not None and settings.model in SIZES:
        config, name, weight_format = SIZES[settings.model], f"gemma-3-{settings.model}", "no checkpoint"
    else:
        from model.checkpoint.open import open_checkpoint

        checkpoint = open_checkpoint(settings.model, cache_dir=settings.cache_dir)
        config, name, weight_format = checkpoint.config, checkpoint.name, checkpoint.weight_format
        stored_types = checkpoint.stored_types
        checkpoint.close()
    device = "cuda" if settings.device == "cuda" else "cpu"
    dtype = compute_type(settings.dtype, device)
    asked = resolve_quantization(settings.quantization, settings.dtype)
    quantization = kept_quantization(asked, device, has_kernels=has_kernels())
    size = settings.tensor_parallel_size
    part = divided_config(config, size)
    spec = part.kv_cache_spec(settings.block_size, TYPE_BYTES[cache_type(dtype, quantization, device)])
    num_weight_bytes = weight_bytes(
        part,
        compute=dtype,
        quantization=quantization,
        device=device,
        has_kernels=has_kernels(),
        vocabulary_rows=ceil_div(config.vocab_size, size),
        stored_types=stored_types,
    )
    max_model_len = min(
        settings.max_model_len or config.max_position_embeddings, config.max_position_embeddings
    )
    plan = spec.plan(
        settings.kv_cache_memory or _default_budget(spec, settings, num_weight_bytes, max_model_len),
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_model_len=max_model_len,
        prefix_caching=settings.prefix_caching,
    )
    return make_report(
        config,
        spec,
        plan,
        name=name,
        weight_bytes=num_weight_bytes,
        weight_format=weight_format,
        dtype=dtype,
        max_num_seqs=settings.max_num_seqs,
        max_model_len=max_model_len,
        tensor_parallel_size=size,
    )


def _default_budget(spec: "KVCacheSpec", settings: Settings, weight_bytes: int, max_model_len: int) -> int:
    """What the server would take on this machine; where that is too little, the least that holds one longest
    request."""
    from model.host.memory import available_memory
    from model.interface.kv_cache_spec import ceil_div
    from server.loading.memory_plan import default_kv_cache_memory

    local_blocks = spec.local_pool_blocks(settings.max_num_seqs, settings.max_num_batched_tokens)
    global_blocks = 1 + spec.blocks(max_model_len).global_blocks
    global_bytes = global_blocks * spec.global_block_bytes
    if settings.prefix_caching:  # KVCacheSpec.plan gives a quarter of the rest to the local pool
        global_bytes = ceil_div(4 * global_bytes, 3)
    least = local_blocks * spec.local_block_bytes + global_bytes
    free = available_memory() // settings.tensor_parallel_size - weight_bytes
    if free > 0 and default_kv_cache_memory(free) >= least:
        return default_kv_cache_memory(free)
    print(
        "gemserve: this machine has too little memory for these settings; the plan is for a cache of "
        f"{least:,} bytes, the least that holds one request of {max_model_len:,} tokens",
        file=sys.stderr,
    )
    return least
