"""POST /v1/embeddings over raw HTTP and through the official client; the fake model's states tell which
tokens were pooled."""

import base64
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest

from tests.fakes import (
    BOS,
    FIRST_TEXT,
    HIDDEN_SIZE,
    FakeRunner,
    fake_engine_factory,
    fake_tokenizer,
    hidden_state,
)
from tests.http.live_server import LiveServer, live_server

EMBEDDINGS = "/v1/embeddings"
IDS = [BOS, *range(FIRST_TEXT, FIRST_TEXT + 30)]


def expected(token_ids: list[int]) -> list[float]:
    mean = sum(map(hidden_state, token_ids), np.zeros(HIDDEN_SIZE)) / len(token_ids)
    values: list[float] = (mean / np.linalg.norm(mean)).tolist()
    return values


def embed(server: LiveServer, **body: Any) -> dict[str, Any]:
    response = server.post(EMBEDDINGS, body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    assert set(answer) == {"object", "model", "data", "usage"}
    assert answer["object"] == "list"
    assert [item["index"] for item in answer["data"]] == list(range(len(answer["data"])))
    assert all(set(item) == {"object", "index", "embedding"} for item in answer["data"])
    return answer


@pytest.mark.parametrize("wrap", [False, True])
@pytest.mark.parametrize("form", ["text", "ids"])
def test_an_input_in_every_form(server: LiveServer, form: str, wrap: bool) -> None:
    text = "The capital of France is"
    token_ids = fake_tokenizer().encode(text)
    assert token_ids[0] == BOS
    one: Any = text if form == "text" else token_ids
    answer = embed(server, input=[one] if wrap else one)
    (item,) = answer["data"]
    assert item["embedding"] == pytest.approx(expected(token_ids), abs=1e-6)
    assert np.linalg.norm(item["embedding"]) == pytest.approx(1, abs=1e-6)
    assert answer["usage"] == {"prompt_tokens": len(token_ids), "total_tokens": len(token_ids)}
    assert answer["model"] == "fake-gemma"


def test_many_inputs_come_back_in_their_order(server: LiveServer) -> None:
    # Longer and shorter than a step's 64 tokens: they do not end in the order of their indices.
    inputs = [IDS[: 1 + index * 7 % 30] + IDS[1:2] * (200 if index % 5 == 0 else 0) for index in range(40)]
    answer = embed(server, input=inputs)
    assert answer["usage"]["prompt_tokens"] == sum(map(len, inputs))
    for item, token_ids in zip(answer["data"], inputs, strict=True):
        assert item["embedding"] == pytest.approx(expected(token_ids), abs=1e-6)


def test_base64_holds_the_same_numbers(server: LiveServer) -> None:
    as_float = embed(server, input=IDS, encoding_format="float")["data"][0]["embedding"]
    encoded = embed(server, input=IDS, encoding_format="base64")["data"][0]["embedding"]
    assert np.frombuffer(base64.b64decode(encoded), "<f4").tolist() == as_float


def test_what_was_read_before_changes_nothing(server: LiveServer) -> None:
    server.complete(prompt=IDS, max_tokens=1)
    assert embed(server, input=IDS)["data"][0]["embedding"] == pytest.approx(expected(IDS), abs=1e-6)


def test_inputs_are_cut_only_where_asked(server: LiveServer) -> None:
    cut = embed(server, input=IDS, truncate_prompt_tokens=5)
    assert cut["data"][0]["embedding"] == pytest.approx(expected([BOS, *IDS[-4:]]), abs=1e-6)
    assert cut["usage"]["prompt_tokens"] == 5
    assert embed(server, input=[7] * 600, truncate_prompt_tokens=-1)["usage"]["prompt_tokens"] == 512
    assert embed(server, input=[7] * 512)["usage"]["prompt_tokens"] == 512


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({}, "input", "missing_required_parameter"),
        ({"input": None}, "input", "missing_required_parameter"),
        ({"input": []}, "input", "empty_array"),
        ({"input": [[]]}, "input", "empty_array"),
        ({"input": ""}, "input", "empty_string"),
        ({"input": ["a", ""]}, "input[1]", "empty_string"),
        ({"input": 5}, "input", "invalid_type"),
        ({"input": [1, "a"]}, "input", "invalid_type"),
        ({"input": [True]}, "input", "invalid_type"),
        ({"input": ["a"] * 2049}, "input", "array_above_max_length"),
        ({"input": [512]}, "input", "invalid_value"),
        ({"input": [7] * 513}, "input", "context_length_exceeded"),
        ({"input": "words " * 9000}, "input", "context_length_exceeded"),
        ({"input": "a", "dimensions": HIDDEN_SIZE - 1}, "dimensions", "unsupported_parameter"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "invalid_value"),
        ({"input": "a", "stream": True}, "stream", "unsupported_parameter"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "integer_below_min_value"),
    ],
)
def test_a_wrong_request_is_a_400_that_names_the_field(
    server: LiveServer, body: dict[str, Any], param: str, code: str
) -> None:
    error = server.refused(EMBEDDINGS, body)
    assert (error["param"], error["code"]) == (param, code)


def test_the_models_own_number_of_dimensions_and_unknown_names(server: LiveServer) -> None:
    embed(server, input="a", dimensions=HIDDEN_SIZE, user="u")
    assert server.refused(EMBEDDINGS, {"input": "a", "model": "x"}, 404)["code"] == "model_not_found"
    assert (
        server.post(EMBEDDINGS, {"input": "a", "moon": 1}).headers["x-gemserve-ignored-parameters"] == "moon"
    )


def test_embeddings_are_counted_and_nothing_is_left_running(server: LiveServer) -> None:
    names = [
        ("requests_total", {"endpoint": "embeddings", "outcome": "stop", "stream": "false"}),
        ("prompt_tokens_total", {}),
    ]
    before = [server.metric(name, **labels) for name, labels in names]
    response = server.post(EMBEDDINGS, {"input": [IDS, IDS[:9]]})
    after = [server.metric(name, **labels) for name, labels in names]
    assert [new - old for new, old in zip(after, before, strict=True)] == [1, len(IDS) + 9]
    assert response.headers["x-request-id"].startswith("embd-")
    assert "prefill;dur=" in response.headers["server-timing"]
    server.wait_for(server.is_idle, 60)


@pytest.fixture(scope="module")
def small_queue() -> Iterator[LiveServer]:
    factory = fake_engine_factory(FakeRunner(step_delay=0.05), max_num_seqs=1)
    with live_server(factory, max_queued_requests=3) as live:
        live.client.timeout = 60
        yield live


def test_the_limits_of_the_queue_and_deadlines_hold(small_queue: LiveServer) -> None:
    with small_queue.open_request(
        {"prompt": "a", "max_tokens": 400, "ignore_eos": True, "stream": True}
    ) as connection:
        assert connection.recv(1) == b"H"
        small_queue.wait_for(lambda: small_queue.metric("requests_running") == 1, 60)
        refused = small_queue.post(EMBEDDINGS, {"input": ["a", "b", "c", "d"]})
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        late = small_queue.post(EMBEDDINGS, {"input": "a", "timeout": 0.05})
        assert late.status_code == 408
    # A request larger than the queue is served when nothing waits.
    assert len(embed(small_queue, input=["a"] * 9)["data"]) == 9
    small_queue.wait_for(small_queue.is_idle, 60)


def test_the_official_client(server: LiveServer) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        by_default = client.embeddings.create(model="fake-gemma", input=[IDS, IDS[:5]])
        assert by_default.data[1].embedding == pytest.approx(expected(IDS[:5]), abs=1e-6)
        assert by_default.usage.total_tokens == len(IDS) + 5
        as_float = client.embeddings.create(model="fake-gemma", input="Hello", encoding_format="float")
        default = client.embeddings.create(model="fake-gemma", input="Hello")
        assert as_float.data[0].embedding == pytest.approx(default.data[0].embedding)
        with pytest.raises(openai.BadRequestError, match="dimensions"):
            client.embeddings.create(model="fake-gemma", input="a", dimensions=2)
