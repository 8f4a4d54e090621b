"""Times decode steps and prefills of every published size on a GPU against what the card allows: ``python -m
model.bench.gpu``.

Weights are random and made on the device; no checkpoint is needed. The floor of a step is, part by part, the
larger of its bytes over the bandwidth of a device-to-device copy and its arithmetic over the rate of a large
matrix product, both measured in the same run. A step is the runner's own, from chunks on the host to sampled
tokens on the host, greedy, decodes replayed as CUDA graphs; keys and values are zeros, whose content does not
matter to the time. Times are medians. Without a GPU the same tables are printed, and say so.
"""

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from model.bench.contexts import decode_step, plan_for
from model.bench.step import GREEDY, bytes_read, decode_work, linears
from model.config.gemma3_config import SIZES, Gemma3Config
from model.config.tensors import parameter_count
from model.execution.cuda_graphs import padded_sizes
from model.execution.device_memory import CudaMemory
from model.execution.runner import ModelRunner, resolve_dtype
from model.host.memory import available_memory
from model.interface.errors import ConfigError
from model.interface.kv_cache_spec import KVCachePlan, ceil_div
from model.interface.sequence_chunk import StepInput, StepMemoryError
from model.network.gemma3 import Gemma3
from model.ops.select import select_ops

BENCHED = ("270m", "1b", "4b", "12b", "27b")
# Runs in no time on a CPU: shows that this program works, and nothing else.
TINY = replace(
    SIZES["270m"],
    vocab_size=2048,
    hidden_size=64,
    intermediate_size=128,
    head_dim=32,
    sliding_window=64,
    num_hidden_layers=7,
    global_layers=(False, False, False, False, False, True, False),
)
CONFIGS = {**SIZES, "tiny": TINY}
NOT_MEASURED = "not measured"
DOES_NOT_FIT = "does not fit"
BLOCK_SIZE = 16
SPARE_BYTES = 1 << 30  # beside weights and cache: activations, graphs, the driver's own
WEIGHT_SCALE = 0.02


@dataclass(frozen=True, slots=True)
class Card:
    """A device and what it reached in this run."""

    name: str
    bandwidth: float  # bytes per second, read and written
    flops: float  # floating-point operations per second of a matrix product in the compute dtype

    def floor(self, work: dict[str, tuple[float, float]]) -> float:
        """Seconds that (bytes, operations) of each part take at least."""
        return sum(max(read / self.bandwidth, operations / self.flops) for read, operations in work.values())

    def text(self) -> str:
        return (
            f"{self.name}: {self.bandwidth / 1e9:,.1f} GB/s by copies, {self.flops / 1e12:,.2f} TFLOP/s "
            "by matrix products"
        )


def median_seconds(function: Callable[[], object], device: torch.device, budget: float) -> float:
    """Of one call, with everything that it started on the device."""

    def finish() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    for _ in range(2):
        function()
    taken: list[float] = []
    end = finish() + budget
    while len(taken) < 5 or time.perf_counter() < end:
        start = finish()
        function()
        taken.append(finish() - start)
    return statistics.median(taken)


def measure_card(device: torch.device, dtype: torch.dtype, budget: float) -> Card:
    is_gpu = device.type == "cuda"
    source = torch.zeros(1 << (30 if is_gpu else 24), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    bandwidth = 2 * source.nbytes / median_seconds(lambda: target.copy_(source), device, budget)
    size = 8192 if is_gpu else 256
    left, right = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    flops = 2 * size**3 / median_seconds(lambda: left @ right, device, budget)
    return Card(torch.cuda.get_device_name(device) if is_gpu else "CPU", bandwidth, flops)


def random_runner(
    config: Gemma3Config, device: torch.device, dtype: torch.dtype, quantization: str
) -> ModelRunner:
    """A runner with random weights, made on the device one tensor at a time."""
    ops = select_ops(device, dtype, quantization)
    with torch.inference_mode():
        model = Gemma3(config, ops, config.vocab_size)
        model.load_weights(
            (name, torch.empty(slot.shape, dtype=dtype, device=device).normal_(std=WEIGHT_SCALE))
            for name, slot in model.weight_slots().items()
        )
    return ModelRunner(model, config.kv_cache_spec(BLOCK_SIZE, ops.cache_dtype.itemsize), ops)


def prefill_work(runner: ModelRunner, num_tokens: int) -> dict[str, tuple[float, float]]:
    """part -> (bytes read, floating-point operations) of a prompt in one step, of which the last token is
    sampled."""
    config, work = runner.config, dict[str, tuple[float, float]]()
    for part, module in linears(runner):
        read, operations = work.get(part, (0.0, 0.0))
        rows = 1 if module.role == "head" else num_tokens
        work[part] = (
            read + bytes_read(module),
            operations + 2.0 * rows * module.in_features * module.out_features,
        )
    window = min(num_tokens, config.sliding_window)
    pairs = {
        "global": num_tokens * (num_tokens + 1) / 2,
        "local": num_tokens * window - window * (window - 1) / 2,
    }
    layers = {"global": config.num_global_layers, "local": config.num_local_layers}
    for kind, count in pairs.items():
        read = float(layers[kind] * num_tokens * runner.spec.bytes_per_token_per_layer)
        work[f"attention, {kind}"] = (
            read,
            4.0 * layers[kind] * count * config.num_attention_heads * config.head_dim,
        )
    return work


class Bench:
    """Measures one size at a time; a cell is the text of the table."""

    def __init__(self, device: torch.device, dtype: torch.dtype, quantization: str, budget: float) -> None:
        self.device, self.dtype, self.quantization, self.budget = device, dtype, quantization, budget
        self.card = measure_card(device, dtype, budget)

    def room(self) -> int:
        """Bytes for weights or a cache."""
        if self.device.type != "cuda":
            return available_memory() - SPARE_BYTES
        gc.collect()
        memory = CudaMemory(self.device)
        memory.release()
        return memory.free() - SPARE_BYTES

    def load(self, config: Gemma3Config) -> ModelRunner | None:
        """None: the weights do not fit."""
        if parameter_count(config, tied=True) * self.dtype.itemsize > self.room():
            return None
        return random_runner(config, self.device, self.dtype, self.quantization)

    def decode(self, runner: ModelRunner, num_seqs: int, context: int) -> str:
        """Milliseconds of a step, the floor, and the share of it that was reached."""
        step = decode_step(runner, num_seqs, context, GREEDY)
        floor = self.card.floor(decode_work(runner, num_seqs, context))
        sizes = padded_sizes(num_seqs)[-1:]
        seconds = self._seconds(runner, plan_for(runner.spec, num_seqs, context), step, sizes, context)
        return (
            DOES_NOT_FIT
            if seconds is None
            else f"{seconds * 1e3:.3f} / {floor * 1e3:.3f} ({floor / seconds:.0%})"
        )

    def prefill(self, runner: ModelRunner, num_tokens: int) -> str:
        """Tokens per second of a prompt in one step, the most that the floor allows, and the share of it that
        was reached."""
        blocks = list(range(1, 1 + ceil_div(num_tokens, BLOCK_SIZE)))
        step = StepInput.of_prompt([1000] * num_tokens, blocks, GREEDY, samples=True)
        count, spec = len(blocks) + 1, runner.spec
        plan = KVCachePlan(
            count, count, count * spec.global_block_bytes, count * spec.local_block_bytes, num_tokens
        )
        floor = self.card.floor(prefill_work(runner, num_tokens))
        seconds = self._seconds(runner, plan, step, (), num_tokens)
        return (
            DOES_NOT_FIT
            if seconds is None
            else f"{num_tokens / seconds:,.0f} / {num_tokens / floor:,.0f} ({floor / seconds:.0%})"
        )

    def _seconds(
        self,
        runner: ModelRunner,
        plan: KVCachePlan,
        step: StepInput,
        graph_sizes: Sequence[int],
        max_model_len: int,
    ) -> float | None:
        runner.release_cache()
        if plan.global_bytes + plan.local_bytes > self.room():
            return None
        try:
            runner.allocate_cache(plan)
            assert runner.cache is not None
            for layer in runner.cache.layers:
                layer.keys.zero_()
                layer.values.zero_()
            if graph_sizes:
                runner.capture_graphs(graph_sizes, max_model_len)
            return median_seconds(lambda: runner.run(step), self.device, self.budget)
        except (ConfigError, StepMemoryError) as error:
            print(error, file=sys.stderr)
            return None
        finally:
            runner.release_cache()


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


Measure = Callable[[Bench, ModelRunner], str]


def decode_of(num_seqs: int, context: int) -> Measure:
    return lambda bench, runner: bench.decode(runner, num_seqs, context)


def prefill_of(num_tokens: int) -> Measure:
    return lambda bench, runner: bench.prefill(runner, num_tokens)


def tables(bench: Bench | None, arguments: argparse.Namespace) -> str:
    """Both tables; ``bench`` None: with nothing measured."""
    decode_rows, prefill_rows = [], []
    for size in arguments.sizes:
        runner = None if bench is None else bench.load(CONFIGS[size])
        name = size.upper() if size in SIZES else size
        missing = NOT_MEASURED if bench is None else f"{DOES_NOT_FIT} (weights)"

        def cell(
            measure: Measure,
            runner: ModelRunner | None = runner,
            missing: str = missing,
        ) -> str:
            return missing if bench is None or runner is None else measure(bench, runner)

        for num_seqs in arguments.sequences:
            cells = [cell(decode_of(num_seqs, context)) for context in arguments.contexts]
            decode_rows.append([name, str(num_seqs), *cells])
            print(*decode_rows[-1], sep="  ", file=sys.stderr, flush=True)
        cells = [cell(prefill_of(num_tokens)) for num_tokens in arguments.prefill_tokens]
        prefill_rows.append([name, *cells])
        print(*prefill_rows[-1], sep="  ", file=sys.stderr, flush=True)
    contexts = [f"{context:,} tokens of context" for context in arguments.contexts]
    prompts = [f"{count:,} tokens" for count in arguments.prefill_tokens]
    return (
        "Decode step, milliseconds / floor (share of the floor):\n\n"
        + markdown(["model", "sequences", *contexts], decode_rows)
        + "\n\nPrefill of one prompt in one step, tokens per second / most by the floor (share):\n\n"
        + markdown(["model", *prompts], prefill_rows)
    )


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--sizes", choices=tuple(CONFIGS), nargs="+", default=list(BENCHED))
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 32, 128, 256])
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 8192, 32768])
    parser.add_argument("--prefill-tokens", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", choices=("none", "int8", "fp8"), default="none")
    parser.add_argument("--budget", type=float, default=0.5, help="seconds per cell")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    arguments = build_parser().parse_args(argv)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("No CUDA device was found: nothing is measured.\n")
        print(tables(None, arguments))
        return 0
    device = torch.device(arguments.device)
    dtype = resolve_dtype(arguments.dtype, device)
    try:
        bench = Bench(device, dtype, arguments.quantization, arguments.budget)
        text = tables(bench, arguments)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    kind = "" if arguments.quantization == "none" else f", weights in {arguments.quantization}"
    print(f"{bench.card.text()}; {str(dtype).removeprefix('torch.')}{kind}, torch {torch.__version__}\n")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
