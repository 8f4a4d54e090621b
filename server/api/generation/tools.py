"""What a request wants of its functions: which of them the model may call, whether it must, and how the text
is read for calls. Every fault is a 400 that names the field."""

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from model.interface.grammar_state import Grammar
from server.api.generation.structured_output import (
    busy_is_an_answer,
    compile_grammar,
    counted_compilation,
)
from server.api.generation.tool_schemas import ToolChoice
from server.errors import invalid_value
from server.grammar.compiler import COMPILE_SECONDS, CompilerBusyError
from server.grammar.source import CallRules, GrammarError, GrammarSource
from server.loading.load import LoadedEngine
from server.observability.metrics import Metrics
from server.text.tool_calls.call_parser import CallFormat
from server.text.tool_calls.functions import Function

AUTO = ToolChoice("auto")
# Each function may be compiled within its own limit, and there may be hundreds of them.
FAULT_SECONDS = 2 * COMPILE_SECONDS


@dataclass(frozen=True, slots=True)
class ToolUse:
    """``functions`` may be called; ``shown`` are those that the model is told of: all of them where no other
    can be called, so that requests share their prompt."""

    functions: tuple[Function, ...]
    shown: tuple[Function, ...]
    must_call: bool
    is_named: bool
    several: bool

    @property
    def call_format(self) -> CallFormat:
        names = frozenset(function.name for function in self.functions)
        return CallFormat(names, is_forced=self.must_call, is_single=not self.several, is_named=self.is_named)


def tool_use(
    functions: Sequence[Function], choice: ToolChoice | None, parallel: bool | None
) -> ToolUse | None:
    """None where no function may be called. ``functions`` are those of the request."""
    if not functions:
        if choice is not None and choice.mode != "none":
            raise invalid_value("tool_choice", "it is allowed only when 'tools' are given")
        return None
    known: dict[str, Function] = {}
    for function in functions:
        if function.name in known:
            param = function.param.removesuffix("parameters") + "name"
            raise invalid_value(param, f"two functions have the name '{function.name}'")
        known[function.name] = function
        _check_type(function)
    choice = choice or AUTO
    for name in choice.names or ():
        if name not in known:
            raise invalid_value("tool_choice", f"none of the 'tools' is a function named '{name[:64]}'")
    if choice.mode == "none":
        return None
    allowed = tuple(
        function for function in functions if choice.names is None or function.name in choice.names
    )
    must_call = choice.mode == "required"
    several = parallel is not False and not choice.is_named
    return ToolUse(allowed, tuple(functions) if must_call else allowed, must_call, choice.is_named, several)


def _check_type(function: Function) -> None:
    kind = "object" if function.parameters is None else function.parameters.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise invalid_value(f"{function.param}.type", "arguments are an object, expected 'object'")


async def compile_constraint(
    loaded: LoadedEngine, content: GrammarSource | None, use: ToolUse | None, metrics: Metrics
) -> Grammar | None:
    """What the text follows: its own constraint, calls, or either of them. Calls that need not be made are
    free text, and schemas that can't be enforced are fine for them."""
    if use is None:
        return await compile_grammar(loaded, content, metrics)
    if not use.must_call and content is None:
        await check_schemas(loaded, use.functions)
        return None
    rules = CallRules(use.functions, use.several, None if use.must_call else content)
    try:
        return await counted_compilation(loaded, GrammarSource("calls", rules, "tools"), metrics)
    except GrammarError as error:
        param, reason = await _faulty_part(loaded, rules) or ("tools", str(error))
        raise invalid_value(param, reason) from None


async def _faulty_part(loaded: LoadedEngine, rules: CallRules) -> tuple[str, str] | None:
    """The field that can't be compiled by itself, and why; None where it is not found soon."""
    parts = [
        GrammarSource("calls", CallRules((function,), several=False), function.param)
        for function in rules.functions
    ]
    with contextlib.suppress(TimeoutError, CompilerBusyError):
        async with asyncio.timeout(FAULT_SECONDS):
            for part in parts if rules.otherwise is None else [rules.otherwise, *parts]:
                try:
                    await loaded.grammars.compile(part)
                except GrammarError as error:
                    return part.param, str(error)
    return None


async def check_schemas(loaded: LoadedEngine, functions: Sequence[Function]) -> None:
    """Whether they are schemas at all. Raises ApiError."""
    try:
        with busy_is_an_answer():
            fault = await loaded.grammars.first_fault([function.schema for function in functions])
    except GrammarError as error:
        raise invalid_value("tools", str(error)) from None
    if fault is not None:
        index, reason = fault
        raise invalid_value(functions[index].param, str(reason))
