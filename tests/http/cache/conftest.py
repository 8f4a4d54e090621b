"""The folder of the tiny model, written once, and one thread: its matrices gain nothing from more."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.tiny import write_tiny_folder


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module", autouse=True)
def threads_restored() -> Iterator[None]:
    """A server started here sets the threads of the whole test process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
