"""Runs the tests of this folder on the CPU under Triton's interpreter, or with ``-m gpu`` on a CUDA device.

Whether kernels are interpreted is fixed for the whole process when triton is first imported, so it is decided here, before any
test module of this folder is.
"""

import importlib.util
import os

import pytest

HAS_TRITON = importlib.util.find_spec("triton") is not None


def pytest_configure(config: pytest.Config) -> None:
    if not HAS_TRITON or config.getoption("markexpr") == "gpu":
        return
    # It stays: triton reads it again whenever it imports more of itself. Processes started by tests that need it unset unset it.
    os.environ["TRITON_INTERPRET"] = "1"
    from tests.model.ops_cuda import interpreter

    interpreter.make_faster()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With ``-m gpu`` every test here that the interpreter runs otherwise is one for the device."""
    if config.getoption("markexpr") == "gpu":
        for item in items:
            if "ops_cuda" in item.path.parts:
                item.add_marker(pytest.mark.gpu)
