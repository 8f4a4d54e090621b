"""How a server imports torch in half of the usual time. Two of its modules serve only those who trace, export or compile models;
they take a third of ``import torch``, and ``defer_unused_modules`` puts them off until something asks for one of their names,
which nothing here does. ``preload_libraries`` maps and links torch's libraries in a thread, outside the interpreter's lock, so
that the import finds them done. Neither changes what torch computes. Importing this module imports no torch."""

import ctypes
import importlib.util
import os
import sys
import threading
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType

# Shapes of every operator for tensors without data, in Python; and what turns models into graphs.
UNUSED_MODULES = frozenset({"torch._meta_registrations", "torch.export"})
# What leaves them out has been tried with this one alone; the modules of another may need each other in another order.
TRIED_TORCH = "2.13."


def defer_unused_modules() -> None:
    """To be called before torch is imported. Does nothing with a version of torch that it was not tried with."""
    try:
        tried = version("torch").startswith(TRIED_TORCH)
    except PackageNotFoundError:
        tried = False
    if tried and not any(isinstance(finder, _DeferringFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _DeferringFinder())


def preload_libraries() -> threading.Thread | None:
    """Start linking torch's libraries; None where that is not known to work. What fails here fails again, and is told, in the
    import."""
    spec = importlib.util.find_spec("torch") if "torch" not in sys.modules else None
    if sys.platform != "linux" or spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent / "lib"
    # Called as C functions, for only then does ctypes let other threads run meanwhile; ctypes.CDLL(path) does not.
    dlopen = ctypes.CDLL(None).dlopen
    dlopen.argtypes, dlopen.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
    # Torch makes the names of this small one visible to all first; the other one takes in all the rest.
    dlopen(bytes(folder / "libtorch_global_deps.so"), os.RTLD_NOW | os.RTLD_GLOBAL)
    # One call: between two, the thread would have to wait for the interpreter's lock.
    arguments = (bytes(folder / "libtorch_python.so"), os.RTLD_NOW | os.RTLD_LOCAL)
    # Not a daemon: a start that fails would end the process while the linker still works, which crashes it.
    thread = threading.Thread(target=dlopen, args=arguments, name="gemserve-preload", daemon=False)
    thread.start()
    return thread


class _DeferringFinder(MetaPathFinder):
    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname not in UNUSED_MODULES:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _DeferringLoader(spec.loader)
        return spec


class _DeferringLoader(Loader):
    """Gives a module that is executed when the first of its names is asked for."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        lock = threading.RLock()
        is_running = False

        def execute_first(name: str) -> object:
            nonlocal is_running
            if name.startswith("__"):  # what others look for in every module, such as __warningregistry__
                raise AttributeError(name)
            with lock:
                if is_running:  # the module's own code, as in any circular import
                    raise AttributeError(f"module {module.__name__!r} has no attribute {name!r} yet")
                if module.__dict__.get("__getattr__") is execute_first:
                    is_running = True
                    try:
                        self._loader.exec_module(module)
                    finally:
                        is_running = False
                    if module.__dict__.get("__getattr__") is execute_first:
                        del module.__dict__["__getattr__"]
            return getattr(module, name)

        module.__dict__["__getattr__"] = execute_first
