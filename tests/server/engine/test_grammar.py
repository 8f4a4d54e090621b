"""Requests with a grammar in the engine: each has its own state, it survives preemption, and it ends the
request."""

from dataclasses import dataclass, field

import pytest

from model.interface.grammar_state import GrammarFault
from server.engine.scheduler.scheduler import SchedulerConfig
from tests.server.engine.harness import Harness, expected_tokens

STOP = 7


@dataclass
class Steps:
    """A grammar of fixed length: position i allows tokens 100 + 10 i to 100 + 10 i + 9. After ``late`` more
    masks it notices."""

    length: int
    may_end_at: int | None = None
    fails_at: int | None = None
    late: bool = False
    states: list["StepsState"] = field(default_factory=list)

    def new_state(self, end_token_ids: frozenset[int]) -> "StepsState":
        self.states.append(StepsState(self, end_token_ids))
        return self.states[-1]


@dataclass
class StepsState:
    grammar: Steps
    end_token_ids: frozenset[int]
    accepted: list[int] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        noticed = not self.grammar.late or self.mask_was_none
        return len(self.accepted) >= self.grammar.length and noticed

    mask_was_none: bool = False

    def mask(self) -> bytes | None:
        position = len(self.accepted)
        if position == self.grammar.fails_at:
            raise GrammarFault("too complex")
        if position >= self.grammar.length:
            self.mask_was_none = True
            return None
        bits = bytearray(125)
        for token_id in range(100 + 10 * position, 110 + 10 * position):
            bits[token_id >> 3] |= 1 << (token_id & 7)
        if position == self.grammar.may_end_at:
            bits = bytearray(125)
            for token_id in self.end_token_ids:
                bits[token_id >> 3] |= 1 << (token_id & 7)
        return bytes(bits)

    def accept(self, token_id: int) -> None:
        self.accepted.append(token_id)


def positions(tokens: list[int]) -> list[int]:
    return [token // 10 - 10 for token in tokens]


def test_a_complete_grammar_ends_the_request_with_its_last_token() -> None:
    harness = Harness()
    request = harness.add([1, 2, 3], 20, grammar=Steps(4))
    harness.run()
    assert positions(harness.tokens(request)) == [0, 1, 2, 3]
    assert harness.finish_reason(request) == "stop"
    assert harness.outputs[request][-1].stop_token_id is None


def test_a_grammar_that_notices_its_end_late_ends_without_another_token() -> None:
    harness = Harness()
    request = harness.add([1, 2, 3], 20, grammar=Steps(4, late=True))
    empty = harness.add([1, 2, 4], 20, grammar=Steps(0, late=True))
    harness.run()
    assert positions(harness.tokens(request)) == [0, 1, 2, 3]
    assert harness.tokens(empty) == []
    assert harness.finish_reason(request) == harness.finish_reason(empty) == "stop"


@pytest.mark.parametrize(("max_tokens", "reason"), [(3, "length"), (4, "stop"), (0, "length")])
def test_the_last_allowed_token_may_complete_it(max_tokens: int, reason: str) -> None:
    harness = Harness()
    request = harness.add([1, 2, 3], max_tokens, grammar=Steps(4))
    harness.run()
    assert len(harness.tokens(request)) == max_tokens
    assert harness.finish_reason(request) == reason


def test_an_end_token_ends_it_and_is_not_shown_to_the_grammar() -> None:
    harness = Harness()
    grammar = Steps(9, may_end_at=2)
    request = harness.add([1, 2, 3], 20, grammar=grammar, stop_token_ids=frozenset({STOP}), min_tokens=6)
    harness.run()
    assert harness.tokens(request)[-1] == STOP
    assert harness.outputs[request][-1].stop_token_id == STOP
    assert positions(harness.tokens(request)[:-1]) == [0, 1] == positions(grammar.states[0].accepted)


def test_a_fault_ends_its_own_request_alone() -> None:
    harness = Harness()
    failing = harness.add([1, 2, 3], 20, grammar=Steps(9, fails_at=2))
    free = harness.add([4, 5, 6], 6)
    harness.run()
    assert "too complex" in str(harness.errors[failing])
    assert harness.tokens(free) == expected_tokens([4, 5, 6], 6)


def test_states_survive_preemption_and_neighbours_are_untouched() -> None:
    """A small pool and admission on the first chunk: everybody is preempted again and again."""
    harness = Harness(num_global_blocks=14, over_admission=True, max_num_seqs=6, prefix_caching=False)
    assert isinstance(harness.config, SchedulerConfig)
    grammars = [Steps(20), Steps(15), Steps(20)]
    constrained = [harness.add([10 + i] * 5, 30, grammar=grammar) for i, grammar in enumerate(grammars)]
    free = [harness.add([20 + i] * 5, 18) for i in range(3)]
    harness.run()
    assert harness.core.stats.preemptions_total > 3
    for request, grammar in zip(constrained, grammars, strict=True):
        assert positions(harness.tokens(request)) == list(range(grammar.length))
        assert grammar.states[0].accepted == harness.tokens(request)
        assert len(grammar.states) == 1
    for i, request in enumerate(free):
        assert harness.tokens(request) == expected_tokens([20 + i] * 5, 18)


def test_choices_of_one_grammar_have_their_own_states() -> None:
    harness = Harness()
    grammar = Steps(5)
    requests = [harness.add([1, 2, 3], 9, grammar=grammar, choice=choice) for choice in range(3)]
    harness.run()
    assert [state.accepted for state in grammar.states] == [harness.tokens(request) for request in requests]
    assert len({tuple(harness.tokens(request)) for request in requests}) == 3
