"""Decode steps as graphs with the kernels of the GPU: padded rows and wide tables change nothing but the
order of sums."""

from dataclasses import replace

import pytest
import torch

from tests.model.graphs import LiveHarness, PairedRuns, RerunDevice, make_model
from tests.model.tiny_models import CONFIG

pytest.importorskip("triton")

from model.execution.cuda_graphs import CudaGraphDevice
from model.ops.cuda.backend import CudaOps
from model.ops.cuda.triton.common import INTERPRETED

DEVICE = torch.device("cpu" if INTERPRETED.value else "cuda")
pytestmark = pytest.mark.skipif(
    DEVICE.type == "cuda" and not torch.cuda.is_available(),
    reason="needs a CUDA device, or TRITON_INTERPRET=1",
)


def test_a_replayed_step_is_the_eager_one() -> None:
    device = RerunDevice() if DEVICE.type == "cpu" else CudaGraphDevice(DEVICE)
    config = replace(
        CONFIG,
        num_hidden_layers=2,
        global_layers=(False, True),
        sliding_window=8,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    runs = PairedRuns(make_model(CudaOps(DEVICE, torch.float32), config), device, LiveHarness, sizes=(2,))
    for length in (3, 29):
        runs.start_made_up(length, seed=length)
    for step in range(2):
        runs.poison()
        graphed, eager = runs.step()
        assert graphed.isfinite().all()
        # Padding changes into how many parts a context is split: the order of float32 sums.
        assert (graphed - eager).abs().max() <= 1e-4 * eager.abs().max()
        if step == 0:
            runs.end(0)  # from now on one row of the two is padding
