"""The kernels compile for GPUs and fit their shared memory, which needs no GPU; and the right backend is
chosen."""

import builtins
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from model.ops.cuda.triton.common import INTERPRETED
from model.ops.cuda.triton.paged_attention import Device
from model.ops.reference import ReferenceOps
from model.ops.select import select_ops

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="a device compiles them anyway")


def test_kernels_compile_for_ampere_and_hopper(tmp_path: Path) -> None:
    """One with matrix products and one of sampling; ``make gpu-compile`` does all."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.model.ops.cuda.compile_kernels", "--quick"]
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "All kernels compile and fit." in result.stdout
    for kernel in ("prefill_kernel for sm_80", "search_kernel for sm_90"):
        assert kernel in result.stdout


def test_without_triton_the_reference_runs_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    original = builtins.__import__

    def fail(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "model.ops.cuda.backend":
            raise ModuleNotFoundError("No module named 'triton'")
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", fail)
    with caplog.at_level(logging.WARNING):
        ops = select_ops(torch.device("cuda"), torch.bfloat16)
    assert type(ops) is ReferenceOps
    assert len(caplog.records) == 1
    assert "Install triton" in caplog.text


def test_devices_before_ampere_get_the_reference_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with caplog.at_level(logging.WARNING):
        ops = select_ops(torch.device("cuda"), torch.bfloat16)
    assert type(ops) is ReferenceOps
    assert len(caplog.records) == 1
    assert "7.5" in caplog.text


@pytest.mark.parametrize(("major", "is_hopper"), [(8, False), (9, True), (10, True), (12, False)])
def test_tiles_fit_the_shared_memory_of_the_generation(major: int, is_hopper: bool) -> None:
    """Newer is not always larger: Blackwell's consumer cards (12.x) have 99 KiB, as Ampere's."""
    assert Device.of(SimpleNamespace(major=major, multi_processor_count=100)) == Device(100, is_hopper)
