"""CUDA graphs of decode steps, over a stand-in for the device: what is padded, what is sent, and that a
replayed step is the eager one bit for bit. The same on a real device where there is one."""

import pytest
import torch

from model.execution import cuda_graphs
from model.execution.cuda_graphs import padded_sizes
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
from tests.model.harness import Harness, TestSequence
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
    # a mixed step, in which the decodes fill up blocks
    for side, harness in enumerate((runs.graphed, runs.eager)):
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
    graphs_of_cpu = harness.runner._graphs
    assert graphs_of_cpu is None
    device = RerunDevice()
    harness.runner.capture_graphs(padded_sizes(MAX_NUM_SEQS), MAX_MODEL_LEN, device)
    graphs_of_device = harness.runner._graphs
    assert graphs_of_device is not None
    harness.runner.release_cache()
    assert harness.runner._graphs is None


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
