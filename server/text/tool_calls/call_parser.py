"""Finds calls of functions in a text while it is being generated. A call stands at the start of the text or
of a line:

    {"name": "f", "parameters": {...}}        also "arguments", or no arguments at all
    [{"name": "f", ...}, {"name": "g", ...}]  several in a list, or one behind the other
    ```json … ```                             either of them in a fence, of tool_code or tool_call too

Everything else is content. What `push` and `flush` return, joined, is the same however the text is split over
calls. Held back is only what may still turn out to be a call, up to MAX_HEAD_CHARACTERS; a call is known once
the name of a known function has been followed by the beginning of its arguments. These are handed on as they
are written: the characters from the opening to the closing brace."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto

from server.text.tool_calls.call_head import (
    FENCE,
    MAX_HEAD_CHARACTERS,
    CallHead,
    IncompleteError,
    MismatchError,
    Reader,
    read_head,
    read_next,
)

_BRACKET = re.compile(r'["\\{}\[\]]')


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How the text of a request is read. ``is_forced``: a grammar lets nothing but calls through.
    ``is_single``: the text ends with its first call. ``is_named``: the client named the function."""

    names: frozenset[str]
    is_forced: bool = False
    is_single: bool = False
    is_named: bool = False


@dataclass(frozen=True, slots=True)
class CallPiece:
    """The next characters of the arguments of a call; ``index`` counts the calls of a text. The first piece
    has the name."""

    index: int
    name: str | None
    arguments: str


Part = str | CallPiece


class _State(Enum):
    CONTENT = auto()  # within a line
    START = auto()  # where a call may begin: blanks with a line break in them, or the start of the text
    ARGUMENTS = auto()
    TAIL = auto()  # behind the arguments, up to the closing brace of the call
    GAP = auto()  # in a list, between calls
    REST = auto()  # in a list, behind something that is no call: up to its end
    FENCE = auto()  # behind a call in a fence


class CallParser:
    """One generated text. `is_done`: the call that ends the text is complete; what is pushed then is
    ignored."""

    def __init__(self, call_format: CallFormat) -> None:
        self.num_calls = 0
        self.is_done = False
        self._format = call_format
        self._names = tuple(sorted(call_format.names))
        self._state = _State.START
        self._held = ""
        self._in_list = False
        self._in_fence = False
        self._follows_call = False  # with nothing but blanks between
        self._brackets = _Brackets(0)

    def push(self, text: str) -> list[Part]:
        self._held += text
        parts: list[Part] = []
        for part in self._read():
            if not part:
                continue
            if isinstance(part, str) and parts and isinstance(previous := parts[-1], str):
                parts[-1] = previous + part
            else:
                parts.append(part)
        return parts

    def flush(self) -> list[Part]:
        """The end of the text: what was held back and has not become a call is content, unless it can only be
        part of one."""
        held, self._held = self._held, ""
        if self._state is not _State.START or self._format.is_forced:
            return []
        if not held.strip():
            return [held] if held and not self._follows_call else []
        try:
            read_head(held, self._names, follows_call=self._follows_call)
        except IncompleteError as error:
            return [] if error.is_sure else [held]
        raise AssertionError("a complete head was held back")

    def _read(self) -> Iterator[Part]:
        """Consumes what is held, as far as its meaning is certain."""
        while self._held and not self.is_done:
            match self._state:
                case _State.CONTENT:
                    yield self._take(self._held.find("\n"))
                    self._state = _State.START if self._held else _State.CONTENT
                case _State.START:
                    try:
                        head = read_head(self._held, self._names, follows_call=self._follows_call)
                    except IncompleteError:
                        return
                    except MismatchError:
                        beginning = self._held[:MAX_HEAD_CHARACTERS]
                        blanks = len(beginning) - len(beginning.lstrip())
                        yield self._take(self._held.find("\n", blanks))
                        self._state = _State.START if self._held else _State.CONTENT
                        self._in_fence = self._follows_call = False
                    else:
                        self._in_list, self._in_fence = head.in_list, head.in_fence or self._in_fence
                        yield self._begin(head)
                case _State.ARGUMENTS:
                    end = self._brackets.end_in(self._held)
                    yield CallPiece(self.num_calls - 1, None, self._take(end))
                    if end >= 0:
                        self._state, self._brackets = _State.TAIL, _Brackets(1)
                case _State.TAIL:
                    end = self._brackets.end_in(self._held)
                    self._take(end)
                    if end >= 0:
                        self._end_call()
                case _State.GAP:
                    try:
                        head = read_next(self._held, self._names)
                    except IncompleteError:
                        return
                    except MismatchError:
                        self._state, self._brackets = _State.REST, _Brackets(1)
                    else:
                        yield self._begin(head)
                case _State.REST:
                    end = self._brackets.end_in(self._held)
                    self._take(end)
                    if end >= 0:
                        self._end_list()
                case _State.FENCE:
                    reader = Reader(self._held)
                    try:
                        reader.blanks()
                        reader.expect(FENCE)
                    except IncompleteError:
                        return
                    except MismatchError:
                        pass
                    else:
                        self._take(reader.position)
                        self._in_fence = False
                    self._state = _State.START

    def _take(self, end: int) -> str:
        """What is held up to ``end``; -1: all of it."""
        end = len(self._held) if end < 0 else end
        taken, self._held = self._held[:end], self._held[end:]
        return taken

    def _begin(self, head: CallHead) -> CallPiece:
        self._take(head.end)
        self._state = _State.ARGUMENTS if head.has_arguments else _State.TAIL
        self._brackets = _Brackets(0 if head.has_arguments else 1)
        self.num_calls += 1
        return CallPiece(self.num_calls - 1, head.name, "" if head.has_arguments else "{}")

    def _end_call(self) -> None:
        if self._format.is_single:
            self.is_done = True
        elif self._in_list:
            self._state = _State.GAP
        else:
            self._end_list()

    def _end_list(self) -> None:
        self._in_list, self._follows_call = False, True
        self._state = _State.FENCE if self._in_fence else _State.START


class _Brackets:
    """How deep a JSON text stands in brackets, strings left out."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._in_string = False
        self._escapes = False

    def end_in(self, text: str) -> int:
        """Takes more text; where the outermost bracket ends in it, behind its last character, or -1."""
        start = 0
        if self._escapes and text:
            self._escapes, start = False, 1
        while match := _BRACKET.search(text, start):
            character, start = match.group(), match.end()
            if character == "\\":
                if self._in_string:
                    self._escapes = start == len(text)
                    start += 1
            elif character == '"':
                self._in_string = not self._in_string
            elif not self._in_string:
                self._depth += 1 if character in "{[" else -1
                if self._depth == 0:
                    return start
        return -1
