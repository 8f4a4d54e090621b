"""Chat messages, in the order of `merge_messages`, to prompt text: `ChatTemplate` renders them with a Jinja
template in a bounded sandbox. Text of a message can never complete a control-token literal in the rendered
prompt: inside message text a sentinel character follows every character that could begin such a literal, and
the caller removes it only after the literals of the template itself have been cut out. Everything a user can
cause is a ChatTemplateError."""

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jinja2

from server.text.template.conversation import ChatMessage, ChatTemplateError
from server.text.template.sandbox import RenderBudget, RenderLimitError, SandboxedTemplateEnvironment

BUILTIN_TEMPLATE_FILE = Path(__file__).with_name("gemma3.jinja")

_PROBE = "text-part-probe"
# Private-use characters: no tokenizer gives them a meaning, and some of them occur in no message.
_SENTINEL_RANGES = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE))


class ControlLiterals:
    """The literals of the control tokens, prepared for marking message text."""

    def __init__(self, literals: Iterable[str]) -> None:
        self._literals = frozenset(literals)
        self.first_characters = "".join(sorted({literal[0] for literal in self._literals}))
        self._tails = frozenset(
            literal[start:] for literal in self._literals for start in range(1, len(literal))
        )
        self._all_but_first = "\0".join(literal[1:] for literal in self._literals)
        self._longest = max(map(len, self._literals), default=0)

    def mark(self, text: str, sentinel: str) -> str:
        """Text in which no control literal can begin, and which cannot continue one that the template
        began."""
        for character in self.first_characters:
            text = text.replace(character, character + sentinel)
        stripped = text.lstrip()
        if self._continues_a_literal(stripped):
            # In front of the first visible character, so that a template that trims the text still sees the
            # same white space.
            text = text[: len(text) - len(stripped)] + sentinel + stripped
        return text

    def _continues_a_literal(self, text: str) -> bool:
        if any(text[:length] in self._tails for length in range(1, min(len(text), self._longest) + 1)):
            return True
        return 0 < len(text) < self._longest and text in self._all_but_first


class ChatTemplate:
    """A compiled template; immutable, so any number of threads may render at once."""

    def __init__(self, source: str | None = None) -> None:
        """`source`: Jinja text, or None for the built-in Gemma 3 template. Raises ChatTemplateError if it
        does not compile."""
        self.is_builtin = source is None
        self.source = BUILTIN_TEMPLATE_FILE.read_text(encoding="utf-8") if source is None else source
        self._environment = SandboxedTemplateEnvironment()
        try:
            self._template = self._environment.from_string(self.source)
        except (jinja2.TemplateError, RecursionError, SyntaxError) as error:
            where = f" (line {error.lineno})" if isinstance(error, jinja2.TemplateSyntaxError) else ""
            raise ChatTemplateError(
                f"The chat template is not valid Jinja{where}: {error}. "
                "Give a correct one with --chat-template.",
                "chat_template",
            ) from error
        self._takes_parts = self._probe_parts()

    def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        literals: ControlLiterals,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        bos_token: str = "<bos>",
        eos_token: str = "<eos>",
    ) -> tuple[str, str]:
        """Returns (rendered text, sentinel): cut the text at the control literals first, then remove the
        sentinel.

        ``continue_final_message``: the text ends with the last message, whose turn stays open.
        """
        sentinel, end_mark = self._unused_characters(messages, 2)
        shown = [self._as_dict(message, literals, sentinel) for message in messages]
        space = _mark_end(shown[-1], end_mark) if continue_final_message else ""
        rendered = self._generate(
            messages=shown,
            add_generation_prompt=add_generation_prompt,
            bos_token=bos_token,
            eos_token=eos_token,
        )
        if continue_final_message:
            rendered, mark, rest = rendered.rpartition(end_mark)
            if not mark:
                raise ChatTemplateError(
                    "continue_final_message: the chat template does not show the last message."
                )
            rendered = rendered.replace(end_mark, "")
            # a template that trims its messages trims this one too
            rendered += space if rest.startswith(space) else ""
        return rendered, sentinel

    def _generate(self, **variables: Any) -> str:
        try:
            return self._environment.render_bounded(self._template, variables, RenderBudget())
        except RenderLimitError as error:
            raise ChatTemplateError(f"The chat template was stopped: {error}.") from error
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"The chat template refused the messages: {error}") from error
        # The template is a foreign program: whatever it raises is an error of this request alone.
        except Exception as error:
            raise ChatTemplateError(
                f"The chat template failed: {type(error).__name__}: {str(error)[:200]}"
            ) from error

    def _probe_parts(self) -> bool:
        """Whether the template prints the text of multi-part content; otherwise the parts are joined before
        it sees them."""
        try:
            rendered = self._generate(
                messages=[{"role": "user", "content": [{"type": "text", "text": _PROBE}]}],
                add_generation_prompt=True,
                bos_token="",
                eos_token="",
            )
        except ChatTemplateError:
            return False
        return _PROBE in rendered and "'type'" not in rendered and '"type"' not in rendered

    def _as_dict(self, message: ChatMessage, literals: ControlLiterals, sentinel: str) -> dict[str, Any]:
        # The published template reads the first part of a system message only: joined, nothing of it is lost.
        if isinstance(message.content, str) or message.role == "system" or not self._takes_parts:
            return {"role": message.role, "content": literals.mark(message.text, sentinel)}
        parts = [{"type": "text", "text": literals.mark(text, sentinel)} for text in message.content]
        return {"role": message.role, "content": parts}

    def _unused_characters(self, messages: Sequence[ChatMessage], count: int) -> list[str]:
        used = set(self.source).union(*(message.text for message in messages))
        candidates = map(chr, itertools.chain.from_iterable(_SENTINEL_RANGES))
        found = list(
            itertools.islice((character for character in candidates if character not in used), count)
        )
        if len(found) < count:
            raise ChatTemplateError(
                "The messages use every private-use character of Unicode: none is left to mark their text."
            )
        return found


def _mark_end(message: dict[str, Any], end_mark: str) -> str:
    """Puts the mark behind the last visible character of the message's text; returns the white space that
    follows it."""
    holder, key = (
        (message, "content") if isinstance(message["content"], str) else (message["content"][-1], "text")
    )
    text: str = holder[key]
    visible = text.rstrip()
    space = text[len(visible) :]
    holder[key] = visible + end_mark + space
    return space
