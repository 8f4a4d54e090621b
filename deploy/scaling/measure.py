"""Measures the steps of a model on this machine, through the engine that serves it, and fits the timing
model. Takes a minute or two for a small model on a CPU; nothing else should run meanwhile."""

import platform
import statistics
from pathlib import Path

from deploy.scaling.timing import Curve, Profile, StepTiming, keys_read
from model.checkpoint.open import open_checkpoint
from model.execution.cuda_graphs import padded_sizes
from model.execution.runner import ModelRunner
from model.interface.running_batch import RunningBatch
from model.interface.sampling_params import SamplingParams
from server.engine.core import EngineCore
from server.engine.kv.kv_manager import KVCacheManager
from server.engine.request import EngineRequest
from server.engine.scheduler.scheduler import SchedulerConfig
from server.loading.load import cache_budget, captures_graphs
from server.loading.memory_plan import effective_max_model_len
from server.settings.settings import Settings
from server.text.tokenizer import Tokenizer

SHORT_PROMPT, LONG_PROMPT = 16, 2048
REPEATS = 3
DECODE_STEPS = 4
# Not measured: it is small beside the steps of a real model, and only keeps requests sent together from
# starting together.
REQUEST_SECONDS = 0.005
POWERS_OF_TWO = tuple(2**power for power in range(16))


def machine_name() -> str:
    """The processor's own name, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )


class Meter:
    """Steps of one loaded model."""

    def __init__(self, settings: Settings) -> None:
        """Raises ModelError for a model or settings that cannot be served."""
        checkpoint = open_checkpoint(settings.model, cache_dir=settings.cache_dir)
        config = checkpoint.config
        tokenizer = Tokenizer.from_file(
            checkpoint.tokenizer_file,
            vocab_size=config.vocab_size,
            bos_token_id=config.bos_token_id,
            eos_token_ids=config.eos_token_ids,
            chat_template=checkpoint.chat_template,
        )
        self.settings = settings
        self.name = checkpoint.name
        self.runner = ModelRunner.load(
            checkpoint,
            dtype=settings.dtype,
            device=settings.device,
            block_size=settings.block_size,
            num_threads=settings.num_threads,
            quantization=settings.quantization,
            num_valid_tokens=tokenizer.num_known_tokens,
        )
        checkpoint.close()
        memory, setting = cache_budget(settings, self.runner)
        self.plan = self.runner.spec.plan(
            memory,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            max_model_len=settings.max_model_len or config.max_position_embeddings,
            prefix_caching=settings.prefix_caching,
            setting=setting,
        )
        self.runner.allocate_cache(self.plan)
        self.runner.warm_up()
        if captures_graphs(settings):
            max_model_len = effective_max_model_len(config, self.plan, settings.max_model_len)
            self.runner.capture_graphs(padded_sizes(settings.max_num_seqs), max_model_len)

    def _core(self, max_num_batched_tokens: int) -> EngineCore:
        max_num_seqs = min(self.settings.max_num_seqs, max_num_batched_tokens)
        batch = RunningBatch(max_num_seqs, self.plan.num_global_blocks - 1)
        kv = KVCacheManager(
            self.runner.spec,
            batch,
            self.plan.num_global_blocks,
            self.plan.num_local_blocks,
            prefix_caching=False,
        )
        capacity = (self.plan.num_global_blocks - 1) * self.runner.spec.block_size
        return EngineCore(self.runner, kv, SchedulerConfig(max_num_seqs, max_num_batched_tokens, capacity))

    def _step_seconds(self, core: EngineCore) -> float:
        core.step()
        assert core.last_step is not None, "the step had nothing to run"
        return core.last_step.duration

    def prefill(self, num_tokens: int) -> float:
        """Of a step that computes so many tokens of one long prompt, at its beginning, and samples none."""
        seconds = []
        for repeat in range(REPEATS):
            core = self._core(num_tokens)
            core.add(_spec(f"prefill-{repeat}", num_tokens + 1, 1))
            seconds.append(self._step_seconds(core))
            core.abort(f"prefill-{repeat}")
        return statistics.median(seconds)

    def decode(self, num_sequences: int, prompt_tokens: int) -> float:
        """Of a step that continues so many sequences."""
        # all start at once
        core = self._core(max(self.settings.max_num_batched_tokens, 2 * num_sequences * SHORT_PROMPT))
        for number in range(num_sequences):
            core.add(_spec(f"decode-{number}", prompt_tokens, DECODE_STEPS + 2))
        seconds: list[float] = []
        while core.has_work:
            core.step()
            step = core.last_step
            if step is not None and step.kind == "decode" and step.num_sequences == num_sequences:
                seconds.append(step.duration)
        return statistics.median(seconds)

    def timing(self) -> StepTiming:
        """What reading keys takes is in every step that is measured; it is taken off the rest."""
        spec, limit, most = self.runner.spec, self.settings.max_num_batched_tokens, self.settings.max_num_seqs
        short, long = self.decode(1, SHORT_PROMPT), self.decode(1, LONG_PROMPT)
        short_keys = keys_read(SHORT_PROMPT, 1, spec)
        key_read = max(0.0, long - short) / (keys_read(LONG_PROMPT, 1, spec) - short_keys)
        counts = [*(count for count in POWERS_OF_TWO if count < limit), limit]
        seconds = [max(0.0, self.prefill(count) - key_read * keys_read(0, count, spec)) for count in counts]
        network = Curve(tuple(counts), tuple(seconds))
        sizes = [*(size for size in POWERS_OF_TWO if size < most), most]
        heads = [
            self.decode(size, SHORT_PROMPT) - network.at(size) - key_read * size * short_keys
            for size in sizes
        ]
        return StepTiming(network, Curve((0, *sizes), (0.0, *(max(0.0, head) for head in heads))), key_read)

    def profile(self) -> Profile:
        timing = self.timing()
        settings = self.settings
        return Profile(
            model=self.name,
            machine=f"{machine_name()}, {settings.num_threads or 'all'} threads, {self.runner.dtype}",
            spec=self.runner.spec,
            num_global_blocks=self.plan.num_global_blocks,
            num_local_blocks=self.plan.num_local_blocks,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            timing=timing,
            request_seconds=REQUEST_SECONDS,
        )


def _spec(name: str, prompt_tokens: int, output_tokens: int) -> EngineRequest:
    tokens = [2, *(20 + (7 * index) % 200 for index in range(prompt_tokens - 1))]
    return EngineRequest(name, tokens, SamplingParams(max_tokens=output_tokens, temperature=0.0))
