"""A tokenizer with the anatomy of Gemma's (byte fallback, spaces as marks, control and text added tokens) in
a few hundred entries, so that tests of pure logic take milliseconds."""

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers

from server.text.tokenizer import Tokenizer

CONTROL = [
    "<pad>",
    "<eos>",
    "<bos>",
    "<unk>",
    "<mask>",
    "[multimodal]",
    "<unused0>",
    "<unused12>",
    "<start_of_turn>",
    "<end_of_turn>",
]
NOT_FLAGGED_SPECIAL = {"<mask>", "[multimodal]", "<unused0>", "<unused12>"}
TEXT_ADDED = ["\n", "\n\n", "▁▁", "<b>", "</b>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
CHARACTERS = [*"▁abcdefghijklmnopqrstuvwxyzABHIST<>_/[]0123456789.,?!-é€", "🙂"]
MERGES = [("▁", "a"), ("a", "b"), ("l", "l"), ("H", "e"), ("He", "ll"), ("Hell", "o"), ("▁", "w"), ("i", "n")]


def build_library_tokenizer() -> tokenizers.Tokenizer:
    merged = [left + right for left, right in MERGES]
    tokens = [*CONTROL, *TEXT_ADDED, *BYTES, *CHARACTERS, *merged]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    assert len(vocabulary) == len(tokens)
    model = models.BPE(vocab=vocabulary, merges=MERGES, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False) for token in CONTROL if token not in NOT_FLAGGED_SPECIAL]
    )
    tokenizer.add_tokens(
        [AddedToken(token, normalized=False) for token in [*TEXT_ADDED, *NOT_FLAGGED_SPECIAL]]
    )
    return tokenizer


def build_tokenizer(chat_template: str | None = None, vocab_size: int | None = None) -> Tokenizer:
    library = build_library_tokenizer()
    return Tokenizer(
        library,
        vocab_size=library.get_vocab_size() if vocab_size is None else vocab_size,
        bos_token_id=CONTROL.index("<bos>"),
        eos_token_ids=(CONTROL.index("<eos>"), CONTROL.index("<end_of_turn>")),
        chat_template=chat_template,
    )


def token_id(library: tokenizers.Tokenizer, token: str) -> int:
    found = library.token_to_id(token)
    assert found is not None, token
    return found
