"""What the two-pool cache saves: bytes of one sequence and sequences that fit a budget, against a layout that
keeps every token of every layer. ``gemserve info --layouts`` prints it for all sizes. Imports no torch."""

from dataclasses import asdict, dataclass

from model.config.gemma3_config import SIZES
from model.interface.kv_cache_spec import KVCacheSpec
from server.loading.memory_plan import format_bytes


@dataclass(frozen=True, slots=True)
class LayoutComparison:
    """One model size. The hybrid count includes the local pool's proven bound for so many sequences and both
    null blocks."""

    size: str
    hybrid_bytes: int  # of one sequence
    uniform_bytes: int
    hybrid_fit: int  # sequences in the budget
    uniform_fit: int

    @property
    def ratio(self) -> float:
        return self.uniform_bytes / self.hybrid_bytes


def hybrid_fit(spec: KVCacheSpec, budget: int, num_tokens: int, max_num_batched_tokens: int) -> int:
    """Most sequences of ``num_tokens`` that run at once: global blocks of each, and a local pool that can
    never be short."""
    blocks = spec.blocks(num_tokens).global_blocks
    count = 0
    while True:
        more = count + 1
        need = (1 + more * blocks) * spec.global_block_bytes
        need += spec.local_pool_blocks(more, max_num_batched_tokens) * spec.local_block_bytes
        if need > budget:
            return count
        count = more


def compare_layouts(
    budget: int, num_tokens: int, *, block_size: int, dtype_size: int, max_num_batched_tokens: int
) -> list[LayoutComparison]:
    rows = []
    for size, config in SIZES.items():
        spec = config.kv_cache_spec(block_size, dtype_size)
        uniform = spec.uniform_sequence_bytes(num_tokens)
        rows.append(
            LayoutComparison(
                size,
                spec.sequence_bytes(num_tokens),
                uniform,
                hybrid_fit(spec, budget, num_tokens, max_num_batched_tokens),
                budget // uniform,
            )
        )
    return rows


def as_text(rows: list[LayoutComparison], budget: int, num_tokens: int) -> str:
    lines = [
        f"Requests of {num_tokens:,} tokens in {format_bytes(budget)}: two pools against keeping every "
        "token of every layer",
        f"{'size':<6}{'per request':>14}{'every token':>14}{'ratio':>8}{'fit':>6}{'fit, every token':>18}",
    ]
    lines += [
        f"{row.size:<6}{format_bytes(row.hybrid_bytes):>14}{format_bytes(row.uniform_bytes):>14}"
        f"{row.ratio:>8.2f}{row.hybrid_fit:>6}{row.uniform_fit:>18}"
        for row in rows
    ]
    return "\n".join(lines)


def as_dicts(rows: list[LayoutComparison]) -> list[dict[str, object]]:
    return [{**asdict(row), "ratio": round(row.ratio, 3)} for row in rows]
