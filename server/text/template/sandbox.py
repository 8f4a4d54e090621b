"""Jinja for templates that come with a checkpoint and are therefore foreign programs. Python's internals are
out of reach (jinja2's immutable sandbox), and a render is bounded: loop iterations and calls, sizes of
intermediate values, output, and time. The bounds stop runaway and known hostile templates with a
RenderLimitError; the values are far above what any chat needs."""

import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any, ClassVar

import jinja2
from jinja2 import nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_STEPS = 100_000
MAX_SECONDS = 10.0
MAX_VALUE_LENGTH = 4_000_000  # characters of a string, items of a list; also of the output
MAX_INTEGER_BITS = 1024
MAX_WIDTH = 1000  # of padding, indentation and the like

_BUDGET_NAME = "render budget"  # The space keeps it out of reach: no name in a template can hold one.
_CONCATENATE = "gemserve_concatenate"
_COUNT_ITERATIONS = "gemserve_count_iterations"
_WIDTH_IN_FORMAT = re.compile(r"\d{4,}|\*")


class RenderLimitError(Exception):
    """The template asked for more than a render may use."""


class RenderBudget:
    """What one render may still use."""

    def __init__(self, steps: int = MAX_STEPS, seconds: float = MAX_SECONDS) -> None:
        self._steps = steps
        self._deadline = time.monotonic() + seconds

    def spend(self, steps: int = 1) -> None:
        self._steps -= steps
        if self._steps < 0:
            raise RenderLimitError("it loops too often or builds too much text")
        if time.monotonic() > self._deadline:
            raise RenderLimitError("it takes too long")

    def check_size(self, length: int) -> None:
        if length > MAX_VALUE_LENGTH:
            raise RenderLimitError(f"it builds a value of more than {MAX_VALUE_LENGTH} characters or items")
        self.spend(length // 1000)


def _budget(context: Context) -> RenderBudget:
    budget = context.get(_BUDGET_NAME)
    if not isinstance(budget, RenderBudget):
        raise RenderLimitError("it was started without a budget")
    return budget


def _check_widths(values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, int) and abs(value) > MAX_WIDTH:
            raise RenderLimitError(f"it asks for a width above {MAX_WIDTH}")


def _with_small_widths(function: Callable[..., Any], format_first: bool = False) -> Callable[..., Any]:
    """The same filter, refusing large numbers. functools.wraps keeps jinja's marks for the extra first
    argument."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        _check_widths([*args[1:], *kwargs.values()])
        if format_first and _WIDTH_IN_FORMAT.search(str(args[0])):
            raise RenderLimitError(f"it asks for a width above {MAX_WIDTH}")
        return function(*args, **kwargs)

    return wrapper


@jinja2.pass_context
def _concatenate(context: Context, values: list[Any]) -> str:
    texts = [str(value) for value in values]
    _budget(context).check_size(sum(map(len, texts)))
    return "".join(texts)


@jinja2.pass_context
def _count_iterations(context: Context, values: Iterable[Any]) -> Iterable[Any]:
    budget = _budget(context)

    def counted() -> Iterator[Any]:
        for value in values:
            budget.spend()
            yield value

    return counted()


def _joined_length(separator: str, values: list[Any]) -> int:
    return sum(len(str(value)) for value in values) + len(separator) * len(values)


@jinja2.pass_context
def _join(context: Context, value: Iterable[Any], d: str = "", attribute: str | None = None) -> str:
    values = list(value)
    if attribute is not None:
        values = [context.environment.getitem(item, attribute) for item in values]
    _budget(context).check_size(_joined_length(str(d), values))
    return str(d).join(str(item) for item in values)


@jinja2.pass_context
def _replace(context: Context, value: Any, old: str, new: str, count: int | None = None) -> str:
    text = str(value)
    _budget(context).check_size(len(text) + (text.count(old) if count is None else count) * len(new))
    return text.replace(old, new, -1 if count is None else count)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    # No HTML escapes, unlike jinja's own filter: the text goes to a model, and Hugging Face templates are
    # written for that.
    _check_widths([indent])
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> str:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


class SandboxedTemplateEnvironment(ImmutableSandboxedEnvironment):
    """Compiles chat templates as Hugging Face does (trim_blocks, lstrip_blocks, loop controls,
    raise_exception)."""

    intercepted_binops: ClassVar[frozenset[str]] = frozenset({"*", "**", "+", "%"})  # type: ignore[misc]

    def __init__(self) -> None:
        # optimized=False: constant folding would evaluate parts of a template while it is compiled, outside
        # any budget.
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=["jinja2.ext.loopcontrols"]
        )
        for name in ("lipsum", "cycler", "joiner"):
            self.globals.pop(name, None)
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        for name in ("center", "indent", "batch", "slice", "wordwrap", "truncate", "urlize", "round"):
            self.filters[name] = _with_small_widths(self.filters[name])
        self.filters["format"] = _with_small_widths(self.filters["format"], format_first=True)
        self.filters["join"] = _join
        self.filters["replace"] = _replace
        self.filters["tojson"] = _tojson
        self.filters[_CONCATENATE] = _concatenate
        self.filters[_COUNT_ITERATIONS] = _count_iterations

    def render_bounded(
        self, template: jinja2.Template, variables: Mapping[str, Any], budget: RenderBudget
    ) -> str:
        pieces: list[str] = []
        length = 0
        for piece in template.generate({**variables, _BUDGET_NAME: budget}):
            length += len(piece)
            budget.spend()
            if length > MAX_VALUE_LENGTH:
                raise RenderLimitError(f"it prints more than {MAX_VALUE_LENGTH} characters")
            pieces.append(piece)
        return "".join(pieces)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        for loop in list(template.find_all(nodes.For)):
            loop.iter = nodes.Filter(loop.iter, _COUNT_ITERATIONS, [], [], None, None)
        return self._bound_concatenation(template)

    def _bound_concatenation(self, template: nodes.Template) -> nodes.Template:
        """Turns every `a ~ b` into a call of the bounded filter: unlike `+`, jinja does not let an
        environment intercept it."""
        pending: list[nodes.Node] = [template]
        while pending:
            node = pending.pop()
            for field, value in node.iter_fields():
                if isinstance(value, list):
                    replaced = [self._bounded(item) for item in value]
                    setattr(node, field, replaced)
                    pending.extend(item for item in replaced if isinstance(item, nodes.Node))
                else:
                    replacement = self._bounded(value)
                    if replacement is not value:
                        setattr(node, field, replacement)
                    if isinstance(replacement, nodes.Node):
                        pending.append(replacement)
        return template

    def _bounded(self, value: Any) -> Any:
        if not isinstance(value, nodes.Concat):
            return value
        operands = nodes.List(value.nodes, lineno=value.lineno)
        bounded = nodes.Filter(operands, _CONCATENATE, [], [], None, None, lineno=value.lineno)
        return bounded.set_environment(self)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = _budget(context)
        if operator == "%" and isinstance(left, str):
            if _WIDTH_IN_FORMAT.search(left):
                raise RenderLimitError(f"it asks for a width above {MAX_WIDTH}")
        elif operator == "**":
            if (
                isinstance(left, int)
                and isinstance(right, int)
                and left.bit_length() * right > MAX_INTEGER_BITS
            ):
                raise RenderLimitError("it computes with huge numbers")
        elif operator == "*":
            if isinstance(left, int) and isinstance(right, int):
                if left.bit_length() + right.bit_length() > MAX_INTEGER_BITS:
                    raise RenderLimitError("it computes with huge numbers")
            elif isinstance(left, int) and hasattr(right, "__len__"):
                budget.check_size(left * len(right))
            elif isinstance(right, int) and hasattr(left, "__len__"):
                budget.check_size(right * len(left))
        elif operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            budget.check_size(len(left) + len(right))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805, names as in jinja2
        budget = _budget(__context)
        budget.spend()
        # jinja wraps str.format in a safe version of it, which keeps the method it stands for in __wrapped__.
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        if isinstance(owner, str):
            __self._check_string_method(budget, owner, getattr(__obj, "__name__", ""), args, kwargs)
        return super().call(__context, __obj, *args, **kwargs)

    @staticmethod
    def _check_string_method(
        budget: RenderBudget, text: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if method in ("center", "ljust", "rjust", "zfill", "expandtabs"):
            _check_widths([*args, *kwargs.values()])
        elif method in ("format", "format_map") and _WIDTH_IN_FORMAT.search(text):
            raise RenderLimitError(f"it asks for a width above {MAX_WIDTH}")
        elif method == "replace" and len(args) >= 2:
            budget.check_size(len(text) + text.count(str(args[0])) * len(str(args[1])))
        elif method == "join" and args:
            budget.check_size(
                _joined_length(text, list(args[0])) if isinstance(args[0], (list, tuple)) else 0
            )
