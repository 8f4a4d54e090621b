"""A random walk over block manager and scheduler: admit, grow, chunk, preempt, abort, finish, hit and evict,
all invariants held.

The runner of the harness verifies after every step that each key the network would read is in the block its
table names. The pools are so small that preemption and eviction happen all the time. A second walk launches
steps before the results of the one before them are read, over a device that computes as late as it may. The
last tests plant faults and expect them to be found.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from model.interface.kv_cache_spec import KVCacheSpec
from server.engine.kv.block_pool import BlockPool
from server.engine.request import RequestStatus
from tests.server.engine.harness import Harness, LazyRunner, expected_tokens

EXAMPLES, STEPS = 100, 100  # a run makes more than 5,000 engine steps
AHEAD_EXAMPLES = 40
seen: Counter[str] = Counter()


def answer(prompt: list[int], max_tokens: int, stops: frozenset[int]) -> list[int]:
    tokens = expected_tokens(prompt, max_tokens)
    end = next((index + 1 for index, token in enumerate(tokens) if token in stops), len(tokens))
    return tokens[:end]


class EngineMachine(RuleBasedStateMachine):
    async_scheduling = False
    stops_of_some: frozenset[int] = frozenset()

    def __init__(self) -> None:
        super().__init__()
        self.prompts: dict[str, tuple[list[int], int, frozenset[int]]] = {}
        self.aborted: set[str] = set()

    @initialize(
        block_size=st.sampled_from([1, 2, 4]),
        num_global_blocks=st.integers(12, 40),
        max_num_seqs=st.integers(1, 5),
        max_num_batched_tokens=st.integers(5, 24),
        spare_local_blocks=st.sampled_from([0, 0, 3, 20]),
        over_admission=st.booleans(),
    )
    def start(
        self,
        block_size: int,
        num_global_blocks: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        spare_local_blocks: int,
        over_admission: bool,
    ) -> None:
        window = 4
        spec = KVCacheSpec(block_size, window, 1, 5, 8)
        self.engine = Harness(
            block_size=block_size,
            window=window,
            num_global_blocks=num_global_blocks,
            num_local_blocks=spec.local_pool_blocks(max_num_seqs, max_num_batched_tokens)
            + spare_local_blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            over_admission=over_admission,
            async_scheduling=self.async_scheduling,
        )

    @rule(
        seed=st.integers(0, 3),
        length=st.integers(1, 25),
        max_tokens=st.integers(0, 12),
        salt=st.sampled_from([None, None, "s"]),
        priority=st.sampled_from([0, 0, 0, -1, 1]),
    )
    def admit(self, seed: int, length: int, max_tokens: int, salt: str | None, priority: int) -> None:
        """Prompts of one seed are prefixes of each other, so that hits of every length happen."""
        source = random.Random(seed)
        tokens = [source.randrange(5) for _ in range(25)][: min(length, self.engine.config.max_model_len - 1)]
        stops = self.stops_of_some if max_tokens % 2 else frozenset[int]()
        request = self.engine.add(
            tokens, max_tokens=max_tokens, salt=salt, priority=priority, stop_token_ids=stops
        )
        self.prompts[request] = (tokens, max_tokens, stops)
        seen["admit"] += 1

    @rule(steps=st.integers(2, 9))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.engine.step()
            seen["step"] += 1

    @rule(choice=st.integers(0, 100))
    def abort(self, choice: int) -> None:
        live = [*self.engine.core.scheduler.waiting, *self.engine.core.scheduler.running]
        preempted = [request for request in live if request.status is RequestStatus.PREEMPTED]
        if live:
            request = preempted[0] if preempted and choice % 2 else live[choice % len(live)]
            seen[f"abort {request.status.value}"] += 1
            self.aborted.add(request.request_id)
            self.engine.core.abort(request.request_id)

    @rule(budget=st.integers(1, 24))
    def change_prefill_share(self, budget: int) -> None:
        self.engine.core.scheduler.budget.mixed_prefill_tokens = max(self.engine.spec.block_size, budget)

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "engine"):
            return
        engine = self.engine
        engine.core.scheduler.check_invariants()
        seen["held"] += len(engine.core.scheduler._held)
        for request in engine.core.scheduler.running:
            held = int(engine.kv.batch.num_blocks[request.row]) - engine.kv.window.first_kept[request.row]
            running = max(1, engine.num_uncomputed(request))
            assert held <= engine.spec.blocks(engine.num_computed(request), running).local_blocks
        for request_id, (tokens, max_tokens, stops) in self.prompts.items():
            outputs = engine.outputs[request_id]
            if outputs and outputs[-1].finish_reason and request_id not in self.aborted:
                count = min(max_tokens, engine.config.max_model_len - len(tokens))
                assert engine.tokens(request_id) == answer(tokens, count, stops)
                seen["finish"] += 1

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        engine = self.engine
        engine.run()
        stats = engine.core.stats
        if isinstance(engine.runner, LazyRunner):
            seen["ahead"] += engine.runner.num_launched_ahead
        seen["arrays"] += engine.runner.num_array_steps
        seen["preempt"] += stats.preemptions_total
        seen["hit"] += stats.prefix_hit_tokens_total
        seen["evict"] += stats.pools["global"].evicted_total
        seen["evict local"] += stats.pools["local"].evicted_total
        seen["recycle"] += stats.recycled_blocks_total
        seen["limited local"] += stats.prefix_limited_total["local"]
        unfinished = [
            r
            for r in self.prompts
            if r not in self.aborted and not (engine.outputs[r] and engine.finish_reason(r))
        ]
        assert not unfinished


class AheadMachine(EngineMachine):
    async_scheduling = True
    stops_of_some = frozenset(range(200))  # one token in five

    @rule(steps=st.integers(3, 8))
    def decode_on(self, steps: int) -> None:
        """Long enough alone that steps are launched ahead."""
        for _ in range(steps):
            if not self.engine.core.scheduler.waiting:
                self.engine.step()
                seen["step"] += 1

    @rule(memory=st.sampled_from([*[None] * 8, 1, 2, 4, 8]))
    def change_memory(self, memory: int | None) -> None:
        self.engine.runner.memory = memory
        seen["memory"] += self.engine.core.stats.memory_faults_total


def walk(machine: type[EngineMachine] = EngineMachine, examples: int = EXAMPLES) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=STEPS,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )


def walk_until(machine: type[EngineMachine], examples: int, num_steps: int, events: Sequence[str]) -> None:
    """Longer walks, until one has met all of this: what a walk meets depends on which modules hypothesis
    finds loaded."""
    for length in (examples, 3 * examples, 9 * examples):
        seen.clear()
        walk(machine, length)
        missing = [event for event in events if not seen[event]]
        if not missing and seen["step"] >= num_steps:
            return
    raise AssertionError(f"the walk never met {missing} in {seen['step']} steps")


EVENTS = (
    "arrays",
    "preempt",
    "hit",
    "evict",
    "evict local",
    "recycle",
    "finish",
    "abort waiting",
    "abort running",
)


def test_random_walks_hold_every_invariant() -> None:
    walk_until(EngineMachine, EXAMPLES, 5_000, (*EVENTS, "limited local", "abort preempted"))


def test_random_walks_one_step_ahead_hold_every_invariant() -> None:
    walk_until(AheadMachine, AHEAD_EXAMPLES, 2_000, (*EVENTS, "ahead", "held", "memory"))


def recycle_one_block_too_early(original: Callable[[KVCacheSpec, int], int]) -> object:
    return lambda self, num_computed: (
        original(self, num_computed) + (1 if num_computed >= 2 * self.sliding_window else 0)
    )


def forget_a_touch(original: Callable[[BlockPool, int], None]) -> object:
    def touch(self: BlockPool, block: int) -> None:
        if self.ref_count(block) == 0:
            original(self, block)

    return touch


def free_twice(original: Callable[[BlockPool, Iterable[int]], None]) -> object:
    def free(self: BlockPool, blocks: Iterable[int]) -> None:
        blocks = list(blocks)
        original(self, blocks + blocks[-1:] if len(blocks) > 3 else blocks)

    return free


@pytest.mark.parametrize(
    ("owner", "method", "fault"),
    [
        (KVCacheSpec, "first_local_block", recycle_one_block_too_early),
        (BlockPool, "touch", forget_a_touch),
        (BlockPool, "free", free_twice),
    ],
)
def test_a_planted_fault_is_found(
    owner: type, method: str, fault: Callable[[object], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, method, fault(getattr(owner, method)))
    with pytest.raises((AssertionError, KeyError)):
        walk()
