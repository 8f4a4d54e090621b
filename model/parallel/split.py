"""Which part of a model each rank of a tensor-parallel group holds. Imports no torch.

Query heads, their KV heads and the MLP's intermediate features are divided evenly; where there are fewer KV
heads than ranks, each KV head is held by as many ranks as read it. Rows of the vocabulary are divided as
evenly as they can be. Norms are held by every rank. Source of the scheme: Megatron-LM (arXiv 1909.08053).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from model.config.gemma3_config import Gemma3Config
from model.config.tensors import model_tensors
from model.interface.errors import ConfigError

if TYPE_CHECKING:
    import torch

FLAG = "--tensor-parallel-size"


def possible_sizes(config: Gemma3Config) -> list[int]:
    """Numbers of ranks that a model can be divided among."""
    return [size for size in range(1, config.num_attention_heads + 1) if _divides(config, size)]


def _divides(config: Gemma3Config, size: int) -> bool:
    kv_heads = config.num_key_value_heads
    shares_kv_heads = kv_heads % size == 0 or size % kv_heads == 0
    return config.num_attention_heads % size == 0 and shares_kv_heads and config.intermediate_size % size == 0


def divided_config(config: Gemma3Config, size: int) -> Gemma3Config:
    """What one rank computes, as a model of its own; its vocabulary is still the whole one. Raises
    ConfigError."""
    if size not in (sizes := possible_sizes(config)):
        raise ConfigError(
            f"{FLAG} {size} does not divide this model of {config.num_attention_heads} query heads, "
            f"{config.num_key_value_heads} key-value heads and {config.intermediate_size} intermediate "
            f"features. Possible for it: {', '.join(map(str, sizes))}."
        )
    return replace(
        config,
        num_attention_heads=config.num_attention_heads // size,
        num_key_value_heads=max(1, config.num_key_value_heads // size),
        intermediate_size=config.intermediate_size // size,
    )


@dataclass(frozen=True, slots=True)
class Part:
    """The part of one rank. ``num_valid_tokens``: rows of the vocabulary that have a token."""

    whole: Gemma3Config
    num_valid_tokens: int
    rank: int
    size: int

    def rows_of(self, rank: int) -> range:
        """Rows of the vocabulary with a token that a rank holds."""
        least, more = divmod(self.num_valid_tokens, self.size)
        start = rank * least + min(rank, more)
        return range(start, start + least + (rank < more))

    @property
    def widths(self) -> list[int]:
        """Logits that each rank computes."""
        return [len(self.rows_of(rank)) for rank in range(self.size)]

    @property
    def embedding_rows(self) -> range:
        """Rows that this rank looks up; those without a token are the last one's."""
        rows = self.rows_of(self.rank)
        return range(rows.start, self.whole.vocab_size) if self.rank == self.size - 1 else rows

    def tensors(self, whole: "Iterable[tuple[str, torch.Tensor]]") -> "Iterator[tuple[str, torch.Tensor]]":
        """This rank's part of every tensor of a checkpoint, as a view."""
        for name, tensor in whole:
            yield name, self.tensor(name, tensor)

    def tensor(self, name: str, tensor: "torch.Tensor") -> "torch.Tensor":
        """This rank's part of one tensor of a checkpoint, as a view."""
        spec = model_tensors(self.whole)[name]
        if spec.split is None:
            return tensor
        if spec.role in ("embedding", "head"):
            held = self.embedding_rows
        else:
            units, dim = spec.split.units, spec.split.dim
            per_unit = spec.shape[dim] // units
            first = self.rank * units // self.size
            held = range(first * per_unit, (first + max(1, units // self.size)) * per_unit)
        return tensor.narrow(spec.split.dim, held.start, len(held))
