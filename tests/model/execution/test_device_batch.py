"""What a device keeps of the running batch: it is told changes alone, and has every block that a step can
read."""

import random

import numpy as np
import torch

from model.execution.device_batch import DeviceBatch
from model.interface.running_batch import GLOBAL, LOCAL, RunningBatch
from model.interface.sampling_params import SamplingParams

CPU = torch.device("cpu")
GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


def grow(batch: RunningBatch, row: int, count: int, first_block: int) -> None:
    blocks = list(range(first_block, first_block + count))
    batch.set_row_blocks(row, blocks, [100 + block for block in blocks])


def test_many_sequences_come_and_go_and_every_row_has_its_own_blocks() -> None:
    choose = random.Random(1)
    batch = RunningBatch(16, 20)
    on_device = DeviceBatch(batch, CPU, mirrors_tables=True)
    live: list[int] = []
    num_sent = 0
    for _ in range(400):
        for row in list(live):
            if choose.random() < 0.05:
                batch.remove(row)
                live.remove(row)
        while batch.num_taken < 16 and choose.random() < 0.5:
            live.append(batch.add([1], 1, GREEDY))
            grow(batch, live[-1], choose.randrange(1, 5), choose.randrange(1, 1 << 20))
        for row in live:
            if batch.num_blocks[row] < 20 and choose.random() < 0.3:
                grow(batch, row, 1, choose.randrange(1, 1 << 20))
        if choose.random() < 0.3:
            continue  # a step that found no memory: what it was told is told again
        num_sent += len(batch.changes.rows)
        on_device.update_tables()
        if choose.random() < 0.5:
            on_device.update_tables()
        batch.changes.clear()
        rows = np.array(choose.sample(live, choose.randint(0, len(live))), dtype=np.int64)
        if not len(rows):
            continue
        width = int(batch.num_blocks[rows].max())
        tables = on_device.block_tables(torch.from_numpy(rows), width)
        assert tables.shape == (2, len(rows), width)
        for index, row in enumerate(rows.tolist()):
            length = int(batch.num_blocks[row])
            for group in (GLOBAL, LOCAL):
                assert tables[group, index, :length].tolist() == batch.blocks[group, row, :length].tolist()
    assert num_sent > 1000


def test_a_table_that_is_there_before_the_device_is_told_anything_is_taken_over() -> None:
    batch = RunningBatch(2, 4)
    grow(batch, batch.add([1], 1, GREEDY), 3, 7)
    batch.changes.clear()
    on_device = DeviceBatch(batch, CPU, mirrors_tables=True)
    assert on_device.block_tables(torch.tensor([0]), 3).tolist() == [[[7, 8, 9]], [[107, 108, 109]]]


def test_the_device_does_not_see_the_host_s_array_change() -> None:
    batch = RunningBatch(1, 4)
    on_device = DeviceBatch(batch, CPU, mirrors_tables=True)
    grow(batch, batch.add([1], 1, GREEDY), 1, 7)
    assert not on_device.block_tables(torch.tensor([0]), 4).any()
    on_device.update_tables()
    assert on_device.block_tables(torch.tensor([0]), 1).tolist() == [[[7]], [[107]]]
