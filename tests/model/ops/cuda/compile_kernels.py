"""Compiles the kernels for real GPUs, without having one: what the interpreter lets pass (types, shared
memory) fails here.

    python -m tests.model.ops.cuda.compile_kernels            every launch of every size, Ampere to Blackwell
    python -m tests.model.ops.cuda.compile_kernels --quick    two kernels, one size, one architecture each

The operations run on tensors of the meta device, and their launches are compiled instead of made: so what is
compiled is what a GPU would be given. Has to be a process of its own, since others interpret the kernels.
"""

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from model.ops.cuda.triton import elementwise, int8_linear, paged_attention, sampling
from model.ops.interface import AttentionMetadata

# Bytes of shared memory that a program may have on the smallest card of the generation: consumer cards have
# less than an A100, and Blackwell's (12.0) less than its data centre cards (10.0).
SHARED_MEMORY = {80: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
QUICK = {80: "prefill_kernel", 90: "search_kernel"}
PROCESSORS = 132
TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float64: "fp64",
    torch.int8: "i8",
    torch.int32: "i32",
    torch.int64: "i64",
}
# hidden size, intermediate size, query heads, KV heads, head size, window
SIZES = {
    "270m": (640, 2048, 4, 1, 256, 512),
    "1b": (1152, 6912, 4, 1, 256, 512),
    "4b": (2560, 10240, 8, 4, 256, 1024),
    "12b": (3840, 15360, 16, 8, 256, 1024),
    "27b": (5376, 21504, 32, 16, 128, 1024),
}
Launch = tuple[Any, dict[str, Any], dict[str, Any]]  # the kernel, its arguments, its options


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def run_layers(size: str, dtype: torch.dtype, device: paged_attention.Device) -> None:
    hidden, intermediate, num_heads, num_kv_heads, head_dim, window = SIZES[size]
    x = meta(100, hidden, dtype=dtype)
    elementwise.rms_norm(x, meta(hidden), 1e-6)
    elementwise.norm_add_norm(x, x.clone(), meta(hidden), meta(hidden), 1e-6)
    elementwise.geglu(meta(100, 2 * intermediate, dtype=dtype))
    for num_tokens in (1, 32, 100):
        x = meta(num_tokens, intermediate, dtype=dtype)
        int8_linear.int8_linear(
            x, meta(hidden, intermediate, dtype=torch.int8), meta(hidden), device.num_processors
        )
    cache = meta(1000, 16, num_kv_heads, head_dim, dtype=dtype)
    for num_tokens in (1, 100):
        elementwise.qk_norm_rope_cache_write(
            meta(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype),
            meta(head_dim),
            meta(head_dim),
            meta(num_tokens, head_dim // 2),
            meta(num_tokens, head_dim // 2),
            cache,
            cache,
            meta(num_tokens, dtype=torch.int64),
            1e-6,
        )
    for width in (None, window):
        for num_queries, num_seqs in ((1, 1), (1, 256), (50, 2)):
            metadata = AttentionMetadata(
                window=width,
                block_size=16,
                query_lens=(num_queries,) * num_seqs,
                context_lens=(1000,) * num_seqs,
                query_start=meta(num_seqs + 1, dtype=torch.int32),
                context_lens_tensor=meta(num_seqs, dtype=torch.int32),
                block_table=meta(num_seqs, 63, dtype=torch.int32),
                slot_mapping=meta(num_queries * num_seqs, dtype=torch.int64),
            )
            query = meta(num_queries * num_seqs, num_heads, head_dim, dtype=dtype)
            paged_attention.paged_attention(query, cache, cache, metadata, 0.0625, device)


def run_sampling() -> None:
    logits, each, wide = meta(8, 262144), meta(8), meta(8, dtype=torch.float64)
    sampling.finite_and_likeliest(logits)
    sampling.draw(logits, each, wide, each, wide)
    sampling.top_candidates(logits, 64, each)


def launches_of(run: Callable[[], None]) -> list[Launch]:
    """Every kernel that is launched, as often as with different constants."""
    launches: dict[str, Launch] = {}

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        arguments = dict(zip(self.arg_names, args, strict=False))
        arguments |= {name: value for name, value in kwargs.items() if name in self.arg_names}
        options = {name: value for name, value in kwargs.items() if name not in self.arg_names}
        launches.setdefault(
            f"{self.fn.__name__} {source(self, arguments).signature} {constants(self, arguments)}",
            (self, arguments, options),
        )

    with torch.inference_mode():
        original, JITFunction.run = JITFunction.run, record
        try:
            run()
        finally:
            JITFunction.run = original
    return list(launches.values())


def constants(kernel: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    return {param.name: arguments[param.name] for param in kernel.params if param.is_constexpr}


def source(kernel: Any, arguments: dict[str, Any]) -> ASTSource:
    """What a launch would have compiled for these arguments: aligned tensors, and integers specialised as
    Triton does."""
    signature: dict[str, str] = {}
    fixed: dict[tuple[int], Any] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for index, param in enumerate(kernel.params):
        value = arguments[param.name]
        if param.is_constexpr:
            signature[param.name], fixed[index,] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[param.name] = "*" + TYPES[value.dtype]
            if not param.do_not_specialize_on_alignment:
                attributes[index,] = [["tt.divisibility", 16]]
        elif isinstance(value, int):
            if value == 1 and not param.do_not_specialize:
                signature[param.name], fixed[index,] = "constexpr", 1
                continue
            signature[param.name] = "i32"
            if value % 16 == 0 and not param.do_not_specialize:
                attributes[index,] = [["tt.divisibility", 16]]
        else:
            signature[param.name] = "fp32"
    return ASTSource(kernel, signature, fixed, attributes)


def check(launches: list[Launch], capability: int, *, quick: bool) -> list[str]:
    """What is wrong, a line each. Prints a line per kernel. ``quick``: the first launch of one kernel
    alone."""
    faults = []
    seen: set[str] = set()
    for kernel, arguments, options in launches:
        if quick and (kernel.fn.__name__ in seen or kernel.fn.__name__ != QUICK[capability]):
            continue
        seen.add(kernel.fn.__name__)
        began = time.process_time()
        compiled = triton.compile(
            source(kernel, arguments), target=GPUTarget("cuda", capability, 32), options=options
        )
        shared = compiled.metadata.shared
        name = f"{kernel.fn.__name__} for sm_{capability}"
        sizes = {
            key: constants(kernel, arguments).get(key)
            for key in ("HEAD_DIM", "WINDOW", "GROUP", "NUM_SPLITS", "SIZE", "BY_MASS")
        }
        sizes = {key: value for key, value in sizes.items() if value is not None}
        print(
            f"{name}: {shared} bytes of shared memory, {time.process_time() - began:.1f} s; {sizes}",
            flush=True,
        )
        if shared > SHARED_MEMORY[capability]:
            faults.append(f"{name} wants {shared} bytes of shared memory: {sizes}")
    return faults


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    faults: list[str] = []
    for capability in SHARED_MEMORY:
        device = paged_attention.Device.of(
            SimpleNamespace(multi_processor_count=PROCESSORS, major=capability // 10)
        )
        for size in SIZES:
            for dtype in (torch.bfloat16, torch.float32):
                if not quick or (size, capability, dtype) == ("270m", 80, torch.bfloat16):
                    faults += check(
                        launches_of(partial(run_layers, size, dtype, device)), capability, quick=quick
                    )
        if not quick or capability == 90:
            faults += check(launches_of(run_sampling), capability, quick=quick)
    print("\n".join(faults) or "All kernels compile and fit.")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
