"""Profiles whole steps of a loaded model on a CPU, part by part: ``python -m model.bench.step``.

For every number of sequences and context length: the time of a decode step as it runs, then with its
operations called one by one and timed, and the floor of each part, which is the larger of its bytes over the
read bandwidth and its products over the rate at which the processor makes such products. What a linear layer
reads and multiplies (float32, int16 or bytes) its packed weight says. Steps, parts, bandwidth and rates are
measured in turn, for a machine's speed changes. Local and global attention are listed apart, per layer, so
that it shows which of them grows with the context. The model's own text is in the cache
(model/bench/contexts.py). Times are medians, in milliseconds.
"""

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from model.bench.contexts import Decodes, write_text
from model.bench.cpu_kernels import PlainProducts, PlainRead
from model.checkpoint.open import open_checkpoint
from model.config.gemma3_config import Gemma3Config
from model.execution.runner import ModelRunner
from model.interface.sampling_params import SamplingParams
from model.network.layers import Linear
from model.ops.cpu.build import load_library
from model.ops.cpu.weights import Factor, PackedWeight, products_per_row
from model.ops.interface import AttentionMetadata

GREEDY = SamplingParams(max_tokens=1 << 20, temperature=0.0)
DRAWN = SamplingParams(max_tokens=1 << 20, temperature=1.0, top_p=0.95)
ELEMENTWISE = ("rms_norm", "norm_add_norm", "geglu", "qk_norm_rope_cache_write")
SAMPLING = ("all_finite", "argmax", "top_candidates", "draw")
LEAST_TURNS = 3


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
    context, where weights are multiplied as floating-point numbers."""
    read: dict[str, float] = defaultdict(float)
    operations: dict[str, float] = defaultdict(float)
    for part, module in linears(runner):
        read[part] += bytes_read(module)
        operations[part] += 2.0 * num_seqs * module.in_features * module.out_features
    linear = {part: (read[part], operations[part]) for part in read}
    return linear | attention_work(runner, num_seqs, context)


def attention_work(runner: ModelRunner, num_seqs: int, context: int) -> dict[str, tuple[float, float]]:
    """The same of the attention of each kind of layers."""
    config: Gemma3Config = runner.config
    work = {}
    for part, layers, length in (
        ("attention, global", config.num_global_layers, context),
        ("attention, local", config.num_local_layers, min(context, config.sliding_window)),
    ):
        keys = float(num_seqs * layers * length)
        operations = 4.0 * keys * config.num_attention_heads * config.head_dim
        work[part] = keys * runner.spec.bytes_per_token_per_layer, operations
    return work


def linears(runner: ModelRunner) -> Iterator[tuple[str, Linear]]:
    """Every linear layer, and the part of a step that it belongs to."""
    for module in runner.model.modules():
        if isinstance(module, Linear):
            yield f"linear {module.role}", module


def bytes_read(module: Linear) -> int:
    """Of its weight, whoever else owns it: a tied head may be the embedding's own matrix."""
    assert module.packed is not None
    return module.packed.nbytes or module.in_features * module.out_features * module.ops.dtype.itemsize


@dataclass(frozen=True, slots=True)
class LinearWork:
    """What a kernel does for a linear layer."""

    num_bytes: int  # read
    factor: Factor  # multiplied
    products: int


def linear_work(weight: PackedWeight, num_rows: int, *, greedy: bool) -> LinearWork:
    """A head with a sketch is read for a few panels only where all is ``greedy``, and its sketch is not read
    otherwise."""
    sketch = weight.sketch
    if sketch is not None and greedy:
        num_bytes, weight = sketch.nbytes, sketch.weight
    else:
        num_bytes = weight.nbytes - (0 if sketch is None else sketch.nbytes)
    return LinearWork(num_bytes, weight.factor, num_rows * products_per_row(load_library(), weight))


class Floors:
    """What each part of a step takes at least."""

    def __init__(self, runner: ModelRunner, num_seqs: int, context: int, *, greedy: bool) -> None:
        self.read: dict[str, float] = defaultdict(float)  # bytes, by part
        self._products: list[tuple[str, Factor, float]] = []  # layers of a part may multiply different things
        for part, module in linears(runner):
            assert isinstance(module.packed, PackedWeight)
            work = linear_work(module.packed, num_seqs, greedy=greedy)
            self.read[part] += work.num_bytes
            self._products.append((part, work.factor, work.products))
        for part, (num_bytes, operations) in attention_work(runner, num_seqs, context).items():
            self.read[part] += num_bytes
            self._products.append((part, "float32", operations / 2))

    @property
    def factors(self) -> list[Factor]:
        """What is multiplied in the step."""
        return sorted({factor for _, factor, _ in self._products})

    def seconds(self, bandwidth: float, rates: Mapping[Factor, float]) -> dict[str, float]:
        """Of each part, on a machine that reads so many bytes and makes so many products a second."""
        computing: dict[str, float] = defaultdict(float)
        for part, factor, products in self._products:
            computing[part] += products / rates[factor]
        return {part: max(self.read[part] / bandwidth, computing[part]) for part in computing}


@dataclass(frozen=True, slots=True)
class Measured:
    """Medians of one period."""

    step: float
    parts: dict[str, float]
    bandwidth: float
    rates: dict[Factor, float]


def measure(decodes: Decodes, factors: Sequence[Factor], budget: float) -> Measured:
    """Steps, their parts, plain reads of the head and plain products, by turns."""
    read, times = PlainRead(_head_memory(decodes.runner)), PartTimes(decodes)
    plain = {factor: PlainProducts(factor) for factor in factors}
    steps: list[float] = []
    reads: list[float] = []
    multiplied: dict[Factor, list[float]] = {factor: [] for factor in factors}
    decodes.run()
    end, turn = time.perf_counter() + budget, 0
    while turn < LEAST_TURNS or time.perf_counter() < end:
        turn += 1
        steps += _seconds_of_two(decodes.run)
        read.run()
        reads += _seconds_of_two(read.run)
        for factor, products in plain.items():
            multiplied[factor] += _seconds_of_two(products.run)
        with times.recording():
            times.run()
            times.run()
    rates = {factor: plain[factor].count / statistics.median(taken) for factor, taken in multiplied.items()}
    return Measured(statistics.median(steps), times.medians(), read.nbytes / statistics.median(reads), rates)


def _seconds_of_two(function: Callable[[], object]) -> list[float]:
    taken = []
    for _ in range(2):
        start = time.perf_counter()
        function()
        taken.append(time.perf_counter() - start)
    return taken


def report(decodes: Decodes, num_seqs: int, context: int, sampling: SamplingParams, budget: float) -> None:
    runner = decodes.runner
    floors = Floors(runner, num_seqs, context, greedy=sampling.greedy)
    measured = measure(decodes, floors.factors, budget)
    floor = floors.seconds(measured.bandwidth, measured.rates)
    medians = dict(measured.parts)
    apart, read = medians.pop("step"), sum(floors.read.values())
    kind = "greedy" if sampling.greedy else f"temperature {sampling.temperature}, top_p {sampling.top_p}"
    rates = ", ".join(f"{rate / 1e9:.1f}e9 of {factor}" for factor, rate in measured.rates.items())
    print(
        f"\n{num_seqs} sequences, {context} tokens of context each, {kind}; "
        f"read bandwidth meanwhile {measured.bandwidth / 1e9:.1f} GB/s, products per second {rates}"
    )
    print(f"{'part':<28}{'ms':>9}{'share':>8}{'floor':>9}{'of floor':>10}")
    for part, seconds in medians.items():
        against = f"{floor[part] * 1e3:>9.2f}{floor[part] / seconds:>10.0%}" if part in floor else ""
        print(f"{part:<28}{seconds * 1e3:>9.2f}{seconds / apart:>8.0%}{against}")
    for part, layers in (
        ("attention, local", runner.config.num_local_layers),
        ("attention, global", runner.config.num_global_layers),
    ):
        if part in medians:
            print(f"  one layer of {part:<15}{medians[part] / layers * 1e3:>9.3f}")
    limit, step = sum(floor.values()), measured.step
    print(f"{'in parts':<28}{apart * 1e3:>9.2f}")
    print(f"{'step':<28}{step * 1e3:>9.2f}{'':>8}{limit * 1e3:>9.2f}{limit / step:>10.0%}")
    print(f"{read / 1e6:.0f} MB read: {read / measured.bandwidth / step:.0%} of the bandwidth", flush=True)


def _head_memory(runner: ModelRunner) -> torch.Tensor:
    packed = runner.model.head.packed
    assert isinstance(packed, PackedWeight)
    return packed.data if packed.sketch is None else packed.sketch.weight.data


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
        print(
            f"{runner.ops.name}, {runner.dtype}, {torch.get_num_threads()} threads, "
            f"{runner.weight_bytes / 1e6:.0f} MB of weights"
        )
        sampling = DRAWN if arguments.sampled else GREEDY
        text = write_text(runner, min(max(arguments.contexts), runner.config.sliding_window))
        for num_seqs in arguments.sequences:
            for context in arguments.contexts:
                decodes = Decodes(runner, num_seqs, context, sampling, text)
                report(decodes, num_seqs, context, sampling, arguments.budget)
                runner.release_cache()


if __name__ == "__main__":
    main()
