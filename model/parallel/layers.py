"""The layers of the network that span ranks, put in the place of its own: row-parallel linears, the look-up
in a divided embedding and a head whose logits are gathered. Everything else of the network, column-parallel
linears among it, is that of a smaller model and knows of no other rank.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import torch

from model.config.gemma3_config import Gemma3Config
from model.config.tensors import LinearSpec, layer_linears
from model.interface.errors import ConfigError
from model.network.gemma3 import Gemma3
from model.network.layers import Embedding, Head, Linear
from model.ops.interface import Ops
from model.parallel.group import Group
from model.parallel.split import FLAG, Part, divided_config
from model.precision import GROUP

MAX_ROWS = 64  # of logits gathered at once


class RowParallelLinear(Linear):
    """Each rank multiplies its share of the input features; the products are summed up."""

    def __init__(self, group: Group, whole: Linear) -> None:
        super().__init__(whole.ops, whole.spec)
        self.group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.group.all_reduce(super().forward(x))


class DividedEmbedding(Embedding):
    """Each rank looks up the ids whose rows it holds, and zeros for the rest; the sum is the embedding."""

    def __init__(self, group: Group, ops: Ops, config: Gemma3Config, rows: range) -> None:
        super().__init__(ops, config)
        self.group = group
        self.first_row = rows.start
        self.shape = (len(rows), config.hidden_size)
        self.weight = torch.empty(self.shape, dtype=ops.dtype, device="meta")

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        rows = token_ids - self.first_row
        elsewhere = (rows < 0) | (rows >= self.shape[0])
        found = self.weight[rows.masked_fill_(elsewhere, 0)].masked_fill_(elsewhere[:, None], 0.0)
        return self.group.all_reduce(found) * self.normalizer


class DividedHead(Head):
    """Each rank computes the logits of its rows of the vocabulary, for hidden states that rank 0 sends: on
    rank 0 ``forward`` is that of a whole head, and the others, whom ``announce`` tells to, call
    ``take_part``."""

    def __init__(self, group: Group, ops: Ops, part: Part) -> None:
        super().__init__(ops, part.whole, part.num_valid_tokens)
        self.group = group
        self.widths = part.widths
        (head,) = self.spec.pieces
        rows = replace(head, shape=(len(part.embedding_rows), self.in_features))
        self.spec = LinearSpec("head", (rows,))
        self.announce: Callable[[int], None] | None = None  # that so many rows are sent next
        # Taken once, so that it is there when memory runs out: what each rank sends and rank 0 receives, and
        # hidden states.
        count = 1 + group.size if group.rank == 0 else 1
        self.sent, *self.received = torch.empty(count, MAX_ROWS, max(self.widths), device=ops.device)
        self.hidden = torch.empty(MAX_ROWS, self.in_features, dtype=ops.dtype, device=ops.device)

    def pack(self, weight: torch.Tensor, *, shared: bool = False) -> None:
        Linear.pack(self, weight[: self.widths[self.group.rank]], shared=shared)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        slices = [self._slice(rows) for rows in torch.split(x, MAX_ROWS)]
        return slices[0] if len(slices) == 1 else torch.cat(slices)

    def greedy(self, x: torch.Tensor) -> None:
        """Logits are needed as a whole."""

    def _slice(self, x: torch.Tensor) -> torch.Tensor:
        assert self.announce is not None, "rank 0 only"
        num_rows = len(x)
        self.announce(num_rows)
        self.group.broadcast(x.contiguous())
        self._send(x)
        parts = zip(self.received, self.widths, strict=True)
        return torch.cat([part[:num_rows, :width] for part, width in parts], dim=1)

    def take_part(self, num_rows: int) -> None:
        """Compute this rank's logits of the next hidden states."""
        hidden = self.hidden[:num_rows]
        self.group.broadcast(hidden)
        self._send(hidden)

    def _send(self, x: torch.Tensor) -> None:
        """Logits of this rank's rows to rank 0. Whatever happens, something is sent: the others wait for
        it."""
        sent = self.sent[: len(x)]
        try:
            # what stands beyond is cut off again
            sent[:, : self.widths[self.group.rank]] = super().forward(x)
        finally:
            self.group.gather(sent, [part[: len(x)] for part in self.received])


class ModelShard:
    """One rank's share of a model, as ``ModelRunner.load`` wants it."""

    def __init__(self, group: Group, whole: Gemma3Config, num_valid_tokens: int) -> None:
        self._group = group
        self.part = Part(whole, num_valid_tokens, group.rank, group.size)
        self.config = divided_config(whole, group.size)

    def divide(self, model: Gemma3) -> None:
        """Replace what spans ranks in a network of ``config`` that has no weights yet."""
        group, ops = self._group, model.ops
        model.runs_whole_layers = False  # the sums stand inside them
        model.embedding = DividedEmbedding(group, ops, self.part.whole, self.part.embedding_rows)
        model.head = DividedHead(group, ops, self.part)
        for layer in model.blocks:
            layer.attention.output = RowParallelLinear(group, layer.attention.output)
            layer.mlp.down = RowParallelLinear(group, layer.mlp.down)

    def tensors(self, whole: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The rank's share of every tensor of a checkpoint, as a view."""
        return self.part.tensors(whole)


def check_quantization(quantization: str, whole: Gemma3Config, size: int) -> None:
    """Refuse weights in fewer bits whose groups of inputs a division would cut. Raises ConfigError."""
    if quantization not in ("int8", "int4"):
        return
    rank = layer_linears(divided_config(whole, size), 0)
    for role, linear in layer_linears(whole, 0).items():
        divided = rank[role].in_features
        if linear.in_features % GROUP == 0 and divided % GROUP:
            raise ConfigError(
                f"--quantization {quantization} keeps weights in groups of {GROUP} inputs, and {FLAG} {size} "
                f"would cut those of the {role} layers: {divided} inputs on each rank. "
                "Use --quantization none, or fewer ranks."
            )
