"""Runs the tests of this folder on the CPU under Triton's interpreter, or with ``-m gpu`` on a CUDA device.

Whether kernels are interpreted is fixed for the whole process when triton is first imported, so it is decided
here, before any test module of this folder is.
"""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

HAS_TRITON = importlib.util.find_spec("triton") is not None
collect_ignore_glob = [] if HAS_TRITON else ["test_*.py"]  # it is made for Linux on x86-64


def runs_on_device(config: pytest.Config) -> bool:
    return bool(config.getoption("markexpr") == "gpu")


def pytest_configure(config: pytest.Config) -> None:
    if not HAS_TRITON or runs_on_device(config):
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        from tests.model.ops.cuda import interpreter

        interpreter.make_faster()


@pytest.fixture(scope="session", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is compiled is compiled anew, and leaves nothing in the user's own cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


@pytest.fixture(autouse=True)
def _interpreted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton asks again whenever it imports more of itself. Servers that other tests start must not see
    it."""
    if not runs_on_device(request.config):
        monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With ``-m gpu`` every test here that the interpreter runs otherwise is one for the device."""
    if runs_on_device(config):
        for item in items:
            if item.path.is_relative_to(Path(__file__).parent):
                item.add_marker(pytest.mark.gpu)
