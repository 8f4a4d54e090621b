"""Fixtures shared by the tests of the model side."""

from collections.abc import Iterator

import pytest
import torch

from tests.model.ops.cpu.instruction_sets import InstructionSet, instruction_sets


@pytest.fixture(autouse=True)
def _num_threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """One thread, since a tiny model's operations are shorter than waking a second one; a module asks for
    more by NUM_THREADS."""
    before = torch.get_num_threads()
    torch.set_num_threads(min(before, getattr(request.module, "NUM_THREADS", 1)))
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=instruction_sets(), ids=str)
def instruction_set(request: pytest.FixtureRequest) -> Iterator[InstructionSet]:
    """The kernels of each instruction set in turn."""
    chosen: InstructionSet = request.param
    with chosen.used():
        yield chosen
