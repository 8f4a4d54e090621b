"""Everything around generation: models, version, metrics, request ids, the OpenAPI description."""

import re
import threading
from itertools import pairwise

import pytest

from server.observability.metrics import CONTENT_TYPE
from tests.http.live_server import LiveServer, error_of

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def test_models_are_listed_under_every_served_name(strict_server: LiveServer) -> None:
    listed = strict_server.client.get("/v1/models").json()
    assert listed["object"] == "list"
    assert [card["id"] for card in listed["data"]] == ["org/name", "alias"]
    card = listed["data"][0]
    assert card["max_model_len"] == 512
    assert isinstance(card["created"], int)
    assert strict_server.client.get("/v1/models/org/name").json() == card
    missing = strict_server.client.get("/v1/models/org/other")
    assert missing.status_code == 404
    assert error_of(missing)["code"] == "model_not_found"


def test_answers_echo_the_served_name(strict_server: LiveServer) -> None:
    assert strict_server.complete(prompt="a", max_tokens=1, model="alias")["model"] == "alias"
    assert strict_server.complete(prompt="a", max_tokens=1)["model"] == "org/name"


def test_ids_and_fingerprint(server: LiveServer) -> None:
    answer = server.complete(prompt="a", max_tokens=1)
    assert re.fullmatch(r"cmpl-[0-9a-f]{32}", answer["id"])
    assert re.fullmatch(r"fp_[0-9a-f]{10}", answer["system_fingerprint"])
    assert answer["object"] == "text_completion"
    assert isinstance(answer["created"], int)
    chat = server.chat(messages=[{"role": "user", "content": "a"}], max_tokens=1)
    assert re.fullmatch(r"chatcmpl-[0-9a-f]{32}", chat["id"])
    assert chat["object"] == "chat.completion"
    assert chat["choices"][0]["message"]["refusal"] is None


def test_version(server: LiveServer) -> None:
    assert server.client.get("/version").json()["name"] == "gemserve"


@pytest.mark.parametrize("given", ["abc-1", "x" * 128])
def test_a_sound_request_id_is_kept(server: LiveServer, given: str) -> None:
    assert server.client.get("/health", headers={"x-request-id": given}).headers["x-request-id"] == given


@pytest.mark.parametrize("given", ["", "x" * 129, "a b", "caf\xe9"])
def test_another_request_id_is_replaced(server: LiveServer, given: str) -> None:
    answer = server.client.get("/health", headers=[(b"x-request-id", given.encode("latin-1"))])
    assert re.fullmatch(r"[0-9a-f]{32}", answer.headers["x-request-id"])


def test_metrics_are_plain_text_without_redirect_or_creation_times(server: LiveServer) -> None:
    response = server.client.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"] == CONTENT_TYPE
    assert "_created" not in response.text
    assert "gemserve_build_info" in response.text
    assert "process_resident_memory_bytes" in response.text


def test_generated_tokens_and_requests_add_up(server: LiveServer) -> None:
    def outcomes() -> float:
        lines = server.client.get("/metrics").text.splitlines()
        wanted = ("gemserve_requests_total{", "gemserve_request_rejections_total{")
        return sum(float(line.split()[-1]) for line in lines if line.startswith(wanted))

    tokens, counted = server.metric("generation_tokens_total"), outcomes()
    usage = [
        server.complete(prompt="a", max_tokens=7, n=2)["usage"],
        server.complete(prompt="a", stop=["e"], temperature=0)["usage"],
    ]
    server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 5, "stream": True})
    server.post(COMPLETIONS, {"prompt": []})
    server.post(COMPLETIONS, {"prompt": "a", "model": "x"})
    server.post(CHAT, {})
    assert (
        server.metric("generation_tokens_total") - tokens
        == sum(item["completion_tokens"] for item in usage) + 5
    )
    assert outcomes() - counted == 6


@pytest.mark.parametrize("options", [{"max_tokens": 6}, {"max_tokens": 40, "stop": ["e"]}, {"max_tokens": 0}])
def test_phases_are_measured_however_a_request_ends(server: LiveServer, options: dict[str, object]) -> None:
    phases = ("queue", "prefill", "decode")
    before = [server.metric(f"request_{phase}_seconds_count") for phase in phases]
    server.complete(prompt="a", temperature=0, **options)
    after = [server.metric(f"request_{phase}_seconds_count") for phase in phases]
    decodes = 1 if options["max_tokens"] else 0
    assert [b - a for a, b in zip(before, after, strict=True)] == [1, 1, decodes]


def test_counters_never_go_back_and_stay_through_scrapes_under_load(server: LiveServer) -> None:
    def counters() -> dict[str, float]:
        lines = [
            line.rsplit(" ", 1)
            for line in server.client.get("/metrics").text.splitlines()
            if not line.startswith("#")
        ]
        return {
            name: float(value)
            for name, value in lines
            if re.match(r"gemserve_\w+_(total|count|sum|bucket)\b", name)
        }

    worker = threading.Thread(target=lambda: [server.complete(prompt="a", max_tokens=20) for _ in range(10)])
    worker.start()
    scrapes = [counters() for _ in range(50)]
    worker.join()
    assert any(name.startswith("gemserve_engine_steps_total") for name in scrapes[0])
    for before, after in pairwise(scrapes):
        assert before.keys() <= after.keys()
        assert all(after[name] >= value for name, value in before.items())


def test_the_number_of_series_does_not_depend_on_what_clients_send(server: LiveServer) -> None:
    def warm_up() -> None:
        server.client.request("BREW", "/x0")
        server.client.get("/x0")
        server.client.get("/v1/models/x0")
        server.post(COMPLETIONS, {"prompt": "a", "model": "x0"})

    def num_series() -> int:
        return len(server.client.get("/metrics").text.splitlines())

    warm_up()
    num_series()  # a scrape counts itself from the next one on
    before = num_series()
    for i in range(40):
        server.client.get(f"/{i}/x")
        server.client.get(f"/v1/models/{i}")
        server.client.request(f"M{i}", "/x")
        server.post(COMPLETIONS, {"prompt": "a", "model": f"m{i}", "user": f"u{i}"})
    assert num_series() == before


def test_openapi_shows_requests_and_answers(server: LiveServer) -> None:
    schema = server.client.get("/openapi.json").json()
    components = schema["components"]["schemas"]
    for name in (
        "CompletionRequest",
        "ChatCompletionRequest",
        "CompletionResponse",
        "ChatCompletionResponse",
        "ErrorResponse",
    ):
        assert name in components
    for path, name in (("/tokenize", "Tokenize"), ("/detokenize", "Detokenize")):
        operation = schema["paths"][path]["post"]
        bodies = (operation["requestBody"], operation["responses"]["200"])
        for part, kind in zip(bodies, ("Request", "Response"), strict=True):
            assert part["content"]["application/json"]["schema"] == {
                "$ref": f"#/components/schemas/{name}{kind}"
            }
        assert {"400", "401", "404", "413", "503"} < set(operation["responses"])
    assert "HTTPValidationError" not in components
    body = schema["paths"][COMPLETIONS]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body == {"$ref": "#/components/schemas/CompletionRequest"}
    for reference in re.findall(r'"#/components/schemas/(\w+)"', server.client.get("/openapi.json").text):
        assert reference in components


def test_openapi_names_what_an_answer_holds_and_requires_nothing_else(server: LiveServer) -> None:
    components = server.client.get("/openapi.json").json()["components"]["schemas"]
    asked = {"max_tokens": 2, "return_token_ids": True, "prompt_logprobs": 1, "return_timings": True}
    plain = {"max_tokens": 2}
    for options in (asked, plain):
        completion = server.complete(prompt="a", **options)
        chat = server.chat(messages=[{"role": "user", "content": "a"}], **options)
        answers = {
            "CompletionResponse": completion,
            "CompletionChoice": completion["choices"][0],
            "ChatCompletionResponse": chat,
            "ChatChoice": chat["choices"][0],
            "MessageResponse": server.post(
                "/v1/messages", {**plain, "messages": [{"role": "user", "content": "a"}]}
            ).json(),
            "CountTokensResponse": server.post(
                "/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "a"}]}
            ).json(),
            "EmbeddingsResponse": server.post("/v1/embeddings", {"input": "a"}).json(),
            "TokenizeResponse": server.post("/tokenize", {"prompt": "a"}).json(),
            "DetokenizeResponse": server.post("/detokenize", {"tokens": [9]}).json(),
            "TokenizerInfo": server.client.get("/tokenizer_info").json(),
        }
        for name, value in answers.items():
            assert set(components[name]["required"]) <= set(value) <= set(components[name]["properties"]), (
                name
            )
            if options is asked:
                assert set(value) == set(components[name]["properties"])
    taken = components["CompletionRequest"]["properties"], components["ChatCompletionRequest"]["properties"]
    both = (
        "allowed_token_ids logprob_token_ids prompt_logprobs return_token_ids include_stop_str_in_output "
        "skip_special_tokens"
    )
    for fields, names in zip(taken, ("best_of", "add_generation_prompt continue_final_message"), strict=True):
        assert set(f"{both} truncate_prompt_tokens {names}".split()) <= set(fields)
        assert "suffix" not in fields
