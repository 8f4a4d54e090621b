"""Engine and network together, float32, tiny random weights: nothing about scheduling may change what a
request gets.

Tolerance 1e-4 on log-probabilities: float32 sums in another order (other matrix shapes per chunk size) differ
by about 1e-6.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch

from model.interface.running_batch import RunningBatch
from model.interface.sampling_params import SamplingParams
from server.engine.core import EngineCore
from server.engine.kv.kv_manager import KVCacheManager
from server.engine.request import EngineRequest, TokenOutput
from server.engine.scheduler.scheduler import SchedulerConfig
from tests.tiny import WINDOW, tiny_config, tiny_runner

TOLERANCE = 1e-4


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices this small gain nothing from threads, and lose much on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass(slots=True)
class Answer:
    tokens: list[int]
    logprobs: list[float]
    top: list[list[int]]
    prompt_logprobs: list[float]
    finish_reason: str | None
    num_cached_tokens: int


class Engine:
    """A core over the tiny model, sized in tokens of the global pool."""

    def __init__(
        self,
        *,
        block_size: int = 16,
        max_num_batched_tokens: int = 64,
        max_num_seqs: int = 8,
        pool_tokens: int = 4096,
        prefix_caching: bool = True,
        over_admission: bool = False,
    ) -> None:
        spec = tiny_config().kv_cache_spec(block_size, 4)
        memory = (pool_tokens // block_size + 1) * spec.global_block_bytes
        memory += spec.local_pool_blocks(max_num_seqs, max_num_batched_tokens) * spec.local_block_bytes
        plan = spec.plan(
            memory,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=4096,
            prefix_caching=False,  # no local blocks beyond the proven bound
        )
        self.runner = tiny_runner(plan, block_size)
        batch = RunningBatch(max_num_seqs, plan.num_global_blocks - 1)
        self.kv = KVCacheManager(
            spec, batch, plan.num_global_blocks, plan.num_local_blocks, prefix_caching=prefix_caching
        )
        config = SchedulerConfig(
            max_num_seqs, max_num_batched_tokens, plan.capacity_tokens, over_admission=over_admission
        )
        self.core = EngineCore(self.runner, self.kv, config, debug_invariants=True)
        self._count = 0

    def run(self, requests: Sequence[tuple[list[int], SamplingParams]]) -> list[Answer]:
        names = []
        for tokens, sampling in requests:
            names.append(f"r{self._count}")
            self._count += 1
            self.core.add(EngineRequest(names[-1], tokens, sampling))
        outputs: dict[str, list[TokenOutput]] = {name: [] for name in names}
        while self.core.has_work:
            for request, event in self.core.step():
                assert isinstance(event, TokenOutput), event
                outputs[request.request_id].append(event)
        return [answer(outputs[name]) for name in names]


def answer(outputs: list[TokenOutput]) -> Answer:
    logprobs = [entry for output in outputs for entry in output.logprobs]
    return Answer(
        [token for output in outputs for token in output.token_ids],
        [entry.logprob for entry in logprobs],
        [[token for token, _ in entry.top] for entry in logprobs],
        [entry.logprob for entry in outputs[0].prompt_logprobs or []],
        outputs[-1].finish_reason,
        outputs[0].num_cached_tokens,
    )


def prompt(length: int, seed: int = 0) -> list[int]:
    return [2] + [(7 + seed * 131 + i * i * 17 + i * 29) % 500 + 6 for i in range(length - 1)]


def greedy(max_tokens: int = 12, **others: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, logprobs=3, **others)  # type: ignore[arg-type]


def assert_same(got: Answer, expected: Answer, *, prompt_too: bool = True) -> None:
    assert got.tokens == expected.tokens
    assert got.finish_reason == expected.finish_reason
    assert got.logprobs == pytest.approx(expected.logprobs, abs=TOLERANCE)
    if prompt_too:
        assert got.prompt_logprobs == pytest.approx(expected.prompt_logprobs, abs=TOLERANCE)


LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 79, 80, 81, 127, 128, 129, 200)


@pytest.fixture(scope="module")
def solo() -> dict[int, Answer]:
    """Each prompt alone, whole prefill, no prefix cache."""
    engine = Engine(max_num_batched_tokens=256, prefix_caching=False)
    return {length: engine.run([(prompt(length), greedy(prompt_logprobs=0))])[0] for length in LENGTHS}


@pytest.mark.parametrize("chunk", [1, 16, 64, 512])
def test_every_chunk_size_gives_the_same_logits(chunk: int, solo: dict[int, Answer]) -> None:
    engine = Engine(max_num_batched_tokens=chunk, max_num_seqs=min(8, chunk))
    for length in LENGTHS if chunk > 1 else LENGTHS[:9]:
        assert_same(engine.run([(prompt(length), greedy(prompt_logprobs=0))])[0], solo[length])


@pytest.mark.parametrize("block_size", [8, 16, 32, 64])
def test_every_block_size_gives_the_same_logits(block_size: int, solo: dict[int, Answer]) -> None:
    engine = Engine(block_size=block_size)
    for length in LENGTHS:
        assert_same(engine.run([(prompt(length), greedy(prompt_logprobs=0))])[0], solo[length])


def test_a_hot_cache_gives_the_same_logits_as_a_cold_one(solo: dict[int, Answer]) -> None:
    engine = Engine()
    for length in LENGTHS[1::2]:
        for turn in range(3):
            got = engine.run([(prompt(length), greedy())])[0]
            assert_same(got, solo[length], prompt_too=False)
            if turn:
                assert got.num_cached_tokens == (length - 1) // 16 * 16


def test_greedy_tokens_do_not_depend_on_neighbours(solo: dict[int, Answer]) -> None:
    for count in (1, 15):
        engine = Engine(max_num_seqs=16)
        neighbours = [
            (prompt(20 + 9 * i, seed=i + 1), SamplingParams(max_tokens=20, seed=i)) for i in range(count)
        ]
        mine = (prompt(81), greedy())
        before = engine.run([mine, *neighbours])[0]
        after = engine.run([*neighbours, mine])[-1]
        assert_same(before, solo[81], prompt_too=False)
        assert_same(after, solo[81], prompt_too=False)
        assert after.top == solo[81].top


MIX = (
    SamplingParams(max_tokens=50, temperature=0.0, logprobs=2, prompt_logprobs=1),
    SamplingParams(max_tokens=50, temperature=0.8, seed=7, logprobs=2),
    SamplingParams(max_tokens=50, temperature=0.0, frequency_penalty=1.0, presence_penalty=0.5, logprobs=0),
    SamplingParams(max_tokens=50, temperature=1.0, seed=11, top_p=0.9, repetition_penalty=1.3, logprobs=0),
)


@pytest.mark.parametrize("over_admission", [False, True])
def test_preempted_requests_get_what_they_get_alone(over_admission: bool) -> None:
    requests = [(prompt(40 + 3 * i, seed=i), MIX[i % 4]) for i in range(8)]
    roomy = Engine(pool_tokens=4096, prefix_caching=False)
    alone = [roomy.run([request])[0] for request in requests]
    tight = Engine(pool_tokens=240, over_admission=over_admission)  # three of them at their full length
    together = tight.run(requests)
    assert tight.core.stats.preemptions_total > 0
    for got, expected in zip(together, alone, strict=True):
        assert_same(got, expected)


def test_a_continuation_equals_a_fresh_prefill_far_beyond_the_window() -> None:
    """300 tokens generated from a prompt below the window: their log-probabilities again, teacher-forced in
    one prefill."""
    engine = Engine(pool_tokens=1024)
    first = engine.run([(prompt(WINDOW - 10), greedy(300))])[0]
    whole = prompt(WINDOW - 10) + first.tokens
    again = engine.run([(whole, SamplingParams(max_tokens=0, prompt_logprobs=0))])[0]
    assert again.prompt_logprobs[-300:] == pytest.approx(first.logprobs, abs=TOLERANCE)
    assert engine.core.stats.recycled_blocks_total > 0


def test_one_request_grows_without_more_local_blocks() -> None:
    engine = Engine(pool_tokens=2048)
    engine.core.add(EngineRequest("long", prompt(100), greedy(500)))
    held = set()
    while engine.core.has_work:
        engine.core.step()
        if engine.core.scheduler.running and engine.core.scheduler.running[0].num_output_tokens:
            row = engine.core.scheduler.running[0].row
            held.add(int(engine.kv.batch.num_blocks[row]) - engine.kv.window.first_kept[row])
    assert max(held) <= WINDOW // 16 + 1
    assert engine.core.stats.recycled_blocks_total >= (600 - WINDOW) // 16 - 2
