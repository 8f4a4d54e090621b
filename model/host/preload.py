"""Links torch's libraries ahead of its import. Importing this module imports no torch."""

import ctypes
import importlib.util
import os
import sys
import threading
from pathlib import Path


def preload_libraries() -> threading.Thread | None:
    """Start to map and link torch's libraries in a thread, outside the interpreter's lock, so that the import
    of torch finds them done. None where that is not known to work. What fails here fails again, and is told,
    in the import."""
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
