"""Token ids to text while they are being generated. What `push` and `flush` return, joined, is the decoded
text of all ids (exactly that of the tokenizers library), cut at the first stop string, however the ids are
split over calls. Held back is only what later tokens can still change: an open run of byte tokens, and the
longest end of the text that is the beginning of a stop string."""

from collections.abc import Iterable, Sequence
from typing import Protocol

_REPLACEMENT_CHARACTER = "\ufffd"


class TokenTable(Protocol):
    """The part of Tokenizer that is needed here."""

    @property
    def entries(self) -> Sequence[str | int | None]: ...

    @property
    def skipped_token_ids(self) -> frozenset[int]: ...


class _StopMatcher:
    """One stop string and how much of it the text ends with (Knuth, Morris, Pratt 1977): linear time in the
    text."""

    __slots__ = ("_failure", "length", "matched", "text")

    def __init__(self, text: str) -> None:
        if not text:
            raise ValueError("a stop string must not be empty")
        self.text = text
        self.length = len(text)
        self.matched = 0
        self._failure = [0] * (self.length + 1)  # [n]: longest proper prefix of text that text[:n] ends with
        border = 0
        for end in range(2, self.length + 1):
            while border and text[border] != text[end - 1]:
                border = self._failure[border]
            if text[border] == text[end - 1]:
                border += 1
            self._failure[end] = border

    def advance(self, character: str) -> bool:
        """Takes the next character; True if the stop string is complete with it."""
        matched = self.matched
        text = self.text
        while matched and text[matched] != character:
            matched = self._failure[matched]
        if text[matched] == character:
            matched += 1
        if matched == self.length:
            self.matched = self._failure[matched]
            return True
        self.matched = matched
        return False


class Detokenizer:
    """One generated sequence. Not for several threads at once.

    stop: the match that ends first wins, of those that end together the first in the list. The text before a
    match is returned even if it comes from the same token, nothing behind it is. include_stop: the stop
    string itself is returned too. min_tokens: a stop string that is complete within so many tokens does not
    count. stopped: the stop string that matched, once one did; further ids are then ignored. It may also be
    found by `flush`. consumed_tokens: how many ids were taken, up to and including the one that completed the
    stop string.

    The published decoder turns a run of byte tokens into characters only if the whole run is valid UTF-8, and
    otherwise every byte of it into one U+FFFD. So a run is shown when the first other token ends it. Skipped
    tokens do not end a run.
    """

    def __init__(
        self,
        tokenizer: TokenTable,
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        self.stopped: str | None = None
        self._entries = tokenizer.entries
        self._skipped: frozenset[int] = tokenizer.skipped_token_ids if skip_special_tokens else frozenset()
        self._matchers = [_StopMatcher(text) for text in stop]
        self._first_characters = frozenset(text[0] for text in stop)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._stop_token_number = 0
        self._pending: list[str] = []  # decoded, not returned yet; a list, so that a long push stays linear
        self._run = bytearray()  # the open run of byte tokens
        self._run_token_numbers: list[int] = []

    @property
    def consumed_tokens(self) -> int:
        return self._num_tokens if self.stopped is None else self._stop_token_number

    def push(self, token_ids: Iterable[int]) -> str:
        """Takes generated ids; returns the new text that nothing to come can change."""
        entries = self._entries
        skipped = self._skipped
        for token_id in token_ids:
            if self.stopped is not None:
                break
            self._num_tokens += 1
            entry = entries[token_id]
            if entry is None or token_id in skipped:
                continue
            if isinstance(entry, int):
                self._run.append(entry)
                self._run_token_numbers.append(self._num_tokens)
                continue
            if self._run:
                self._end_run()
            self._append(entry, self._num_tokens)
        return self._take(self._num_held())

    def flush(self) -> str:
        """The tail, at the end of the generation: text that was held back, U+FFFD for bytes that never became
        a character."""
        if self._run:
            self._end_run()
        return self._take(0)

    def _num_held(self) -> int:
        if self.stopped is not None or not self._matchers:
            return 0
        return max(matcher.matched for matcher in self._matchers)

    def _take(self, num_held: int) -> str:
        text = "".join(self._pending)
        end = len(text) - num_held
        self._pending = [text[end:]] if num_held else []
        return text[:end]

    def _end_run(self) -> None:
        run, token_numbers = bytes(self._run), self._run_token_numbers
        self._run = bytearray()
        self._run_token_numbers = []
        try:
            text = run.decode()
        except UnicodeDecodeError:
            for token_number in token_numbers:
                self._append(_REPLACEMENT_CHARACTER, token_number)
            return
        if not self._matchers:
            self._pending.append(text)
            return
        end = 0
        for character in text:
            end += len(character.encode())
            self._append(character, token_numbers[end - 1])

    def _append(self, text: str, token_number: int) -> None:
        """Adds decoded text of one token; finds the stop string that ends first in it."""
        if self.stopped is not None:
            return
        matchers = self._matchers
        if not matchers:
            self._pending.append(text)
            return
        if self._first_characters.isdisjoint(text) and not self._num_held():
            self._pending.append(text)
            return
        counts = token_number > self._min_tokens
        for index, character in enumerate(text):
            found: _StopMatcher | None = None
            for matcher in matchers:
                if matcher.advance(character) and found is None:
                    found = matcher
            if found is not None and counts:
                decoded = "".join(self._pending) + text[: index + 1]
                self._pending = [decoded if self._include_stop else decoded[: -found.length]]
                self.stopped = found.text
                self._stop_token_number = token_number
                return
        self._pending.append(text)
