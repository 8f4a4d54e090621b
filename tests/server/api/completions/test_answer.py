"""The choices of a completion: the prompt's echo comes once, and token ids belong to their text."""

from typing import Any

from server.api.completions.answer import CompletionAnswer
from server.api.completions.request import CompletionRequest
from tests.server.api.events import HEAD, event, plan
from tests.server.text.small_tokenizer import build_tokenizer


def form(**fields: Any) -> CompletionAnswer:
    body = CompletionRequest.model_validate({"prompt": "a", **fields})
    return CompletionAnswer(build_tokenizer(), plan(n=2), body, HEAD)


def test_the_prompt_is_echoed_once_for_each_choice() -> None:
    said = form(echo=True)
    assert [piece["text"] for piece in said.pieces(event("x", first=True))] == ["prompt 0x"]
    assert [piece["text"] for piece in said.pieces(event("y"))] == ["y"]
    assert [piece["text"] for piece in said.pieces(event("z", index=1, first=True))] == ["prompt 0z"]


def test_the_end_is_a_piece_of_its_own() -> None:
    pieces = form().pieces(event("x", finish="length"))
    assert [(piece["text"], piece["finish_reason"]) for piece in pieces] == [("x", None), ("", "length")]


def test_token_ids_are_shown_where_they_are_asked_for_the_prompts_once() -> None:
    said = form(return_token_ids=True)
    first = said.pieces(event("x", tokens=[7], first=True))
    assert (first[0]["token_ids"], first[0]["prompt_token_ids"]) == ([7], [2, 40])
    held_back = said.pieces(event(tokens=[8]))
    assert (held_back[0]["text"], held_back[0]["token_ids"]) == ("", [8])
    assert "prompt_token_ids" not in held_back[0]
    assert "token_ids" not in form().pieces(event("x", tokens=[7]))[0]


def test_the_pieces_joined_are_the_choice() -> None:
    said = form()
    pieces = said.pieces(event("a", first=True)) + said.pieces(event("b", finish="stop"))
    merged = said.merged(0, pieces)
    assert (merged["text"], merged["finish_reason"], merged["logprobs"]) == ("ab", "stop", None)
