"""Texts that follow a constraint: every spelling, how they end, and constraints that are refused."""

from typing import Any

from tests.corpus.areas.chats import chat
from tests.corpus.areas.completions import complete, drawn
from tests.corpus.exchange import Exchange, both_ways

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["a", "b", None]}, "maxItems": 3},
        "home": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/place"}]},
    },
    "required": ["name", "age", "tags", "home"],
    "additionalProperties": False,
    "$defs": {
        "place": {"type": "object", "properties": {"at": {"type": "number"}}, "additionalProperties": False}
    },
}


def schema_format(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **more}}


SPELLINGS: dict[str, dict[str, Any]] = {
    "an object of any form": {"response_format": {"type": "json_object"}, "max_tokens": 30},
    "a JSON schema": {
        "response_format": schema_format(PERSON, strict=True, description="a person"),
        "max_tokens": 120,
    },
    "structured_outputs.json": {"structured_outputs": {"json": PERSON}, "max_tokens": 60},
    "structured_outputs.json_object": {"structured_outputs": {"json_object": True}},
    "structured_outputs.regex": {
        "structured_outputs": {"regex": r"\d{3}-[a-f]{2}( (yes|no))?"},
        "max_tokens": 30,
    },
    "structured_outputs.choice": {"structured_outputs": {"choice": ["yes", "no", "maybe not"]}},
    "structured_outputs.grammar": {"structured_outputs": {"grammar": 'start: "a" /[0-9]{2}/ ("," start)?'}},
    "guided_json as text": {"guided_json": '{"enum": [1, 2, "three", {"four": null}]}'},
    "guided_regex": {"guided_regex": "[a-z]{5}"},
    "guided_choice": {"guided_choice": [str(number) for number in range(100)]},
    "guided_grammar in GBNF": {"guided_grammar": 'root ::= "x" [0-9]+ "!"'},
}
REFUSED: dict[str, dict[str, Any]] = {
    "two constraints": {"guided_regex": "a", "guided_choice": ["b"]},
    "an empty structured_outputs": {"structured_outputs": {}},
    "a missing schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
    "a missing json_schema": {"response_format": {"type": "json_schema"}},
    "an unknown type": {"response_format": {"type": "xml"}},
    "an unknown type in a schema": {"response_format": schema_format({"type": "objekt"})},
    "a schema that is no object": {"guided_json": 5},
    "a schema that is no JSON": {"guided_json": "{"},
    "a reference to nothing": {"guided_json": {"$ref": "#/$defs/missing"}},
    "a reference to elsewhere": {"guided_json": {"$ref": "https://example.com/schema.json"}},
    "an unknown format": {"guided_json": {"type": "string", "format": "unheard-of"}},
    "nothing that fits": {"guided_json": {"allOf": [{"type": "string"}, {"type": "integer"}]}},
    "a broken regular expression": {"guided_regex": "foo**"},
    "look-around": {"guided_regex": "(?=a)b"},
    "an empty choice": {"guided_choice": []},
    "a choice of nothing": {"guided_choice": [""]},
    "a grammar without its rule": {"guided_grammar": "start: missing"},
    "a grammar that is none": {"guided_grammar": "no grammar at all"},
    "structural tags": {"structured_outputs": {"regex": "a", "structural_tag": "{}"}},
}


def exchanges() -> list[Exchange]:
    found = []
    for seed, (name, fields) in enumerate(SPELLINGS.items()):
        found += both_ways(drawn(f"completion: {name}", seed, **{"max_tokens": 24, **fields}))
        found.append(chat(f"chat: {name}", temperature=1, seed=seed, **{"max_tokens": 24, **fields}))
    return [
        *found,
        *both_ways(
            complete("greedy", guided_regex="[a-z]{6}"),
            drawn("several choices of one constraint", 1, n=3, guided_regex="[a-z]{6}"),
            complete("several prompts of one constraint", ["a", "b"], guided_choice=["left", "right"]),
            drawn("log-probabilities of the raw distribution", 2, guided_regex="[ab]{4}", logprobs=2),
            drawn("cut by length", 3, guided_regex="[a-z]{30}", max_tokens=4),
            drawn("no end before its end", 4, guided_regex="[a-z]{4}", logit_bias={"1": 100}, min_tokens=10),
            drawn("a stop text ends it", 5, guided_choice=["abcdef"], stop="d"),
            drawn("bias among what is left", 6, guided_choice=["0", "1"], logit_bias={"120": 10}),
        ),
        complete("nothing to generate", guided_regex="[a-z]{4}", max_tokens=0),
        chat("a format of text is none", response_format={"type": "text"}, max_tokens=3),
    ]


def refused() -> list[Exchange]:
    return [complete(name, **fields) for name, fields in REFUSED.items()]
