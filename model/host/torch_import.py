"""How a server imports torch in half of the usual time. Two of its modules serve only those who trace, export
or compile models; they take a third of ``import torch``, and ``defer_unused_modules`` puts them off until
something asks for one of their names or imports another module of torch, which nothing here does. All of
torch works as ever then, but for operators on tensors without data ("meta"), of which nothing here uses more
than shapes. ``preload_libraries`` maps and links torch's libraries in a thread, outside the interpreter's
lock, so that the import finds them done. Neither changes what torch computes. Importing this module imports
no torch."""

import ctypes
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType

# Shapes of every operator for tensors without data, in Python; and what turns models into graphs.
UNUSED_MODULES = frozenset({"torch._meta_registrations", "torch.export"})
# What leaves them out has been tried with this one alone; the modules of another may need each other in
# another order.
TRIED_TORCH = "2.13."


def defer_unused_modules() -> None:
    """To be called before torch is imported. Does nothing with a version of torch that it was not tried
    with."""
    try:
        tried = version("torch").startswith(TRIED_TORCH)
    except PackageNotFoundError:
        tried = False
    if tried and not any(isinstance(finder, _DeferringFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _DeferringFinder())


def preload_libraries() -> threading.Thread | None:
    """Start linking torch's libraries; None where that is not known to work. What fails here fails again, and
    is told, in the import."""
    spec = importlib.util.find_spec("torch") if "torch" not in sys.modules else None
    if sys.platform != "linux" or spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent / "lib"
    # Called as C functions, for only then does ctypes let other threads run meanwhile; ctypes.CDLL(path) does
    # not.
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
    """Puts off the modules of UNUSED_MODULES. All of them are executed before any other module of torch is
    imported late: such a module may need them, and in the middle of its own import they would meet one that
    is half done."""

    def __init__(self) -> None:
        self._deferred: dict[str, _DeferringLoader] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.startswith("torch.") and self._deferred and _is_initialized("torch"):
            self.execute_all()
            if fullname in sys.modules:  # one of those that came with them: it must not be executed twice
                return ModuleSpec(fullname, _LoadedLoader(sys.modules[fullname]))
        if fullname not in UNUSED_MODULES or _is_initialized("torch"):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = self._deferred[fullname] = _DeferringLoader(spec.loader, self)
        return spec

    def execute_all(self) -> None:
        """In the order of torch's own import. What these modules import in their turn finds nothing left to
        do."""
        deferred, self._deferred = self._deferred, {}
        for _, loader in sorted(deferred.items()):
            loader.execute()


def _is_initialized(name: str) -> bool:
    """Whether a module has been imported to its end."""
    module = sys.modules.get(name)
    return module is not None and not getattr(module.__spec__, "_initializing", False)


def _let_generators_be_made() -> None:
    """``torch._meta_registrations`` brings the type of torch.Generator, without which none can be made."""
    import torch
    from torch._opaque_base import OpaqueBaseMeta

    torch._C._set_generator_metaclass(OpaqueBaseMeta)


class _LoadedLoader(Loader):
    """Gives a module that came while its import had begun already."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__
        module.__spec__ = None  # else the import takes that, in place of the one that it is given

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


class _DeferringLoader(Loader):
    """Gives a module that is executed when the first of its names is asked for."""

    def __init__(self, loader: Loader, finder: _DeferringFinder | None = None) -> None:
        """With a ``finder``, whatever else it has put off is executed first, and what others need of the
        module is there."""
        self._loader = loader
        self._finder = finder
        self.execute: Callable[[], None] = lambda: None

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        lock = threading.RLock()
        is_running = False

        def execute() -> None:
            nonlocal is_running
            with lock:
                if not is_running and module.__dict__.get("__getattr__") is execute_first:
                    is_running = True
                    try:
                        self._loader.exec_module(module)
                    finally:
                        is_running = False
                    if module.__dict__.get("__getattr__") is execute_first:
                        del module.__dict__["__getattr__"]

        def execute_first(name: str) -> object:
            if name.startswith("__"):  # what others look for in every module, such as __warningregistry__
                raise AttributeError(name)
            if self._finder is not None:
                self._finder.execute_all()
            with lock:
                if is_running:  # the module's own code, as in any circular import
                    raise AttributeError(f"module {module.__name__!r} has no attribute {name!r} yet")
                execute()
            return getattr(module, name)

        self.execute = execute
        module.__dict__["__getattr__"] = execute_first
        if module.__name__ == "torch._meta_registrations":
            _let_generators_be_made()
