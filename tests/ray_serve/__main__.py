"""``python -m tests.ray_serve``: the application of deploy/ray on two Ray nodes of this machine, with a small
random model. Streams, session affinity, a node killed under open streams, the throughput that a second
replica adds, scaling down."""

import argparse
import json
import statistics
import sys
import tempfile
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from tests.deploy.replicas import wait_until
from tests.ray_serve.cluster import RayServe, Replica, ray_serve, write_model

LONG_STREAM_TOKENS = 1500  # many seconds: still open when the node dies
# Two replicas may compute on two threads of one core, so that a second one gives less than twice as much.
THROUGHPUT_CLIENTS, THROUGHPUT_TOKENS, THROUGHPUT_ROUNDS, LEAST_GAIN = 8, 60, 3, 1.2


def passed(what: str) -> None:
    print(f"ray: {what}", flush=True)


def body_of(prompt: str, max_tokens: int, **options: Any) -> dict[str, Any]:
    return {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        **options,
    }


def complete(serve: RayServe, session: str, prompt: str, max_tokens: int) -> dict[str, Any]:
    answer = serve.client.post(
        "/v1/completions", json=body_of(prompt, max_tokens), headers={"x-session-id": session}
    )
    assert answer.status_code == 200, f"{answer.status_code} {answer.text}"
    result: dict[str, Any] = answer.json()
    assert result["usage"]["completion_tokens"] == max_tokens, result["usage"]
    return result


class Stream:
    """A stream that a thread reads to its end."""

    def __init__(self, serve: RayServe, session: str, max_tokens: int) -> None:
        self.events: list[str] = []
        self.error: Exception | None = None
        self._body = body_of(
            f"{session} says", max_tokens, stream=True, stream_options={"include_usage": True}
        )
        self._serve, self._session, self._max_tokens = serve, session, max_tokens
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        try:
            with (
                httpx.Client(base_url=self._serve.client.base_url, timeout=120) as client,
                client.stream(
                    "POST", "/v1/completions", json=self._body, headers={"x-session-id": self._session}
                ) as response,
            ):
                if response.status_code != 200:
                    raise AssertionError(f"{response.status_code} {response.read().decode()}")
                for line in response.iter_lines():
                    if line:
                        self.events.append(line.removeprefix("data: "))
        except (httpx.HTTPError, AssertionError) as error:
            self.error = error

    def join(self) -> None:
        self._thread.join(timeout=300)
        assert not self._thread.is_alive(), "a stream hangs"

    @property
    def is_complete(self) -> bool:
        if self.error is not None or not self.events or self.events[-1] != "[DONE]":
            return False
        return bool(json.loads(self.events[-2])["usage"]["completion_tokens"] == self._max_tokens)


def check_streaming(serve: RayServe) -> None:
    stream = Stream(serve, "first", 50)
    stream.join()
    assert stream.is_complete, (stream.error, stream.events[-2:])
    assert len(stream.events) > 10, "the answer came in one piece"
    passed(f"a stream of 50 tokens came in {len(stream.events)} events")


def check_affinity(serve: RayServe, sessions: list[list[str]]) -> None:
    """Every later request of a session finds the beginning of its prompt in the cache of its replica."""
    for session in (session for place in sessions for session in place):
        prompt = f"{session} " + "once upon a time " * 20
        complete(serve, session, prompt, 2)
        for turn in range(3):
            usage = complete(serve, session, f"{prompt} turn {turn}", 2)["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            assert cached > 0.8 * usage["prompt_tokens"], f"{session} changed its replica: {usage}"
    passed(f"{sum(map(len, sessions))} sessions on two replicas stay where their cache is")


def throughput(serve: RayServe, replicas: list[Replica], sessions: list[str]) -> float:
    """Output tokens per second with as many requests in flight for every session, by the clock of the replica
    that computes longest: its processor time, of which other work on this machine takes nothing."""
    before = [replica.processor_seconds for replica in replicas]
    with ThreadPoolExecutor(len(sessions)) as pool:
        list(
            pool.map(lambda session: complete(serve, session, f"{session} runs", THROUGHPUT_TOKENS), sessions)
        )
    longest = max(replica.processor_seconds - start for replica, start in zip(replicas, before, strict=True))
    return len(sessions) * THROUGHPUT_TOKENS / longest


def check_throughput(serve: RayServe, replicas: list[Replica], sessions: list[list[str]]) -> None:
    one, two = [], []
    for _ in range(THROUGHPUT_ROUNDS):
        one.append(throughput(serve, replicas, sessions[0] * THROUGHPUT_CLIENTS))
        two.append(throughput(serve, replicas, (sessions[0] + sessions[1]) * THROUGHPUT_CLIENTS))
    gain = statistics.median(two) / statistics.median(one)
    passed(
        f"{statistics.median(one):.0f} tokens per second of a processor with one replica, "
        f"{gain:.2f} times that with two"
    )
    assert gain > LEAST_GAIN, f"a second replica should give more than {LEAST_GAIN} times the throughput"


def check_killed_node(serve: RayServe, sessions: list[list[str]], kept: int) -> None:
    """``kept``: index of the replica on the first node. The streams of the other one are cut."""
    going = [Stream(serve, session, LONG_STREAM_TOKENS) for session in sessions[kept]]
    cut = [Stream(serve, session, LONG_STREAM_TOKENS) for session in sessions[1 - kept]]
    wait_until(lambda: all(len(stream.events) > 5 for stream in going + cut), "all streams run")
    serve.kill_second_node()
    for stream in cut:
        stream.join()
        assert not stream.is_complete, "the stream was over before its node was killed"
        assert stream.error is not None or "error" in stream.events[-1], (
            f"the client of the cut stream sees no error: {stream.events[-2:]}"
        )
    passed(
        f"node killed: its client sees {type(cut[0].error).__name__ if cut[0].error else cut[0].events[-1]}"
    )
    for session in (session for place in sessions for session in place):
        complete(serve, session, f"{session} goes on", 2)
    passed("new requests of all sessions succeed")
    for stream in going:
        stream.join()
        assert stream.is_complete, (stream.error, stream.events[-1:])
    passed(f"the {len(going)} streams of the other node came to their end")
    serve.add_second_node()
    passed("a replacement runs on a new node")


def check_scale_down(serve: RayServe) -> None:
    """The replica that goes finishes its stream, the other one stays; nothing fails."""
    replicas = serve.replicas()
    streams = [
        Stream(serve, session, LONG_STREAM_TOKENS)
        for place in serve.sessions(replicas, 1)
        for session in place
    ]
    wait_until(lambda: all(len(stream.events) > 5 for stream in streams), "all streams run")
    serve.deploy(1)
    wait_until(lambda: serve.num_running() == 1, "one replica is told to stop")
    assert not any(stream.is_complete for stream in streams), (
        "a stream was over before a replica was told to stop"
    )
    for stream in streams:
        stream.join()
        assert stream.is_complete, (stream.error, stream.events[-1:])
    serve.wait_for_replicas(1)
    assert serve.replicas()[0] in replicas, "both replicas were replaced"
    complete(serve, "last", "the end", 2)
    passed("scaled to one replica: the streams of both came to their end")


def check(serve: RayServe) -> None:
    check_streaming(serve)
    replicas = serve.replicas()
    assert len(replicas) == 2, replicas
    sessions = serve.sessions(replicas, 2)
    check_affinity(serve, sessions)
    kept = next(i for i, replica in enumerate(replicas) if serve.is_on_head(replica))
    check_killed_node(serve, sessions, kept)
    replicas = serve.replicas()
    check_throughput(serve, replicas, serve.sessions(replicas, 1))
    check_scale_down(serve)


def main() -> int:
    argparse.ArgumentParser(prog="python -m tests.ray_serve", description=__doc__).parse_args()
    with tempfile.TemporaryDirectory(prefix="gemserve-ray-") as folder:
        try:
            with ray_serve(write_model(Path(folder) / "model")) as serve:
                check(serve)
        except Exception:
            traceback.print_exc()
            print("ray: FAILED", file=sys.stderr)
            return 1
    passed("passed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
