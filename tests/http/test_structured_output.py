"""Structured output over HTTP: every spelling, what is refused, and how answers end. The model is a fake
without preferences."""

import json
import re
import time
from typing import Any

import jsonschema
import openai
import pytest

from tests.http.live_server import LiveServer
from tests.http.test_streams import chunks_of, joined
from tests.server.grammar.test_bad_constraints import BAD
from tests.server.grammar.walks import NESTED, SCHEMAS

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]
DIGITS = "[0-9]{5}"
LETTERS = "[abc]{5}"  # no token has two of them


def schema_format(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **more}}


def answer(server: LiveServer, path: str = COMPLETIONS, **fields: Any) -> tuple[str, str, dict[str, Any]]:
    """(text, finish reason, usage)"""
    body = {"max_tokens": 200, "temperature": 1, **fields}
    if path == COMPLETIONS:
        whole = server.complete(prompt="Hello", **body)
        text = whole["choices"][0]["text"]
    else:
        whole = server.chat(messages=MESSAGES, **body)
        text = whole["choices"][0]["message"]["content"]
    return text, whole["choices"][0]["finish_reason"], whole["usage"]


SPELLINGS: list[tuple[dict[str, Any], str]] = [
    ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
    ({"guided_choice": ["yes", "no"]}, "yes|no"),
    ({"guided_choice": [str(i) for i in range(10_000)]}, "[0-9]{1,4}"),
    ({"structured_outputs": {"regex": DIGITS}}, DIGITS),
    ({"guided_regex": DIGITS}, DIGITS),
    ({"structured_outputs": {"grammar": 'start: "a" /[0-9]/'}}, "a[0-9]"),
    ({"guided_grammar": 'root ::= "a" [0-9]'}, "a[0-9]"),
    ({"structured_outputs": {"json": {"enum": [1, 2]}, "disable_any_whitespace": True}}, "1|2"),
    ({"structured_outputs": {"json": '{"enum": [1, 2]}'}}, "1|2"),
    ({"guided_json": {"enum": [1, 2]}}, "1|2"),
    ({"guided_json": '{"enum": [1, 2]}', "guided_regex": None, "structured_outputs": None}, "1|2"),
    ({"response_format": schema_format({"enum": [1, 2]})}, "1|2"),
    ({"response_format": schema_format({"enum": [1, 2]}, strict=True, description="a number")}, "1|2"),
    ({"response_format": {"type": "text"}, "guided_choice": ["a"]}, "a"),
]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(("fields", "pattern"), SPELLINGS, ids=lambda value: str(value)[:40])
def test_every_spelling_constrains_the_text(
    server: LiveServer, path: str, fields: dict[str, Any], pattern: str
) -> None:
    text, reason, usage = answer(server, path, **fields)
    assert re.fullmatch(pattern, text)
    assert reason == "stop"
    assert 1 <= usage["completion_tokens"] <= len(text) + 1


@pytest.mark.parametrize("name", SCHEMAS)
def test_json_validates_or_was_cut(server: LiveServer, name: str) -> None:
    reasons = set()
    for seed in range(4):
        text, reason, _ = answer(server, response_format=schema_format(SCHEMAS[name]), seed=seed)
        reasons.add(reason)
        if reason == "stop":
            jsonschema.validate(json.loads(text), SCHEMAS[name])
    assert "stop" in reasons


def test_any_object(server: LiveServer) -> None:
    """Case 52: no blanks outside strings, and a text that ends by itself is valid."""
    for seed in range(5):
        text, reason, _ = answer(
            server, CHAT, response_format={"type": "json_object"}, seed=seed, max_tokens=300
        )
        assert text.startswith("{")
        assert not re.search(r"\s", re.sub(r'"(\\.|[^"\\])*("|$)', "", text))
        if reason == "stop":
            assert isinstance(json.loads(text), dict)
    text, _, _ = answer(server, structured_outputs={"json_object": True}, max_tokens=3)
    assert text.startswith("{")


# -- how it ends ---------------------------------------------------------------------------------------------


def test_it_ends_at_once_whatever_else_is_asked_for(server: LiveServer) -> None:
    """Case 54: with min_tokens, with ignore_eos, with a bias towards or against the end."""
    for more in (
        {"min_tokens": 64},
        {"ignore_eos": True},
        {"logit_bias": {"1": 100}},
        {"logit_bias": {"1": -100, "106": -100}},
    ):
        text, reason, usage = answer(server, guided_regex=LETTERS, **more)
        assert re.fullmatch(LETTERS, text)
        assert reason == "stop"
        assert usage["completion_tokens"] == 5


def test_a_limit_cuts_it(server: LiveServer) -> None:
    text, reason, usage = answer(server, guided_regex=LETTERS, max_tokens=3)
    assert re.fullmatch("[abc]{3}", text)
    assert reason == "length"
    assert usage["completion_tokens"] == 3
    assert answer(server, guided_regex=LETTERS, max_tokens=5)[1] == "stop"
    assert answer(server, guided_regex=LETTERS, max_tokens=0)[:2] == ("", "length")


def test_a_stop_string_ends_it_earlier(server: LiveServer) -> None:
    text, reason, _ = answer(server, guided_choice=["abcdef"], stop=["d"])
    assert (text, reason) == ("abc", "stop")


def test_choices_differ_and_repeat(server: LiveServer) -> None:
    body = {"prompt": "Hello", "max_tokens": 20, "n": 4, "seed": 5, "guided_regex": "[a-z]{8}"}
    first, again = server.complete(**body), server.complete(**body)
    found = [choice["text"] for choice in first["choices"]]
    assert found == [choice["text"] for choice in again["choices"]]
    assert all(re.fullmatch("[a-z]{8}", text) for text in found)
    assert len(set(found)) == 4


def test_prompts_of_one_request_share_the_grammar(server: LiveServer) -> None:
    whole = server.complete(prompt=["a", "b", "c"], max_tokens=20, guided_regex="[a-z]{8}", temperature=0)
    assert [choice["finish_reason"] for choice in whole["choices"]] == ["stop"] * 3
    assert all(re.fullmatch("[a-z]{8}", choice["text"]) for choice in whole["choices"])


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_stream_equals_the_answer_in_one_piece(server: LiveServer, path: str) -> None:
    fields = {"response_format": schema_format(NESTED), "seed": 3, "max_tokens": 200, "temperature": 1}
    body: dict[str, Any] = {"prompt": "Hello"} if path == COMPLETIONS else {"messages": MESSAGES}
    chunks = chunks_of(server, path, {**body, **fields, "stream_options": {"include_usage": True}})
    usage = chunks.pop()["usage"]
    text, reason, whole_usage = answer(server, path, **fields)
    assert joined(path, chunks) == text
    assert chunks[-1]["choices"][0]["finish_reason"] == reason == "stop"
    assert usage["completion_tokens"] == whole_usage["completion_tokens"]


def test_log_probabilities_are_there_for_every_token(server: LiveServer) -> None:
    whole = server.complete(prompt="Hello", max_tokens=20, guided_regex=LETTERS, logprobs=2)
    logprobs = whole["choices"][0]["logprobs"]
    assert "".join(logprobs["tokens"]) == whole["choices"][0]["text"]
    assert len(logprobs["top_logprobs"]) == 5


def test_the_official_client_parses_its_own_schema(server: LiveServer) -> None:
    from pydantic import BaseModel, ConfigDict

    class Place(BaseModel):
        model_config = ConfigDict(extra="forbid")
        visited: bool
        stars: int

    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        parsed = client.chat.completions.parse(
            model="fake-gemma",
            messages=[{"role": "user", "content": "Hi"}],
            response_format=Place,
            seed=1,
            max_tokens=400,
        )
    assert isinstance(parsed.choices[0].message.parsed, Place)


# -- what is refused -----------------------------------------------------------------------------------------


def spelled(kind: str, value: Any) -> tuple[dict[str, Any], str]:
    match kind:
        case "json":
            return {"response_format": schema_format(value)}, "response_format.json_schema.schema"
        case "regex":
            return {"structured_outputs": {"regex": value}}, "structured_outputs.regex"
    return {f"guided_{kind}": value}, f"guided_{kind}"


@pytest.mark.parametrize(("kind", "value"), BAD, ids=lambda value: repr(value)[:24])
def test_a_bad_constraint_is_a_400_that_names_the_field(server: LiveServer, kind: str, value: Any) -> None:
    """Case 51: within two seconds, and the server goes on."""
    fields, param = spelled(kind, value)
    content = json.dumps({"prompt": "Hello", **fields}).replace("Infinity", "1e999")
    used = time.process_time()
    response = server.client.post(COMPLETIONS, content=content, headers={"content-type": "application/json"})
    assert time.process_time() - used < 2
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert param in error["message"]
    server.check_alive()


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        (
            {"response_format": {"type": "json_schema"}},
            "response_format.json_schema",
            "missing_required_parameter",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            "response_format.json_schema.schema",
            "missing_required_parameter",
        ),
        ({"response_format": {"type": "xml"}}, "response_format.type", "invalid_value"),
        ({"response_format": {}}, "response_format.type", "missing_required_parameter"),
        ({"response_format": "json"}, "response_format", "invalid_type"),
        ({"response_format": schema_format("text")}, "response_format.json_schema.schema", "invalid_type"),
        ({"structured_outputs": {}}, "structured_outputs", "invalid_value"),
        (
            {"structured_outputs": {"structural_tag": "x"}},
            "structured_outputs.structural_tag",
            "invalid_type",
        ),
        (
            {"structured_outputs": {"regex": "a", "choice": ["b"]}},
            "structured_outputs.choice",
            "invalid_value",
        ),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex", "invalid_value"),
        ({"guided_regex": ""}, "guided_regex", "empty_string"),
        ({"guided_grammar": ""}, "guided_grammar", "empty_string"),
        ({"guided_choice": []}, "guided_choice", "empty_array"),
        ({"guided_choice": [""]}, "guided_choice[0]", "empty_string"),
        ({"guided_choice": ["a", 5]}, "guided_choice[1]", "invalid_type"),
        ({"guided_choice": ["a"] * 10_001}, "guided_choice", "array_above_max_length"),
        ({"guided_json": "{"}, "guided_json", "invalid_value"),
        ({"guided_json": "[" * 100_000}, None, None),
        ({"guided_json": "[]"}, "guided_json", "invalid_type"),
        ({"guided_json": 5}, "guided_json", "invalid_type"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_wrong_form_is_refused_by_name(
    server: LiveServer, fields: dict[str, Any], param: str | None, code: str | None
) -> None:
    error = server.refused(COMPLETIONS, {"prompt": "Hello", **fields})
    assert (error["param"], error["code"]) == (param, code)


def test_a_neighbour_streams_on_while_constraints_are_refused(server: LiveServer) -> None:
    body = {"prompt": "Hello", "max_tokens": 100, "temperature": 1, "seed": 8, "stream": True}
    expected = server.post(COMPLETIONS, body).text
    with server.client.stream("POST", COMPLETIONS, json=body) as stream:
        pieces = stream.iter_text()
        begun = next(pieces)
        for regex in ("foo**", "[", "(a"):
            server.refused(COMPLETIONS, {"prompt": "Hello", "guided_regex": regex})
        whole = begun + "".join(pieces)
    texts = [re.findall(r'"text":"[^"]*"', events) for events in (whole, expected)]
    assert texts[0] == texts[1]
