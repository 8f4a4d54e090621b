"""CUDA graphs of decode steps: the hundreds of launches of a step as one, for batches padded to a few sizes.

A step in which every sequence has one token is laid into buffers that never move, and the graph of the next
larger size is replayed; all sizes share one memory pool. A row of the buffers is a sequence of the step, in
the step's order: what it computes travels in one copy from pinned memory, its block tables are gathered on
the device, and the host waits for nothing. Rows that pad a batch write to the null block, which nobody reads,
and see no keys. What makes a graph of a callable is handed in, so that all of this is tested without a
device.

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

from model.interface.kv_cache_spec import KVCacheSpec, ceil_div
from model.network.forward_batch import ForwardBatch, StepLayout
from model.network.gemma3 import Gemma3
from model.network.kv_cache import KVCache
from model.ops.interface import AttentionMetadata

logger = logging.getLogger(__name__)

LARGEST_BATCH = 256  # in larger batches launching costs little beside the step itself
Step = Callable[[], torch.Tensor]


def padded_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Choose the batch sizes that get a graph, ascending: 1, 2, 4 and multiples of 8, up to the one that
    holds ``max_num_seqs``."""
    sizes = [1, 2, 4, *range(8, LARGEST_BATCH + 1, 8)]
    needed = next((index for index, size in enumerate(sizes) if size >= max_num_seqs), len(sizes) - 1)
    return tuple(sizes[: needed + 1])


class Event(Protocol):
    """A marker in the device's queue of work, like ``torch.cuda.Event``."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class GraphDevice(Protocol):
    """The operations that capturing and replaying need of a device."""

    def capture(self, step: Step) -> Step:
        """Run ``step`` to warm it up, record it, and return what replays it: the same tensor each time, with
        new content."""
        ...

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        """Allocate uint8 memory on the host from which copies to the device do not block."""
        ...

    def event(self) -> Event: ...


class CudaGraphDevice:
    """CUDA graphs on a stream of their own, in one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, step: Step) -> Step:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            step()  # warm-up: compiles kernels and allocates workspaces, which cannot be captured
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads, such as a collective library's, may use the device meanwhile.
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


class _StepBuffer:
    """A step's input in one piece of memory, on the host or on the device, so that one copy sends it; its
    parts are views with an entry per row."""

    def __init__(self, memory: torch.Tensor, num_rows: int) -> None:
        columns_end = num_rows * 4 * 8
        self.memory = memory
        columns = memory[:columns_end].view(torch.int64).view(4, num_rows)
        self.token_ids, self.positions, self.global_slots, self.local_slots = columns.unbind()
        self.context_lens = memory[columns_end:].view(torch.int32)

    @staticmethod
    def num_bytes(num_rows: int) -> int:
        return num_rows * (4 * 8 + 4)


class _Staging:
    """Host memory for a step's input. It is not written again before the device has copied it."""

    def __init__(self, device: GraphDevice, num_rows: int) -> None:
        self.input = _StepBuffer(device.host_buffer(_StepBuffer.num_bytes(num_rows)), num_rows)
        self._taken = device.event()
        self._is_sent = False

    def wait(self) -> None:
        if self._is_sent:
            self._taken.synchronize()
            self._is_sent = False

    def send(self, target: _StepBuffer) -> None:
        target.memory.copy_(self.input.memory, non_blocking=True)
        self._taken.record()
        self._is_sent = True


class DecodeGraphs:
    """The graphs of one network over one cache. Call ``capture`` first; ``run`` then takes the steps that
    ``accepts`` is true for."""

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
        """Allocate the buffers. ``sizes``: the batch sizes to make graphs of, ascending."""
        self.sizes = tuple(sizes)
        self._model, self._cache, self._spec, self._device = model, cache, spec, device
        self._num_rows = num_rows = self.sizes[-1]
        table_width = ceil_div(max_model_len, spec.block_size)
        self._max_context = table_width * spec.block_size
        target = model.ops.device
        self._input = _StepBuffer(
            torch.zeros(_StepBuffer.num_bytes(num_rows), dtype=torch.uint8, device=target), num_rows
        )
        self._tables = torch.zeros(2, num_rows, table_width, dtype=torch.int32, device=target)
        self._query_start = torch.arange(num_rows + 1, dtype=torch.int32, device=target)
        # Two, so that the host fills one while the device still copies the other.
        self._staging = [_Staging(device, num_rows), _Staging(device, num_rows)]
        self._replays: dict[int, Step] = {}

    @torch.inference_mode()
    def capture(self, sizes: Sequence[int] | None = None) -> None:
        """Capture the graphs of ``sizes`` (all when None), largest first, so that the smaller ones fit into
        the pool of the largest.

        Every row is padding meanwhile: nothing but the null block is written.
        """
        began = time.monotonic()
        for size in sorted(sizes or self.sizes, reverse=True):
            self._replays[size] = self._device.capture(partial(self._step, size))
        logger.info("captured %d CUDA graphs in %.1f s", len(self._replays), time.monotonic() - began)

    def accepts(self, layout: StepLayout) -> bool:
        """Whether ``run`` can take this step: one token per sequence, no more sequences than the largest
        size, positions within the longest length."""
        count = len(layout.rows)
        return (
            count <= self._num_rows
            and len(layout.positions) == count
            and int(layout.positions.max()) < self._max_context
        )

    def run(
        self, layout: StepLayout, block_tables: torch.Tensor, token_ids: torch.Tensor | None
    ) -> torch.Tensor:
        """Replay the step and return the final hidden states [n, h] of its tokens, which the next step
        overwrites. ``block_tables`` int32 [group, n, table_width] are those of the step's rows; ``token_ids``
        int64 [n] are given where the device has drawn them."""
        count = len(layout.rows)
        size = next(size for size in self.sizes if size >= count)
        self._staging.reverse()
        staging = self._staging[0]
        staging.wait()
        _fill(staging.input, layout, size)
        staging.send(self._input)
        self._tables[:, :count, : block_tables.shape[2]].copy_(block_tables)
        if token_ids is not None:
            self._input.token_ids[:count].copy_(token_ids)
        return self._replays[size]()[:count]

    def _step(self, size: int) -> torch.Tensor:
        """Run the network over the first ``size`` rows of the buffers; this is the function that is
        captured."""

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
        )
        hidden: torch.Tensor = self._model(batch, self._cache)
        return hidden


def _fill(target: _StepBuffer, layout: StepLayout, size: int) -> None:
    """Fill in the input of the first ``size`` rows. Rows without a sequence are padding: they write to the
    null block and read nothing."""
    count = len(layout.rows)
    global_slots, local_slots = layout.slots
    columns = (target.token_ids, target.positions, target.global_slots, target.local_slots)
    for column, values in zip(
        columns, (layout.token_ids, layout.positions, global_slots, local_slots), strict=True
    ):
        column[count:size] = 0
        if values is not None:
            column[:count] = torch.from_numpy(values)
    target.context_lens[count:size] = 0
    target.context_lens[:count] = torch.from_numpy(layout.context_lens)
