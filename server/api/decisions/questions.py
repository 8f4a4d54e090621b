"""A typed question as the model sees it. The options are listed under labels of one token each; how likely
the model is to begin its answer with each of the labels, and no other token, is the distribution over the
options. Pure: no I/O."""

import itertools
import string
from collections.abc import Iterator
from dataclasses import dataclass

from server.api.decisions.request import DecisionQuestion
from server.errors import ApiError, invalid_value, missing_parameter
from server.text.tokenizer import Tokenizer

_YES_NO = ("Yes", "No")
# Tokens of a vocabulary that has no words for them, as small ones.
_SHORT_YES_NO = ("Y", "N")


@dataclass(frozen=True, slots=True)
class AskedQuestion:
    """``text`` ends the prompt; ``labels`` are the tokens that stand for the options, in their order."""

    question: DecisionQuestion
    text: str
    labels: tuple[int, ...]


class Labels:
    """Texts of one token each, found in the vocabulary when they are needed."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._candidates = self._find()
        self._found: list[tuple[str, int]] = []

    def _find(self) -> Iterator[tuple[str, int]]:
        upper = string.ascii_uppercase
        pairs = map("".join, itertools.product(upper, upper))
        for text in itertools.chain(upper, pairs, string.ascii_lowercase, string.digits):
            token_id = self.token_of(text)
            if token_id is not None:
                yield text, token_id

    def token_of(self, text: str) -> int | None:
        ids = self._tokenizer.encode_plain(text)
        return ids[0] if len(ids) == 1 else None

    def take(self, count: int) -> list[tuple[str, int]] | None:
        """The first so many, None where there are not enough."""
        self._found += itertools.islice(self._candidates, max(0, count - len(self._found)))
        return self._found[:count] if len(self._found) >= count else None


def asked(question: DecisionQuestion, labels: Labels, param: str) -> AskedQuestion:
    """Raises ApiError where the question is incomplete."""
    for name, owner in (("choices", "choice"), ("levels", "score")):
        given = getattr(question, name)
        if question.type == owner and given is None:
            raise missing_parameter(f"{param}.{name}")
        if question.type != owner and given is not None:
            raise invalid_value(f"{param}.{name}", f"only a question of type '{owner}' has it")
    if question.type == "predicate":
        return _predicate(question, labels, param)
    if question.type == "choice":
        options = [(_shown(choice.value), choice.description) for choice in question.choices or ()]
        head = "Which of these is right?"
    else:
        options = [(level.label, level.description) for level in question.levels or ()]
        head = "Which of these levels is right? They go from the lowest to the highest."
    found = labels.take(len(options))
    if found is None:
        raise _too_few_tokens(param)
    lines = [
        f"{label}: {option}{f' ({description})' if description else ''}"
        for (label, _), (option, description) in zip(found, options, strict=True)
    ]
    text = f"{question.instructions}\n\n{head} Answer with its label, and nothing else.\n" + "\n".join(lines)
    return AskedQuestion(question, text, tuple(token_id for _, token_id in found))


def _predicate(question: DecisionQuestion, labels: Labels, param: str) -> AskedQuestion:
    for words in (_YES_NO, _SHORT_YES_NO):
        ids = [labels.token_of(word) for word in words]
        if None not in ids:
            text = (
                f"{question.instructions}\n\nIs this true? Answer with {words[0]} or {words[1]}, "
                "and nothing else."
            )
            return AskedQuestion(question, text, tuple(token_id for token_id in ids if token_id is not None))
    raise _too_few_tokens(param)


def _shown(value: str | bool) -> str:
    return value if isinstance(value, str) else str(value).lower()


def _too_few_tokens(param: str) -> ApiError:
    return invalid_value(param, "the vocabulary of this model has too few short tokens for so many options")
