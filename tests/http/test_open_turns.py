"""add_generation_prompt and continue_final_message: how the prompt of a chat ends."""

from typing import Any

import pytest

from tests.fakes import END_OF_TURN, START_OF_TURN, fake_engine_factory, fake_tokenizer
from tests.http.live_server import LiveServer, live_server
from tests.http.test_streams import CHAT, chunks_of, joined

TOKENIZER = fake_tokenizer()
QUESTION = {"role": "user", "content": "Name a city."}
BEGUN = {"role": "assistant", "content": "A city is Par"}


def prompt_of(server: LiveServer, messages: list[dict[str, Any]], **options: Any) -> str:
    answer = server.chat(messages=messages, max_tokens=1, return_token_ids=True, **options)
    return TOKENIZER.decode(answer["prompt_token_ids"], skip_special_tokens=False)


def test_the_prompt_ends_with_the_begun_answer(server: LiveServer) -> None:
    turn = "<bos><start_of_turn>user\nName a city.<end_of_turn>\n<start_of_turn>model\n"
    assert prompt_of(server, [QUESTION]) == turn
    assert prompt_of(server, [QUESTION, BEGUN], continue_final_message=True) == turn + "A city is Par"
    explicit = {"continue_final_message": True, "add_generation_prompt": False}
    assert prompt_of(server, [QUESTION, BEGUN], **explicit) == turn + "A city is Par"
    closed = turn + "A city is Par<end_of_turn>\n"
    assert prompt_of(server, [QUESTION, BEGUN], add_generation_prompt=False) == closed
    assert prompt_of(server, [QUESTION, BEGUN]) == closed + "<start_of_turn>model\n"


@pytest.mark.parametrize("stream", [False, True])
def test_the_answer_is_what_a_completion_of_that_prompt_would_be(server: LiveServer, stream: bool) -> None:
    body = {"messages": [QUESTION, BEGUN], "continue_final_message": True, "max_tokens": 20, "temperature": 0}
    prompt = server.chat(**body, return_token_ids=True)["prompt_token_ids"]
    expected = server.complete(prompt=prompt, max_tokens=20, temperature=0)["choices"][0]["text"]
    got = (
        joined(CHAT, chunks_of(server, CHAT, body))
        if stream
        else server.chat(**body)["choices"][0]["message"]["content"]
    )
    assert got == expected


@pytest.mark.parametrize(
    ("content", "end"),
    [
        ("Par ", "Par"),  # Gemma's template trims its messages
        (" \n Par", "Par"),
        ("", ""),
        ("a<end_of_turn>b<", "a<end_of_turn>b<"),
        ("Par. A city is Par", "Par. A city is Par"),
        ("\ue000\ue001 x \ue000", "\ue000\ue001 x \ue000"),
        ([{"type": "text", "text": "One"}, {"type": "text", "text": " two "}], "One two"),
    ],
)
def test_the_text_of_the_last_message_is_whole_and_stays_text(
    server: LiveServer, content: Any, end: str
) -> None:
    body = {
        "messages": [QUESTION, {**BEGUN, "content": content}],
        "continue_final_message": True,
        "max_tokens": 1,
    }
    tokens = server.chat(**body, return_token_ids=True)["prompt_token_ids"]
    assert TOKENIZER.decode(tokens, skip_special_tokens=False).endswith("<start_of_turn>model\n" + end)
    assert (tokens.count(START_OF_TURN), tokens.count(END_OF_TURN)) == (2, 1)


def test_a_turn_of_the_user_can_be_continued_too(server: LiveServer) -> None:
    assert (
        prompt_of(server, [QUESTION], continue_final_message=True) == "<bos><start_of_turn>user\nName a city."
    )


def test_what_contradicts_itself_is_refused(server: LiveServer) -> None:
    both = {"messages": [QUESTION, BEGUN], "continue_final_message": True, "add_generation_prompt": True}
    error = server.refused(CHAT, both)
    assert (error["param"], error["code"]) == ("add_generation_prompt", "invalid_value")
    system_last = [QUESTION, {"role": "system", "content": "x"}]
    error = server.refused(CHAT, {"messages": system_last, "continue_final_message": True})
    assert (error["param"], error["code"]) == ("continue_final_message", "invalid_value")
    for name in ("add_generation_prompt", "continue_final_message"):
        assert server.refused(CHAT, {"messages": [QUESTION], name: "yes"})["param"] == name


TRAILING = "{% for m in messages %}[{{ m.content }}]{% endfor %}{% if add_generation_prompt %}>{% endif %}"
BLIND = "{% for m in messages[:1] %}[{{ m.content }}]{% endfor %}"


def test_another_template_keeps_the_white_space_it_keeps_or_cannot_be_continued() -> None:
    def factory_of(template: str) -> Any:
        load = fake_engine_factory()

        def with_template(*args: Any) -> Any:
            loaded = load(*args)
            loaded.tokenizer = fake_tokenizer(template)
            return loaded

        return with_template

    messages = [QUESTION, {**BEGUN, "content": "Par "}]
    with live_server(factory_of(TRAILING)) as live:
        assert prompt_of(live, messages, continue_final_message=True) == "<bos>[Name a city.][Par "
        assert prompt_of(live, messages) == "<bos>[Name a city.][Par ]>"
    with live_server(factory_of(BLIND)) as live:
        error = live.refused(CHAT, {"messages": messages, "continue_final_message": True})
        assert "does not show the last message" in error["message"]
