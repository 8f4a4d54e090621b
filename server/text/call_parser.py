"""Finds calls of functions in a text while it is being generated. A call stands at the start of the text or of a line:

    {"name": "f", "parameters": {...}}        also "arguments", or no arguments at all
    [{"name": "f", ...}, {"name": "g", ...}]  several in a list, or one behind the other
    ```json … ```                             either of them in a fence, of tool_code or tool_call too

Everything else is content. What `push` and `flush` return, joined, is the same however the text is split over calls. Held back is
only what may still turn out to be a call; a call is known once the name of a known function has been followed by the beginning of
its arguments. These are handed on as they are written: the characters from the opening to the closing brace."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto

_FENCE_NAMES = ("json", "tool_code", "tool_call", "tool_calls", "")
_FENCE = "```"
_BRACKET = re.compile(r'["\\{}\[\]]')


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How the text of a request is read. ``is_forced``: a grammar lets nothing but calls through. ``is_single``: the text ends
    with its first call. ``is_named``: the client named the function."""

    names: frozenset[str]
    is_forced: bool = False
    is_single: bool = False
    is_named: bool = False


@dataclass(frozen=True, slots=True)
class CallPiece:
    """The next characters of the arguments of a call; ``index`` counts the calls of a text. The first piece has the name."""

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


class _IncompleteError(Exception):
    """The text so far may be the beginning of a call."""

    def __init__(self, is_sure: bool) -> None:
        super().__init__()
        self.is_sure = is_sure  # it has come as far as the name


class _MismatchError(Exception):
    """The text is no call."""


@dataclass(frozen=True, slots=True)
class _Head:
    """A call up to its arguments: where they begin, or the brace behind a call without any."""

    name: str
    end: int
    has_arguments: bool
    in_list: bool
    in_fence: bool


class CallParser:
    """One generated text. `is_done`: the call that ends the text is complete; what is pushed then is ignored."""

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
        """The end of the text: what was held back and has not become a call is content, unless it can only be part of one."""
        held, self._held = self._held, ""
        if self._state is not _State.START or self._format.is_forced:
            return []
        if not held.strip():
            return [held] if held and not self._follows_call else []
        try:
            _read_head(held, self._names, follows_call=self._follows_call)
        except _IncompleteError as error:
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
                        head = _read_head(self._held, self._names, follows_call=self._follows_call)
                    except _IncompleteError:
                        return
                    except _MismatchError:
                        blanks = len(self._held) - len(self._held.lstrip())
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
                        head = _read_next(self._held, self._names)
                    except _IncompleteError:
                        return
                    except _MismatchError:
                        self._state, self._brackets = _State.REST, _Brackets(1)
                    else:
                        yield self._begin(head)
                case _State.REST:
                    end = self._brackets.end_in(self._held)
                    self._take(end)
                    if end >= 0:
                        self._end_list()
                case _State.FENCE:
                    reader = _Reader(self._held)
                    try:
                        reader.blanks()
                        reader.expect(_FENCE)
                    except _IncompleteError:
                        return
                    except _MismatchError:
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

    def _begin(self, head: _Head) -> CallPiece:
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


class _Reader:
    """Reads expected characters. The end of the text is an _IncompleteError, anything unexpected a _MismatchError."""

    def __init__(self, text: str) -> None:
        self.position = 0
        self.is_sure = False
        self._text = text

    def peek(self) -> str:
        if self.position == len(self._text):
            raise _IncompleteError(self.is_sure)
        return self._text[self.position]

    def blanks(self) -> None:
        while self.position < len(self._text) and self._text[self.position].isspace():
            self.position += 1

    def accepts(self, character: str) -> bool:
        if self.peek() != character:
            return False
        self.position += 1
        return True

    def expect(self, *literals: str) -> str:
        """One of them; the first that fits is taken."""
        may_follow = False
        for literal in literals:
            if self._text.startswith(literal, self.position):
                self.position += len(literal)
                return literal
            may_follow = may_follow or literal.startswith(self._text[self.position :])
        raise _IncompleteError(self.is_sure) if may_follow else _MismatchError

    def word(self, words: tuple[str, ...]) -> None:
        """Exactly one of them: what follows is no letter."""
        start = self.position
        while self.position < len(self._text) and (self._text[self.position].isalnum() or self._text[self.position] == "_"):
            self.position += 1
        found = self._text[start : self.position]
        if self.position == len(self._text) and any(word.startswith(found) for word in words):
            raise _IncompleteError(self.is_sure)
        if found not in words:
            raise _MismatchError


def _read_head(text: str, names: tuple[str, ...], *, follows_call: bool) -> _Head:
    """Raises _IncompleteError, _MismatchError. Behind a call there may be a comma."""
    reader = _Reader(text)
    reader.blanks()
    if follows_call and reader.accepts(","):
        reader.blanks()
    in_fence = reader.peek() == "`"
    if in_fence:
        reader.expect(_FENCE)
        reader.word(_FENCE_NAMES)
        reader.blanks()
    in_list = reader.accepts("[")
    return _read_object(reader, names, in_list, in_fence)


def _read_next(text: str, names: tuple[str, ...]) -> _Head:
    """The next call of a list. Its end is a _MismatchError, as is everything else."""
    reader = _Reader(text)
    reader.is_sure = True
    reader.blanks()
    if not reader.accepts(","):
        raise _MismatchError
    return _read_object(reader, names, in_list=True, in_fence=False)


def _read_object(reader: _Reader, names: tuple[str, ...], in_list: bool, in_fence: bool) -> _Head:
    reader.blanks()
    reader.expect("{")
    reader.blanks()
    reader.expect('"name"')
    reader.blanks()
    reader.expect(":")
    reader.is_sure = True
    reader.blanks()
    reader.expect('"')
    name = reader.expect(*(name + '"' for name in names))[:-1]
    reader.blanks()
    if reader.peek() == "}":
        return _Head(name, reader.position, has_arguments=False, in_list=in_list, in_fence=in_fence)
    reader.expect(",")
    reader.blanks()
    reader.expect('"parameters"', '"arguments"')
    reader.blanks()
    reader.expect(":")
    reader.blanks()
    if reader.peek() != "{":
        raise _MismatchError
    return _Head(name, reader.position, has_arguments=True, in_list=in_list, in_fence=in_fence)
