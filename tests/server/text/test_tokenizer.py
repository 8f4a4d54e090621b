"""Encoding: exactly one BOS, control tokens only where they are meant, and no state that calls could
share."""

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import tokenizers

from server.text.template.conversation import ChatMessage
from server.text.tokenizer import Tokenizer, TokenizerError
from tests.server.text.small_tokenizer import CONTROL, build_library_tokenizer, build_tokenizer
from tests.server.text.small_tokenizer import token_id as id_of


@pytest.mark.parametrize(
    ("text", "rest"),
    [("Hello", "Hello"), ("<bos>Hello", "Hello"), ("<bos><bos>Hello", "Hello"), ("", ""), ("<bos>", "")],
)
def test_raw_text_gets_exactly_one_leading_bos(
    tokenizer: Tokenizer, library: tokenizers.Tokenizer, text: str, rest: str
) -> None:
    assert tokenizer.encode(text) == [2, *library.encode(rest).ids]


@pytest.mark.parametrize(
    "text",
    [
        "a<end_of_turn>\nb",
        "<start_of_turn>  <b>x</b>",
        "<unused0><unused12><mask>",
        "[multimodal]",
        "<<eos>>",
        "<bos<eos>",
        "a  b\n\n\nc",
    ],
)
def test_raw_text_is_parsed_as_the_library_does_with_special_tokens(
    tokenizer: Tokenizer, library: tokenizers.Tokenizer, text: str
) -> None:
    assert tokenizer.encode(text) == [2, *library.encode(text, add_special_tokens=False).ids]


def test_a_number_that_no_control_token_has_is_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode("<unused7>"), skip_special_tokens=False) == "<bos><unused7>"
    assert not set(tokenizer.encode("<unused7>")[1:]) & tokenizer.control_token_ids


@pytest.mark.parametrize("literal", CONTROL)
def test_plain_encoding_never_makes_a_control_token(tokenizer: Tokenizer, literal: str) -> None:
    text = f"a{literal}b {literal}{literal}"
    ids = tokenizer.encode_plain(text)
    assert not set(ids) & tokenizer.control_token_ids
    assert tokenizer.decode(ids) == text


def test_text_tokens_such_as_blank_lines_and_tags_are_matched_in_plain_encoding(
    tokenizer: Tokenizer, library: tokenizers.Tokenizer
) -> None:
    assert tokenizer.encode_plain("a\n\n<b>b</b>") == library.encode("a\n\n<b>b</b>").ids


def test_a_lone_surrogate_becomes_the_replacement_character(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("a\ud800b") == tokenizer.encode("a\ufffdb")
    assert tokenizer.encode_chat([ChatMessage("user", "\udfff")]) == tokenizer.encode_chat(
        [ChatMessage("user", "\ufffd")]
    )


def test_bytes_and_text_of_single_tokens(tokenizer: Tokenizer, library: tokenizers.Tokenizer) -> None:
    byte = id_of(library, "<0xE2>")
    assert (tokenizer.token_bytes(byte), tokenizer.token_text(byte)) == (b"\xe2", "\ufffd")
    word = id_of(library, "▁w")
    assert (tokenizer.token_bytes(word), tokenizer.token_text(word)) == (b" w", " w")
    assert tokenizer.token_text(2) == "<bos>"
    assert tokenizer.token_bytes(2) == b"<bos>"


def test_joined_token_bytes_are_the_text(tokenizer: Tokenizer) -> None:
    text = "Hello in a 世界 🙂\n\n é"
    assert (
        b"".join(tokenizer.token_bytes(token_id) for token_id in tokenizer.encode_plain(text))
        == text.encode()
    )


def test_64_threads_get_what_one_thread_gets(tokenizer: Tokenizer) -> None:
    rng = random.Random(71)
    texts = ["".join(rng.choices("ab l in\n<eos> Hello 世", k=rng.choice([3, 40, 400]))) for _ in range(50)]
    expected = {
        text: (tokenizer.encode(text), tokenizer.encode_chat([ChatMessage("user", text)])) for text in texts
    }

    def call(index: int) -> bool:
        text = texts[index % len(texts)]
        ids, chat_ids = expected[text]
        if index % 3 == 0:
            return tokenizer.encode_chat([ChatMessage("user", text)]) == chat_ids
        if index % 3 == 1:
            return tokenizer.decode(ids) == tokenizer.decode(ids[1:])
        return tokenizer.encode(text) == ids

    with ThreadPoolExecutor(64) as pool:
        assert all(pool.map(call, range(5000)))


def test_a_file_that_is_no_tokenizer_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text('{"version": "1.0"', encoding="utf-8")
    with pytest.raises(TokenizerError, match=str(path)):
        Tokenizer.from_file(path, vocab_size=10, bos_token_id=2, eos_token_ids=(1,))


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    build_library_tokenizer().save(str(path))
    with pytest.raises(TokenizerError, match="model has only 100"):
        Tokenizer.from_file(path, vocab_size=100, bos_token_id=2, eos_token_ids=(1,))


def test_added_control_tokens_beyond_the_model_are_plain_text() -> None:
    library = build_library_tokenizer()
    size = library.get_vocab_size()
    library.add_special_tokens(["<image_soft_token>"])
    tokenizer = Tokenizer(library, vocab_size=size, bos_token_id=2, eos_token_ids=(1,))
    assert max(tokenizer.encode("<image_soft_token>")) < size
    assert tokenizer.decode(tokenizer.encode("<image_soft_token>")) == "<image_soft_token>"


def test_a_bos_token_the_tokenizer_lacks_is_refused() -> None:
    size = build_library_tokenizer().get_vocab_size()
    with pytest.raises(TokenizerError, match="BOS"):
        Tokenizer(build_library_tokenizer(), vocab_size=size + 5, bos_token_id=size + 1, eos_token_ids=(1,))


def test_names_of_the_turn_tokens() -> None:
    tokenizer = build_tokenizer()
    assert tokenizer.end_of_turn_id == CONTROL.index("<end_of_turn>")
    assert tokenizer.control_token_ids == frozenset(range(len(CONTROL)))


def test_published_ids_of_the_real_vocabulary(gemma: Tokenizer) -> None:
    assert gemma.encode("Hello") == gemma.encode("<bos>Hello") == [2, 9259]
    assert gemma.encode("") == [2]
    assert gemma.encode("Hello world") == [2, 9259, 1902]
    assert gemma.decode([1902]) == " world"
    assert {0, 1, 2, 3, 4, 6, 11, 105, 106, 255999, 262143} <= gemma.control_token_ids
    assert not gemma.control_token_ids & {107, 138, 168, 200, 238, 493, 9259}


def test_no_control_token_of_the_real_vocabulary_comes_from_plain_text(gemma: Tokenizer) -> None:
    literals = [gemma.token_text(token_id) for token_id in sorted(gemma.control_token_ids)]
    assert len(literals) > 6000
    for text in ["".join(literals), " ".join(literals), *literals[:300]]:
        assert not set(gemma.encode_plain(text)) & gemma.control_token_ids
    assert gemma.encode("".join(literals[3:]))[1:] == sorted(gemma.control_token_ids)[3:]


def test_encoding_ever_new_texts_keeps_no_memory(tokenizer: Tokenizer) -> None:
    """The library's word cache would keep about 2 KiB of each: 8 MiB here."""
    rng = random.Random(0)

    def encode(count: int) -> None:
        for _ in range(count):
            tokenizer.encode("".join(rng.choices("abHelo wi.", k=60)))

    process = psutil.Process()
    encode(500)
    before = process.memory_info().rss
    encode(4000)
    assert process.memory_info().rss - before < 3 << 20
