"""/tokenizer_info, /tokenize and /detokenize: what they say is what generation does, and they never hold up
the server."""

import json
import threading
from typing import Any

import httpx
import pytest

from server.api.tokenize import request as tokenize_schemas
from server.text.tokenizer import Tokenizer
from tests.fakes import BOS, END_OF_TURN, EOS, VOCAB_SIZE, fake_engine_factory, fake_tokenizer
from tests.http.live_server import LiveServer, error_of, live_server

TOKENIZER = fake_tokenizer()
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi <end_of_turn> é"}]


def tokenize(server: LiveServer, **body: Any) -> dict[str, Any]:
    response = server.post("/tokenize", body)
    assert response.status_code == 200, response.text
    result: dict[str, Any] = response.json()
    return result


def detokenize(server: LiveServer, tokens: list[int]) -> str:
    response = server.post("/detokenize", {"tokens": tokens})
    assert response.status_code == 200, response.text
    body = response.json()
    assert set(body) == {"prompt"}
    return str(body["prompt"])


def test_tokenizer_info(server: LiveServer) -> None:
    info = server.client.get("/tokenizer_info").json()
    assert (info["bos_token"], info["eos_token"], info["pad_token"]) == ("<bos>", "<eos>", "<pad>")
    assert info["model_max_length"] == 512
    assert info["chat_template"] == TOKENIZER.chat_template_source
    assert "<start_of_turn>" in info["chat_template"]


def test_what_a_scoring_tool_does_without_a_tokenizer_of_its_own(server: LiveServer) -> None:
    """lm-eval's remote tokenizer: the ids of the end token, of a context, and back again."""
    info = server.client.get("/tokenizer_info").json()
    assert tokenize(server, prompt=info["eos_token"], add_special_tokens=False)["tokens"] == [EOS]
    text = " The answer is né\n10"
    tokens = tokenize(server, prompt=text, add_special_tokens=False)["tokens"]
    assert tokens == TOKENIZER.encode_plain(text)
    assert detokenize(server, tokens) == text


@pytest.mark.parametrize("prompt", ["", "Hello", "<bos>Hello", "a<end_of_turn>b", "é日本🙂", " a  b\n"])
def test_a_prompt_is_encoded_as_for_a_completion(server: LiveServer, prompt: str) -> None:
    answer = tokenize(server, prompt=prompt)
    completion = server.complete(prompt=prompt, max_tokens=1, return_token_ids=True)
    assert answer["tokens"] == completion["choices"][0]["prompt_token_ids"]
    assert (answer["count"], answer["max_model_len"], answer["token_strs"]) == (
        len(answer["tokens"]),
        512,
        None,
    )
    bare = tokenize(server, prompt=prompt, add_special_tokens=False)["tokens"]
    assert bare == (answer["tokens"] if prompt.startswith("<bos>") else answer["tokens"][1:])
    assert detokenize(server, bare) == prompt


@pytest.mark.parametrize("options", [{}, {"add_generation_prompt": False}, {"continue_final_message": True}])
def test_messages_are_encoded_as_for_a_chat(server: LiveServer, options: dict[str, Any]) -> None:
    answer = tokenize(server, messages=MESSAGES, **options)
    chat = server.chat(messages=MESSAGES, max_tokens=1, return_token_ids=True, **options)
    assert answer["tokens"] == chat["prompt_token_ids"]
    assert answer["tokens"].count(BOS) == 1
    # Typed by the user, it stays text.
    closes_turn = not options.get("continue_final_message")
    assert answer["tokens"].count(END_OF_TURN) == int(closes_turn)


def test_the_texts_of_tokens_on_request(server: LiveServer) -> None:
    answer = tokenize(server, prompt="a né", return_token_strs=True)
    assert answer["token_strs"] == [TOKENIZER.token_text(token_id) for token_id in answer["tokens"]]
    assert answer["token_strs"][:3] == ["<bos>", "a", " "]


def test_every_token_has_a_text(server: LiveServer) -> None:
    assert detokenize(server, []) == ""
    every = list(range(VOCAB_SIZE))
    assert detokenize(server, every) == TOKENIZER.decode(every, skip_special_tokens=False)


TOKENIZE_REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({}, "prompt", "missing_required_parameter"),
    ({"prompt": None}, "prompt", "missing_required_parameter"),
    ({"prompt": 5}, "prompt", "invalid_type"),
    ({"prompt": ["a"]}, "prompt", "invalid_type"),
    ({"prompt": "\ud800"}, "prompt", "invalid_value"),
    ({"prompt": "a", "messages": MESSAGES}, "messages", "invalid_value"),
    ({"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt", "invalid_value"),
    ({"prompt": "a", "add_special_tokens": "no"}, "add_special_tokens", "invalid_type"),
    ({"prompt": "a", "chat_template": "x"}, "chat_template", "unsupported_parameter"),
    ({"messages": []}, "messages", "empty_array"),
    ({"messages": [{"role": "assistant", "content": "x"}]}, "messages[0].role", "invalid_value"),
    (
        {"messages": MESSAGES, "add_generation_prompt": True, "continue_final_message": True},
        "add_generation_prompt",
        "invalid_value",
    ),
]
DETOKENIZE_REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({}, "tokens", "missing_required_parameter"),
    ({"tokens": "a"}, "tokens", "invalid_type"),
    ({"tokens": [1.0]}, "tokens", "invalid_type"),
    ({"tokens": [True]}, "tokens", "invalid_type"),
    ({"tokens": [-1]}, "tokens", "invalid_value"),
    ({"tokens": [VOCAB_SIZE]}, "tokens", "invalid_value"),
    ({"tokens": [10**30]}, "tokens", "invalid_value"),
    ({"tokens": ["a"] * 500_000}, "tokens", "invalid_type"),
]


@pytest.mark.parametrize(
    ("path", "body", "param", "code"),
    [("/tokenize", *case) for case in TOKENIZE_REFUSED]
    + [("/detokenize", *case) for case in DETOKENIZE_REFUSED],
    ids=lambda value: repr(value)[:40],
)
def test_errors_have_the_form_of_all_others(
    server: LiveServer, path: str, body: dict[str, Any], param: str, code: str
) -> None:
    response = server.client.post(
        path, content=json.dumps(body), headers={"content-type": "application/json"}
    )
    assert response.status_code == 400, response.text
    error = error_of(response)
    assert (error["param"], error["code"]) == (param, code)
    server.check_alive()


def test_lengths_are_limited(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    longest = tokenize_schemas.MAX_PROMPT_CHARACTERS
    error = server.refused("/tokenize", {"prompt": "a" * (longest + 1)})
    assert (error["param"], error["code"]) == ("prompt", "string_above_max_length")
    monkeypatch.setattr(tokenize_schemas, "MAX_TOKENS", 10)
    assert detokenize(server, [BOS] * 10) == "<bos>" * 10
    error = server.refused("/detokenize", {"tokens": [BOS] * 11})
    assert (error["param"], error["code"]) == ("tokens", "array_above_max_length")


def test_models_and_unknown_fields_are_treated_as_everywhere(
    server: LiveServer, strict_server: LiveServer
) -> None:
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [BOS]})):
        assert server.refused(path, {**body, "model": "x"}, status=404)["code"] == "model_not_found"
        assert strict_server.post(path, {**body, "model": "alias"}).status_code == 200
        response = server.post(path, {**body, "unheard_of": 1})
        assert response.headers["x-gemserve-ignored-parameters"] == "unheard_of"
        assert strict_server.refused(path, {**body, "unheard_of": 1})["code"] == "unknown_parameter"


def test_a_model_that_is_not_loaded_yet_answers_503() -> None:
    loading = threading.Event()

    def wait_for_it() -> None:
        loading.wait(60)

    with live_server(fake_engine_factory(before_load=wait_for_it), wait=False) as live:
        try:
            answers = [
                live.client.get("/tokenizer_info"),
                live.post("/tokenize", {"prompt": "a"}),
                live.post("/detokenize", {"tokens": [2]}),
            ]
            assert [response.status_code for response in answers] == [503] * 3
            assert {error_of(response)["code"] for response in answers} == {"model_not_ready"}
        finally:
            loading.set()
        live.wait_for(lambda: live.client.get("/health/ready").status_code == 200)


def test_a_long_text_is_encoded_beside_the_event_loop(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, may_end = threading.Event(), threading.Event()
    encode = Tokenizer.encode

    def slow_encode(self: Tokenizer, text: str, add_bos: bool = True) -> list[int]:
        if text == "slow":
            started.set()
            assert may_end.wait(60)
        return encode(self, text, add_bos)

    monkeypatch.setattr(Tokenizer, "encode", slow_encode)
    answers: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: answers.append(server.post("/tokenize", {"prompt": "slow"})))
    thread.start()
    try:
        assert started.wait(60)
        assert server.client.get("/health", timeout=30).status_code == 200
        assert not answers
    finally:
        may_end.set()
        thread.join()
    assert answers[0].status_code == 200


def test_texts_in_work_are_limited_like_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two are in work, and others neither wait without end nor are they read; generation goes on beside
    them."""
    begun, go_on = threading.Semaphore(0), threading.Event()
    answers: list[httpx.Response] = []
    with live_server(max_queued_requests=2) as server:
        tokenizer = server.app.state.server.loaded.tokenizer
        encode, decode = tokenizer.encode, tokenizer.decode

        def slow(work: Any) -> Any:
            def waiting(*args: Any, **options: Any) -> Any:
                begun.release()
                assert go_on.wait(60)
                return work(*args, **options)

            return waiting

        with monkeypatch.context() as patch:
            patch.setattr(tokenizer, "encode", slow(encode))
            patch.setattr(tokenizer, "decode", slow(decode))
            bodies = [("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [9]})]
            threads = [
                threading.Thread(target=lambda path=path, body=body: answers.append(server.post(path, body)))
                for path, body in bodies
            ]
            for thread in threads:
                thread.start()
                assert begun.acquire(timeout=60)
            for path, body in bodies:
                refused = server.post(path, body)
                assert refused.status_code == 429
                assert error_of(refused)["code"] == "server_overloaded"
                assert refused.headers["retry-after"] == "1"
            go_on.set()
            for thread in threads:
                thread.join()
        assert [answer.status_code for answer in answers] == [200, 200]
        assert tokenize(server, prompt="a")["count"] == 2
