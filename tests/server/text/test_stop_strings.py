"""Stop strings: found on decoded text wherever the token borders are; nothing of a stop string leaks,
everything before it is delivered, and no more than needed is held back."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from server.text.detokenizer import Detokenizer


class TextTable:
    """A vocabulary made for one test: an entry is a text or one byte."""

    def __init__(self, entries: Sequence[str | int], skipped: frozenset[int] = frozenset()) -> None:
        self.entries: list[str | int | None] = list(entries)
        self.skipped_token_ids = skipped


def decode(entries: list[str | int]) -> tuple[str, list[int]]:
    """The published decoding, written independently: the text, and for every character the number of its last
    token."""
    text = ""
    owners: list[int] = []
    position = 0
    while position < len(entries):
        entry = entries[position]
        if isinstance(entry, str):
            text += entry
            owners += [position + 1] * len(entry)
            position += 1
            continue
        end = position
        run: list[int] = []
        while end < len(entries) and isinstance(value := entries[end], int):
            run.append(value)
            end += 1
        try:
            characters = bytes(run).decode()
        except UnicodeDecodeError:
            characters = "\ufffd" * len(run)
            owners += range(position + 1, end + 1)
        else:
            for character in characters:
                position += len(character.encode())
                owners.append(position)
        text += characters
        position = end
    return text, owners


def cut(
    text: str, owners: list[int], stops: list[str], include_stop: bool, min_tokens: int
) -> tuple[str, str | None, int | None]:
    for end in range(1, len(text) + 1):
        if owners[end - 1] <= min_tokens:
            continue
        for stop in stops:
            if text[:end].endswith(stop):
                return text[: end if include_stop else end - len(stop)], stop, owners[end - 1]
    return text, None, None


token = st.one_of(st.text("ab€", min_size=1, max_size=5), st.sampled_from([*"é€".encode(), 0xFF, 0x61]))


@given(
    entries=st.lists(token, max_size=12),
    stops=st.lists(st.text("ab€é\ufffd", min_size=1, max_size=4), max_size=4),
    cuts=st.sets(st.integers(0, 12)),
    include_stop=st.booleans(),
    min_tokens=st.integers(0, 3),
)
@example(entries=["aab", "aaab"], stops=["aaab"], cuts=set(), include_stop=False, min_tokens=0)
@example(entries=["ab", "ab"], stops=["b", "ab"], cuts={1}, include_stop=False, min_tokens=1)
def test_streamed_text_is_the_decoded_text_cut_at_the_first_stop(
    entries: list[str | int], stops: list[str], cuts: set[int], include_stop: bool, min_tokens: int
) -> None:
    expected, stop, token_number = cut(*decode(entries), stops, include_stop, min_tokens)
    detokenizer = Detokenizer(
        TextTable(entries), stop=stops, include_stop=include_stop, min_tokens=min_tokens
    )
    borders = [0, *sorted(c for c in cuts if c < len(entries)), len(entries)]
    shown = ""
    for start, end in pairwise(borders):
        shown += detokenizer.push(range(start, end))
        assert expected.startswith(shown)
    shown += detokenizer.flush()
    assert shown == expected
    assert detokenizer.stopped == stop
    assert detokenizer.consumed_tokens == (len(entries) if token_number is None else token_number)


@given(
    text=st.text("abc", max_size=16),
    stops=st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=3),
)
def test_only_the_longest_beginning_of_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    detokenizer = Detokenizer(TextTable(list(text)), stop=stops)
    shown = ""
    for index in range(len(text)):
        shown += detokenizer.push([index])
        if detokenizer.stopped is not None:
            return
        so_far = text[: index + 1]
        held = max((n for s in stops for n in range(1, len(s)) if so_far.endswith(s[:n])), default=0)
        assert shown == so_far[: len(so_far) - held]


NUMBERS = [" 6", ",", " 7", ",", " 8", ",", " 9", ",", " 1", "0", ",", " 1", "1", ",", " 1", "2"]


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        (["10, 11"], " 6, 7, 8, 9, "),
        (["0, 1"], " 6, 7, 8, 9, 1"),
        (["11", "11, 12"], " 6, 7, 8, 9, 10, "),
        (["zzzz not there"], "".join(NUMBERS)),
    ],
)
def test_stop_strings_that_span_tokens(stop: list[str], text: str) -> None:
    detokenizer = Detokenizer(TextTable(NUMBERS), stop=stop)
    assert "".join(detokenizer.push([index]) for index in range(len(NUMBERS))) + detokenizer.flush() == text


def test_text_before_the_stop_in_the_same_token_is_returned_and_nothing_after_it() -> None:
    detokenizer = Detokenizer(TextTable(["one. STOP two", "three"]), stop=["STOP"])
    assert detokenizer.push([0, 1]) == "one. "
    assert (detokenizer.stopped, detokenizer.consumed_tokens) == ("STOP", 1)
    assert detokenizer.push([1]) == detokenizer.flush() == ""
    assert detokenizer.consumed_tokens == 1


def test_text_held_back_for_a_stop_that_never_comes_is_flushed() -> None:
    detokenizer = Detokenizer(TextTable(["a", "EN"]), stop=["END"])
    assert detokenizer.push([0, 1]) == "a"
    assert detokenizer.flush() == "EN"


def test_a_stop_string_may_end_in_bytes_that_only_the_flush_completes() -> None:
    detokenizer = Detokenizer(TextTable(["a", *"€".encode()]), stop=["€"])
    assert detokenizer.push(range(4)) == "a"
    assert detokenizer.flush() == ""
    assert (detokenizer.stopped, detokenizer.consumed_tokens) == ("€", 4)


def test_a_skipped_control_token_cannot_be_a_stop_string_but_a_shown_one_can() -> None:
    table = TextTable(["a", "<end_of_turn>"], skipped=frozenset({1}))
    hidden = Detokenizer(table, stop=["<end_of_turn>"])
    assert hidden.push([0, 1]) + hidden.flush() == "a"
    assert hidden.stopped is None
    shown = Detokenizer(table, stop=["<end_of_turn>"], skip_special_tokens=False)
    assert shown.push([0, 1]) == "a"
    assert shown.stopped == "<end_of_turn>"


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        Detokenizer(TextTable([]), stop=[""])
