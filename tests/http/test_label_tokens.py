"""Parameters about single tokens, on a real (tiny, random) network: allowed_token_ids, logprob_token_ids,
prompt_logprobs."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.http.cache.tiny_server import DIGITS, NUM_TOKENS, VOCAB_SIZE, ids, tiny_server
from tests.http.live_server import LiveServer
from tests.http.test_streams import CHAT, COMPLETIONS, MESSAGES, chunks_of
from tests.tiny import write_tiny_folder

EOS = 1
LABELS = [DIGITS[7], DIGITS[2], DIGITS[4]]
PROMPT = ids(40)
PATHS: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": PROMPT}),
    (CHAT, {"messages": [{"role": "user", "content": "hello is in a b"}]}),
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server started here sets the threads of the whole test process."""
    before = torch.get_num_threads()
    folder: Path = write_tiny_folder(tmp_path_factory.mktemp("tiny"))
    with tiny_server(folder) as live:
        yield live
    torch.set_num_threads(before)


def answer(server: LiveServer, path: str, **body: Any) -> dict[str, Any]:
    return server.complete(**body) if path == COMPLETIONS else server.chat(**body)


# -- allowed_token_ids ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0}, {"temperature": 1, "seed": 3}, {"top_k": 5, "seed": 1}]
)
@pytest.mark.parametrize(("path", "source"), PATHS)
def test_nothing_but_allowed_tokens_is_drawn(
    tiny: LiveServer, path: str, source: dict[str, Any], sampling: dict[str, Any]
) -> None:
    body = {**source, **sampling, "max_tokens": 20, "return_token_ids": True}
    free = answer(tiny, path, **body)["choices"][0]["token_ids"]
    assert not set(free) <= set(LABELS)
    chosen = answer(tiny, path, **body, allowed_token_ids=LABELS)["choices"][0]
    assert set(chosen["token_ids"]) <= set(LABELS)
    # No end token is among them, so that nothing ends the text before its time.
    assert (len(chosen["token_ids"]), chosen["finish_reason"]) == (20, "length")
    chunks = chunks_of(tiny, path, {**body, "allowed_token_ids": LABELS})
    streamed = [token_id for chunk in chunks for token_id in chunk["choices"][0]["token_ids"]]
    assert streamed == chosen["token_ids"]


def test_of_the_allowed_tokens_the_likeliest_is_the_greedy_one(tiny: LiveServer) -> None:
    body = {
        "prompt": PROMPT,
        "max_tokens": 1,
        "temperature": 0,
        "allowed_token_ids": LABELS,
        "return_token_ids": True,
    }
    choice = tiny.complete(**body, logprobs=0, logprob_token_ids=LABELS)["choices"][0]
    values = choice["logprobs"]["top_logprobs"][0]
    assert max(values, key=lambda text: values[text]) == choice["text"]


def test_an_allowed_end_token_ends_and_waits_for_min_tokens(tiny: LiveServer) -> None:
    body = {"prompt": PROMPT, "max_tokens": 9, "return_token_ids": True}
    only_end = tiny.complete(**body, allowed_token_ids=[EOS])
    assert (only_end["choices"][0]["token_ids"], only_end["choices"][0]["finish_reason"]) == ([EOS], "stop")
    waits = tiny.complete(**body, allowed_token_ids=[EOS, DIGITS[0]], min_tokens=4, temperature=0)
    assert waits["choices"][0]["token_ids"][:4] == [DIGITS[0]] * 4


@pytest.mark.parametrize(
    ("value", "more", "code"),
    [
        ([], {}, "empty_array"),
        ([-1], {}, "integer_below_min_value"),
        ([VOCAB_SIZE], {}, "invalid_value"),
        ([NUM_TOKENS], {}, "invalid_value"),  # the head has a row for it, the tokenizer no token
        ([EOS], {"min_tokens": 1}, "invalid_value"),
        ([DIGITS[0]], {"min_tokens": 1, "stop_token_ids": [DIGITS[0]]}, "invalid_value"),
        ([1.0], {}, "invalid_type"),
        ("1", {}, "invalid_type"),
        (list(range(9)) * 120, {}, "array_above_max_length"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_a_set_that_leaves_nothing_to_draw_is_refused(
    tiny: LiveServer, value: Any, more: dict[str, Any], code: str
) -> None:
    response = tiny.post(COMPLETIONS, {"prompt": PROMPT, "max_tokens": 3, "allowed_token_ids": value, **more})
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, code)
    assert error["param"].startswith("allowed_token_ids")


# -- logprob_token_ids ---------------------------------------------------------------------------------------


def softmax_of_everything(tiny: LiveServer, prompt: list[int]) -> dict[int, float]:
    """Every token's log-probability, label by label as others report it: as the first token of the prompt's
    continuation."""
    values = {}
    for token_id in LABELS:
        scored = tiny.complete(prompt=[*prompt, token_id], max_tokens=0, echo=True, logprobs=0)
        values[token_id] = scored["choices"][0]["logprobs"]["token_logprobs"][-1]
    return values


def test_a_fixed_set_of_labels_is_reported_at_each_position_in_its_order(tiny: LiveServer) -> None:
    body = {"prompt": PROMPT, "max_tokens": 6, "temperature": 1, "seed": 2, "return_token_ids": True}
    plain = tiny.complete(**body, logprobs=3)["choices"][0]
    choice = tiny.complete(**body, logprobs=3, logprob_token_ids=LABELS)["choices"][0]
    assert choice["token_ids"] == plain["token_ids"]
    assert choice["logprobs"]["token_logprobs"] == plain["logprobs"]["token_logprobs"]
    texts = [chr(ord("0") + DIGITS.index(label)) for label in LABELS]
    prompt = list(PROMPT)
    for token_id, token, value, top in zip(
        choice["token_ids"],
        *(choice["logprobs"][name] for name in ("tokens", "token_logprobs", "top_logprobs")),
        strict=True,
    ):
        assert list(top) == list(dict.fromkeys([*texts, token]))
        assert top[token] == value
        # Another order of sums in a prompt of another length: float32 differs by about 1e-6.
        expected = softmax_of_everything(tiny, prompt)
        assert [top[text] for text in texts] == pytest.approx([expected[label] for label in LABELS], abs=1e-4)
        prompt.append(token_id)


def test_labels_of_a_chat_are_its_top_logprobs(tiny: LiveServer) -> None:
    body = {
        **PATHS[1][1],
        "max_tokens": 4,
        "temperature": 0,
        "logprobs": True,
        "logprob_token_ids": [*LABELS, LABELS[0]],
    }
    entries = tiny.chat(**body)["choices"][0]["logprobs"]["content"]
    assert len(entries) == 4
    for entry in entries:
        assert [top["token"] for top in entry["top_logprobs"]] == ["7", "2", "4"]
        # greedy: nothing is likelier
        assert all(top["logprob"] <= entry["logprob"] for top in entry["top_logprobs"])
    chunks = chunks_of(tiny, CHAT, body)
    streamed = [
        entry for chunk in chunks for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert streamed == entries
    # top_logprobs counts the likeliest; a set of labels takes their place whatever it says.
    assert tiny.chat(**body, top_logprobs=1)["choices"][0]["logprobs"]["content"] == entries


def test_labels_are_of_generated_positions_the_echoed_prompt_keeps_the_likeliest(tiny: LiveServer) -> None:
    body = {"prompt": PROMPT, "max_tokens": 2, "temperature": 0, "logprobs": 1, "echo": True}
    plain = tiny.complete(**body)["choices"][0]["logprobs"]["top_logprobs"]
    labelled = tiny.complete(**body, logprob_token_ids=LABELS)["choices"][0]["logprobs"]["top_logprobs"]
    assert labelled[: len(PROMPT)] == plain[: len(PROMPT)]
    assert all({"7", "2", "4"} <= set(top) for top in labelled[len(PROMPT) :])
    empty = tiny.complete(**body, logprob_token_ids=[])["choices"][0]["logprobs"]["top_logprobs"]
    assert empty == plain


@pytest.mark.parametrize(
    ("path", "body", "code"),
    [
        (COMPLETIONS, {"prompt": "a", "logprob_token_ids": LABELS}, "invalid_value"),
        (CHAT, {"messages": MESSAGES, "logprob_token_ids": LABELS, "logprobs": False}, "invalid_value"),
        (COMPLETIONS, {"prompt": "a", "logprobs": 1, "logprob_token_ids": [NUM_TOKENS]}, "invalid_value"),
        (COMPLETIONS, {"prompt": "a", "logprobs": 1, "logprob_token_ids": [-1]}, "integer_below_min_value"),
        (
            COMPLETIONS,
            {"prompt": "a", "logprobs": 1, "logprob_token_ids": [9] * 129},
            "array_above_max_length",
        ),
    ],
)
def test_labels_that_cannot_be_reported_are_refused(
    tiny: LiveServer, path: str, body: dict[str, Any], code: str
) -> None:
    response = tiny.post(path, body)
    assert (response.status_code, response.json()["error"]["code"]) == (400, code)
    assert response.json()["error"]["param"].startswith("logprob_token_ids")


# -- prompt_logprobs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 5, 20])
def test_prompt_logprobs_are_those_of_echo_by_token_id(tiny: LiveServer, count: int) -> None:
    choice = tiny.complete(prompt=PROMPT, max_tokens=1, temperature=0, prompt_logprobs=count)["choices"][0]
    entries = choice["prompt_logprobs"]
    echoed = tiny.complete(prompt=PROMPT, max_tokens=0, echo=True, logprobs=0)["choices"][0]["logprobs"]
    assert choice["logprobs"] is None
    assert len(entries) == len(PROMPT)
    assert entries[0] is None
    for token_id, token, value, entry in zip(
        PROMPT[1:], echoed["tokens"][1:], echoed["token_logprobs"][1:], entries[1:], strict=True
    ):
        own = entry[str(token_id)]
        assert (own["decoded_token"], own["logprob"]) == (token, pytest.approx(value, abs=1e-4))
        ranks = sorted(item["rank"] for item in entry.values())
        assert ranks == [*range(1, count + 1)] + ([] if own["rank"] <= count else [own["rank"]])
        by_rank = sorted(entry.values(), key=lambda item: item["rank"])
        assert [item["logprob"] for item in by_rank] == sorted(
            (item["logprob"] for item in by_rank), reverse=True
        )


def test_the_rank_of_a_prompt_token_counts_all_likelier_ones(tiny: LiveServer) -> None:
    """The twenty likeliest are known with their values: a token's rank is one more than how many of them are
    likelier."""
    entries = tiny.complete(prompt=PROMPT, max_tokens=0, prompt_logprobs=20)["choices"][0]["prompt_logprobs"]
    zero = tiny.complete(prompt=PROMPT, max_tokens=0, prompt_logprobs=0)["choices"][0]["prompt_logprobs"]
    beyond = 0
    for token_id, entry, alone in zip(PROMPT[1:], entries[1:], zero[1:], strict=True):
        own = entry[str(token_id)]
        assert list(alone) == [str(token_id)]
        assert alone[str(token_id)]["rank"] == own["rank"]
        likelier = sum(item["logprob"] > own["logprob"] for item in entry.values())
        assert own["rank"] == likelier + 1 if own["rank"] <= 20 else likelier == 20
        beyond += own["rank"] > 20
        assert math.isfinite(own["logprob"])
    assert 0 < beyond < len(PROMPT)


def test_prompt_logprobs_go_with_echo_and_with_several_choices(tiny: LiveServer) -> None:
    body = {"prompt": [PROMPT, PROMPT[:9]], "max_tokens": 2, "n": 2, "temperature": 1, "seed": 5}
    choices = tiny.complete(**body, prompt_logprobs=1, echo=True, logprobs=4)["choices"]
    assert [len(choice["prompt_logprobs"]) for choice in choices] == [40, 40, 9, 9]
    for choice in choices:
        assert all(1 <= len(entry) <= 2 for entry in choice["prompt_logprobs"][1:])
        assert all(
            4 <= len(top) <= 5 for top in choice["logprobs"]["top_logprobs"][1:] if "\ufffd" not in top
        )


def test_prompt_logprobs_of_a_chat_stand_beside_its_choices(tiny: LiveServer) -> None:
    chat = tiny.chat(**PATHS[1][1], max_tokens=1, prompt_logprobs=2, return_token_ids=True)
    assert "prompt_logprobs" not in chat["choices"][0]
    entries = chat["prompt_logprobs"]
    assert entries[0] is None
    assert all(
        str(token_id) in entry
        for token_id, entry in zip(chat["prompt_token_ids"][1:], entries[1:], strict=True)
    )
    assert "prompt_logprobs" not in tiny.chat(**PATHS[1][1], max_tokens=1)


def test_prompt_logprobs_are_not_streamed(tiny: LiveServer) -> None:
    for path, source in PATHS:
        response = tiny.post(path, {**source, "prompt_logprobs": 0, "stream": True})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt_logprobs")


def test_a_label_set_makes_a_classifier(tiny: LiveServer) -> None:
    """One token from a fixed set, with the whole set's values: what the parameters are for, together."""
    body = {
        "prompt": PROMPT,
        "max_tokens": 1,
        "temperature": 0,
        "allowed_token_ids": LABELS,
        "logprob_token_ids": LABELS,
    }
    top = tiny.complete(**body, logprobs=0)["choices"][0]["logprobs"]["top_logprobs"][0]
    assert set(top) == {"7", "2", "4"}
