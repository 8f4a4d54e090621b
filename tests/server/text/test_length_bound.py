"""The lower bound of a prompt's length: never above the true length, and no claim about tokenizers that may
shorten text."""

from collections.abc import Callable

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers

from server.text.length_bound import PromptTooLongError
from server.text.template.conversation import ChatMessage
from server.text.tokenizer import Tokenizer
from tests.server.text.small_tokenizer import CONTROL, build_library_tokenizer, build_tokenizer

TOKENIZER = build_tokenizer()
LONGEST = len("<start_of_turn>")
PIECES = [*CONTROL, "Hello", " ", "▁", "\n\n", "<b>", "a", "ab", "é", "🙂", "日", "\u0301", "\x00"]


@given(st.lists(st.sampled_from(PIECES), max_size=40).map("".join))
def test_no_text_has_fewer_tokens(text: str) -> None:
    for add_bos in (True, False):
        assert TOKENIZER.least_num_tokens(text, add_bos) <= len(TOKENIZER.encode(text, add_bos))


@pytest.mark.parametrize("text", ["", "<bos>", "<bos>" * 100, "<start_of_turn>" * 10])
def test_the_bound_is_reached(text: str) -> None:
    assert TOKENIZER.least_num_tokens(text) == len(TOKENIZER.encode(text))


def test_the_bound_grows_with_the_text() -> None:
    assert TOKENIZER.least_num_tokens("a" * (LONGEST * 1000)) == 1001


def test_a_chat_is_refused_before_it_is_encoded_only_when_it_cannot_fit() -> None:
    messages = [ChatMessage("user", "<start_of_turn>" * 10 + "a" * 300)]
    length = len(TOKENIZER.encode_chat(messages))
    assert len(TOKENIZER.encode_chat(messages, max_tokens=length)) == length
    with pytest.raises(PromptTooLongError) as caught:
        TOKENIZER.encode_chat(messages, max_tokens=20)
    assert 20 < caught.value.num_tokens <= length
    padded = [ChatMessage("user", " " * 100_000 + "a")]  # the template trims it
    assert len(TOKENIZER.encode_chat(padded, max_tokens=40)) <= 40


def changed(change: Callable[[tokenizers.Tokenizer], object]) -> Tokenizer:
    library = build_library_tokenizer()
    change(library)
    size = library.get_vocab_size()
    return Tokenizer(library, vocab_size=size, bos_token_id=CONTROL.index("<bos>"), eos_token_ids=(1,))


def set_normalizer(normalizer: object) -> Callable[[tokenizers.Tokenizer], object]:
    return lambda library: setattr(library, "normalizer", normalizer)


def set_pre_tokenizer(pre_tokenizer: object) -> Callable[[tokenizers.Tokenizer], object]:
    return lambda library: setattr(library, "pre_tokenizer", pre_tokenizer)


@pytest.mark.parametrize(
    "change",
    [
        set_normalizer(normalizers.NFC()),
        set_normalizer(normalizers.Replace("  ", "▁")),
        set_normalizer(normalizers.Replace(tokenizers.Regex(" +"), "▁")),
        set_normalizer(normalizers.Sequence([normalizers.Replace(" ", "▁"), normalizers.Strip()])),
        set_pre_tokenizer(pre_tokenizers.Split(" ", "removed")),
        set_pre_tokenizer(pre_tokenizers.Whitespace()),
        lambda library: library.add_tokens([AddedToken("~", lstrip=True)]),
        lambda library: setattr(library.model, "byte_fallback", False),
        lambda library: setattr(
            library,
            "model",
            models.BPE(vocab=library.get_vocab(), merges=[], unk_token="<unk>", fuse_unk=True),
        ),
    ],
)
def test_nothing_is_claimed_where_text_may_be_dropped_or_joined(
    change: Callable[[tokenizers.Tokenizer], object],
) -> None:
    assert changed(change).least_num_tokens("a" * 10_000) == 1


@pytest.mark.parametrize(
    "change",
    [
        set_normalizer(None),
        set_normalizer(normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])),
        set_pre_tokenizer(pre_tokenizers.Split(" ", "merged_with_previous")),
        set_pre_tokenizer(pre_tokenizers.Metaspace()),
    ],
)
def test_parts_that_keep_the_text_are_known(change: Callable[[tokenizers.Tokenizer], object]) -> None:
    assert changed(change).least_num_tokens("a" * 10_000) > 600
