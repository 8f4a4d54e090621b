"""Times every CPU kernel against what the machine allows, measured in the same run: ``python -m
model.bench.cpu_kernels``.

The floor of an operation is the larger of its bytes over the read bandwidth (a plain sum over memory far
larger than the caches) and its products over the rate at which the processor's instructions make such
products of what is in registers. Times are the best of many runs, so that other work on the machine does not
count. Shapes are those of Gemma 3 270M.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle
from typing import cast

import torch

from model.ops.cpu.backend import CpuOps
from model.ops.cpu.build import load_library
from model.ops.cpu.weights import FACTORS, Factor, PackedWeight, WeightStorage, products_per_row
from model.ops.interface import AttentionMetadata, LinearWeight, Ops
from model.ops.reference import ReferenceOps

CPU = torch.device("cpu")
HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY, LAYERS = 640, 2048, 4, 1, 256, 262144, 18
LINEARS = {
    "qkv": (1536, HIDDEN),
    "output": (HIDDEN, 1024),
    "gate_up": (2 * INTERMEDIATE, HIDDEN),
    "down": (HIDDEN, INTERMEDIATE),
}
BLOCK_SIZE = 16
FAR_LARGER_THAN_CACHES = 256 << 20  # bytes


def seconds(function: Callable[[], object], budget: float) -> float:
    function()
    times: list[float] = []
    end = time.perf_counter() + budget
    while len(times) < 5 or time.perf_counter() < end:
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


class PlainRead:
    """Reads memory far larger than the caches: of the given tensor, or if that is too small, of its own in
    huge pages.

    How fast memory is depends on where it lies (a machine may have several, and a virtual one does not say
    which), so what a kernel reaches is to be compared with a plain read of the memory that it reads.
    """

    SMALLEST = 64 << 20

    def __init__(self, tensor: torch.Tensor | None = None) -> None:
        self._ops = CpuOps(CPU, torch.float32)
        if tensor is not None and tensor.nbytes >= self.SMALLEST:
            whole = tensor.view(torch.uint8).reshape(-1)[: tensor.nbytes // 4096 * 4096]
            self._memory = whole.view(torch.float32).view(64, -1)
        else:
            self._memory = torch.empty(64, FAR_LARGER_THAN_CACHES // (64 * 4))
            load_library().advise_huge_pages(self._memory.data_ptr(), self._memory.nbytes)
            self._memory.fill_(1.0)
        self.nbytes = self._memory.nbytes

    def run(self) -> None:
        self._ops.all_finite(self._memory)


def measure_bandwidth(budget: float = 1.0) -> float:
    """Bytes per second of the best of many plain reads."""
    read = PlainRead()
    return read.nbytes / seconds(read.run, budget)


class PlainProducts:
    """Multiplies what is in registers, on all threads, with the instructions of the kernels for weights whose
    products are of such factors."""

    ITEMS, ROUNDS = 256, 4_000  # some milliseconds, in items that are as small as those of the kernels

    def __init__(self, factor: Factor) -> None:
        kind = next(kind for kind, multiplied in FACTORS.items() if multiplied == factor)
        self._multiply = partial(
            load_library().multiply_in_registers, kind, self.ITEMS, self.ROUNDS, torch.get_num_threads()
        )
        self.count: int = self._multiply()  # of products

    def run(self) -> None:
        self._multiply()


def _in_turn(ops: Ops, x: torch.Tensor, weights: Sequence[LinearWeight], role: str) -> Callable[[], object]:
    """A function that multiplies by another weight each time."""
    turn = cycle(weights)
    multiply = ops.logits if role == "head" else ops.linear
    return lambda: multiply(x, next(turn))


class Bench:
    def __init__(
        self, dtype: torch.dtype, storages: list[WeightStorage], budget: float, with_reference: bool
    ) -> None:
        self.budget = budget
        self.with_reference = with_reference
        self.dtype = dtype
        self.ops: dict[WeightStorage, CpuOps] = {storage: CpuOps(CPU, dtype, storage) for storage in storages}
        self.any_ops = next(iter(self.ops.values()))
        self.reference = ReferenceOps(CPU, dtype)
        self.bandwidth = measure_bandwidth(budget * 2)
        plain = {factor: PlainProducts(factor) for factor in dict.fromkeys(FACTORS.values())}
        self.products = {factor: of.count / seconds(of.run, budget) for factor, of in plain.items()}
        print(f"{self.any_ops.name}, {dtype}, {torch.get_num_threads()} threads")
        rates = ", ".join(f"{rate / 1e9:.1f}e9 of {factor}" for factor, rate in self.products.items())
        print(f"read bandwidth {self.bandwidth / 1e9:.1f} GB/s, products per second: {rates}")
        print(f"{'operation':<42}{'ms':>9}{'floor':>9}{'of floor':>9}{'reference':>11}", flush=True)

    def report(
        self,
        name: str,
        function: Callable[[], object],
        reference: Callable[[], object] | None,
        num_bytes: float,
        products: float = 0,
        factor: Factor = "float32",
    ) -> float:
        taken = seconds(function, self.budget)
        floor = max(num_bytes / self.bandwidth, products / self.products[factor])
        other = f"{seconds(reference, self.budget) * 1e3:>11.3f}" if reference and self.with_reference else ""
        print(f"{name:<42}{taken * 1e3:>9.3f}{floor * 1e3:>9.3f}{floor / taken:>9.0%}{other}", flush=True)
        return taken

    def linears(self, rows: list[int]) -> None:
        totals: dict[tuple[str, int], float] = {}
        for storage, ops in self.ops.items():
            for role, (n, k) in {**LINEARS, "head": (VOCABULARY, HIDDEN)}.items():
                weight = (torch.randn(n, k) * 0.02).to(self.dtype)
                packed = [cast(PackedWeight, ops.pack_linear(weight, "down"))]
                copies = -(-FAR_LARGER_THAN_CACHES // packed[0].nbytes)  # multiplied by in turn
                packed += [cast(PackedWeight, ops.pack_linear(weight, "down")) for _ in range(copies - 1)]
                products = products_per_row(load_library(), packed[0])
                plain = [
                    self.reference.pack_linear(weight.clone(), "down")
                    for _ in range(copies if self.with_reference else 0)
                ]
                for m in rows:
                    if role == "head" and m > 64:
                        continue
                    x = torch.randn(m, k).to(self.dtype)
                    num_bytes = packed[0].nbytes + (4 * m * n if role == "head" else 0)
                    ours, theirs = _in_turn(ops, x, packed, role), _in_turn(self.reference, x, plain, role)
                    name, factor = f"{role} {n}x{k} {storage} m={m}", packed[0].factor
                    taken = self.report(name, ours, theirs, num_bytes, m * products, factor)
                    totals[storage, m] = totals.get((storage, m), 0) + taken * (
                        1 if role == "head" else LAYERS
                    )
                del packed, plain
        for (kept_as, m), total in totals.items():
            head = " (without the head)" if m > 64 else ""
            print(f"all linear layers of a step, {kept_as}, m={m}: {total * 1e3:.1f} ms{head}", flush=True)

    def elementwise(self, rows: list[int]) -> None:
        size = torch.empty(0, dtype=self.dtype).element_size()
        for n in rows:
            x, residual = torch.randn(n, HIDDEN).to(self.dtype), torch.randn(n, HIDDEN).to(self.dtype)
            scale = torch.full((HIDDEN,), 0.5)
            gate_up = torch.randn(n, 2 * INTERMEDIATE).to(self.dtype)
            self.report(
                f"norm_add_norm n={n}",
                lambda x=x, y=residual, s=scale: self.any_ops.norm_add_norm(x, y, s, s, 1e-6),  # type: ignore[misc]
                lambda x=x, y=residual, s=scale: self.reference.norm_add_norm(x, y, s, s, 1e-6),  # type: ignore[misc]
                4 * n * HIDDEN * size,
            )
            self.report(
                f"geglu n={n}",
                lambda x=gate_up: self.any_ops.geglu(x),  # type: ignore[misc]
                lambda x=gate_up: self.reference.geglu(x),  # type: ignore[misc]
                3 * n * INTERMEDIATE * size,
            )

    def attention(self, num_seqs: int, queries: int, context: int, window: int | None) -> None:
        blocks = -(-context // BLOCK_SIZE)
        keys = torch.randn(num_seqs * blocks + 1, BLOCK_SIZE, KV_HEADS, HEAD_DIM).to(self.dtype)
        values = keys.clone()
        table = (torch.randperm(num_seqs * blocks) + 1).view(num_seqs, blocks).to(torch.int32)
        starts = torch.arange(num_seqs + 1, dtype=torch.int32) * queries
        contexts = torch.full((num_seqs,), context, dtype=torch.int32)
        metadata = AttentionMetadata(
            window,
            BLOCK_SIZE,
            (queries,) * num_seqs,
            (context,) * num_seqs,
            starts,
            contexts,
            table,
            torch.empty(0),
        )
        query = torch.randn(num_seqs * queries, HEADS, HEAD_DIM).to(self.dtype)
        start = context - queries
        seen = sum(min(start + q + 1, window or context) for q in range(queries)) * num_seqs
        touched = num_seqs * min(context, (window or context) + queries - 1)
        self.report(
            f"attention {num_seqs} x {queries} of {context}" + (f" window {window}" if window else ""),
            lambda: self.any_ops.paged_attention(query, keys, values, metadata, 0.06),
            lambda: self.reference.paged_attention(query, keys, values, metadata, 0.06),
            2.0 * touched * KV_HEADS * HEAD_DIM * keys.element_size(),
            2.0 * seen * HEADS * HEAD_DIM,
        )

    def rope(self, n: int) -> None:
        qkv = torch.randn(n, (HEADS + 2 * KV_HEADS) * HEAD_DIM).to(self.dtype)
        angles = torch.randn(n, HEAD_DIM // 2)
        cache = torch.zeros(n // BLOCK_SIZE + 1, BLOCK_SIZE, KV_HEADS, HEAD_DIM, dtype=self.dtype)
        slots, scale, cos, sin = torch.arange(n), torch.ones(HEAD_DIM), angles.cos(), angles.sin()
        self.report(
            f"qk_norm_rope_cache_write n={n}",
            lambda: self.any_ops.qk_norm_rope_cache_write(
                qkv, scale, scale, cos, sin, cache, cache, slots, 1e-6
            ),
            lambda: self.reference.qk_norm_rope_cache_write(
                qkv, scale, scale, cos, sin, cache, cache, slots, 1e-6
            ),
            2.0 * qkv.nbytes + 2 * cos.nbytes,
        )

    def sampling(self, rows: int) -> None:
        logits = torch.randn(rows, VOCABULARY) * 4
        ones, zeros = torch.ones(rows), torch.zeros(rows)
        uniform, whole = torch.rand(rows, dtype=torch.float64), torch.ones(rows, dtype=torch.float64)
        ours, theirs = self.any_ops, self.reference
        once = float(logits.nbytes)
        self.report(
            f"all_finite {rows}", lambda: ours.all_finite(logits), lambda: theirs.all_finite(logits), once
        )
        self.report(f"argmax {rows}", lambda: ours.argmax(logits), lambda: theirs.argmax(logits), once)
        for k in (64, 1024):
            self.report(
                f"top_candidates {rows} k={k}",
                lambda k=k: ours.top_candidates(logits, k, ones),  # type: ignore[misc]
                lambda k=k: theirs.top_candidates(logits, k, ones),  # type: ignore[misc]
                once,
            )
        self.report(
            f"draw {rows}",
            lambda: ours.draw(logits, ones, whole, zeros, uniform),
            lambda: theirs.draw(logits, ones, whole, zeros, uniform),
            once,
        )
        self.report(
            f"draw {rows} top_p=0.95",
            lambda: ours.draw(logits, ones, 0.95 * whole, zeros, uniform),
            lambda: theirs.draw(logits, ones, 0.95 * whole, zeros, uniform),
            once,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--weights", nargs="+", default=["float32", "bfloat16", "int8", "int4"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 256])
    parser.add_argument("--only", nargs="+", default=["linear", "elementwise", "attention", "sampling"])
    parser.add_argument("--budget", type=float, default=0.5, help="seconds per operation")
    parser.add_argument("--no-reference", action="store_true")
    arguments = parser.parse_args()
    with torch.inference_mode():
        bench = Bench(
            getattr(torch, arguments.dtype),
            cast(list[WeightStorage], arguments.weights),
            arguments.budget,
            not arguments.no_reference,
        )
        if "linear" in arguments.only:
            bench.linears(arguments.rows)
        if "elementwise" in arguments.only:
            bench.elementwise(arguments.rows)
            for rows in arguments.rows:
                bench.rope(rows)
        if "attention" in arguments.only:
            for shape in (
                (1, 1, 1000),
                (1, 1, 30000),
                (32, 1, 256),
                (32, 1, 2048),
                (1, 256, 256),
                (1, 256, 2048),
                (4, 512, 512),
            ):
                bench.attention(*shape, None)
            for shape in ((1, 1, 1000), (1, 1, 30000), (32, 1, 2048), (1, 256, 2048)):
                bench.attention(*shape, 512)
        if "sampling" in arguments.only:
            for rows in (1, 32):
                bench.sampling(rows)


if __name__ == "__main__":
    main()
