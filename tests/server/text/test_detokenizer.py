"""The incremental detokenizer says what the tokenizers library says, however the ids are split over calls."""

import random

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from server.text.detokenizer import Detokenizer
from server.text.tokenizer import Tokenizer
from tests.server.text.small_tokenizer import build_library_tokenizer, build_tokenizer
from tests.server.text.small_tokenizer import token_id as id_of

LIBRARY = build_library_tokenizer()
TOKENIZER = build_tokenizer()
EURO = [id_of(LIBRARY, f"<0x{byte:02X}>") for byte in "€".encode()]
LETTER = id_of(LIBRARY, "a")
BOS = id_of(LIBRARY, "<bos>")


def split(ids: list[int], rng: random.Random) -> list[list[int]]:
    parts = []
    start = 0
    while start < len(ids):
        end = start + rng.randint(1, 4)
        parts.append(ids[start:end])
        start = end
    return parts


def collect(detokenizer: Detokenizer, parts: list[list[int]]) -> str:
    return "".join(detokenizer.push(part) for part in parts) + detokenizer.flush()


@given(
    ids=st.lists(
        st.one_of(
            st.integers(0, LIBRARY.get_vocab_size() - 1),
            st.sampled_from(EURO),
            st.integers(EURO[0] - 100, EURO[0] + 10),
        ),
        max_size=24,
    ),
    skip_special_tokens=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_joined_pushes_equal_the_full_decode(ids: list[int], skip_special_tokens: bool, seed: int) -> None:
    expected = LIBRARY.decode(ids, skip_special_tokens=skip_special_tokens)
    detokenizer = Detokenizer(TOKENIZER, skip_special_tokens=skip_special_tokens)
    assert collect(detokenizer, split(ids, random.Random(seed))) == expected
    assert TOKENIZER.decode(ids, skip_special_tokens) == expected
    assert detokenizer.consumed_tokens == len(ids)


def test_a_character_of_several_byte_tokens_is_held_until_complete() -> None:
    detokenizer = Detokenizer(TOKENIZER)
    assert [detokenizer.push([token_id]) for token_id in [*EURO, LETTER]] == ["", "", "", "€a"]


def test_dangling_bytes_become_one_replacement_character_each_at_the_end() -> None:
    detokenizer = Detokenizer(TOKENIZER)
    assert detokenizer.push([LETTER, *EURO[:2]]) == "a"
    assert detokenizer.flush() == "\ufffd\ufffd"
    assert detokenizer.flush() == ""


def test_one_invalid_byte_spoils_its_whole_run_as_in_the_published_decoder() -> None:
    ids = [*EURO, EURO[0], LETTER, *EURO]
    assert collect(Detokenizer(TOKENIZER), [ids]) == LIBRARY.decode(ids) == "\ufffd\ufffd\ufffd\ufffda€"


def test_a_skipped_special_token_does_not_end_a_run_of_bytes() -> None:
    ids = [EURO[0], BOS, *EURO[1:]]
    assert collect(Detokenizer(TOKENIZER), [[token_id] for token_id in ids]) == "€"
    assert collect(Detokenizer(TOKENIZER, skip_special_tokens=False), [ids]) == "\ufffd<bos>\ufffd\ufffd"


def test_the_space_in_front_of_the_first_token_is_kept() -> None:
    assert Detokenizer(TOKENIZER).push([id_of(LIBRARY, "▁w")]) == " w"


def test_ids_the_tokenizer_does_not_know_stand_for_no_text() -> None:
    size = LIBRARY.get_vocab_size()
    padded = build_tokenizer(vocab_size=size + 64)
    assert padded.decode([LETTER, size + 3, LETTER]) == "aa"
    assert padded.token_bytes(size + 3) == b""


@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_2000_random_sequences_of_the_real_vocabulary(
    gemma: Tokenizer, gemma_file: str, skip_special_tokens: bool
) -> None:
    library = tokenizers.Tokenizer.from_file(gemma_file)
    rng = random.Random(25)
    for _ in range(1000):
        ids = [
            rng.choice([rng.randrange(238, 494), rng.randrange(262144), rng.randrange(256), 472, 418, 411])
            for _ in range(rng.randint(1, 24))
        ]
        expected = library.decode(ids, skip_special_tokens=skip_special_tokens)
        assert (
            collect(Detokenizer(gemma, skip_special_tokens=skip_special_tokens), split(ids, rng)) == expected
        )


def test_a_rare_character_repeated_streams_without_replacement_characters(gemma: Tokenizer) -> None:
    text = " ".join(["\uad2d"] * 12)
    ids = gemma.encode_plain(text)
    assert ids[:3] == [472, 418, 411]
    detokenizer = Detokenizer(gemma)
    chunks = [detokenizer.push([token_id]) for token_id in ids]
    assert "".join(chunks) + detokenizer.flush() == text
    assert not any("\ufffd" in chunk for chunk in chunks)


def test_a_long_sequence_decodes_in_linear_time() -> None:
    # A text that is copied for every token would take minutes at this length.
    assert len(TOKENIZER.decode([LETTER] * 1_000_000)) == 1_000_000
