"""Bodies of requests from a schema of /openapi.json, most of them valid, and mutations of them."""

import copy
import json
import random
from collections.abc import Mapping
from typing import Any

# What a random value would seldom get right, and what would make a request take long.
KNOWN: Mapping[str, Any] = {
    "prompt": "the cow jumps",
    "messages": [{"role": "user", "content": "hello"}],
    "tokens": [2, 30, 31],
    "max_tokens": 3,
    "max_completion_tokens": 3,
    "min_tokens": 1,
    "n": 2,
    "best_of": 2,
    "timeout": 5,
}
# Fields that exclude each other or most values of others.
LEFT_OUT = frozenset(
    {
        "model",
        "response_format",
        "structured_outputs",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
    }
)
WORDS = ("a", "will", "hello", "the", "1", "é", "日本", "\n", "<bos>", "<end_of_turn>")


class Raw(str):
    """Stands in a body as it is, whether it is JSON or not."""

    __slots__ = ()


HOSTILE: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63) - 1, 10**30, 10**400, 1e308, -1e-320, 0.1),
    *("", "x" * 5000, "\ud800", "\x00", "NaN", "😀" * 50, "</s>", "../../etc/passwd", "{{ 7 * 7 }}"),
    *(
        [],
        {},
        [[]],
        [{}],
        {"": None},
        [None] * 3,
        ["a"] * 2000,
        list(range(2000)),
        [[1]] * 1500,
        {str(i): i for i in range(1500)},
    ),
    *(
        Raw("NaN"),
        Raw("-Infinity"),
        Raw("1e999"),
        Raw("9" * 5000),
        Raw("[" * 100 + "]" * 100),
        Raw("[" * 100_000),
        Raw("tru"),
    ),
    *(Raw('{"a":1,"a":2}'), Raw('"\\ud83d"'), Raw('"\\x"'), Raw(""), Raw("01")),
)


def valid(
    schema: Mapping[str, Any], components: Mapping[str, Any], choose: random.Random, depth: int = 0
) -> Any:
    """A value that the schema allows, as far as schemas say it."""
    if "$ref" in schema:
        return valid(components[schema["$ref"].rsplit("/", 1)[-1]], components, choose, depth)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return choose.choice(schema["enum"])
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            return valid(choose.choice(schema[key]), components, choose, depth)
    match schema.get("type"):
        case "object" if "properties" in schema:
            return _object(schema, components, choose, depth)
        case "object":
            return {}
        case "array":
            items = schema.get("items", {})
            return [
                valid(items, components, choose, depth + 1) for _ in range(max(1, schema.get("minItems", 1)))
            ]
        case "string":
            return " ".join(choose.choices(WORDS, k=choose.randint(1, 4)))
        case "integer":
            return choose.randint(max(schema.get("minimum", 0), -5), min(schema.get("maximum", 20), 20))
        case "number":
            return round(
                choose.uniform(max(schema.get("minimum", 0), -1), min(schema.get("maximum", 1), 1)), 3
            )
        case "boolean":
            return choose.random() < 0.5
    return None


def _object(
    schema: Mapping[str, Any], components: Mapping[str, Any], choose: random.Random, depth: int
) -> dict[str, Any]:
    required = set(schema.get("required", ()))
    value = {}
    for name, field in schema["properties"].items():
        if depth == 0 and name in LEFT_OUT:
            continue
        if name in required or choose.random() < (0.08 if depth == 0 else 0.5):
            value[name] = (
                KNOWN[name] if depth == 0 and name in KNOWN else valid(field, components, choose, depth + 1)
            )
    if depth == 0:  # every field is optional to a schema where one of several is needed
        value |= {name: KNOWN[name] for name in ("prompt", "max_tokens") if name in schema["properties"]}
        if "messages" in schema["properties"] and "prompt" not in schema["properties"]:
            value |= {name: KNOWN[name] for name in ("messages", "max_tokens")}
    return value


def mutated(value: Any, choose: random.Random) -> Any:
    """One place of it is replaced, removed or joined by another one."""
    places = list(_places(value))
    if not places:
        return _hostile(choose)
    container, key = choose.choice(places)
    match choose.randrange(5):
        case 0:
            del container[key]
        case 1 if isinstance(container, dict):
            container["".join(choose.choices("aä_ \u2028.", k=choose.randint(0, 6)))] = _hostile(choose)
        case 2:
            is_small = len(encoded(container[key])) < 1000
            container[key] = [
                copy.deepcopy(container[key]) for _ in range(choose.choice((1, 3, 1100 if is_small else 2)))
            ]
        case _:
            container[key] = _hostile(choose)
    return value


def _hostile(choose: random.Random) -> Any:
    """A copy: it may be mutated in its turn."""
    return copy.deepcopy(choose.choice(HOSTILE))


def _places(value: Any) -> Any:
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from _places(value[key])


def encoded(value: Any) -> bytes:
    """As JSON, but for what stands in it raw."""
    if isinstance(value, Raw):
        return value.encode()
    if isinstance(value, dict):
        return (
            b"{"
            + b",".join(json.dumps(key).encode() + b":" + encoded(item) for key, item in value.items())
            + b"}"
        )
    if isinstance(value, list):
        return b"[" + b",".join(map(encoded, value)) + b"]"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 10**300:
        return b"1" + b"0" * 400
    return json.dumps(value).encode()
