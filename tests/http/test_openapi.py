"""/openapi.json is true, and /docs shows it without anything from elsewhere. That answers are as described is
checked wherever a test gets one (`openapi_contract`); here it is shown that this check sees what is wrong,
and that nothing escapes it."""

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

import httpx
import pytest

from server.api.meta.docs import ASSETS
from tests.http.live_server import LiveServer, live_server
from tests.http.openapi_contract import check_answer, document, operation_of
from tests.http.test_streams import STREAM_USAGE

HELLO = [{"role": "user", "content": "Hello"}]
COMPLETION = {"prompt": "Hello", "max_tokens": 3}


def changed(
    response: httpx.Response, *, text: str | None = None, status: int | None = None, **headers: str | None
) -> httpx.Response:
    """The same answer with something else in it."""
    given = {**response.headers, **{name.replace("_", "-"): value for name, value in headers.items()}}
    kept = {name: value for name, value in given.items() if value is not None and name != "content-length"}
    content = (response.text if text is None else text).encode()
    return httpx.Response(
        status or response.status_code, headers=kept, content=content, request=response.request
    )


def test_the_check_sees_what_is_not_described(server: LiveServer) -> None:
    answer = server.post("/v1/completions", COMPLETION)
    body = answer.json()
    check_answer(changed(answer))
    wrong = [
        changed(answer, status=418),
        changed(answer, x_request_id=None),
        changed(answer, content_type="text/plain"),
        changed(answer, openai_processing_ms="soon"),
        *(
            changed(answer, text=json.dumps(value))
            for value in ({**body, "more": 1}, {**body, "created": "now"}, {})
        ),
        changed(answer, text=json.dumps({**body, "usage": {**body["usage"], "more": 1}})),
    ]
    stream = server.post("/v1/completions", {**COMPLETION, "stream": True})
    check_answer(changed(stream))
    wrong += [
        changed(stream, text=stream.text.replace('"created":', '"creates":', 1)),
        changed(stream, text=stream.text.replace("[DONE]", '{"a":1}')),
        changed(stream, text=stream.text.replace("data: ", "date: ", 1)),
    ]
    message = server.post("/v1/messages", {"messages": HELLO, "max_tokens": 3, "stream": True})
    check_answer(changed(message))
    wrong += [
        changed(message, text=message.text.replace("event: message_stop", "event: message_halt")),
        changed(message, text=message.text.replace("event: message_stop\n", "")),
        changed(message, text=message.text.replace('"text_delta"', '"text_delter"')),
    ]
    for answer in wrong:
        with pytest.raises((AssertionError, ValueError)):
            check_answer(answer)


@pytest.mark.parametrize(
    "stream",
    [{}, {"stream": True}, {"stream": True, "stream_options": {"include_usage": True}}, STREAM_USAGE],
)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"return_token_ids": True, "return_timings": True, "return_tokens_as_token_ids": True},
        {"max_tokens": 0},
    ],
    ids=str,
)
def test_answers_with_all_that_can_be_asked_for(
    server: LiveServer, options: dict[str, Any], stream: dict[str, Any]
) -> None:
    """`post` checks them."""
    logprobs = {} if stream else {"prompt_logprobs": 2}
    labels = {"logprob_token_ids": [400, 401]}
    for fields in ({"logprobs": 2, "echo": True}, {"logprobs": 2, **labels}, {"n": 2, "seed": 3}, logprobs):
        server.post("/v1/completions", {**COMPLETION, **options, **stream, **fields}).raise_for_status()
    for fields in ({"logprobs": True, "top_logprobs": 2}, {"n": 2, "seed": 3}, logprobs):
        server.post(
            "/v1/chat/completions", {"messages": HELLO, "max_tokens": 3, **options, **stream, **fields}
        ).raise_for_status()


def all_routes(routes: Iterable[Any]) -> Iterator[Any]:
    """Those that answer; others hold some."""
    for route in routes:
        if hasattr(route, "methods"):
            yield route
        else:
            yield from all_routes(route.original_router.routes)


def test_every_route_is_described_and_every_description_is_a_route(server: LiveServer) -> None:
    routes = {
        (method, re.sub(r":\w+\}", "}", route.path))
        for route in all_routes(server.app.routes)
        for method in route.methods or ()
        if method != "HEAD" and route.path not in ("/openapi.json", "/docs", *ASSETS)
    }
    assert len(routes) > 10
    described = {
        (method.upper(), path) for path, operations in document()["paths"].items() for method in operations
    }
    assert routes == described
    assert server.client.get("/openapi.json").json() == document()


def test_every_answer_has_its_statuses_headers_and_models() -> None:
    for path, operations in document()["paths"].items():
        for method, operation in operations.items():
            answers = operation["responses"]
            assert {"200", "400", "403", "408", "431", "500", "503"} <= set(answers), path
            assert ("401" in answers) == (not path.startswith("/health")), path
            assert ({"404", "413", "429"} <= set(answers)) == (method == "post"), path
            for status, answer in answers.items():
                assert "x-request-id" in answer["headers"], (path, status)
                assert answer["content"], (path, status)
                for content in answer["content"].values():
                    assert content.get("schema") or content.get("itemSchema"), (path, status)
            for status in {"429", "503"} & set(answers):
                assert answers[status]["headers"]["retry-after"]["required"]
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"):
        assert set(document()["paths"][path]["post"]["responses"]["200"]["content"]) == {
            "application/json",
            "text/event-stream",
        }


def test_references_lead_somewhere_and_nothing_is_described_in_vain() -> None:
    components = set(document()["components"]["schemas"])
    referred = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document())))
    assert referred <= components
    assert components - referred == set()


def test_keys_and_strictness_are_described_where_they_hold() -> None:
    plain = document()
    assert "securitySchemes" not in plain["components"]
    assert "additionalProperties" not in plain["components"]["schemas"]["CompletionRequest"]
    with live_server(api_key=("key",), strict_params=True) as server:
        guarded = server.client.get("/openapi.json", headers={"x-api-key": "key"}).json()
    assert set(guarded["components"]["securitySchemes"]) == {"bearer", "apiKey"}
    assert guarded["paths"]["/health"]["get"]["security"] == []
    assert guarded["paths"]["/v1/models"]["get"]["security"] == [{"bearer": []}, {"apiKey": []}]
    assert guarded["components"]["schemas"]["CompletionRequest"]["additionalProperties"] is False


def test_what_is_not_described_is_checked_nowhere() -> None:
    assert operation_of("GET", "/v1/models/org/name") is not None
    assert operation_of("GET", "/openapi.json") is None
    assert operation_of("PUT", "/v1/models") is None


# -- the page ------------------------------------------------------------------------------------------------


def test_the_page_and_all_that_it_loads_come_from_this_server(server: LiveServer) -> None:
    page = server.client.get("/docs")
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    assert "//" not in page.text
    loaded = set(re.findall(r'(?:src|href)="([^"]*)"', page.text))
    assert {f"/{path}" for path in loaded} == set(ASSETS)
    for path, media_type in ASSETS.items():
        asset = server.client.get(path)
        assert asset.status_code == 200
        assert asset.headers["content-type"] == media_type
        assert len(asset.content) > 50
    start = server.client.get("/docs/start.js").text
    assert 'url: "openapi.json"' in start
    # else its makers' site is asked about every document that is not local
    assert "validatorUrl: null" in start
    # Fonts and images of the style sheet are in it.
    style = server.client.get("/docs/swagger-ui.css").text
    assert all(target.strip("\"'").startswith("data:") for target in re.findall(r"url\(([^)]*)\)", style))
    assert "@import" not in style


def test_the_browser_is_told_to_load_nothing_from_elsewhere(server: LiveServer) -> None:
    policy = dict(
        part.strip().split(" ", 1)
        for part in server.client.get("/docs").headers["content-security-policy"].split(";")
    )
    assert policy["default-src"] == "'none'"
    for name in ("script-src", "connect-src", "style-src", "img-src"):
        assert set(policy[name].split()) <= {"'self'", "'unsafe-inline'", "data:"}
    assert policy["script-src"] == "'self'"


def test_the_page_is_behind_the_key_too() -> None:
    with live_server(api_key=("key",)) as server:
        for path in ("/docs", *ASSETS):
            assert server.client.get(path).status_code == 401
            assert server.client.get(path, headers={"x-api-key": "key"}).status_code == 200


def test_no_other_file_of_the_package_is_served(server: LiveServer) -> None:
    for path in (
        "/docs/",
        "/docs/redoc.standalone.js",
        "/docs/../core.py",
        "/docs/..%2fcore.py",
        "/docs/%2e%2e/core.py",
    ):
        assert server.client.get(path).status_code == 404
