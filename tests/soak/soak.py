"""Rounds of random load with a look at the books after each. Calm rounds, in which nobody leaves, must
balance exactly; in rough ones clients leave at random moments."""

import asyncio
import random
import time
from dataclasses import dataclass, field
from typing import Any

from tests.http.cache.tiny_server import COMPLETIONS, TOLERANCE
from tests.soak.books import Books
from tests.soak.client import Reply, send
from tests.soak.server_process import CACHE_TOKENS, Samples, ServerProcess
from tests.soak.workload import Job, Workload, steady_prompts

NUM_CLIENTS = 24
ROUND_SECONDS = 15.0
MAX_TOKENS = 100
# Short answers, many requests: what a process comes to hold (arenas, garbage between full collections)
# depends on their number.
WARM_UP_MAX_TOKENS = 6
IDLE_SECONDS = 2.0
MAX_MEMORY_GROWTH = 0.02
# Below this margin between the two likeliest tokens the rounding of another batch may decide.
SAFE_MARGIN = 1e-2


@dataclass(slots=True)
class Summary:
    seed: int
    num_requests: int = 0
    num_finished: int = 0
    num_left: int = 0
    num_refused: int = 0
    num_repeats: int = 0
    generated_tokens: int = 0
    preemptions: float = 0
    evictions: float = 0
    cached_share: float = 0
    demand: float = 0
    memory_before: int = 0
    memory_after: int = 0

    @property
    def memory_growth(self) -> float:
        return self.memory_after / self.memory_before - 1

    def line(self) -> str:
        return (
            f"soak: {self.num_requests} requests, {self.num_finished} finished, {self.num_left} left early, "
            f"{self.num_refused} refused, {self.num_repeats} greedy repeats; {self.generated_tokens} tokens, "
            f"{self.cached_share:.0%} of prompts cached, {self.preemptions:.0f} preemptions, "
            f"{self.evictions:.0f} evictions, demand {self.demand:.1f} times the "
            f"cache; memory {self.memory_before / 2**20:.1f} to {self.memory_after / 2**20:.1f} MiB "
            f"({self.memory_growth:+.2%}); seed {self.seed}"
        )


@dataclass(slots=True)
class Entry:
    request_id: str
    job: Job
    reply: Reply
    usage: dict[str, Any] | None
    reasons: list[str]


@dataclass(slots=True)
class Soak:
    server: ServerProcess
    seed: int
    summary: Summary = field(init=False)
    # bodies and their answers
    steady: list[tuple[dict[str, Any], dict[str, Any]]] = field(init=False, default_factory=list)
    _demand: list[int] = field(init=False, default_factory=list)
    _wanted: int = field(init=False, default=0)  # tokens that requests in flight may come to hold

    def __post_init__(self) -> None:
        self.summary = Summary(self.seed)

    async def run(self, warm_up_seconds: float, seconds: float) -> Summary:
        """Raises AssertionError with the first thing found wrong."""
        await self._learn_steady_answers()
        self.server.new_records()
        await self._rounds("warm-up", warm_up_seconds, WARM_UP_MAX_TOKENS)
        start = self.server.samples()
        self.summary = Summary(self.seed, memory_before=self.server.resident_bytes)
        await self._rounds("load", seconds, MAX_TOKENS)
        end = self.server.samples()
        summary = self.summary
        summary.memory_after = self.server.resident_bytes
        summary.preemptions = _grown(start, end, "preemptions_total")
        summary.evictions = _grown(start, end, "kv_cache_evicted_blocks_total")
        summary.cached_share = _grown(start, end, "prompt_tokens_cached_total") / _grown(
            start, end, "prompt_tokens_total"
        )
        summary.demand = sum(self._demand) / len(self._demand) / CACHE_TOKENS
        assert summary.preemptions > 0, "the load was too light to preempt anything"
        assert summary.evictions > 0, "the load was too light to evict anything"
        assert summary.memory_growth < MAX_MEMORY_GROWTH, summary.line()
        return summary

    async def _learn_steady_answers(self) -> None:
        """The answers of the steady requests, alone; those whose tokens hang by a thread are left out."""
        for body in steady_prompts():
            answer = (
                await send(self.server.port, COMPLETIONS, Job(COMPLETIONS, body).encoded, "steady", None)
            ).json
            tops = [
                sorted(top.values(), reverse=True) for top in answer["choices"][0]["logprobs"]["top_logprobs"]
            ]
            if all(len(top) > 1 and top[0] - top[1] > SAFE_MARGIN for top in tops):
                self.steady.append((body, answer))
        assert len(self.steady) >= 3, "too few answers to repeat"

    async def _rounds(self, name: str, seconds: float, max_tokens: int) -> None:
        """Rough and calm rounds in turn, an even number of about ROUND_SECONDS each."""
        count = 2 * max(1, round(seconds / ROUND_SECONDS / 2))
        for index in range(count):
            await self._round(f"{self.seed}-{name}-{index}", seconds / count, max_tokens, calm=index % 2 == 1)

    async def _round(self, name: str, seconds: float, max_tokens: int, *, calm: bool) -> None:
        before = self.server.samples()
        deadline = time.monotonic() + seconds
        async with asyncio.TaskGroup() as group:
            clients = [
                group.create_task(
                    self._client(
                        f"{name}-{i}", deadline, Workload(f"{name}-{i}", calm=calm, max_tokens=max_tokens)
                    )
                )
                for i in range(NUM_CLIENTS)
            ]
        after = await self._wait_until_idle()
        records = self.server.new_records()
        books = Books()
        entries = [entry for client in clients for entry in client.result()]
        for entry in entries:
            books.enter(
                entry.job, entry.reply, entry.usage, entry.reasons, records.pop(entry.request_id, None)
            )
        assert not records, "requests in the log that nobody sent"
        assert books.are_exact or not calm
        books.compare(before, after)
        self.summary.num_requests += len(entries)
        self.summary.num_finished += books.num_finished
        self.summary.num_left += books.num_left
        self.summary.num_refused += sum(books.rejections.values())
        self.summary.generated_tokens += books.generated_tokens

    async def _client(self, name: str, deadline: float, workload: Workload) -> list[Entry]:
        """One request after the other until the deadline."""
        entries: list[Entry] = []
        choose = random.Random(name)
        while time.monotonic() < deadline:
            request_id = f"{name}-{len(entries)}"
            steady = choose.random() < 0.15
            if steady:
                body, expected = choose.choice(self.steady)
                entry = await self._send(Job(COMPLETIONS, body, (len(body["prompt"]),)), request_id)
                assert_repeats(entry.reply.json, expected)
                self.summary.num_repeats += 1
            else:
                entry = await self._send(workload.next(), request_id)
            entries.append(entry)
        last = workload.last()
        if last is not None:
            entries.append(await self._send(last, f"{name}-{len(entries)}"))
        return entries

    async def _send(self, job: Job, request_id: str) -> Entry:
        wanted = 0
        if job.rejection is None:
            wanted = (
                sum(length + job.body["max_tokens"] for length in job.prompt_lengths or (20,))
                * job.sequences_per_prompt
            )
        self._wanted += wanted
        self._demand.append(self._wanted)
        reply = await send(self.server.port, job.path, job.encoded, request_id, job.leave)
        self._wanted -= wanted
        usage, reasons = check_reply(job, reply)
        return Entry(request_id, job, reply, usage, reasons)

    async def _wait_until_idle(self) -> Samples:
        """The metrics, twice in a row without any request in them and without a used block."""
        deadline = time.monotonic() + IDLE_SECONDS
        quiet = 0
        while quiet < 2:
            samples = self.server.samples()
            busy = {key: value for key, value in samples.items() if _is_busy(key) and value}
            quiet = 0 if busy else quiet + 1
            assert time.monotonic() < deadline, f"not idle after all clients are gone: {busy}"
            await asyncio.sleep(0.1)
        return samples


def _is_busy(key: tuple[str, frozenset[tuple[str, str]]]) -> bool:
    name, labels = key
    if name == "kv_cache_blocks":
        return ("state", "used") in labels
    if name == "http_requests_in_flight":
        return ("route", "/metrics") not in labels
    return name in ("requests_running", "requests_waiting", "streams_active")


def _grown(before: Samples, after: Samples, name: str) -> float:
    return sum(after[key] - before.get(key, 0) for key in after if key[0] == name)


def check_reply(job: Job, reply: Reply) -> tuple[dict[str, Any] | None, list[str]]:
    """The last usage that the client saw, and the reasons of finished choices; asserts what every answer must
    hold."""
    if reply.left:
        streamed = reply.events if reply.status == 200 and job.body.get("stream") else []
        return (streamed[-1]["usage"] if streamed else None), []
    assert reply.status == job.status, (job, reply)
    if job.rejection is not None:
        assert set(reply.json) == {"error"}
        return None, []
    if job.body.get("stream"):
        assert reply.body.endswith(b"\n\ndata: [DONE]\n\n"), (job, reply.body[-300:])
        events = reply.events
        assert not any("error" in event for event in events), (job, events[-1])
        pieces = [choice for event in events for choice in event["choices"]]
        usage: dict[str, Any] = events[-1]["usage"]
    else:
        pieces, usage = reply.json["choices"], reply.json["usage"]
    reasons = [piece["finish_reason"] for piece in pieces if piece["finish_reason"] is not None]
    num_answers = job.num_choices * len(job.prompt_lengths or (0,))
    assert len(reasons) == num_answers, (job, reasons)
    assert set(reasons) <= {"stop", "length"}
    assert usage["completion_tokens"] <= job.body["max_tokens"] * num_answers, (job, usage)
    if job.prompt_lengths is not None:
        assert usage["prompt_tokens"] == sum(job.prompt_lengths), (job, usage)
    return usage, reasons


def assert_repeats(answer: dict[str, Any], expected: dict[str, Any]) -> None:
    got, wanted = answer["choices"][0], expected["choices"][0]
    for name in ("text", "finish_reason"):
        assert got[name] == wanted[name], (got, wanted)
    assert got["logprobs"]["tokens"] == wanted["logprobs"]["tokens"]
    pairs = zip(got["logprobs"]["token_logprobs"], wanted["logprobs"]["token_logprobs"], strict=True)
    assert all(abs(a - b) < TOLERANCE for a, b in pairs), (got, wanted)
    assert answer["usage"]["completion_tokens"] == expected["usage"]["completion_tokens"]
