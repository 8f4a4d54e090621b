"""What a request constrains its text to: ``response_format``, ``structured_outputs`` and the ``guided_*``
spellings are one thing, and only one of them may be given. Every fault is a 400 that names the field."""

import contextlib
from collections.abc import Iterator
from typing import Any

from model.interface.grammar_state import Grammar
from server.api.generation.request import ChoicesRequest, GenerationRequest
from server.api.generation.structured_schemas import ResponseFormat, StructuredOutputs
from server.errors import compiler_busy, invalid_value, missing_parameter
from server.grammar.compiler import CompilerBusyError
from server.grammar.source import GrammarError, GrammarSource
from server.loading.load import LoadedEngine
from server.observability.metrics import Metrics

_ANY_OBJECT: dict[str, Any] = {"type": "object"}


async def compile_grammar(
    loaded: LoadedEngine, source: GrammarSource | None, metrics: Metrics
) -> Grammar | None:
    """The compiled constraint of a request, None without one."""
    if source is None:
        return None
    try:
        return await counted_compilation(loaded, source, metrics)
    except GrammarError as error:
        raise invalid_value(source.param, str(error)) from None


async def counted_compilation(loaded: LoadedEngine, source: GrammarSource, metrics: Metrics) -> Grammar:
    """Raises GrammarError, ApiError."""
    metrics.grammars.labels(source.kind).inc()
    with metrics.grammar_seconds.time(), busy_is_an_answer():
        return await loaded.grammars.compile(source)


@contextlib.contextmanager
def busy_is_an_answer() -> Iterator[None]:
    """Around work of the compiler: that it has no place for it is told to the client."""
    try:
        yield
    except CompilerBusyError:
        raise compiler_busy() from None


def choices_constraint(body: ChoicesRequest) -> GrammarSource | None:
    """The one constraint of a completion or chat, not compiled yet."""
    return grammar_source(body, _of_response_format(body.response_format))


def grammar_source(body: GenerationRequest, formats: list[GrammarSource]) -> GrammarSource | None:
    """The one constraint of a request; ``formats`` are those that it has besides the spellings that all
    endpoints share."""
    sources = [
        *formats,
        *_of_structured_outputs(body.structured_outputs),
        *_sources("guided_", body.guided_json, body.guided_regex, body.guided_choice, body.guided_grammar),
    ]
    if len(sources) > 1:
        others = ", ".join(f"'{source.param}'" for source in sources[:-1])
        raise invalid_value(
            sources[-1].param, f"a text can follow one constraint only, and {others} is given too"
        )
    return sources[0] if sources else None


def _of_response_format(given: ResponseFormat | None) -> list[GrammarSource]:
    if given is None or given.type == "text":
        return []
    if given.type == "json_object":
        return [any_object("response_format")]
    if given.json_schema is None:
        raise missing_parameter("response_format.json_schema")
    if given.json_schema.schema_ is None:
        raise missing_parameter("response_format.json_schema.schema")
    return [GrammarSource("json", given.json_schema.schema_, "response_format.json_schema.schema")]


def _of_structured_outputs(given: StructuredOutputs | None) -> list[GrammarSource]:
    if given is None:
        return []
    prefix = "structured_outputs."
    sources = _sources(prefix, given.json_, given.regex, given.choice, given.grammar)
    if given.json_object:
        sources.append(any_object(prefix + "json_object"))
    if not sources:
        raise invalid_value(
            "structured_outputs", "expected one of json, json_object, regex, choice and grammar in it"
        )
    return sources


def _sources(
    prefix: str,
    schema: dict[str, Any] | None,
    regex: str | None,
    choices: list[str] | None,
    grammar: str | None,
) -> list[GrammarSource]:
    given: list[tuple[Any, Any]] = [
        ("json", schema),
        ("regex", regex),
        ("choice", None if choices is None else tuple(choices)),
        ("grammar", grammar),
    ]
    return [GrammarSource(kind, value, prefix + kind) for kind, value in given if value is not None]


def any_object(param: str) -> GrammarSource:
    return GrammarSource("json", _ANY_OBJECT, param)
