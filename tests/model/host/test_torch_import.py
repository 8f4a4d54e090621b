"""What a server leaves out of ``import torch`` comes when it is asked for, and torch computes as ever."""

import subprocess
import sys
import threading
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest
import torch

from model.host import torch_import
from model.host.torch_import import _DeferringFinder, _DeferringLoader, defer_unused_modules

ROOT = Path(__file__).parent.parent.parent.parent

PROGRAM = """
import sys
from model.host.torch_import import UNUSED_MODULES, defer_unused_modules, preload_libraries

def deferred():
    return {name for name in UNUSED_MODULES if "__getattr__" in vars(sys.modules[name])}

defer_unused_modules()
defer_unused_modules()
thread = preload_libraries()
assert thread is not None
thread.join()
import torch
assert preload_libraries() is None  # too late
import model.execution.runner, model.ops.cpu.backend
assert deferred() == UNUSED_MODULES, deferred()
x = torch.arange(6.0).view(2, 3)
assert torch.nn.functional.linear(x, x).tolist() == [[5.0, 14.0], [14.0, 50.0]]
assert torch.empty(2, 3, device="meta").shape == (2, 3)
assert torch.randint(9, (3,), generator=torch.Generator().manual_seed(1)).tolist() == EXPECTED
assert deferred() == UNUSED_MODULES, deferred()
assert torch.export.Dim("rows").__name__ == "rows"
assert "torch.export" not in deferred()
from torch import _meta_registrations
assert callable(_meta_registrations.register_meta)
assert deferred() == set()
"""

LATE_IMPORT = """
from model.host.torch_import import defer_unused_modules

defer_unused_modules()
import os
import sys
import torch
assert "__getattr__" in vars(sys.modules["torch._meta_registrations"])
if os.fork() == 0:
    import torch._prims  # one of those that the unused ones import
    assert torch._prims.__spec__.submodule_search_locations
    import torch._prims.rng_prims, torch._refs.linalg
    assert "__getattr__" not in vars(sys.modules["torch._meta_registrations"])
    os._exit(0)
assert os.wait()[1] == 0
with torch.profiler.profile():  # imports more of torch, which needs all of it
    gradient = torch.func.grad(lambda x: x.sin().sum())(torch.zeros(2))
assert gradient.tolist() == [1.0, 1.0]
assert "__getattr__" not in vars(sys.modules["torch._meta_registrations"])
scores = torch.empty(4, 4, device="meta")
assert scores.softmax(-1).masked_fill(scores > 0, 1.0).shape == (4, 4)
assert torch.compile(lambda x: x + 1, backend="eager")(torch.zeros(1)).item() == 1.0
"""


def test_two_modules_are_put_off_until_something_asks_for_them() -> None:
    expected = torch.randint(9, (3,), generator=torch.Generator().manual_seed(1)).tolist()
    run(PROGRAM.replace("EXPECTED", str(expected)))


def test_what_torch_imports_later_finds_them_executed() -> None:
    run(LATE_IMPORT)


def run(program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr


def test_a_torch_that_this_was_not_tried_with_is_imported_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sys, "meta_path", [finder for finder in sys.meta_path if not isinstance(finder, _DeferringFinder)]
    )
    monkeypatch.setattr(torch_import, "version", lambda package: "2.14.0")
    defer_unused_modules()
    assert not any(isinstance(finder, _DeferringFinder) for finder in sys.meta_path)
    monkeypatch.setattr(torch_import, "version", lambda package: "2.13.1+cpu")
    defer_unused_modules()
    assert isinstance(sys.meta_path[0], _DeferringFinder)


class Source:
    """A loader of a module that counts how often it is executed."""

    def __init__(self, fault: Exception | None = None) -> None:
        self.executed = 0
        self.fault = fault

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        self.executed += 1
        assert not hasattr(module, "value"), "as in any circular import"
        if self.fault is not None:
            raise self.fault
        module.value = 5  # type: ignore[attr-defined]


def deferred_module(source: Source) -> ModuleType:
    module = ModuleType("deferred")
    _DeferringLoader(source).exec_module(module)  # type: ignore[arg-type]
    return module


def test_a_deferred_module_is_executed_once_by_whoever_comes_first() -> None:
    source = Source()
    module = deferred_module(source)
    assert not hasattr(module, "__warningregistry__")
    assert source.executed == 0
    values: list[int] = []
    threads = [threading.Thread(target=lambda: values.append(module.value)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert values == [5] * 8
    assert source.executed == 1
    with pytest.raises(AttributeError):
        module.missing  # noqa: B018
    assert source.executed == 1


def test_a_fault_of_a_deferred_module_is_told() -> None:
    source = Source(ImportError("no such library"))
    module = deferred_module(source)
    for _ in range(2):
        with pytest.raises(ImportError, match="no such library"):
            module.value  # noqa: B018
