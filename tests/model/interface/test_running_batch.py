"""The running batch: rows that belong to sequences, their block tables and the one list of what changed
there."""

import random

import numpy as np
import pytest

from model.interface.running_batch import GLOBAL, LOCAL, NULL_BLOCK, RunningBatch
from model.interface.sampling_params import SamplingParams
from model.interface.sequence_chunk import ChunkResult, SequenceChunk, StepInput, StepResult

GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


def test_a_sequence_gets_the_lowest_free_row_and_its_columns() -> None:
    batch = RunningBatch(3, 4)
    tokens = [5, 6, 7]
    settings = SamplingParams(max_tokens=9, temperature=0.5, top_p=0.25, min_p=0.125, top_k=3, seed=-1)
    rows = [
        batch.add(tokens, 2, settings, max_num_tokens=11, num_computed_tokens=1),
        batch.add([1], 1, GREEDY),
    ]
    assert rows == [0, 1]
    assert batch.num_taken == 2
    assert batch.token_ids[0] is tokens
    columns = (batch.num_prompt_tokens, batch.num_tokens, batch.num_computed_tokens, batch.last_token_ids)
    assert [int(column[0]) for column in (*columns, batch.max_num_tokens)] == [2, 3, 1, 7, 11]
    drawn = (batch.temperature, batch.top_p, batch.min_p, batch.top_k)
    assert [column[0].item() for column in drawn] == [0.5, 0.25, 0.125, 3]
    assert batch.is_greedy.tolist()[:2] == [False, True]
    assert batch.streams[0] != batch.streams[1]
    batch.remove(0)
    assert batch.add([2], 1, GREEDY) == 0


def test_a_batch_that_is_full_takes_nobody() -> None:
    batch = RunningBatch(1, 1)
    batch.add([1], 1, GREEDY)
    with pytest.raises(IndexError):
        batch.add([1], 1, GREEDY)


def test_plain_is_who_wants_a_token_and_nothing_else() -> None:
    class Anything:
        is_complete = False

        def mask(self) -> bytes | None:
            return None

        def accept(self, token_id: int) -> None:
            pass

    batch = RunningBatch(4, 1)
    for sampling in (
        GREEDY,
        SamplingParams(max_tokens=1, logprobs=0),
        SamplingParams(1, presence_penalty=1.0),
    ):
        batch.add([1], 1, sampling)
    batch.add([1], 1, GREEDY, grammar=Anything())
    assert batch.is_plain.tolist() == [True, False, False, False]
    chunks = [
        SequenceChunk(0, [1], 0, samples=True),
        SequenceChunk(0, [1], 0, samples=False),
        SequenceChunk(0, [1], 0, samples=True, pooling=True),
        SequenceChunk(0, [1], 0, samples=True, prompt_targets=[2]),
        SequenceChunk(1, [1], 0, samples=True),
    ]
    step = StepInput(batch, np.array([0, 1]), np.array([0, 0]), np.array([1, 1]), chunks)
    assert step.is_plain.tolist() == [True, False, True, False, False, False, False]


def test_tables_are_those_of_lists_and_changes_name_every_new_entry() -> None:
    """A device that is told the changes alone has, of each sequence, every block that it holds."""
    choose = random.Random(2)
    batch = RunningBatch(6, 20)
    mirror = np.zeros_like(batch.blocks)
    tables: dict[int, tuple[list[int], list[int]]] = {}
    for _ in range(500):
        if tables and choose.random() < 0.2:
            row = choose.choice(list(tables))
            batch.remove(row)
            del tables[row]
            assert not batch.blocks[:, row].any()
        elif batch.num_taken < 6:
            tables[batch.add([1], 1, GREEDY)] = ([], [])
        rows: list[int] = []
        indices: list[int] = []
        for row, (held, _) in tables.items():
            count = choose.randrange(3) if len(held) < 17 else 0
            rows += [row] * count
            indices += range(len(held), len(held) + count)
        if rows:
            new = [[choose.randrange(1, 1000) for _ in rows] for _ in (GLOBAL, LOCAL)]
            batch.set_blocks(np.array(rows), np.array(indices), *new)
            for row, global_block, local_block in zip(rows, *new, strict=True):
                tables[row][GLOBAL].append(global_block)
                tables[row][LOCAL].append(local_block)
        if choose.random() < 0.5:  # a step
            at = batch.changes.rows, batch.changes.indices
            mirror[:, *at] = batch.blocks[:, *at]
            batch.changes.clear()
            for row, of_both in tables.items():
                length = len(of_both[GLOBAL])
                assert batch.num_blocks[row] == length
                assert (
                    mirror[:, row, :length].tolist()
                    == batch.blocks[:, row, :length].tolist()
                    == list(of_both)
                )
        order = np.array(choose.sample(list(tables), len(tables)), dtype=np.int64)
        gathered = batch.block_tables(order, 20)
        assert gathered.tolist() == batch.blocks[:, order].tolist()
    assert NULL_BLOCK == 0


def test_the_first_rows_in_their_order_are_not_copied() -> None:
    batch = RunningBatch(4, 8)
    assert np.shares_memory(batch.block_tables(np.array([0, 1, 2]), 5), batch.blocks)
    for rows in ([0, 2], [1, 0], [1, 2]):
        part = batch.block_tables(np.array(rows), 5)
        assert not np.shares_memory(part, batch.blocks)
        assert part.shape == (2, 2, 5)


def step_of(num_decodes: int, num_chunks: int) -> StepInput:
    batch = RunningBatch(num_decodes + num_chunks, 1)
    for _ in range(batch.num_rows):
        batch.add([1, 2, 3], 1, GREEDY)
    rows = np.arange(num_decodes)
    chunks = [SequenceChunk(row, [1, 2], 0, samples=False) for row in range(num_decodes, batch.num_rows)]
    return StepInput(batch, rows, 10 * rows, 100 + rows, chunks)


@pytest.mark.parametrize("cut", range(6))
def test_a_step_is_its_parts(cut: int) -> None:
    whole = step_of(3, 2)
    parts = whole.part(0, cut), whole.part(cut, 5)
    assert [len(part) for part in parts] == [cut, 5 - cut]
    assert [row for part in parts for row in part.rows.tolist()] == whole.rows.tolist()
    assert [start for part in parts for start in part.starts.tolist()] == whole.starts.tolist()
    assert [t for part in parts if part.token_ids is not None for t in part.token_ids.tolist()] == [
        100,
        101,
        102,
    ]
    assert sum(part.num_tokens for part in parts) == whole.num_tokens == 7
    assert sum(part.num_prefill_tokens for part in parts) == whole.num_prefill_tokens == 4


def test_a_result_is_a_bare_token_a_fault_or_what_stands_beside() -> None:
    other = ChunkResult(token_ids=[4], logprobs=[])
    result = StepResult(np.array([7, -1, -1]), {2: other})
    assert [one.token_ids for one in result.all()] == [[7], [], [4]]
    assert result[1].error is not None
    assert result[2] is other
    assert StepResult.of([other, other]).all() == [other, other]


def test_a_prompt_on_its_own_has_the_blocks_that_it_is_given() -> None:
    step = StepInput.of_prompt([5, 6, 7], [3, 9])
    (chunk,) = step.prefills
    assert (list(chunk.token_ids), chunk.start, chunk.samples) == ([5, 6, 7], 0, False)
    assert step.batch.blocks[:, chunk.row].tolist() == [[3, 9]] * 2
