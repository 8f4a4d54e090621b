"""CUDA graphs of decode steps: the hundreds of launches of a step as one, for batches padded to a few sizes.

A step in which every sequence has one token is laid into buffers that never move, and the graph of the next
larger size is replayed; all sizes share one memory pool. Block tables stay on the device from step to step:
what changed travels with the step's tokens in one copy from pinned memory, and the host waits for nothing.
Rows that pad a batch write to the null block, which nobody reads, and see no keys. What makes a graph of a
callable is handed in, so that all of this is tested without a device.

Attention in a captured step depends on the padded size and on device tensors only: there
``AttentionMetadata.context_lens`` are upper bounds, and a row whose length is 0 reads nothing and may yield
anything.
"""

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch

from model.execution.decode_rows import DecodeLayout, DecodeRows
from model.interface.kv_cache_spec import KVCacheSpec, ceil_div
from model.interface.sequence_chunk import DecodeChunks, SequenceChunk
from model.network.forward_batch import ForwardBatch, drawn_token_ids
from model.network.gemma3 import Gemma3
from model.network.kv_cache import KVCache
from model.ops.interface import AttentionMetadata

logger = logging.getLogger(__name__)

LARGEST_BATCH = 256  # beyond it, launching costs little beside the step itself
UPDATES_PER_COPY = (
    4096  # entries of block tables that one copy carries; a step that changes more takes several
)
Step = Callable[[], torch.Tensor]


def padded_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Batch sizes that get a graph, ascending: 1, 2, 4 and multiples of 8, up to the one that holds
    ``max_num_seqs``."""
    sizes = [1, 2, 4, *range(8, LARGEST_BATCH + 1, 8)]
    needed = next((index for index, size in enumerate(sizes) if size >= max_num_seqs), len(sizes) - 1)
    return tuple(sizes[: needed + 1])


class Event(Protocol):
    """A place in the device's queue of work, as ``torch.cuda.Event``."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class GraphDevice(Protocol):
    """What graphs need of a device."""

    def capture(self, step: Step) -> Step:
        """Run ``step`` to warm it up, record it, and return what replays it: the same tensor each time, with
        new content."""
        ...

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        """uint8 memory of the host, from which copies to the device do not block."""
        ...

    def event(self) -> Event: ...


class CudaGraphDevice:
    """The real one: graphs on a stream of their own, in one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, step: Step) -> Step:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            step()  # compiles kernels and makes workspaces, neither of which can be recorded
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile, as that of a collective library does.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            output = step()

        def replay() -> torch.Tensor:
            graph.replay()
            return output

        return replay

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def event(self) -> Event:
        return torch.cuda.Event()  # type: ignore[no-untyped-call]


class _StepInput:
    """One run of bytes that holds all that a step sends, on the host or on the device: views of its parts.

    First what every step sends, one row of each part per row of the batch; then the changes of the block
    tables.
    """

    def __init__(self, memory: torch.Tensor, num_rows: int) -> None:
        columns_end = num_rows * 5 * 8
        places = columns_end + ceil_div(num_rows, 2) * 8  # int64 is aligned
        entries = places + UPDATES_PER_COPY * 8
        self.memory = memory
        self.fixed = memory[:places]
        columns = memory[:columns_end].view(torch.int64).view(5, num_rows)
        self.token_ids, self.positions, self.global_slots, self.local_slots, self.order = columns.unbind()
        self.context_lens = memory[columns_end : columns_end + num_rows * 4].view(torch.int32)
        self.places = memory[places:entries].view(torch.int64)
        self.entries = memory[entries:].view(torch.int32)

    @staticmethod
    def num_bytes(num_rows: int) -> int:
        return num_rows * 5 * 8 + ceil_div(num_rows, 2) * 8 + UPDATES_PER_COPY * 12


class _Staging:
    """Memory of the host for a step's input, which is not written again before the device has taken it."""

    def __init__(self, device: GraphDevice, num_rows: int) -> None:
        self.input = _StepInput(device.host_buffer(_StepInput.num_bytes(num_rows)), num_rows)
        self._taken = device.event()
        self._is_sent = False

    def wait(self) -> None:
        if self._is_sent:
            self._taken.synchronize()
            self._is_sent = False

    def send(self, target: _StepInput, *, with_updates: bool) -> None:
        if with_updates:
            target.memory.copy_(self.input.memory, non_blocking=True)
        else:
            target.fixed.copy_(self.input.fixed, non_blocking=True)
        self._taken.record()
        self._is_sent = True


class DecodeGraphs:
    """The graphs of one network over one cache. ``capture`` first; ``run`` then takes what ``accepts`` lets
    through."""

    @torch.inference_mode()
    def __init__(
        self,
        model: Gemma3,
        cache: KVCache,
        spec: KVCacheSpec,
        device: GraphDevice,
        sizes: Sequence[int],
        max_model_len: int,
    ) -> None:
        """``sizes``: the batch sizes to make graphs of, ascending."""
        self.sizes = tuple(sizes)
        self._model, self._cache, self._spec, self._device = model, cache, spec, device
        self._num_rows = num_rows = self.sizes[-1]
        table_width = ceil_div(max_model_len, spec.block_size)
        self._max_context = table_width * spec.block_size
        target = model.ops.device
        self._input = _StepInput(
            torch.zeros(_StepInput.num_bytes(num_rows), dtype=torch.uint8, device=target), num_rows
        )
        self._input.order.copy_(torch.arange(num_rows))
        self._tables = torch.zeros(2, num_rows, table_width, dtype=torch.int32, device=target)
        self._query_start = torch.arange(num_rows + 1, dtype=torch.int32, device=target)
        self._rows = DecodeRows(num_rows, table_width, spec.block_size, spec.sliding_window)
        # Two, so that a step is laid out while the device still takes the one before.
        self._staging = [_Staging(device, num_rows), _Staging(device, num_rows)]
        self._replays: dict[int, Step] = {}

    @torch.inference_mode()
    def capture(self, sizes: Sequence[int] | None = None) -> None:
        """Make the graphs of all sizes, or of these, largest first, so that the smaller ones fit into the
        pool of the largest.

        Every row is padding meanwhile: nothing but the null block is written.
        """
        began = time.monotonic()
        for size in sorted(sizes or self.sizes, reverse=True):
            self._replays[size] = self._device.capture(partial(self._step, size))
        logger.info("captured %d CUDA graphs in %.1f s", len(self._replays), time.monotonic() - began)

    def accepts(self, chunks: Sequence[SequenceChunk]) -> bool:
        """Whether these chunks are a step that ``run`` can take: one token each, not too many, within the
        longest length."""
        if len(chunks) > self._num_rows:
            return False
        if isinstance(chunks, DecodeChunks):
            return int(chunks.starts.max()) < self._max_context
        return all(len(chunk.token_ids) == 1 and chunk.start < self._max_context for chunk in chunks)

    def run(self, chunks: Sequence[SequenceChunk]) -> torch.Tensor:
        """Final hidden states [n, h] of the chunks' tokens, in their order: overwritten by the next step."""
        layout = self._rows.lay_out(chunks)
        size = next(size for size in self.sizes if size >= len(chunks))
        first = 0
        while len(layout.places) - first > UPDATES_PER_COPY:
            self._send_updates(self._next_staging(), layout, first)
            first += UPDATES_PER_COPY
        staging = self._next_staging()
        _fill(staging.input, layout, size)
        if first < len(layout.places):
            self._send_updates(staging, layout, first)
        else:
            staging.send(self._input, with_updates=False)
        if isinstance(chunks, DecodeChunks) and chunks.drawn is not None:
            token_ids = drawn_token_ids(chunks.drawn, self._input.memory.device)
            self._input.token_ids.index_copy_(0, self._input.order[: len(chunks)], token_ids)
        return self._replays[size]()[: len(chunks)]

    def _next_staging(self) -> _Staging:
        self._staging.reverse()
        self._staging[0].wait()
        return self._staging[0]

    def _send_updates(self, staging: _Staging, layout: DecodeLayout, first: int) -> None:
        """The next changes of the block tables, and whatever else stands in ``staging``."""
        places, entries = (
            values[first : first + UPDATES_PER_COPY] for values in (layout.places, layout.entries)
        )
        count = len(places)
        staging.input.places[:count] = torch.tensor(places)
        staging.input.entries[:count] = torch.tensor(entries, dtype=torch.int32)
        staging.send(self._input, with_updates=True)
        self._tables.view(-1).index_copy_(0, self._input.places[:count], self._input.entries[:count])

    def _step(self, size: int) -> torch.Tensor:
        """The network over the first ``size`` rows of the buffers: what is captured."""

        def attention(group: int, slots: torch.Tensor, window: int | None) -> AttentionMetadata:
            return AttentionMetadata(
                window=window,
                block_size=self._spec.block_size,
                query_lens=(1,) * size,
                context_lens=(self._max_context,) * size,
                query_start=self._query_start[: size + 1],
                context_lens_tensor=self._input.context_lens[:size],
                block_table=self._tables[group, :size],
                slot_mapping=slots[:size],
            )

        batch = ForwardBatch(
            token_ids=self._input.token_ids[:size],
            positions=self._input.positions[:size],
            global_attention=attention(0, self._input.global_slots, None),
            local_attention=attention(1, self._input.local_slots, self._spec.sliding_window),
            first_rows=tuple(range(size + 1)),
        )
        hidden: torch.Tensor = self._model(batch, self._cache)
        return hidden.index_select(0, self._input.order[:size])


def _fill(target: _StepInput, layout: DecodeLayout, size: int) -> None:
    """What the first ``size`` rows compute. Those of no sequence are padding: they write to the null block
    and read nothing."""
    count = len(layout.rows)
    rows = torch.from_numpy(layout.rows)
    columns = (target.token_ids, target.positions, target.global_slots, target.local_slots)
    for column, values in zip(
        columns, (layout.token_ids, layout.positions, layout.global_slots, layout.local_slots), strict=True
    ):
        column[count:size] = 0
        if values is not None:
            column[rows] = torch.from_numpy(values)
    target.context_lens[count:size] = 0
    target.context_lens[:count] = (target.positions[:count] + 1).int()
    target.order[:count] = rows
    target.order[count:size] = torch.arange(count, size)
