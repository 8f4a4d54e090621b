"""What /openapi.json says of a route: the statuses that it can give, their headers and their bodies."""

from typing_extensions import TypedDict

from server.api.chat.request import ChatCompletionRequest
from server.api.description import answers, event_stream, request_body, without_closed_objects
from server.errors import ErrorResponse
from server.http.error_answers import MessagesErrorResponse


class Said(TypedDict):
    text: str


def test_a_route_that_takes_a_body_may_refuse_it() -> None:
    plain, taking = answers(Said), answers(Said, takes_body=True)
    assert plain[200]["model"] is Said
    assert set(taking) - set(plain) == {404, 413, 429}
    assert all(taking[status]["model"] is ErrorResponse for status in taking if status != 200)
    assert "x-gemserve-ignored-parameters" in taking[200]["headers"]


def test_a_route_that_is_open_refuses_no_key() -> None:
    assert 401 in answers(Said)
    assert 401 not in answers(Said, is_open=True)


def test_what_is_refused_before_its_route_has_openais_form_and_no_id() -> None:
    found = answers(Said, is_anthropic=True)
    assert found[401]["model"] is MessagesErrorResponse
    assert found[431]["model"] is ErrorResponse
    assert not found[431]["headers"]["x-request-id"]["required"]
    assert found[200]["headers"]["x-request-id"]["required"]


def test_an_event_names_its_data() -> None:
    found = event_stream(Said, ends_with="[DONE]")
    assert found["properties"]["data"]["anyOf"][0] == {"const": "[DONE]"}
    named = event_stream(Said, named=True)
    assert named["required"] == ["data", "event"]
    assert named["properties"]["data"]["contentSchema"] == {"anyOf": [{"$ref": "#/components/schemas/Said"}]}


def test_a_body_is_named_by_its_model() -> None:
    body = request_body(ChatCompletionRequest)["requestBody"]
    schema = body["content"]["application/json"]["schema"]
    assert schema == {"$ref": "#/components/schemas/ChatCompletionRequest"}
    assert "parameters" in request_body(ChatCompletionRequest, computes=True)


def test_objects_are_opened_where_unknown_fields_are_taken() -> None:
    schemas = {"A": {"additionalProperties": False}, "B": {"additionalProperties": {"type": "string"}}}
    without_closed_objects(schemas, ["A", "B"])
    assert schemas == {"A": {}, "B": {"additionalProperties": {"type": "string"}}}
