"""The beginning of a call of a function in a text: from blanks, a fence, a list or the object's brace up to
its arguments, read as far as the text goes. ``call_parser`` says where calls may stand."""

from dataclasses import dataclass

FENCE = "```"
# A beginning that is longer is none: a model that writes blanks without an end has its text sent on. It is
# read anew with every token that is added to it, in the event loop.
MAX_HEAD_CHARACTERS = 1000
_FENCE_NAMES = ("json", "tool_code", "tool_call", "tool_calls", "")


class IncompleteError(Exception):
    """The text so far may be the beginning of a call."""

    def __init__(self, is_sure: bool) -> None:
        super().__init__()
        self.is_sure = is_sure  # it has come as far as the name


class MismatchError(Exception):
    """The text is no call."""


@dataclass(frozen=True, slots=True)
class CallHead:
    """A call up to its arguments: where they begin, or the brace behind a call without any."""

    name: str
    end: int
    has_arguments: bool
    in_list: bool
    in_fence: bool


class Reader:
    """Reads expected characters. The end of the text is an IncompleteError, anything unexpected a
    MismatchError, and so is everything beyond MAX_HEAD_CHARACTERS."""

    def __init__(self, text: str) -> None:
        self.position = 0
        self.is_sure = False
        self._text = text[:MAX_HEAD_CHARACTERS]

    def peek(self) -> str:
        if self.position == len(self._text):
            raise self._end()
        return self._text[self.position]

    def _end(self) -> Exception:
        """What the end of the text means."""
        return IncompleteError(self.is_sure) if len(self._text) < MAX_HEAD_CHARACTERS else MismatchError()

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
        raise self._end() if may_follow else MismatchError()

    def word(self, words: tuple[str, ...]) -> None:
        """Exactly one of them: what follows is no letter."""
        start = self.position
        while self.position < len(self._text) and (
            self._text[self.position].isalnum() or self._text[self.position] == "_"
        ):
            self.position += 1
        found = self._text[start : self.position]
        if self.position == len(self._text) and any(word.startswith(found) for word in words):
            raise self._end()
        if found not in words:
            raise MismatchError


def read_head(text: str, names: tuple[str, ...], *, follows_call: bool) -> CallHead:
    """Raises IncompleteError, MismatchError. Behind a call there may be a comma."""
    reader = Reader(text)
    reader.blanks()
    if follows_call and reader.accepts(","):
        reader.blanks()
    in_fence = reader.peek() == "`"
    if in_fence:
        reader.expect(FENCE)
        reader.word(_FENCE_NAMES)
        reader.blanks()
    in_list = reader.accepts("[")
    return _read_object(reader, names, in_list, in_fence)


def read_next(text: str, names: tuple[str, ...]) -> CallHead:
    """The next call of a list. Its end is a MismatchError, as is everything else."""
    reader = Reader(text)
    reader.is_sure = True
    reader.blanks()
    if not reader.accepts(","):
        raise MismatchError
    return _read_object(reader, names, in_list=True, in_fence=False)


def _read_object(reader: Reader, names: tuple[str, ...], in_list: bool, in_fence: bool) -> CallHead:
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
        return CallHead(name, reader.position, has_arguments=False, in_list=in_list, in_fence=in_fence)
    reader.expect(",")
    reader.blanks()
    reader.expect('"parameters"', '"arguments"')
    reader.blanks()
    reader.expect(":")
    reader.blanks()
    if reader.peek() != "{":
        raise MismatchError
    return CallHead(name, reader.position, has_arguments=True, in_list=in_list, in_fence=in_fence)
