"""Decode steps as graphs with the kernels of the GPU: padded rows and wide tables change nothing but the order of sums."""

import pytest
import torch

from tests.model.graphs import LiveHarness, PairedRuns, RerunDevice, make_model

pytest.importorskip("triton")

from model.cuda_graphs import CudaGraphDevice
from model.ops.cuda import CudaOps
from model.ops.triton_kernels.common import INTERPRETED

DEVICE = torch.device("cpu" if INTERPRETED.value else "cuda")
pytestmark = pytest.mark.skipif(
    DEVICE.type == "cuda" and not torch.cuda.is_available(), reason="needs a CUDA device, or TRITON_INTERPRET=1"
)


def test_a_replayed_step_is_the_eager_one() -> None:
    device = RerunDevice() if DEVICE.type == "cpu" else CudaGraphDevice(DEVICE)
    runs = PairedRuns(make_model(CudaOps(DEVICE, torch.float32)), device, LiveHarness, max_num_seqs=4)
    for length in (7, 70, 9):
        runs.start(length, seed=length)
    for step in range(4):
        runs.poison()
        graphed, eager = runs.step()
        assert graphed.isfinite().all()
        # Padding changes into how many parts a context is split: the order of float32 sums.
        assert (graphed - eager).abs().max() <= 1e-4 * eager.abs().max()
        if step == 1:
            runs.end(0)
