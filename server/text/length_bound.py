"""How few tokens a text can possibly have, without encoding it: no token covers more characters than the
longest one of the vocabulary has. True only where encoding neither drops nor joins characters, which is read
off the tokenizer's parts; of a part that is not known here nothing is claimed."""

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tokenizers
from tokenizers.models import BPE


class PromptTooLongError(ValueError):
    """The prompt has at least ``num_tokens`` tokens; it was not encoded."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(f"the prompt has at least {num_tokens} tokens")
        self.num_tokens = num_tokens


def most_characters_per_token(
    tokenizer: tokenizers.Tokenizer,
    added: Iterable[tokenizers.AddedToken],
    entries: Sequence[str | int | None],
) -> int | None:
    """None: not known. ``entries`` are the texts of all tokens, ``added`` those that are matched before the
    model's own."""
    keeps_text = (
        _keeps_every_character(tokenizer)
        and _keeps(_state(tokenizer.normalizer), "normalizers", _normalizer_keeps)
        and _keeps(_state(tokenizer.pre_tokenizer), "pretokenizers", _pre_tokenizer_keeps)
        and not any(token.lstrip or token.rstrip for token in added)
    )
    if not keeps_text:
        return None
    return max(map(len, (entry for entry in entries if isinstance(entry, str))), default=1)


def _keeps_every_character(tokenizer: tokenizers.Tokenizer) -> bool:
    """Characters without a token become one token per byte, instead of one for all of them or none."""
    has_bytes = all(tokenizer.token_to_id(f"<0x{byte:02X}>") is not None for byte in range(256))
    return isinstance(tokenizer.model, BPE) and bool(tokenizer.model.byte_fallback) and has_bytes


def _state(part: Any) -> dict[str, Any] | None:
    if part is None:
        return None
    state: dict[str, Any] = json.loads(part.__getstate__())
    return state


def _keeps(state: dict[str, Any] | None, children: str, check: Callable[[dict[str, Any]], bool]) -> bool:
    if state is None:
        return True
    if state["type"] == "Sequence":
        return all(_keeps(child, children, check) for child in state[children])
    return check(state)


def _normalizer_keeps(state: dict[str, Any]) -> bool:
    if state["type"] == "Prepend":
        return True
    pattern: str | None = state.get("pattern", {}).get("String")
    content: str = state.get("content", "")
    return state["type"] == "Replace" and pattern is not None and len(content) >= len(pattern)


def _pre_tokenizer_keeps(state: dict[str, Any]) -> bool:
    kind: str = state["type"]
    return kind == "Metaspace" or (kind == "Split" and state["behavior"] != "Removed")
