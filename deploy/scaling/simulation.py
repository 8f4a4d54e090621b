"""A discrete-event simulation of replicas behind a router. Every replica is our own engine with its real
scheduler and cache; only the model's step is replaced by its duration: the replica's clock moves on by what
the timing model says. Imports no torch."""

import hashlib
import heapq
import random
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from deploy.scaling.timing import Profile
from deploy.scaling.workload import Demand, SimulatedRequest, requests_of
from model.interface.running_batch import RunningBatch
from model.interface.sampling_params import SamplingParams
from model.interface.sequence_chunk import ChunkResult, StepInput, StepResult
from server.engine.core import EngineCore
from server.engine.kv.kv_manager import KVCacheManager
from server.engine.request import EngineRequest, TokenOutput
from server.engine.scheduler.scheduler import SchedulerConfig

TOKEN = 7  # what every simulated step samples
WARM_UP = EngineRequest("warm-up", (TOKEN,) * 64, SamplingParams(max_tokens=4, temperature=0.0))
VIRTUAL_NODES = 64


class Policy(StrEnum):
    """How the router picks a replica."""

    ROUND_ROBIN = "round-robin"
    LEAST_REQUESTS = "least-requests"
    TWO_CHOICES = "two-choices"  # the less loaded of two drawn at random
    # consistent hashing by group; to the next one while the chosen has twice the mean load
    AFFINITY = "affinity"


class _TimedRunner:
    """Takes no time of ours, and moves its replica's clock by the step's."""

    def __init__(self, profile: Profile) -> None:
        self.now = 0.0
        self._profile = profile

    def run(self, step: StepInput) -> StepResult:
        self.now += self._profile.timing.seconds(step, self._profile.spec)
        others = {
            i: ChunkResult() for i, chunk in enumerate(step.prefills, len(step.decodes)) if not chunk.samples
        }
        return StepResult(np.full(len(step), TOKEN), others)


class Replica:
    def __init__(self, profile: Profile) -> None:
        self.runner = _TimedRunner(profile)
        batch = RunningBatch(profile.max_num_seqs, profile.num_global_blocks - 1)
        kv = KVCacheManager(
            profile.spec, batch, profile.num_global_blocks, profile.num_local_blocks, prefix_caching=True
        )
        config = SchedulerConfig(
            profile.max_num_seqs, profile.max_num_batched_tokens, profile.capacity_tokens
        )
        self.core = EngineCore(self.runner, kv, config, clock=lambda: self.runner.now)
        self.is_stepping = False
        self.busy_seconds = 0.0
        self.http_free = 0.0  # when the event loop has the last request in the engine
        # A server in service has measured its own steps, by which it sizes those that prefill beside running
        # streams.
        self.core.add(WARM_UP)
        while self.core.has_work:
            self.core.step()


@dataclass(slots=True)
class RequestTimes:
    """Seconds of simulated time."""

    arrival: float
    first_token: float = 0.0
    finished: float = 0.0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0


@dataclass(slots=True)
class Outcome:
    demand: Demand
    num_replicas: int
    seconds: float
    times: list[RequestTimes]
    busy_share: float
    num_preemptions: int
    num_steps: int
    prompt_tokens: int = field(default=0)

    @property
    def output_tokens_per_second(self) -> float:
        return sum(times.num_output_tokens for times in self.times) / self.seconds

    @property
    def requests_per_second(self) -> float:
        return len(self.times) / self.seconds

    @property
    def cached_share(self) -> float:
        return sum(times.num_cached_tokens for times in self.times) / self.prompt_tokens

    def first_token_seconds(self, quantile: float) -> float:
        return _quantile([times.first_token - times.arrival for times in self.times], quantile)

    def token_seconds(self, quantile: float) -> float:
        """Mean time per output token after the first, of a request."""
        rows = [
            (t.finished - t.first_token) / (t.num_output_tokens - 1)
            for t in self.times
            if t.num_output_tokens > 1
        ]
        return _quantile(rows, quantile) if rows else 0.0


def _quantile(values: list[float], quantile: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(quantile * len(ordered)))]


class Router:
    """``num_open``: requests in each replica, which whoever sends and ends them keeps."""

    def __init__(self, policy: Policy, num_replicas: int, seed: int) -> None:
        self.num_open = [0] * num_replicas
        self._policy = policy
        self._draw = random.Random(seed)
        self._next = 0
        points = ((_point(f"{i}/{node}"), i) for i in range(num_replicas) for node in range(VIRTUAL_NODES))
        self._ring = sorted(points) if policy is Policy.AFFINITY else []

    def choose(self, request: SimulatedRequest) -> int:
        count = len(self.num_open)
        if self._policy is Policy.ROUND_ROBIN:
            self._next = (self._next + 1) % count
            return self._next
        if self._policy is Policy.LEAST_REQUESTS:
            least = min(self.num_open)
            return self._draw.choice([index for index in range(count) if self.num_open[index] == least])
        if self._policy is Policy.TWO_CHOICES or request.group is None:
            return min((self._draw.randrange(count) for _ in range(2)), key=self.num_open.__getitem__)
        limit = 2 * (sum(self.num_open) + 1) / count + 1
        start = bisect_left(self._ring, (_point(f"group {request.group}"), 0))
        for step in range(len(self._ring)):
            index = self._ring[(start + step) % len(self._ring)][1]
            if self.num_open[index] < limit:
                return index
        raise AssertionError("some replica has at most the mean load")


def _point(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


class Simulation:
    """Events, in order of time: a request is sent (it has no replica yet), reaches its engine, or a step of a
    replica ends."""

    def __init__(self, profile: Profile, num_replicas: int, policy: Policy, demand: Demand) -> None:
        self._demand = demand
        self._request_seconds = profile.request_seconds
        self._replicas = [Replica(profile) for _ in range(num_replicas)]
        self._router = Router(policy, num_replicas, demand.seed)
        self._requests = deque(requests_of(demand))
        self._times: dict[str, RequestTimes] = {}
        self._events: list[tuple[float, int, int | None, SimulatedRequest | None]] = []
        self._num_events = 0
        self._num_steps = 0

    def run(self) -> Outcome:
        if self._demand.clients is None:
            for request in self._requests:
                assert request.arrival is not None
                self._push(request.arrival, None, request)
            self._requests.clear()
        else:
            for _ in range(min(self._demand.clients, len(self._requests))):
                self._push(0.0, None, self._requests.popleft())
        prompt_tokens, now = 0, 0.0
        while self._events:
            now, _, index, sent = heapq.heappop(self._events)
            if index is None:
                assert sent is not None
                prompt_tokens += len(sent.prompt_token_ids)
                self._send(now, sent)
                continue
            replica = self._replicas[index]
            if sent is None:
                replica.is_stepping = False
            else:
                sampling = SamplingParams(max_tokens=sent.output_tokens, temperature=0.0)
                replica.core.add(EngineRequest(str(sent.number), sent.prompt_token_ids, sampling), now)
            if not replica.is_stepping and replica.core.has_work:
                self._step(now, index, replica)
        return Outcome(
            demand=self._demand,
            num_replicas=len(self._replicas),
            seconds=now,
            times=[self._times[name] for name in sorted(self._times, key=int)],
            busy_share=sum(replica.busy_seconds for replica in self._replicas) / (now * len(self._replicas)),
            num_preemptions=sum(replica.core.stats.preemptions_total for replica in self._replicas),
            num_steps=self._num_steps,
            prompt_tokens=prompt_tokens,
        )

    def _push(self, time: float, index: int | None, request: SimulatedRequest | None) -> None:
        self._num_events += 1  # orders events of one moment by when they were made
        heapq.heappush(self._events, (time, self._num_events, index, request))

    def _send(self, now: float, request: SimulatedRequest) -> None:
        """Requests of one replica get through its event loop one after the other."""
        self._times[str(request.number)] = RequestTimes(now)
        index = self._router.choose(request)
        self._router.num_open[index] += 1
        replica = self._replicas[index]
        replica.http_free = max(replica.http_free, now) + self._request_seconds
        self._push(replica.http_free, index, request)

    def _step(self, now: float, index: int, replica: Replica) -> None:
        """The step begins now; what it yields is there at its end, and so is the next chance to begin one."""
        replica.runner.now = now
        events = replica.core.step()
        end = replica.runner.now
        replica.busy_seconds += end - now
        replica.is_stepping = True
        self._num_steps += 1
        self._push(end, index, None)
        for request, event in events:
            assert isinstance(event, TokenOutput), event
            times = self._times[request.request_id]
            if times.num_output_tokens == 0:
                times.first_token, times.num_cached_tokens = end, event.num_cached_tokens
            times.num_output_tokens += len(event.token_ids)
            if event.finish_reason is not None:
                times.finished = end
                self._router.num_open[index] -= 1
                if self._requests and self._demand.clients is not None:
                    self._push(end, None, self._requests.popleft())


def simulate(profile: Profile, num_replicas: int, policy: Policy, demand: Demand) -> Outcome:
    return Simulation(profile, num_replicas, policy, demand).run()
