"""From a constraint to a compiled grammar over the model's tokens, off the event loop, within limits of time,
memory and size.

A faulty or too expensive constraint is a GrammarError and harms nobody else: the library counts its own work
and gives up, and a compilation that takes too long all the same is left behind.
"""

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, TypeVar

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from model.interface.grammar_state import GrammarFault, GrammarState
from server.grammar.sound_schemas import SoundSchemas
from server.grammar.source import CallRules, GrammarError, GrammarSource, check_schema
from server.grammar.state import MatcherState, compute_mask
from server.text.tokenizer import Tokenizer
from server.text.tool_calls.functions import call_head

Result = TypeVar("Result")

COMPILE_SECONDS = 1.5
COMPILE_THREADS = 2
# For one of the places, all of which may be held by compilations that were left behind.
PLACE_SECONDS = 10.0
# Of text that leaves no choice. The library gives up on endless ones at some 60,000.
MAX_FORCED_BYTES = 32 * 1024
_ENDLESS = (
    f"begins with more than {MAX_FORCED_BYTES} bytes that leave no choice, or must hold itself and "
    "never comes to an end"
)
# The library descends by recursion, some 10 kB for each reference of a chain; the size limits keep chains
# below 16 000.
COMPILE_STACK_BYTES = 512 * 1024 * 1024
MAX_MASK_THREADS = 8
IDLE_SECONDS = 2.0
IDLE_POLLS = 8  # in that time

# Beside the defaults, which stand for 20 ms of work for the first lexer and 15 ms for a mask. A lexer state
# takes 1 to 2 kB; the states of a request share them. Each property that may be left out is an item in the
# row.
_STACK_SIZE_LOCK = threading.Lock()
_LIMITS = LLParserLimits(max_lexer_states=50_000, max_items_in_row=10_000, verbose_errors=False)


class CompilerBusyError(Exception):
    """No place to compile became free for too long."""


class CompiledGrammar:
    """A grammar at its beginning. Implements ``model.interface.grammar_state.Grammar``; any number of states
    start from it."""

    def __init__(self, matcher: LLMatcher, eos_token_id: int, threads: Executor) -> None:
        """Raises GrammarFault if not even the first token can be found within the limits."""
        self._matcher = matcher
        self._eos_token_id = eos_token_id
        self._threads = threads
        self._first_mask = compute_mask(matcher.deep_copy())

    def new_state(self, end_token_ids: frozenset[int]) -> GrammarState:
        return MatcherState(
            self._matcher.deep_copy(), self._eos_token_id, end_token_ids, self._first_mask, self._threads
        )


class GrammarCompiler:
    """One per loaded model. The view of the vocabulary is made in the first idle moment, or by ``warm_up`` or
    a compilation where it is needed before."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._vocabulary: LLTokenizer | None = None
        self._vocabulary_lock = threading.Lock()
        self._warming: asyncio.Future[LLTokenizer] | None = None
        self._mask_threads = ThreadPoolExecutor(min(MAX_MASK_THREADS, os.cpu_count() or 1), "gemserve-mask")
        self._places = asyncio.Semaphore(COMPILE_THREADS)
        self._sound_schemas = SoundSchemas()

    @property
    def is_warm(self) -> bool:
        """The view of the vocabulary is there."""
        return self._vocabulary is not None

    async def compile(self, source: GrammarSource) -> CompiledGrammar:
        """Raises GrammarError, CompilerBusyError. Its time counts from when one of the places is free and the
        view of the vocabulary is made; a thread keeps its place until it is done."""
        if self._vocabulary is None:
            await self._vocabulary_made()
        return await self._in_thread(lambda: self.compile_now(source))

    async def first_fault(self, schemas: Sequence[dict[str, Any]]) -> tuple[int, GrammarError] | None:
        """Which of them is no JSON schema, and why; None where all are. Those that were found to be one are
        not looked at again. Raises GrammarError where they take too long, CompilerBusyError."""
        unknown = await asyncio.to_thread(self._sound_schemas.unknown, schemas)
        if not unknown:
            return None

        def check() -> tuple[int, GrammarError] | None:
            until = time.monotonic() + COMPILE_SECONDS
            for index in unknown:
                if time.monotonic() > until:  # nobody waits any more, and others wait for the place
                    raise _too_slow()
                try:
                    check_schema(schemas[index])
                except GrammarError as error:
                    return index, error
                self._sound_schemas.add(schemas[index])
            return None

        return await self._in_thread(check)

    async def _in_thread(self, compile_it: Callable[[], Result]) -> Result:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(PLACE_SECONDS):
                await self._places.acquire()
        except TimeoutError:
            raise CompilerBusyError from None
        result: Future[Result] = Future()

        def work() -> None:
            try:
                compiled = compile_it()
            except BaseException as error:
                result.set_exception(error)
            else:
                result.set_result(compiled)
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits for a place
                loop.call_soon_threadsafe(self._places.release)

        try:
            _start_thread(work)
        except RuntimeError:  # no more threads, or no memory for one
            self._places.release()
            raise
        try:
            async with asyncio.timeout(COMPILE_SECONDS):
                return await asyncio.shield(asyncio.wrap_future(result))
        except TimeoutError:
            raise _too_slow() from None

    async def _vocabulary_made(self) -> None:
        """One thread makes it for all who wait."""
        if self._warming is None or (self._warming.done() and self._vocabulary is None):
            self._warming = asyncio.ensure_future(asyncio.to_thread(self.warm_up))
        await asyncio.shield(self._warming)

    def compile_now(self, source: GrammarSource) -> CompiledGrammar:
        """The same in the calling thread, without a limit of time, and on its stack."""
        grammar = source.translate()
        vocabulary = self.warm_up()
        matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise GrammarError(_first_lines(matcher.get_error()))
        if isinstance(source.value, CallRules):
            self._check_arguments(matcher, source.value)
        elif _is_endless(matcher.deep_copy()):
            raise GrammarError(f"what follows it {_ENDLESS}")
        try:
            return CompiledGrammar(matcher, vocabulary.eos_token, self._mask_threads)
        except GrammarFault as error:
            raise GrammarError(f"no text begins to follow it: {_first_lines(str(error))}") from None

    def _check_arguments(self, matcher: LLMatcher, rules: CallRules) -> None:
        """Arguments that are forced to go on for ever, as those that must hold themselves, are a fault of the
        schema. It shows where they begin; the first mask is far from there."""
        for function in rules.functions:
            state = matcher.deep_copy()
            state.consume_tokens(self._tokenizer.encode_plain(call_head(function.name)))
            if _is_endless(state):
                raise GrammarError(
                    f"arguments of the function '{function.name}': what follows their schema {_ENDLESS}"
                )

    def warm_up(self) -> LLTokenizer:
        """The view of the vocabulary; one or two seconds of work the first time for hundreds of thousands of
        tokens."""
        with self._vocabulary_lock:
            if self._vocabulary is None:
                # In two steps, since the library keeps the interpreter's lock: nobody waits for more than one
                # of them.
                plain = LLTokenizer(TokenizerWrapper(_Vocabulary(self._tokenizer)), slices=[])
                self._vocabulary = plain.with_slices(LLTokenizer.general_slices())
            return self._vocabulary

    async def warm_up_when_idle(self, is_idle: Callable[[], bool]) -> None:
        """Make the view in the first moment in which nothing has run for IDLE_SECONDS: the library keeps the
        interpreter's lock meanwhile, and would hold up streams. Returns when it is there; a request with a
        constraint does not wait for such a moment."""
        quiet_polls = 0
        while self._vocabulary is None:
            await asyncio.sleep(IDLE_SECONDS / IDLE_POLLS)
            quiet_polls = quiet_polls + 1 if is_idle() else 0
            if quiet_polls >= IDLE_POLLS and self._vocabulary is None:
                await self._vocabulary_made()

    def close(self) -> None:
        """Let the threads end; what is being computed is finished."""
        self._mask_threads.shutdown(wait=False)


def _too_slow() -> GrammarError:
    return GrammarError(f"it takes more than {COMPILE_SECONDS} seconds to compile; simplify it")


def _is_endless(state: LLMatcher) -> bool:
    """Whether the text is forced to go on for ever from here, as that of a schema that must hold itself, or
    for so long that it looks like that."""
    return len(state.compute_ff_bytes()) > MAX_FORCED_BYTES or state.is_error()


class _Vocabulary:
    """The tokenizer as llguidance wants to see it: the bytes of each token, and which of them are no text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = tokenizer.eos_token_ids[0]
        self.bos_token_id = tokenizer.bos_token_id
        # Ids beyond the known ones have no logit; those without a token among them have no bytes and are
        # never allowed.
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.num_known_tokens)]
        self.special_token_ids = sorted(tokenizer.control_token_ids | {self.eos_token_id})
        self._byte_ids = {
            entry: token_id for token_id, entry in enumerate(tokenizer.entries) if isinstance(entry, int)
        }

    def __call__(self, text: str) -> list[int]:
        """Ids of forced text. The tokenizer reads some characters as others (its own mark as a blank): these
        go byte by byte."""
        ids = self._tokenizer.encode_plain(text)
        if b"".join(self.tokens[token_id] for token_id in ids) == text.encode():
            return ids
        return [self._byte_ids[byte] for byte in text.encode()]


def _start_thread(work: Callable[[], None]) -> None:
    """A thread of its own with a deep stack, given back when it ends. The process does not wait for it."""
    with _STACK_SIZE_LOCK:  # the size is a setting of the whole process, for threads that start
        previous = threading.stack_size(COMPILE_STACK_BYTES)
        try:
            threading.Thread(target=work, name="gemserve-grammar", daemon=True).start()
        finally:
            threading.stack_size(previous)


def _first_lines(error: str) -> str:
    """What went wrong and where. The library dumps the grammar after it, and its regular expressions end with
    the reason."""
    lines = [line.strip() for line in error.splitlines() if line.strip(" ^") not in ("", "<non-verbose/>")]
    reasons = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (reasons or [" ".join(lines[:3])])[0][:300] or "it can't be compiled"
