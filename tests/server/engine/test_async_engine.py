"""The engine's thread: streams, aborts by closing, death with an error for everyone, drain."""

import asyncio

import pytest

from model.interface.sampling_params import SamplingParams
from model.interface.sequence_chunk import NOT_FINITE, ChunkResult, StepInput, StepResult
from server.engine.async_engine import AsyncEngine, EngineLimits
from server.engine.core import EngineCore
from server.engine.request import (
    EngineDeadError,
    EngineDrainingError,
    EngineRequest,
    RequestFailedError,
    TokenOutput,
)
from tests.server.engine.harness import CheckingRunner, Harness, expected_tokens
from tests.server.engine.scheduler.test_scheduler import prompt


class FaultyRunner(CheckingRunner):
    """Reports a numerical fault for prompts that begin with token 666."""

    def run(self, step: StepInput) -> StepResult:
        result = super().run(step)
        for index, row in enumerate(step.rows.tolist()):
            if step.batch.token_ids[row][0] == 666:
                result.others[index] = ChunkResult(error=NOT_FINITE)
        return result


def make_engine(runner: CheckingRunner | None = None) -> AsyncEngine:
    parts = Harness(num_global_blocks=300)
    core = EngineCore(runner or parts.runner, parts.kv, parts.config, debug_invariants=True)
    return AsyncEngine(
        core, EngineLimits(parts.config.max_model_len, parts.config.max_num_seqs, parts.kv.capacity_tokens)
    )


def spec(request_id: str, length: int = 10, max_tokens: int = 8, first: int | None = None) -> EngineRequest:
    tokens = prompt(length, len(request_id))
    return EngineRequest(
        request_id, tokens if first is None else [first, *tokens], SamplingParams(max_tokens=max_tokens)
    )


async def collect(engine: AsyncEngine, request: EngineRequest) -> list[int]:
    return [token async for output in engine.generate(request) for token in output.token_ids]


async def until_idle(engine: AsyncEngine) -> None:
    async with asyncio.timeout(5):
        # The engine's thread updates these numbers; there is no event to wait for.
        while engine.stats.num_running or engine.stats.num_waiting or engine.num_streams:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def test_concurrent_streams_get_their_own_tokens_and_the_last_output_has_reason_and_timings() -> None:
    async def main() -> None:
        engine = make_engine()
        engine.start()
        specs = [spec("x" * (i + 1), length=3 + i) for i in range(12)]
        results = await asyncio.gather(*(collect(engine, s) for s in specs))
        for request, tokens in zip(specs, results, strict=True):
            assert tokens == expected_tokens(request.prompt_token_ids, 8)
        outputs = [output async for output in engine.generate(spec("last"))]
        assert [output.finish_reason for output in outputs] == [None] * 7 + ["length"]
        timings = outputs[-1].timings
        assert timings is not None
        assert timings.first_scheduled is not None
        assert timings.first_token is not None
        assert timings.finished is not None
        assert timings.arrival <= timings.first_scheduled <= timings.first_token <= timings.finished
        await until_idle(engine)
        await engine.stop()

    asyncio.run(main())


def test_closing_a_stream_aborts_its_request_and_frees_its_blocks() -> None:
    async def main() -> None:
        engine = make_engine()
        engine.start()
        stream = engine.generate(spec("endless", max_tokens=1000))
        await anext(stream)
        await stream.aclose()
        task = asyncio.create_task(collect(engine, spec("cancelled", max_tokens=1000)))
        await asyncio.sleep(0.02)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until_idle(engine)
        assert engine.stats.pools["global"].used == engine.stats.pools["local"].used == 0
        await engine.stop()

    asyncio.run(main())


def test_a_fault_in_a_step_ends_every_stream_with_an_error_and_tells_the_owner() -> None:
    async def main() -> None:
        runner = CheckingRunner(Harness().spec)
        runner.fail_at_step = 5
        engine = make_engine(runner)
        deaths: list[BaseException] = []
        engine.on_death = deaths.append
        engine.start()
        results = await asyncio.gather(
            *(collect(engine, spec("y" * (i + 1), max_tokens=100)) for i in range(4)), return_exceptions=True
        )
        assert [type(result) for result in results] == [EngineDeadError] * 4
        assert engine.is_dead
        assert not engine.is_ready
        assert [str(death) for death in deaths] == ["planted fault"]
        with pytest.raises(EngineDeadError):
            await collect(engine, spec("late"))
        await engine.stop()

    asyncio.run(main())


def test_a_request_that_fails_alone_takes_no_other_request_with_it() -> None:
    async def main() -> None:
        engine = make_engine(FaultyRunner(Harness().spec))
        engine.start()
        good = [spec("z" * (i + 1)) for i in range(3)]
        results = await asyncio.gather(
            collect(engine, spec("bad", first=666)),
            *(collect(engine, s) for s in good),
            return_exceptions=True,
        )
        assert isinstance(results[0], RequestFailedError)
        assert results[1:] == [expected_tokens(s.prompt_token_ids, 8) for s in good]
        await until_idle(engine)
        assert engine.stats.numerical_faults_total == 1
        assert engine.stats.pools["global"].used == 0
        await engine.stop()

    asyncio.run(main())


def test_drain_lets_streams_finish_within_its_grace_and_refuses_new_ones() -> None:
    async def main() -> None:
        engine = make_engine()
        engine.start()
        running = asyncio.create_task(collect(engine, spec("short")))
        endless = asyncio.create_task(collect(engine, spec("endless stream", max_tokens=1000)))
        await asyncio.sleep(0.01)
        drain = asyncio.create_task(engine.drain(0.2))
        await asyncio.sleep(0)
        with pytest.raises(EngineDrainingError):
            await collect(engine, spec("new"))
        await drain
        assert len(await running) == 8
        result = (await asyncio.gather(endless, return_exceptions=True))[0]
        assert isinstance(result, EngineDrainingError)
        await until_idle(engine)
        await engine.stop()

    asyncio.run(main())


def test_outputs_are_token_outputs_of_one_step_each() -> None:
    async def main() -> None:
        engine = make_engine()
        engine.start()
        outputs = [output async for output in engine.generate(spec("steps"))]
        assert all(isinstance(output, TokenOutput) for output in outputs)
        assert [len(output.token_ids) for output in outputs] == [1] * 8
        await engine.stop()

    asyncio.run(main())
