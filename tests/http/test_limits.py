"""What max_tokens, the context length, temperature and seed mean at their edges."""

import pytest

from tests.http.live_server import LiveServer
from tests.http.test_streams import COMPLETIONS

LIMIT = 512


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("length", [LIMIT, LIMIT + 1, 3 * LIMIT])
def test_a_prompt_that_leaves_no_room_is_refused_with_true_numbers(
    server: LiveServer, length: int, stream: bool
) -> None:
    error = server.refused(COMPLETIONS, {"prompt": [9] * length, "max_tokens": 7, "stream": stream})
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    assert error["message"] == (
        f"This model's maximum context length is {LIMIT} tokens. However, you requested {length + 7} tokens "
        f"({length} in the messages, 7 in the completion). Please reduce the length of the "
        "messages or completion."
    )


@pytest.mark.parametrize(
    ("length", "max_tokens", "generated"), [(LIMIT - 1, 16, 1), (LIMIT - 3, 100, 3), (LIMIT - 3, 2, 2)]
)
def test_max_tokens_is_lowered_to_the_room_left(
    server: LiveServer, strict_server: LiveServer, length: int, max_tokens: int, generated: int
) -> None:
    body = {"prompt": [9] * length, "max_tokens": max_tokens, "temperature": 0}
    answer = server.complete(**body)
    assert answer["usage"]["completion_tokens"] == generated
    assert answer["choices"][0]["finish_reason"] == "length"
    strict = strict_server.post(COMPLETIONS, body)
    assert strict.status_code == (200 if generated == max_tokens else 400)


def test_scoring_a_prompt_as_long_as_the_context_needs_no_room(server: LiveServer) -> None:
    assert server.complete(prompt=[9] * LIMIT, max_tokens=0)["usage"]["completion_tokens"] == 0
    server.refused(COMPLETIONS, {"prompt": [9] * (LIMIT + 1), "max_tokens": 0})


def test_chat_answers_up_to_the_context_and_max_completion_tokens_wins(server: LiveServer) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    usage = server.chat(messages=messages)["usage"]
    assert usage["total_tokens"] == LIMIT
    assert (
        server.chat(messages=messages, max_tokens=9, max_completion_tokens=4)["usage"]["completion_tokens"]
        == 4
    )


@pytest.mark.parametrize("temperature", [0, 1e-40, 1e-8, 1e-5])
def test_tiny_temperatures_are_greedy(server: LiveServer, temperature: float) -> None:
    body = {"prompt": "Hello", "max_tokens": 20}
    expected = server.complete(**body, temperature=0)["choices"]
    assert server.complete(**body, temperature=temperature, seed=5)["choices"] == expected
    assert server.complete(**body, temperature=1, top_k=1, seed=5)["choices"] == expected


@pytest.mark.parametrize("seed", [0, -1, 2**31, 2**63 - 1, 1 - 2**63])
def test_a_seed_repeats_and_another_one_differs(server: LiveServer, seed: int) -> None:
    body = {"prompt": "Hello", "max_tokens": 16, "temperature": 1}
    first = server.complete(**body, seed=seed)["choices"]
    assert server.complete(**body, seed=seed)["choices"] == first
    assert server.complete(**body, seed=seed // 2 + 7)["choices"] != first
