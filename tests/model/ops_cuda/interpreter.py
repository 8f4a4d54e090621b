"""Makes Triton's interpreter several times faster: it redirects the whole language anew at each call of a function within a
kernel, although the kernel's own start has done so already.
"""

from typing import Any

import triton.experimental.gluon  # noqa: F401 - else the first launch imports it, when nobody asks for the interpreter any more
from triton.runtime import interpreter

import model.ops.cuda  # noqa: F401 - the kernels are made for the interpreter while it is asked for


def patch_language_once() -> None:
    redirect = interpreter._patch_lang
    inside: set[int] = set()

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Only the first call per module: within triton's own library it reaches names that no kernel's start redirects.
        if id(self.fn.__globals__) not in inside:
            inside.add(id(self.fn.__globals__))
            redirect(self.fn)
        return self.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call
