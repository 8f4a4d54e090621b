"""Profiles whole steps of a loaded model on a CPU, part by part: ``python -m model.bench.step``.

For every number of sequences and context length: the time of a decode step as it runs, then with its
operations called one by one and timed, and the floor of each part, which is the larger of its bytes over the
read bandwidth and its arithmetic over the peak (of float32, or of bytes where weights are of few bits), all
measured in the same run. Local and global attention are listed apart, per layer, so that it shows which of
them grows with the context. The model's own text is in the cache (model/bench/contexts.py). Times are
medians, in milliseconds.
"""

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from model.bench.contexts import Decodes, write_text
from model.bench.cpu_kernels import PlainRead, measure_byte_products, measure_flops
from model.checkpoint.open import open_checkpoint
from model.config.gemma3_config import Gemma3Config
from model.execution.runner import ModelRunner
from model.interface.sampling_params import SamplingParams
from model.network.layers import Linear
from model.ops.cpu.weights import PackedWeight
from model.ops.interface import AttentionMetadata

GREEDY = SamplingParams(max_tokens=1 << 20, temperature=0.0)
DRAWN = SamplingParams(max_tokens=1 << 20, temperature=1.0, top_p=0.95)
ELEMENTWISE = ("rms_norm", "norm_add_norm", "geglu", "qk_norm_rope_cache_write")
SAMPLING = ("all_finite", "argmax", "top_candidates", "draw")


class PartTimes:
    """Wraps the operations of a runner's backend, and sums the time that each takes in a step."""

    def __init__(self, decodes: Decodes) -> None:
        self.decodes = decodes
        self.seconds: dict[str, float] = defaultdict(float)
        self.steps: list[dict[str, float]] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        runner = self.decodes.runner
        ops: Any = runner.ops
        roles = {
            id(module.packed): module.role for module in runner.model.modules() if isinstance(module, Linear)
        }

        def linear(_x: torch.Tensor, weight: object) -> str:
            return f"linear {roles[id(weight)]}"

        def attention(
            _query: torch.Tensor, _k: torch.Tensor, _v: torch.Tensor, metadata: AttentionMetadata, *_: object
        ) -> str:
            return "attention, global" if metadata.window is None else "attention, local"

        names: dict[str, Callable[..., str]] = {
            "linear": linear,
            "logits": linear,
            "greedy": linear,
            "paged_attention": attention,
        }
        ops.decoder_layers = lambda *_: False
        names |= {name: lambda *_, name=name: name for name in (*ELEMENTWISE, *SAMPLING)}
        for name, part in names.items():
            setattr(ops, name, self._timed(getattr(ops, name), part))
        try:
            yield
        finally:
            for name in (*names, "decoder_layers"):
                delattr(ops, name)

    def _timed(self, function: Callable[..., Any], part: Callable[..., str]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            start = time.perf_counter()
            result = function(*arguments)
            self.seconds[part(*arguments)] += time.perf_counter() - start
            return result

        return timed

    def run(self) -> None:
        """One step, recorded."""
        self.seconds.clear()
        start = time.perf_counter()
        self.decodes.run()
        whole = time.perf_counter() - start
        self.steps.append(
            {**self.seconds, "everything else": whole - sum(self.seconds.values()), "step": whole}
        )

    def medians(self) -> dict[str, float]:
        return {part: statistics.median(step[part] for step in self.steps) for part in self.steps[0]}


def decode_work(runner: ModelRunner, num_seqs: int, context: int) -> dict[str, tuple[float, float]]:
    """part -> (bytes read, floating-point operations) of a step that decodes so many sequences of so much
    context."""
    config: Gemma3Config = runner.config
    read: dict[str, float] = defaultdict(float)
    operations: dict[str, float] = defaultdict(float)
    for part, module in linears(runner):
        read[part] += bytes_read(module)
        operations[part] += 2.0 * num_seqs * module.in_features * module.out_features
    heads_by_dim = config.num_attention_heads * config.head_dim
    for part, layers, length in (
        ("attention, global", config.num_global_layers, context),
        ("attention, local", config.num_local_layers, min(context, config.sliding_window)),
    ):
        read[part] = float(num_seqs * layers * length * runner.spec.bytes_per_token_per_layer)
        operations[part] = 4.0 * num_seqs * layers * length * heads_by_dim
    return {part: (read[part], operations[part]) for part in read}


def linears(runner: ModelRunner) -> Iterator[tuple[str, Linear]]:
    """Every linear layer, and the part of a step that it belongs to."""
    for module in runner.model.modules():
        if isinstance(module, Linear):
            yield f"linear {module.role}", module


def bytes_read(module: Linear) -> int:
    """Of its weight, whoever else owns it: a tied head may be the embedding's own matrix."""
    assert module.packed is not None
    return module.packed.nbytes or module.in_features * module.out_features * module.ops.dtype.itemsize


class Floors:
    """What each part of a step takes at least."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.flops = measure_flops()
        self.byte_products = measure_byte_products()

    def of(
        self, num_seqs: int, context: int, bandwidth: float, *, greedy: bool
    ) -> dict[str, tuple[float, float]]:
        """part -> (bytes read, seconds)."""
        work = decode_work(self.runner, num_seqs, context)
        read = {part: num_bytes for part, (num_bytes, _) in work.items()}
        computing = {part: operations / self.flops for part, (_, operations) in work.items()}
        for part, module in linears(self.runner):
            packed, products = module.packed, num_seqs * module.in_features * module.out_features
            assert isinstance(packed, PackedWeight)
            sketch = packed.sketch
            if sketch is not None:  # greedy: the head itself is read for a few panels only
                read[part] -= packed.nbytes - sketch.nbytes if greedy else sketch.nbytes
            if packed.storage in ("int5", "int4") or (sketch is not None and greedy):
                computing[part] += products / self.byte_products - 2.0 * products / self.flops
        return {part: (read[part], max(read[part] / bandwidth, computing[part])) for part in work}


def report(
    decodes: Decodes, floors: Floors, num_seqs: int, context: int, sampling: SamplingParams, budget: float
) -> None:
    runner = decodes.runner
    step, bandwidth = _step_and_bandwidth(decodes, budget)
    times = PartTimes(decodes)
    with times.recording():
        _repeat(times.run, budget)
    medians = times.medians()
    floor = floors.of(num_seqs, context, bandwidth, greedy=sampling.greedy)
    apart, read = medians.pop("step"), sum(num_bytes for num_bytes, _ in floor.values())
    kind = "greedy" if sampling.greedy else f"temperature {sampling.temperature}, top_p {sampling.top_p}"
    print(
        f"\n{num_seqs} sequences, {context} tokens of context each, {kind}; "
        f"read bandwidth meanwhile {bandwidth / 1e9:.1f} GB/s"
    )
    print(f"{'part':<28}{'ms':>9}{'share':>8}{'floor':>9}{'of floor':>10}")
    for part, seconds in medians.items():
        limit = floor[part][1] if part in floor else 0.0
        against = f"{limit * 1e3:>9.2f}{limit / seconds:>10.0%}" if limit else ""
        print(f"{part:<28}{seconds * 1e3:>9.2f}{seconds / apart:>8.0%}{against}")
    for part, layers in (
        ("attention, local", runner.config.num_local_layers),
        ("attention, global", runner.config.num_global_layers),
    ):
        if part in medians:
            print(f"  one layer of {part:<15}{medians[part] / layers * 1e3:>9.3f}")
    limit = sum(seconds for _, seconds in floor.values())
    print(f"{'in parts':<28}{apart * 1e3:>9.2f}")
    print(f"{'step':<28}{step * 1e3:>9.2f}{'':>8}{limit * 1e3:>9.2f}{limit / step:>10.0%}")
    print(f"{read / 1e6:.0f} MB read: {read / bandwidth / step:.0%} of the bandwidth", flush=True)


def _step_and_bandwidth(decodes: Decodes, budget: float) -> tuple[float, float]:
    """Seconds of a step and bytes per second of plain reads of the head, both medians; they take turns, for a
    machine's speed may change."""
    read = PlainRead(_head_memory(decodes.runner))
    steps: list[float] = []
    reads: list[float] = []
    decodes.run()
    end = time.perf_counter() + budget
    while len(reads) < 5 or time.perf_counter() < end:
        steps += _repeat(decodes.run, 0.0)
        read.run()
        reads += _repeat(read.run, 0.0)
    return statistics.median(steps), read.nbytes / statistics.median(reads)


def _head_memory(runner: ModelRunner) -> torch.Tensor:
    packed = runner.model.head.packed
    assert isinstance(packed, PackedWeight)
    return packed.data if packed.sketch is None else packed.sketch.weight.data


def _repeat(function: Callable[[], object], budget: float) -> list[float]:
    """Seconds of each call, of five or as many as the budget allows."""
    taken: list[float] = []
    end = time.perf_counter() + budget
    while len(taken) < 5 or time.perf_counter() < end:
        start = time.perf_counter()
        function()
        taken.append(time.perf_counter() - start)
    return taken


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default=None, help="folder, .gguf file or hub id; the embedded 270M when left out"
    )
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--contexts", type=int, nargs="+", default=[256])
    parser.add_argument(
        "--sampled", action="store_true", help="temperature 1 and top_p 0.95 instead of greedy"
    )
    parser.add_argument("--budget", type=float, default=3.0, help="seconds per table")
    arguments = parser.parse_args(words)
    runner = ModelRunner.load(
        open_checkpoint(arguments.model),
        dtype=arguments.dtype,
        quantization=arguments.quantization,
        device="cpu",
        progress=False,
    )
    with torch.inference_mode():
        floors = Floors(runner)
        print(
            f"{runner.ops.name}, {runner.dtype}, {torch.get_num_threads()} threads, "
            f"{runner.weight_bytes / 1e6:.0f} MB of weights"
        )
        print(
            f"products per second: {floors.flops / 2e9:.1f}e9 of float32, "
            f"{floors.byte_products / 1e9:.1f}e9 of bytes"
        )
        sampling = DRAWN if arguments.sampled else GREEDY
        text = write_text(runner, min(max(arguments.contexts), runner.config.sliding_window))
        for num_seqs in arguments.sequences:
            for context in arguments.contexts:
                decodes = Decodes(runner, num_seqs, context, sampling, text)
                report(decodes, floors, num_seqs, context, sampling, arguments.budget)
                runner.release_cache()


if __name__ == "__main__":
    main()
