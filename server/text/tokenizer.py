"""Text to token ids and back, for Gemma's tokenizer.json. Control tokens (`<bos>`, `<end_of_turn>`,
`<unused5>`, ...) are never matched by the underlying tokenizer: `encode` finds their literals itself,
`encode_plain` and message text leave them ordinary characters. Nothing is changed after construction, so any
number of threads may use one Tokenizer at once. Every encoded prompt has exactly one BOS, at the front."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import tokenizers

from model.interface.errors import CheckpointError
from server.text.detokenizer import Detokenizer
from server.text.length_bound import PromptTooLongError, most_characters_per_token
from server.text.template.chat_template import ChatTemplate, ControlLiterals
from server.text.template.conversation import ChatMessage

# Tokens that the model reserves although tokenizer.json does not flag them as special: none of them is text.
_RESERVED_LITERAL = re.compile(
    r"<unused\d+>|<mask>|\[multimodal\]|<(?:start|end)_of_image>|<image_soft_token>"
)
_SPACE_MARK = "\u2581"


class TokenizerError(CheckpointError):
    """A tokenizer file that is damaged, not understood, or does not fit the model. The text names the
    file."""


class Tokenizer:
    """`num_tokens` is the model's vocabulary size. From `num_known_tokens` on no id has a token: a head may
    have more rows."""

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        *,
        vocab_size: int,
        bos_token_id: int,
        eos_token_ids: Sequence[int],
        chat_template: str | None = None,
        tokens: Sequence[str] | None = None,
    ) -> None:
        """``tokens``: their texts by id, where they are at hand. Raises TokenizerError if the vocabulary does
        not fit, ChatTemplateError if the template (None: built in) is broken."""
        self.num_tokens = vocab_size
        self.bos_token_id = bos_token_id
        self.eos_token_ids = tuple(eos_token_ids)
        added = {
            token_id: token
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
            if token_id < vocab_size
        }
        control = {token_id: token.content for token_id, token in added.items() if _is_control(token)}
        self.control_token_ids = frozenset(control)
        self.skipped_token_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._control_literals = {content: token_id for token_id, content in control.items()}
        self.end_of_turn_id = self._control_literals.get("<end_of_turn>")
        self._control_pattern = _literal_pattern(self._control_literals)
        self._plain = _without_control_tokens(tokenizer, added, self.control_token_ids)
        _drop_word_cache(self._plain)
        if self._plain.get_vocab_size() > vocab_size:
            raise TokenizerError(
                f"it has {self._plain.get_vocab_size()} tokens, but the model has only {vocab_size}"
            )
        self._entries = self._build_entries(control, tokens)
        self.num_known_tokens = next(
            token_id for token_id in range(vocab_size, 0, -1) if self._entries[token_id - 1] is not None
        )
        text_tokens = (token for token_id, token in added.items() if token_id not in control)
        self._most_characters = most_characters_per_token(self._plain, text_tokens, self._entries)
        self._leading_bos = re.compile(f"(?:{re.escape(self.token_text(bos_token_id))})*")
        self._literals = ControlLiterals(self._control_literals)
        self._chat_template = ChatTemplate(chat_template)

    @classmethod
    def from_file(
        cls,
        path: str | Path,
        *,
        vocab_size: int,
        bos_token_id: int,
        eos_token_ids: Sequence[int],
        chat_template: str | None = None,
        tokens: Sequence[str] | None = None,
    ) -> "Tokenizer":
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # The library raises bare Exception.
            raise TokenizerError(f"{path}: not a readable tokenizer.json: {error}") from error
        try:
            return cls(
                tokenizer,
                vocab_size=vocab_size,
                bos_token_id=bos_token_id,
                eos_token_ids=eos_token_ids,
                chat_template=chat_template,
                tokens=tokens,
            )
        except TokenizerError as error:
            raise TokenizerError(f"{path}: {error}") from error

    @property
    def uses_builtin_chat_template(self) -> bool:
        """True when no template was given and the built-in one of Gemma 3 is used; to be announced at
        start."""
        return self._chat_template.is_builtin

    @property
    def chat_template_source(self) -> str:
        """The Jinja text that chats are rendered with."""
        return self._chat_template.source

    def control_token_id(self, literal: str) -> int | None:
        """The control token that is written like this."""
        return self._control_literals.get(literal)

    def encode(self, text: str, add_bos: bool = True) -> list[int]:
        """Ids of a raw completion prompt. Literals of control tokens become these tokens; a leading BOS is
        not doubled.

        Without ``add_bos`` there are as many BOS as the text holds literals of it.
        """
        ids = self._encode_with_control(_scalar_values(text))
        return self._with_one_leading_bos(ids) if add_bos else ids

    def least_num_tokens(self, text: str, add_bos: bool = True) -> int:
        """A lower bound of the length of ``encode(text, add_bos)`` that costs nothing."""
        if not add_bos:
            return self._least_num_tokens(len(text))
        match = self._leading_bos.match(text)
        assert match is not None
        return 1 + self._least_num_tokens(len(text) - match.end())

    def _least_num_tokens(self, num_characters: int) -> int:
        return 0 if self._most_characters is None else -(-num_characters // self._most_characters)

    def encode_plain(self, text: str) -> list[int]:
        """Ids of text that is only text: no BOS, and never a control token."""
        if not text:
            return []
        # A batch of one: unlike encode() it lets other threads run, so a long prompt stalls neither the model
        # nor the streams.
        return self._plain.encode_batch_fast([_scalar_values(text)], add_special_tokens=False)[0].ids

    def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        *,
        max_tokens: int | None = None,
    ) -> list[int]:
        """Ids of the rendered chat, messages in the order of merge_messages. Raises ChatTemplateError, and
        PromptTooLongError for what is certain to have more than ``max_tokens`` before it is encoded.

        ``continue_final_message`` leaves the last turn open and wants no generation prompt.
        """
        pieces = self._render_pieces(messages, add_generation_prompt, continue_final_message)
        least = 1 + sum(
            1 if isinstance(piece, int) else self._least_num_tokens(len(piece)) for piece in pieces
        )
        if max_tokens is not None and least > max_tokens:
            raise PromptTooLongError(least)
        ids: list[int] = [self.bos_token_id]
        for piece in pieces:
            if isinstance(piece, int):
                ids.append(piece)
            else:
                ids.extend(self.encode_plain(piece))
        return ids

    def render_chat(self, messages: Sequence[ChatMessage], add_generation_prompt: bool = True) -> str:
        """The text of the prompt that encode_chat encodes. Encoding this text again would not be safe: see
        encode_chat."""
        pieces = self._render_pieces(messages, add_generation_prompt)
        return self.token_text(self.bos_token_id) + "".join(
            self.token_text(piece) if isinstance(piece, int) else piece for piece in pieces
        )

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of all ids, exactly as the tokenizers library decodes them."""
        detokenizer = Detokenizer(self, skip_special_tokens=skip_special_tokens)
        return detokenizer.push(ids) + detokenizer.flush()

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for: a byte token its byte, a control token its literal."""
        entry = self.entry(token_id)
        if entry is None:
            return b""
        return bytes([entry]) if isinstance(entry, int) else entry.encode()

    def token_text(self, token_id: int) -> str:
        """The text one token stands for on its own; U+FFFD for a byte that is no character alone."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def entry(self, token_id: int) -> str | int | None:
        """What a token is made of: text, one byte (as its value), or None if the tokenizer does not know the
        id."""
        return self._entries[token_id] if 0 <= token_id < len(self._entries) else None

    @property
    def entries(self) -> Sequence[str | int | None]:
        """`entry` of every id, for loops that cannot afford a call per token."""
        return self._entries

    def _encode_with_control(self, text: str) -> list[int]:
        ids: list[int] = []
        for piece in self._split_control(text):
            if isinstance(piece, int):
                ids.append(piece)
            else:
                ids.extend(self.encode_plain(piece))
        return ids

    def _split_control(self, text: str) -> list[str | int]:
        """The text cut at the literals of control tokens: their ids, and the non-empty texts between."""
        pieces: list[str | int] = []
        start = position = 0
        while match := self._control_pattern.search(text, position):
            token_id = self._control_literals.get(match.group())
            if token_id is None:  # The pattern takes any number where a literal has one.
                position = match.start() + 1
                continue
            if match.start() > start:
                pieces.append(text[start : match.start()])
            pieces.append(token_id)
            start = position = match.end()
        if start < len(text):
            pieces.append(text[start:])
        return pieces

    def _render_pieces(
        self,
        messages: Sequence[ChatMessage],
        add_generation_prompt: bool,
        continue_final_message: bool = False,
    ) -> list[str | int]:
        """Rendered chat as control ids and plain texts, every BOS left out."""
        clean = [
            ChatMessage(
                message.role,
                _scalar_values(message.content)
                if isinstance(message.content, str)
                else tuple(_scalar_values(text) for text in message.content),
            )
            for message in messages
        ]
        rendered, sentinel = self._chat_template.render(
            clean,
            literals=self._literals,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            bos_token=self.token_text(self.bos_token_id),
            eos_token=self.token_text(self.eos_token_ids[0]) if self.eos_token_ids else "",
        )
        pieces: list[str | int] = []
        for piece in self._split_control(rendered):
            if isinstance(piece, int):
                if piece != self.bos_token_id:
                    pieces.append(piece)
            elif text := piece.replace(sentinel, ""):
                # Texts that only a dropped BOS kept apart are one text.
                if pieces and isinstance(previous := pieces[-1], str):
                    pieces[-1] = previous + text
                else:
                    pieces.append(text)
        return pieces

    def _with_one_leading_bos(self, ids: list[int]) -> list[int]:
        start = 0
        while start < len(ids) and ids[start] == self.bos_token_id:
            start += 1
        return [self.bos_token_id, *ids[start:]]

    def _build_entries(self, control: dict[int, str], tokens: Sequence[str] | None) -> list[str | int | None]:
        # Runs over the whole vocabulary at every start, hence the plain loops.
        if tokens is not None and len(tokens) == self.num_tokens:
            entries: list[str | int | None] = [token.replace(_SPACE_MARK, " ") for token in tokens]
        else:
            found = map(self._plain.id_to_token, range(self.num_tokens))
            entries = [token and token.replace(_SPACE_MARK, " ") for token in found]
        for byte in range(256):
            for literal in (f"<0x{byte:02X}>", f"<0x{byte:02x}>"):
                if (token_id := self._plain.token_to_id(literal)) is not None:
                    entries[token_id] = byte
        for token_id, literal in control.items():
            entries[token_id] = literal
        if not 0 <= self.bos_token_id < self.num_tokens or entries[self.bos_token_id] is None:
            raise TokenizerError(f"the model's BOS token id {self.bos_token_id} is not in the tokenizer")
        return entries


def _is_control(token: tokenizers.AddedToken) -> bool:
    return bool(token.special) or _RESERVED_LITERAL.fullmatch(token.content) is not None


def _drop_word_cache(tokenizer: tokenizers.Tokenizer) -> None:
    """The library caches the ids of 10,000 words. Gemma's model splits nothing into words, so every text
    would be kept as one and hardly ever be met again: kilobytes per request, for nothing."""
    if isinstance(tokenizer.model, tokenizers.models.BPE):
        tokenizer.model._resize_cache(0)


def _without_control_tokens(
    tokenizer: tokenizers.Tokenizer,
    added: dict[int, tokenizers.AddedToken],
    control_token_ids: frozenset[int],
) -> tokenizers.Tokenizer:
    """A tokenizer on the same (shared, read-only) model that matches only the added tokens that are text,
    such as tabs."""
    plain = tokenizers.Tokenizer(tokenizer.model)
    if tokenizer.normalizer is not None:
        plain.normalizer = tokenizer.normalizer
    if tokenizer.pre_tokenizer is not None:
        plain.pre_tokenizer = tokenizer.pre_tokenizer
    text_tokens = {
        token_id: token for token_id, token in sorted(added.items()) if token_id not in control_token_ids
    }
    plain.add_tokens(list(text_tokens.values()))
    for token_id, token in text_tokens.items():
        if plain.token_to_id(token.content) != token_id:
            raise TokenizerError(
                f"added token {token.content!r} has id {token_id}, which is not its id in the vocabulary"
            )
    return plain


def _literal_pattern(literals: Iterable[str]) -> re.Pattern[str]:
    """Matches every literal, and literals with another number: thousands of numbered tokens make one
    alternative."""
    shapes = {re.sub(r"\d+", r"\\d+", re.escape(literal)) for literal in literals}
    # The longest first: where one literal begins another, the longer one is meant.
    return re.compile("|".join(sorted(shapes, key=len, reverse=True)) or r"(?!)")


def _scalar_values(text: str) -> str:
    """Text without lone surrogates, which JSON can carry and UTF-8 cannot: each becomes U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", errors="surrogatepass").decode("utf-16-le", errors="replace")
    return text
