"""Engine and network with decode steps replayed as graphs: requests get the same tokens as without, however
they come and go."""

import random
from collections import Counter
from typing import Any

import pytest
import torch

from model.execution.cuda_graphs import CudaGraphDevice, GraphDevice, padded_sizes
from model.execution.runner import ModelRunner
from model.interface.running_batch import RunningBatch
from model.interface.sampling_params import SamplingParams
from model.interface.sequence_chunk import StepInput
from model.network.pending_step import PendingStep
from model.ops.select import select_ops
from server.engine.core import EngineCore
from server.engine.kv.kv_manager import KVCacheManager
from server.engine.request import EngineRequest, TokenOutput
from server.engine.scheduler.scheduler import SchedulerConfig
from tests.model.graphs import BLOCK_SIZE, RerunDevice, make_model
from tests.model.ops.cpu.harness import cpu_ops, needs_kernels
from tests.model.tiny_models import CONFIG, random_prompt

ABORTED = "r7"
MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS, MAX_MODEL_LEN = 9, 48, 160


def make_core(
    runner: ModelRunner, pool_tokens: int, device: GraphDevice | None, *, ahead: bool
) -> EngineCore:
    spec = runner.spec
    memory = (pool_tokens // BLOCK_SIZE + 1) * spec.global_block_bytes
    memory += spec.local_pool_blocks(MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS) * spec.local_block_bytes
    plan = spec.plan(
        memory,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        max_model_len=MAX_MODEL_LEN,
        prefix_caching=False,
    )
    runner.mirrors_tables = device is not None  # as on a device that keeps tables of its own
    runner.allocate_cache(plan)
    assert runner.cache is not None
    for layer in runner.cache.layers:
        layer.keys.fill_(torch.nan)
        layer.values.fill_(torch.nan)
    if device is not None:
        runner.capture_graphs(padded_sizes(MAX_NUM_SEQS), MAX_MODEL_LEN, device)
    batch = RunningBatch(MAX_NUM_SEQS, plan.num_global_blocks - 1)
    kv = KVCacheManager(spec, batch, plan.num_global_blocks, plan.num_local_blocks, prefix_caching=True)
    config = SchedulerConfig(MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS, plan.capacity_tokens, over_admission=True)
    return EngineCore(runner, kv, config, debug_invariants=True, async_scheduling=ahead)


def answers(
    runner: ModelRunner,
    pool_tokens: int,
    device: GraphDevice | None,
    *,
    ahead: bool = False,
    stops: frozenset[int] = frozenset(),
) -> dict[str, list[int]]:
    core = make_core(runner, pool_tokens, device, ahead=ahead)
    choose = random.Random(4)
    shared = random_prompt(40, seed=1)
    waiting = []
    for index in range(24):
        prompt = shared[: choose.randrange(40)] + random_prompt(choose.randrange(1, 30), seed=index)
        sampling = SamplingParams(
            max_tokens=choose.randrange(1, 70),
            temperature=choose.choice((0.0, 1.0)),
            seed=index,
            stop_token_ids=stops,
        )
        waiting.append(EngineRequest(f"r{index}", prompt, sampling))
    tokens: dict[str, list[int]] = {spec.request_id: [] for spec in waiting}
    steps = 0
    while waiting or core.has_work:
        if waiting and steps % 3 == 0:
            core.add(waiting.pop(0))
        if steps == 60:
            core.abort(ABORTED)
        for request, event in core.step():
            assert isinstance(event, TokenOutput), event
            tokens[request.request_id] += event.token_ids
        steps += 1
    return tokens


@needs_kernels
@pytest.mark.parametrize("pool_tokens", [2000, 400], ids=["room for all", "preemption"])
def test_requests_get_the_same_tokens_through_graphs(pool_tokens: int) -> None:
    model = make_model(cpu_ops(torch.float32))
    runner = ModelRunner(model, CONFIG.kv_cache_spec(BLOCK_SIZE, 4), model.ops)
    expected = answers(runner, pool_tokens, None)
    device = RerunDevice()
    actual = answers(runner, pool_tokens, device)
    # at another token, if steps took other times
    aborted = list(zip(actual.pop(ABORTED), expected.pop(ABORTED), strict=False))
    assert all(got == wanted for got, wanted in aborted)
    assert actual == expected
    assert len(device.replayed) > 50
    assert {1, 2, 4, 8, 16} >= set(device.replayed) >= {4, 8, 16}


@needs_kernels
@pytest.mark.parametrize("graphed", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("pool_tokens", [2000, 400], ids=["room for all", "preemption"])
def test_requests_get_the_same_tokens_one_step_ahead(pool_tokens: int, graphed: bool) -> None:
    """The tokens that a step draws go to the next one without the host, in whatever row of a graph's buffers
    they belong."""
    model = make_model(cpu_ops(torch.float32))
    runner = ModelRunner(model, CONFIG.kv_cache_spec(BLOCK_SIZE, 4), model.ops)
    stops = frozenset(range(0, CONFIG.vocab_size, 25))
    expected = answers(runner, pool_tokens, None, stops=stops)
    device = RerunDevice() if graphed else None
    followed = Counter[bool]()
    launch = runner.launch

    rows_before: list[int] = []

    def counted(step: StepInput) -> PendingStep:
        if step.token_ids is None:
            followed[step.rows.tolist() == rows_before] += 1
        rows_before[:] = step.rows.tolist()
        return launch(step)

    runner.launch = counted  # type: ignore[method-assign]
    actual = answers(runner, pool_tokens, device, ahead=True, stops=stops)
    aborted = list(zip(actual.pop(ABORTED), expected.pop(ABORTED), strict=False))
    assert all(got == wanted for got, wanted in aborted)
    assert actual == expected
    assert followed[True] > 10
    assert followed[False] > 5, "of some, the step before had others beside them"


def answers_of_one_batch(runner: ModelRunner, device: GraphDevice, *, ahead: bool) -> dict[str, list[int]]:
    """Of requests that come together and end together, so that every step has the same batch whenever it is
    launched."""
    core = make_core(runner, 2000, device, ahead=ahead)
    launch_ahead, num_ahead = core._launch_ahead, 0

    def counted(step: StepInput) -> Any:
        nonlocal num_ahead
        if runner.ops.device.type == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        try:
            following = launch_ahead(step)
        finally:
            if runner.ops.device.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")
        num_ahead += following is not None
        return following

    core._launch_ahead = counted  # type: ignore[method-assign]
    tokens: dict[str, list[int]] = {}
    for index in range(6):
        sampling = SamplingParams(
            max_tokens=50, temperature=index % 2, seed=index, stop_token_ids=frozenset()
        )
        core.add(EngineRequest(f"r{index}", random_prompt(8, seed=index), sampling))
    while core.has_work:
        for request, event in core.step():
            assert isinstance(event, TokenOutput), event
            tokens.setdefault(request.request_id, []).extend(event.token_ids)
    assert num_ahead == (48 if ahead else 0), "every decode step but the first"
    return tokens


@needs_kernels
def test_steps_ahead_of_one_batch_are_the_same_steps() -> None:
    model = make_model(cpu_ops(torch.float32))
    runner = ModelRunner(model, CONFIG.kv_cache_spec(BLOCK_SIZE, 4), model.ops)
    assert answers_of_one_batch(runner, RerunDevice(), ahead=True) == answers_of_one_batch(
        runner, RerunDevice(), ahead=False
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_steps_ahead_on_a_device_are_the_same_steps_and_nobody_waits() -> None:
    model = make_model(select_ops(torch.device("cuda"), torch.float32))
    runner = ModelRunner(model, CONFIG.kv_cache_spec(BLOCK_SIZE, 4), model.ops)
    device = CudaGraphDevice(torch.device("cuda"))
    assert answers_of_one_batch(runner, device, ahead=True) == answers_of_one_batch(
        runner, device, ahead=False
    )
