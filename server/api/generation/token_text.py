"""Log-probabilities as both endpoints write them: OpenAI's legacy object of four lists, and chat's list of
entries."""

import codecs
from collections.abc import Callable, Sequence

from typing_extensions import TypedDict

from model.interface.sequence_chunk import TokenLogprobs
from server.text.tokenizer import Tokenizer

# JSON has no -Infinity; OpenAI's documentation names this value for it.
LEAST_LOGPROB = -9999.0

TokenName = Callable[[int], str]


class LegacyLogprobsSchema(TypedDict):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TopLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class PromptLogprob(TypedDict):
    logprob: float
    rank: int
    decoded_token: str


# One entry per token of the prompt, by token id; null for the first.
PromptLogprobs = list[dict[str, PromptLogprob] | None]


def wire_logprob(value: float) -> float:
    return max(value, LEAST_LOGPROB)


def token_namer(tokenizer: Tokenizer, as_ids: bool) -> TokenName:
    """How a token is called in lists of log-probabilities: by its text, or by its id in vLLM's spelling,
    which is unique."""
    return (lambda token_id: f"token_id:{token_id}") if as_ids else tokenizer.token_text


def chat_entry(
    tokenizer: Tokenizer, name: TokenName, token: TokenLogprobs, num_top: int | None
) -> ChatTokenLogprob:
    """``num_top`` None: all alternatives. ``bytes`` are the token's own, so that all of them joined are the
    exact output even where a character spans tokens."""
    top = [_token_entry(tokenizer, name, token_id, logprob) for token_id, logprob in token.top[:num_top]]
    return {**_token_entry(tokenizer, name, token.token_id, token.logprob), "top_logprobs": top}


def _token_entry(tokenizer: Tokenizer, name: TokenName, token_id: int, logprob: float) -> TopLogprob:
    raw = tokenizer.token_bytes(token_id)
    return {"token": name(token_id), "logprob": wire_logprob(logprob), "bytes": list(raw) or None}


def prompt_entries(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprobs], num_top: int) -> PromptLogprobs:
    """vLLM's prompt_logprobs: null for the first token, then for each the token itself and the likeliest, by
    token id."""
    entries: PromptLogprobs = [None]
    for token in logprobs:
        top = token.top[:num_top]
        assert token.rank is not None, "tokens of a prompt come with their rank"
        ranked = [(token.token_id, token.logprob, token.rank)]
        # Equal values share a rank, as they do where the token itself is ranked.
        ranked += [
            (i, value, 1 + sum(other > value for _, other in top)) for i, value in top if i != token.token_id
        ]
        entries.append(
            {
                str(token_id): {
                    "logprob": wire_logprob(value),
                    "rank": rank,
                    "decoded_token": tokenizer.token_text(token_id),
                }
                for token_id, value, rank in ranked
            }
        )
    return entries


class LegacyLogprobs:
    """Writes the legacy lists of one choice, piece by piece; offsets are in characters from the start of the
    prompt."""

    def __init__(self, tokenizer: Tokenizer, name: TokenName, num_top: int, skipped: frozenset[int]) -> None:
        """``skipped`` tokens stand in the lists and not in the text."""
        self._tokenizer = tokenizer
        self._name = name
        self._num_top = num_top
        self._skipped = skipped
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def prompt(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], text: str, shows_control: bool
    ) -> LegacyLogprobsSchema:
        """Entries of an echoed prompt. Its first token has no log-probability: nothing stands before it.

        ``shows_control``: the text is what the client wrote, so that literals of control tokens are part of
        it.
        """
        lists = joined_legacy([])
        for position, token_id in enumerate(token_ids):
            is_added_bos = (
                position == 0 and token_id == self._tokenizer.bos_token_id and not self._starts_with_bos(text)
            )
            advances = not is_added_bos and (shows_control or token_id not in self._skipped)
            self._append(
                lists, token_id, logprobs[position - 1] if position else None, advances, self._num_top
            )
        self.skip_prompt(text)
        return lists

    def _starts_with_bos(self, text: str) -> bool:
        return text.startswith(self._tokenizer.token_text(self._tokenizer.bos_token_id))

    def skip_prompt(self, text: str) -> None:
        """Generated tokens count from the prompt's end, echoed or not."""
        self._decoder.reset()
        self._offset = len(text)

    def generated(self, logprobs: Sequence[TokenLogprobs], all_alternatives: bool) -> LegacyLogprobsSchema:
        lists = joined_legacy([])
        for token in logprobs:
            num_top = len(token.top) if all_alternatives else self._num_top
            self._append(lists, token.token_id, token, token.token_id not in self._skipped, num_top)
        return lists

    def _append(
        self,
        lists: LegacyLogprobsSchema,
        token_id: int,
        token: TokenLogprobs | None,
        advances: bool,
        num_top: int,
    ) -> None:
        tokenizer = self._tokenizer
        lists["tokens"].append(self._name(token_id))
        lists["text_offset"].append(self._offset)
        if advances:
            self._offset += len(self._decoder.decode(tokenizer.token_bytes(token_id)))
        if token is None:
            lists["token_logprobs"].append(None)
            lists["top_logprobs"].append(None)
            return
        lists["token_logprobs"].append(wire_logprob(token.logprob))
        top: dict[str, float] = {}
        for other_id, logprob in [*token.top[:num_top], (token.token_id, token.logprob)]:
            text, value = self._name(other_id), wire_logprob(logprob)
            # Tokens that look alike share a key: the likelier one stands there.
            top[text] = max(value, top.get(text, value))
        lists["top_logprobs"].append(top)


def joined_legacy(pieces: Sequence[LegacyLogprobsSchema]) -> LegacyLogprobsSchema:
    """The lists of all pieces one after the other; of none, empty lists."""
    return {
        "tokens": [item for piece in pieces for item in piece["tokens"]],
        "token_logprobs": [item for piece in pieces for item in piece["token_logprobs"]],
        "top_logprobs": [item for piece in pieces for item in piece["top_logprobs"]],
        "text_offset": [item for piece in pieces for item in piece["text_offset"]],
    }
