"""Steps whose sequences are all greedy go through the sketch of the head, and get the tokens that all logits
would give them."""

import pytest
import torch

from model.interface.sampling_params import SamplingParams
from model.network.gemma3 import Gemma3
from model.ops.cpu.backend import CpuOps
from tests.model.harness import GREEDY, Harness, TestSequence
from tests.model.ops.cpu.harness import cpu_ops, needs_kernels
from tests.tiny import tiny_config, tiny_tensors

pytestmark = needs_kernels
DRAWN = SamplingParams(max_tokens=100, temperature=1.0, seed=1)


@pytest.fixture(scope="module")
def model() -> Gemma3:
    model = Gemma3(tiny_config(), cpu_ops(torch.float32, "int8"), 500)
    with torch.inference_mode():
        model.load_weights(tiny_tensors().items())
    return model


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows of logits were computed, call by call."""
    rows: list[int] = []

    def logits(self: CpuOps, x: torch.Tensor, head: object) -> torch.Tensor:
        rows.append(len(x))
        return original(self, x, head)  # type: ignore[arg-type]

    original = CpuOps.logits
    monkeypatch.setattr(CpuOps, "logits", logits)
    return rows


def decode(model: Gemma3, settings: list[SamplingParams], steps: int) -> list[list[int]]:
    harness = Harness(model, model.ops, block_size=4, num_tokens=400)
    sequences = [
        TestSequence(list(range(3 + 7 * index, 20 + 9 * index)), sampling)
        for index, sampling in enumerate(settings)
    ]
    for _ in range(steps):
        results = harness.run(
            [(sequence, len(sequence.tokens) - sequence.num_computed) for sequence in sequences]
        )
        for sequence, result in zip(sequences, results, strict=True):
            sequence.tokens += result.token_ids
    return [sequence.tokens for sequence in sequences]


def test_greedy_steps_compute_no_logits_and_draw_the_same_tokens(model: Gemma3, counted: list[int]) -> None:
    alone = decode(model, [GREEDY] * 3, 12)
    assert counted == []
    mixed = decode(model, [GREEDY] * 3 + [DRAWN], 12)
    assert counted == [4] * 12
    assert mixed[:3] == alone


def test_a_row_that_is_not_finite_fails_alone(model: Gemma3, counted: list[int]) -> None:
    hidden = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    expected = model.greedy(hidden.clone())
    assert expected is not None
    assert expected.tolist() == model.logits(hidden).argmax(-1).tolist()
    hidden[2, 7] = torch.nan
    found = model.greedy(hidden)
    assert found is not None
    assert found.tolist() == [token if row != 2 else -1 for row, token in enumerate(expected.tolist())]
