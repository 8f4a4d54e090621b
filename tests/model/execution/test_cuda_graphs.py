"""CUDA graphs of decode steps, over a stand-in for the device: what is padded, what is sent, and that a
replayed step is the eager one bit for bit. The same on a real device where there is one."""

import random

import numpy as np
import pytest
import torch

from model.execution import cuda_graphs
from model.execution.cuda_graphs import padded_sizes
from model.execution.decode_rows import DecodeRows
from model.interface.block_tables import BlockTableRows
from model.interface.sequence_chunk import DecodeChunks, SequenceChunk
from model.ops.select import select_ops
from tests.model.graphs import (
    MAX_MODEL_LEN,
    MAX_NUM_SEQS,
    LiveHarness,
    PairedRuns,
    RerunDevice,
    long_life,
    make_harness,
    make_model,
)
from tests.model.harness import GREEDY, Harness, TestSequence
from tests.model.ops.cpu.harness import cpu_ops, needs_kernels
from tests.model.tiny_models import random_prompt


def test_sizes_are_fine_where_batches_are_small() -> None:
    assert padded_sizes(1) == (1,)
    assert padded_sizes(3) == (1, 2, 4)
    assert padded_sizes(8) == (1, 2, 4, 8)
    assert padded_sizes(9) == (1, 2, 4, 8, 16)
    assert padded_sizes(64) == (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)
    assert padded_sizes(1000)[-2:] == (248, 256)


@needs_kernels
@pytest.mark.parametrize(
    ("dtype", "kind"), [(torch.float32, LiveHarness), (torch.bfloat16, LiveHarness), (torch.float32, Harness)]
)
def test_a_replayed_step_is_the_eager_one_bit_for_bit(dtype: torch.dtype, kind: type[Harness]) -> None:
    device = RerunDevice()
    runs = PairedRuns(make_model(cpu_ops(dtype)), device, kind)
    assert device.captured == [24, 16, 8, 4, 2, 1]  # the largest first
    num_steps = 0
    for graphed, eager in long_life(runs):
        assert graphed.isfinite().all()
        assert torch.equal(graphed, eager)
        num_steps += 1
    assert len(device.replayed) == num_steps
    assert set(device.replayed) == {24, 16, 8, 4, 2, 1}


@needs_kernels
def test_what_is_not_a_batch_of_decodes_runs_eagerly_and_in_between() -> None:
    model = make_model(cpu_ops(torch.float32))
    device = RerunDevice()
    runs = PairedRuns(model, device, LiveHarness)
    for length in (5, 70, 30):
        runs.start(length, seed=length)
    assert device.replayed == []  # prefills
    runs.step()
    assert device.replayed == [4]
    late = TestSequence(random_prompt(40)), TestSequence(random_prompt(40))
    for side, harness in enumerate(
        (runs.graphed, runs.eager)
    ):  # a mixed step, in which the decodes fill up blocks
        harness.run([*[(pair[side], 1) for pair in runs.pairs], (late[side], 39)])
    assert device.replayed == [4]
    for pair in runs.pairs:
        for sequence in pair:
            sequence.tokens.append(3)
    runs.pairs.append(late)
    graphed, eager = runs.step()
    assert device.replayed == [4, 4]
    assert torch.equal(graphed, eager)


@needs_kernels
def test_sampled_tokens_and_errors_are_those_of_eager_steps() -> None:
    """Through ``run``: one sequence whose numbers are not finite fails alone, in a row that later serves
    another."""
    model = make_model(cpu_ops(torch.float32))
    runs = PairedRuns(model, RerunDevice(), LiveHarness)
    for length in (20, 21, 22):
        runs.start(length, seed=length)
    for side, harness in enumerate((runs.graphed, runs.eager)):
        harness.cache.layers[0].values[runs.pairs[1][side].local_table[0], 3] = torch.inf
    results = [
        list(harness.run([(pair[side], 1) for pair in runs.pairs]))
        for side, harness in enumerate((runs.graphed, runs.eager))
    ]
    assert results[0] == results[1]
    assert [result.error is None for result in results[0]] == [True, False, True]
    for pair in runs.pairs:
        for sequence in pair:
            sequence.tokens.append(5)
    runs.end(1)
    runs.start(30, seed=1)
    graphed, eager = runs.step()
    assert torch.equal(graphed, eager)


@needs_kernels
def test_memory_of_the_host_is_not_written_before_the_device_has_taken_it() -> None:
    device = RerunDevice()
    runs = PairedRuns(make_model(cpu_ops(torch.float32)), device, LiveHarness)
    runs.start(5, seed=1)
    for _ in range(5):
        runs.step()
    # RecordedEvent itself refuses to be recorded twice without a wait; of two buffers, each waited for its
    # former use only.
    assert [event.recorded for event in device.events] == [2, 3]
    assert [event.synchronized for event in device.events] == [1, 2]


@needs_kernels
def test_a_step_that_changes_more_than_one_copy_carries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "UPDATES_PER_COPY", 7)
    runs = PairedRuns(make_model(cpu_ops(torch.float32)), RerunDevice(), LiveHarness)
    for length in (150, 5, 60, 61):
        runs.start(length, seed=length)
    for _ in range(10):
        graphed, eager = runs.step()
        assert torch.equal(graphed, eager)


@needs_kernels
def test_only_what_fits_is_replayed() -> None:
    model = make_model(cpu_ops(torch.float32))
    harness = make_harness(model, LiveHarness)
    device = RerunDevice()
    harness.runner.capture_graphs((1, 2), 16, device)
    sequences = [TestSequence(random_prompt(length)) for length in (4, 5, 6)]
    harness.run([(sequence, len(sequence.tokens) - 1) for sequence in sequences])
    harness.run([(sequence, 1) for sequence in sequences])  # three, and graphs for two
    long = TestSequence(random_prompt(17))
    harness.run([(long, 16)])
    harness.run([(long, 1)])  # its token stands beyond the longest length
    assert device.replayed == []


def test_a_cpu_gets_no_graphs_and_a_new_cache_drops_them() -> None:
    ops = select_ops(torch.device("cpu"), torch.float32)
    harness = make_harness(make_model(ops), LiveHarness)
    harness.runner.capture_graphs(padded_sizes(MAX_NUM_SEQS), MAX_MODEL_LEN)
    assert harness.runner._graphs is None
    device = RerunDevice()
    harness.runner.capture_graphs(padded_sizes(MAX_NUM_SEQS), MAX_MODEL_LEN, device)
    assert harness.runner._graphs is not None
    harness.runner.release_cache()
    assert harness.runner._graphs is None


# -- rows ----------------------------------------------------------------------------------------------------


def decode(table: list[int], position: int, local_table: list[int] | None = None) -> SequenceChunk:
    return SequenceChunk([9], position, table, local_table or table, GREEDY, samples=True)


def test_a_sequence_keeps_its_row_and_sends_only_new_blocks() -> None:
    rows = DecodeRows(num_rows=4, table_width=10, block_size=4, window=8)
    first, second, third = [11, 12], [21], [31, 32, 33]
    layout = rows.lay_out([decode(first, 7), decode(second, 2), decode(third, 8)])
    assert layout.rows.tolist() == [0, 1, 2]
    assert layout.positions.tolist() == [7, 2, 8]
    assert layout.global_slots.tolist() == layout.local_slots.tolist() == [12 * 4 + 3, 21 * 4 + 2, 33 * 4]
    assert layout.places == [0, 1, 40, 41, 10, 50, 20, 21, 22, 60, 61, 62]
    assert layout.entries == [11, 12, 11, 12, 21, 21, 31, 32, 33, 31, 32, 33]
    third.append(34)
    layout = rows.lay_out([decode(second, 3), decode(third, 12), decode(first, 7)])
    assert layout.rows.tolist() == [1, 2, 0]
    assert (layout.places, layout.entries) == ([23, 63], [34, 34])
    layout = rows.lay_out(
        [decode(third, 13), decode(second, 3)]
    )  # the first has ended: the last takes its row
    assert layout.rows.tolist() == [0, 1]
    assert layout.places == [0, 1, 2, 3, 41, 42, 43]  # of a local table, what the window reaches
    layout = rows.lay_out([decode(third, 14), decode(second, 3)])
    assert (layout.rows.tolist(), layout.places) == ([0, 1], [])


def test_blocks_behind_the_window_are_not_sent() -> None:
    rows = DecodeRows(num_rows=1, table_width=10, block_size=4, window=8)
    layout = rows.lay_out([decode([1, 2, 3, 4, 5, 6], 20, [0, 0, 0, 7, 8, 9])])
    assert layout.places == [0, 1, 2, 3, 4, 5, 13, 14, 15]
    assert layout.entries == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert layout.local_slots.tolist() == [9 * 4]


def test_another_list_is_another_sequence_even_where_it_equals() -> None:
    rows = DecodeRows(num_rows=2, table_width=4, block_size=4, window=8)
    table, other = [1], [1]
    rows.lay_out([decode(table, 0)])
    assert rows.lay_out([decode(other, 0)]).places == [0, 8]
    assert rows.lay_out([decode(other, 1, [2])]).entries == [
        1,
        2,
    ]  # the same global table, and not the same local one
    assert rows.lay_out([decode(other, 1), decode(other, 1)]).rows.tolist() == [0, 1]


def test_many_sequences_come_and_go_and_no_row_is_given_twice() -> None:
    shuffle = random.Random(1)
    rows = DecodeRows(num_rows=16, table_width=20, block_size=4, window=8)
    device = [0] * (2 * 16 * 20)
    live: list[tuple[list[int], int]] = []
    for _ in range(400):
        live = [
            (table, position + 1) for table, position in live if shuffle.random() < 0.95 and position < 70
        ]
        while len(live) < 16 and shuffle.random() < 0.5:
            live.append(([], shuffle.randrange(40)))
        for table, position in live:
            while len(table) <= position // 4:
                table.append(shuffle.randrange(1, 1 << 20))
        batch = shuffle.sample(live, shuffle.randint(0, len(live)))
        layout = rows.lay_out([decode(table, position) for table, position in batch])
        assert sorted(layout.rows.tolist()) == list(range(len(batch)))
        for place, entry in zip(layout.places, layout.entries, strict=True):
            device[place] = entry
        for row, (table, position) in zip(layout.rows, batch, strict=True):
            last, first = position // 4, max(0, position - 7) // 4
            assert device[row * 20 : row * 20 + last + 1] == table[: last + 1]
            assert device[320 + row * 20 + first : 320 + row * 20 + last + 1] == table[first : last + 1]


def test_chunks_that_stay_the_same_take_no_loop_and_send_the_same() -> None:
    """DecodeChunks, as the engine makes them: rows of tables that other sequences take over later."""
    tables = BlockTableRows()
    lists: dict[int, tuple[list[int], list[int]]] = {}
    made = 0

    def begin(blocks: list[int]) -> int:
        row = tables.take()
        lists[row] = ([], [])
        grow(row, blocks)
        return row

    def grow(row: int, blocks: list[int]) -> None:
        tables.append(row, len(lists[row][0]), blocks, blocks)
        for table in lists[row]:
            table.extend(blocks)

    def chunks_of(*table_rows: int) -> DecodeChunks:
        def make(index: int) -> SequenceChunk:
            nonlocal made
            made += 1
            row = table_rows[index]
            return SequenceChunk(
                [9], int(chunks.starts[index]), *lists[row], GREEDY, samples=True, tables=tables, row=row
            )

        count = len(table_rows)
        of_each = [lists[row] for row in table_rows]
        chunks = DecodeChunks(
            [GREEDY] * count, [1] * count, tables, table_rows, of_each, plain=True, make_chunk=make
        )
        return chunks

    rows = DecodeRows(num_rows=4, table_width=10, block_size=4, window=8)
    first, second = begin([11, 12]), begin([21])
    chunks = chunks_of(first, second)
    chunks.move(np.array([5, 6]), np.array([7, 2]))
    layout = rows.lay_out(chunks)
    assert (layout.token_ids.tolist(), layout.positions.tolist()) == ([5, 6], [7, 2])
    assert layout.global_slots.tolist() == [12 * 4 + 3, 21 * 4 + 2]
    assert (layout.places, layout.entries) == ([0, 1, 40, 41, 10, 50], [11, 12, 11, 12, 21, 21])
    grow(first, [13])
    chunks.move(np.array([7, 8]), np.array([8, 3]))
    made = 0
    layout = rows.lay_out(chunks)
    assert made == 0
    assert (layout.places, layout.entries) == ([2, 42], [13, 13])
    assert layout.local_slots.tolist() == [13 * 4, 21 * 4 + 3]
    tables.give_back(first, 3)
    third = begin([31])
    assert third == first  # the same row of the tables, and another sequence
    chunks = chunks_of(third, second)
    chunks.move(np.array([7, 8]), np.array([1, 3]))
    layout = rows.lay_out(chunks)
    assert layout.rows.tolist() == [0, 1]
    assert (layout.places, layout.entries) == ([0, 40], [31, 31])


# -- on a device ---------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_replayed_step_on_a_device_is_the_eager_one() -> None:
    model = make_model(select_ops(torch.device("cuda"), torch.float32))
    runs = PairedRuns(model, cuda_graphs.CudaGraphDevice(torch.device("cuda")), LiveHarness)
    for graphed, eager in long_life(runs):
        assert graphed.isfinite().all()
        # Padding changes which kernels multiply, and how a context is split: the order of float32 sums.
        assert (graphed - eager).abs().max() < 1e-3 * eager.abs().max()
