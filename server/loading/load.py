"""From settings to a loaded engine: checkpoint, tokenizer, weights, cache plan, engine. Everything slow about
a start is here.

Phases are reported by name as they begin, so that the readiness probe can say what is being waited for.
Importing this module imports no torch; calling ``load_engine`` does.
"""

import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from model.host.preload import preload_libraries
from model.interface.errors import ConfigError
from model.interface.running_batch import RunningBatch
from server.engine.async_engine import AsyncEngine, EngineLimits
from server.engine.core import EngineCore
from server.engine.kv.kv_manager import KVCacheManager
from server.engine.scheduler.scheduler import SchedulerConfig
from server.loading.memory_plan import default_kv_cache_memory, effective_max_model_len, make_report
from server.settings.settings import Settings

if TYPE_CHECKING:
    from model.checkpoint.base import Checkpoint
    from model.execution.runner import ModelRunner
    from model.execution.weight_cache import WeightCache
    from model.parallel.ranks import Ranks
    from server.grammar.compiler import GrammarCompiler
    from server.text.tokenizer import Tokenizer

logger = logging.getLogger("gemserve.load")


@dataclass(slots=True)
class LoadedEngine:
    """What the HTTP layer needs of a loaded model. The engine's thread is not started yet."""

    engine: AsyncEngine
    tokenizer: "Tokenizer"
    grammars: "GrammarCompiler"
    model_names: list[str]  # the first one is used in answers
    hidden_size: int  # dimensions of an embedding
    default_sampling: dict[str, Any]  # of generation_config.json
    fingerprint: str  # identity of weights, dtype and version of the computation
    model_info: dict[str, str]  # labels of the info metric
    cache_info: dict[str, str]
    startup_seconds: dict[str, float] = field(default_factory=dict)  # by phase
    # Bytes by what they hold; only the engine's thread calls it once that runs.
    read_memory: Callable[[], dict[str, int]] = dict
    # Has a callback told of a fault outside the engine's steps: the end of a process that holds a part of the
    # model.
    watch: Callable[[Callable[[BaseException], None]], None] = lambda callback: None
    # ends such processes, once the engine's thread has ended; None: there are none
    close: Callable[[], None] | None = None


class _Phases:
    """Times each phase from its name's report to the next one's."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self.seconds: dict[str, float] = {}
        self._report = report
        self._name: str | None = None
        self._began = 0.0

    def enter(self, name: str | None) -> None:
        now = time.monotonic()
        if self._name is not None:
            self.seconds[self._name] = round(now - self._began, 3)
        self._name, self._began = name, now
        if name is not None:
            self._report(name)

    def split(self, name: str, part: str, seconds: float) -> None:
        """A part of a phase that has ended gets a name of its own."""
        self.seconds[name] = round(max(0.0, self.seconds[name] - seconds), 3)
        self.seconds[part] = round(seconds, 3)


def open_weight_cache(settings: Settings, checkpoint: "Checkpoint | None") -> "WeightCache | None":
    """Begins to read the packed weights of an earlier start in a thread, if there are any. None where none
    are kept: also for parts of a model, of which every rank packs its own."""
    if checkpoint is None or not settings.weight_cache or settings.tensor_parallel_size > 1:
        return None
    from model.execution.weight_cache import WeightCache, weight_cache_key
    from model.host.disk_cache import default_cache_dir

    key = weight_cache_key(
        checkpoint, dtype=settings.dtype, device=settings.device, quantization=settings.quantization
    )
    return None if key is None else WeightCache((settings.cache_dir or default_cache_dir()) / "weights", key)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template {file} is not readable text: {error}") from None


def captures_graphs(settings: Settings) -> bool:
    """Ranks that share a model would have to capture and replay together, which they do not: they run every
    step as it is."""
    return settings.cuda_graphs and settings.tensor_parallel_size == 1


def schedules_ahead(settings: Settings, device_type: str) -> bool:
    """Whether the next step is launched before the results of the last one are read. Ranks that share a model
    take a step at a time; a CPU would only deliver later."""
    if settings.tensor_parallel_size > 1:
        if settings.async_scheduling:
            logger.warning(
                "--async-scheduling has no effect with --tensor-parallel-size %d",
                settings.tensor_parallel_size,
            )
        return False
    return device_type == "cuda" if settings.async_scheduling is None else settings.async_scheduling


def cache_budget(settings: Settings, runner: "ModelRunner") -> tuple[int, str]:
    """Bytes for the cache, and the setting that they come from: as was said, else what a CUDA device has
    left, else a share of the host's memory. To be called before there is a cache."""
    if settings.kv_cache_memory is not None:
        return settings.kv_cache_memory, "--kv-cache-memory"
    from model.execution.device_memory import profile_cuda_memory

    profile = profile_cuda_memory(
        runner,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_num_seqs=settings.max_num_seqs,
        max_model_len=min(settings.max_model_len or sys.maxsize, runner.config.max_position_embeddings),
        cuda_graphs=captures_graphs(settings),
    )
    if profile is None:
        return default_kv_cache_memory(runner.free_memory()), "--kv-cache-memory"
    return profile.cache_bytes(settings.gpu_memory_utilization), "--gpu-memory-utilization"


def load_engine(
    settings: Settings,
    report_phase: Callable[[str], None] = lambda phase: None,
    checkpoint: "Checkpoint | None" = None,
    weight_cache: "WeightCache | None" = None,
) -> LoadedEngine:
    """Load what the settings name. ``checkpoint``: one that is already open, ``weight_cache``: that of its
    weights, both None to have them opened here. Raises ModelError with the remedy in its text."""
    if settings.tensor_parallel_size == 1:
        return _load_engine(settings, report_phase, checkpoint, weight_cache, None)
    from model.parallel.ranks import Ranks

    ranks = Ranks(settings.tensor_parallel_size)  # they import torch while the checkpoint is read
    try:
        return ranks.guarded(lambda: _load_engine(settings, report_phase, checkpoint, weight_cache, ranks))
    except BaseException:
        ranks.close()
        raise


def _load_engine(
    settings: Settings,
    report_phase: Callable[[str], None],
    checkpoint: "Checkpoint | None",
    weight_cache: "WeightCache | None",
    ranks: "Ranks | None",
) -> LoadedEngine:
    phases = _Phases(report_phase)
    phases.enter("checkpoint")
    preloading = preload_libraries()  # beside the tokenizer, which keeps the interpreter's lock for a second
    from model.checkpoint.open import open_checkpoint
    from server.grammar.compiler import GrammarCompiler
    from server.text.template.conversation import ChatTemplateError
    from server.text.tokenizer import Tokenizer

    if checkpoint is None:
        checkpoint = open_checkpoint(settings.model, cache_dir=settings.cache_dir)
        weight_cache = open_weight_cache(settings, checkpoint)
    phases.enter("tokenizer")
    config = checkpoint.config
    try:
        tokenizer = Tokenizer.from_file(
            checkpoint.tokenizer_file,
            vocab_size=config.vocab_size,
            bos_token_id=config.bos_token_id,
            eos_token_ids=config.eos_token_ids,
            chat_template=checkpoint.chat_template
            if settings.chat_template is None
            else _read(settings.chat_template),
            tokens=checkpoint.tokens,
        )
    except ChatTemplateError as error:
        raise ConfigError(f"{settings.chat_template or checkpoint.name}: {error}") from None
    if tokenizer.uses_builtin_chat_template:
        logger.info(
            "the model has no chat template: chats use the built-in one of Gemma 3; "
            "--chat-template takes another one"
        )
    grammars = GrammarCompiler(tokenizer)
    phases.enter("import")
    if preloading is not None:
        preloading.join()
    from model.execution.cuda_graphs import padded_sizes
    from model.execution.runner import ModelRunner

    if ranks is not None:
        from model.parallel.runner import ParallelRunner

    phases.enter("weights")
    load: Callable[..., ModelRunner] = partial(ModelRunner.load, weight_cache=weight_cache)
    if ranks is not None:
        load = partial(ParallelRunner.load_on, ranks)
    runner = load(
        checkpoint,
        dtype=settings.dtype,
        device=settings.device,
        block_size=settings.block_size,
        num_threads=settings.num_threads,
        quantization=settings.quantization,
        num_valid_tokens=tokenizer.num_known_tokens,
    )
    name, weight_format, fingerprint = checkpoint.name, checkpoint.weight_format, checkpoint.fingerprint
    default_sampling = dict(checkpoint.default_sampling)
    checkpoint.close()

    phases.enter("cache")
    phases.split("weights", "compile", runner.compile_seconds)
    memory, setting = cache_budget(settings, runner)
    plan = runner.spec.plan(
        memory,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_model_len=settings.max_model_len or config.max_position_embeddings,
        prefix_caching=settings.prefix_caching,
        setting=setting,
    )
    max_model_len = effective_max_model_len(config, plan, settings.max_model_len)
    logger.info(
        "plan\n%s",
        make_report(
            config,
            runner.spec,
            plan,
            name=name,
            weight_bytes=runner.weight_bytes,
            weight_format=weight_format,
            dtype=runner.dtype,
            max_num_seqs=settings.max_num_seqs,
            max_model_len=settings.max_model_len,
            tensor_parallel_size=settings.tensor_parallel_size,
        ).text(),
    )
    runner.allocate_cache(plan)
    phases.enter("warmup")
    runner.warm_up()
    if captures_graphs(settings):
        runner.capture_graphs(padded_sizes(settings.max_num_seqs), max_model_len)
    phases.enter(None)

    batch = RunningBatch(settings.max_num_seqs, runner.spec.global_blocks(max_model_len))
    kv = KVCacheManager(
        runner.spec,
        batch,
        plan.num_global_blocks,
        plan.num_local_blocks,
        prefix_caching=settings.prefix_caching,
    )
    scheduler_config = SchedulerConfig(settings.max_num_seqs, settings.max_num_batched_tokens, max_model_len)
    core = EngineCore(
        runner,
        kv,
        scheduler_config,
        debug_invariants=settings.debug_invariants,
        sample_seconds=lambda: runner.sample_seconds,
        async_scheduling=schedules_ahead(settings, runner.ops.device.type),
    )
    engine = AsyncEngine(core, EngineLimits(max_model_len, settings.max_num_seqs, plan.capacity_tokens))
    names = list(settings.served_model_name) or [name]
    loaded = LoadedEngine(
        engine=engine,
        tokenizer=tokenizer,
        grammars=grammars,
        model_names=names,
        hidden_size=config.hidden_size,
        default_sampling=default_sampling,
        fingerprint=fingerprint,
        model_info={
            "model": names[0],
            "architecture": "Gemma3ForCausalLM",
            "dtype": runner.dtype,
            "quantization": runner.quantization,
            "max_model_len": str(max_model_len),
            "fingerprint": fingerprint,
        },
        cache_info={
            "block_size": str(settings.block_size),
            "num_gpu_blocks": str(plan.num_global_blocks),
            "kv_dtype": str(runner.ops.cache_dtype).removeprefix("torch."),
            "prefix_caching": str(settings.prefix_caching).lower(),
        },
        startup_seconds=phases.seconds,
        read_memory=runner.memory_bytes,
    )
    if ranks is not None:
        assert isinstance(runner, ParallelRunner)
        loaded.watch, loaded.close = ranks.on_death, runner.close
    return loaded
