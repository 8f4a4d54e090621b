"""Makes Triton's interpreter several times faster.

It redirects the whole language anew at each call of a function within a kernel, although the kernel's own
start has done so already; makes a table of all types for each look-up of one; and adds every pair of integers
twice, to see whether they overflow.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

import model.ops.cuda.backend  # noqa: F401 - all kernels are made for the interpreter while it is asked for
from model.ops.cuda.triton.common import INTERPRETED


def make_faster() -> None:
    assert INTERPRETED, "something imported triton before these tests could ask for its interpreter"
    redirect, numpy_type = interpreter._patch_lang, interpreter._get_np_dtype
    redirected: set[int] = set()
    known: dict[str, Any] = {}

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Only the first call per module: within triton's own library it reaches names that no kernel's start
        # redirects.
        if id(self.fn.__globals__) not in redirected:
            redirected.add(id(self.fn.__globals__))
            redirect(self.fn)
        return self.rewrite()(*args, **kwargs)

    def known_numpy_type(kind: Any) -> Any:
        kind = kind.scalar
        if isinstance(kind, tl.pointer_type):
            return np.dtype(np.uint64)
        if kind.name not in known:
            known[kind.name] = numpy_type(kind)
        return known[kind.name]

    interpreter.InterpretedFunction.__call__ = call
    interpreter._get_np_dtype = known_numpy_type
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
