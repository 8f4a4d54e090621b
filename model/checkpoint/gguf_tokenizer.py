"""Rebuilds a ``tokenizer.json`` from GGUF metadata, equal in its ids to the published Gemma 3 tokenizer.

A GGUF of a SentencePiece model lists tokens, scores and types, but no merges. They follow from the scores: a
token can arise from every pair of tokens that it splits into, and pairs merge in the order of the token's
score (then the longer left part, then the longer right part first, then vocabulary order), which is how the
published file was made too. Two conventions of GGUF are undone: user-defined tokens carry a meaningless score
(they merge first) and are written with spaces in place of U+2581.

Token types: 1 normal, 2 unknown, 3 control, 4 user defined, 5 unused, 6 byte. Control tokens become special
tokens (Gemma's reserved ``<unusedN>`` ones as well, so that they are never shown), user-defined ones become
plain added tokens. Imports no torch.
"""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from tqdm import tqdm

from model.interface.errors import CheckpointError

CONVERTER_VERSION = "1"  # part of the cache key: raise it with every change of the output

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
SPACE = "\u2581"  # SentencePiece's visible space
MAX_TOKEN_CHARACTERS = 1024  # the published tokens have at most 93; the work per token grows with the square
PROGRESS_STEP = 4096


def check_vocabulary(metadata: Mapping[str, Any], file: str) -> None:
    """Refuse, before anything is loaded, a vocabulary that cannot be rebuilt. ``tokenizer.ggml.tokens`` is
    known to be a list."""
    tokens = metadata["tokenizer.ggml.tokens"]
    if metadata.get("tokenizer.ggml.model") != "llama":
        kind = metadata.get("tokenizer.ggml.model")
        raise CheckpointError(
            f"{file}: tokenizer.ggml.model is {kind!r:.80}; Gemma 3 files have 'llama' (SentencePiece)."
        )
    if metadata.get("tokenizer.ggml.add_space_prefix", False) is not False:
        raise CheckpointError(f"{file}: tokenizer.ggml.add_space_prefix is set, which Gemma 3 does not do.")
    for key in ("tokenizer.ggml.scores", "tokenizer.ggml.token_type"):
        array = metadata.get(key)
        if not isinstance(array, np.ndarray) or len(array) != len(tokens):
            length = "missing" if array is None else f"not a list of {len(tokens)} numbers, one per token"
            raise CheckpointError(f"{file}: {key} is {length}.")
    if not np.isfinite(metadata["tokenizer.ggml.scores"]).all():
        raise CheckpointError(f"{file}: tokenizer.ggml.scores holds values that are not finite.")
    if not np.isin(
        metadata["tokenizer.ggml.token_type"], (NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE)
    ).all():
        raise CheckpointError(f"{file}: tokenizer.ggml.token_type holds types that are not known.")
    longest = max(map(len, tokens))
    if longest > MAX_TOKEN_CHARACTERS:
        raise CheckpointError(
            f"{file}: tokenizer.ggml.tokens holds a token of {longest} characters; "
            f"{MAX_TOKEN_CHARACTERS} are supported."
        )


def build_tokenizer_json(metadata: Mapping[str, Any], file: str, *, progress: bool) -> str:
    """The text of a tokenizer.json for the ``tokenizers`` library. ``file`` names the GGUF in errors
    (CheckpointError)."""
    check_vocabulary(metadata, file)
    types: list[int] = metadata["tokenizer.ggml.token_type"].tolist()
    scores: list[float] = metadata["tokenizer.ggml.scores"].tolist()
    tokens = [
        token.replace(" ", SPACE) if token_type == USER_DEFINED else token
        for token, token_type in zip(metadata["tokenizer.ggml.tokens"], types, strict=True)
    ]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        twice = next(token for token_id, token in enumerate(tokens) if vocabulary[token] != token_id)
        raise CheckpointError(f"{file}: tokenizer.ggml.tokens lists {twice!r:.80} twice.")
    merges = _merges(tokens, vocabulary, scores, types, progress)
    # The older spelling "left right" loads faster; it cannot express a token with a space in it.
    spaced = any(" " in token for token in tokens)
    added = [
        {
            "id": token_id,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": types[token_id] != USER_DEFINED,
        }
        for token_id, token in enumerate(tokens)
        if types[token_id] in (UNKNOWN, CONTROL, USER_DEFINED)
    ]
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"String": " "},
            "behavior": "MergedWithPrevious",
            "invert": False,
        },
        "post_processor": _post_processor(metadata, tokens, file),
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": _token(metadata, "unknown_token_id", 3, tokens, file),
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": [list(pair) if spaced else " ".join(pair) for pair in merges],
        },
    }
    return json.dumps(document, ensure_ascii=False, separators=(",", ":"))


def _merges(
    tokens: list[str], vocabulary: dict[str, int], scores: list[float], types: list[int], progress: bool
) -> list[tuple[str, str]]:
    """Every pair that merges into a token, best first."""
    found: list[tuple[float, int, int, str, str]] = []
    get = vocabulary.get
    with tqdm(
        total=len(tokens),
        unit="token",
        desc="Converting tokenizer",
        disable=None if progress else True,
        leave=False,
    ) as bar:
        for token_id, token in enumerate(tokens):
            if token_id % PROGRESS_STEP == 0:
                bar.update(token_id - bar.n)
            if types[token_id] not in (NORMAL, USER_DEFINED) or len(token) < 2:
                continue
            score = 0.0 if types[token_id] == USER_DEFINED else scores[token_id]
            pairs: list[tuple[int, int, int]] = []
            for cut in range(1, len(token)):
                left = get(token[:cut])
                if left is not None and (right := get(token[cut:])) is not None:
                    pairs.append((left, right, cut))
            pairs.sort()
            length = len(token)
            found += [(score, cut, length - cut, token[:cut], token[cut:]) for _, _, cut in pairs]
        # Stable, also in reverse: pairs that tie stay in vocabulary order.
        found.sort(key=lambda merge: merge[:3], reverse=True)
        bar.update(len(tokens) - bar.n)
    return [(left, right) for _, _, _, left, right in found]


def _post_processor(metadata: Mapping[str, Any], tokens: list[str], file: str) -> dict[str, Any]:
    bos = _token(metadata, "bos_token_id", 2, tokens, file)
    start = {"SpecialToken": {"id": bos, "type_id": 0}}
    pair_start = {"SpecialToken": {"id": bos, "type_id": 1}}
    first, second = {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}
    return {
        "type": "TemplateProcessing",
        "single": [start, first],
        "pair": [start, first, pair_start, second],
        "special_tokens": {bos: {"id": bos, "ids": [tokens.index(bos)], "tokens": [bos]}},
    }


def _token(metadata: Mapping[str, Any], key: str, default: int, tokens: list[str], file: str) -> str:
    token_id = metadata.get(f"tokenizer.ggml.{key}", default)
    if not isinstance(token_id, int) or not 0 <= token_id < len(tokens):
        raise CheckpointError(f"{file}: tokenizer.ggml.{key} {token_id!r:.80} is not a token id.")
    return tokens[token_id]
