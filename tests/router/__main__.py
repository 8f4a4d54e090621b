"""``python -m tests.router``: vllm-router in front of two replicas with the tiny model. What it forwards,
what it answers for what we lack, whose cache a prefix lands in, and one replica stopped under load without a
failed request."""

import argparse
import contextlib
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from tests.deploy.replicas import Replica, replicas, wait_until
from tests.ports import free_port
from tests.tiny import write_tiny_folder

LACKING = ("/v1/rerank", "/v1/audio/speech", "/pooling")
FLAGS = ("--served-model-name", "tiny", "--kv-cache-memory", "64MiB", "--shutdown-timeout", "30")
# As docs/deployment.md says; with the router's own numbers every try of a request may go to the replica that
# was stopped. The router forgets a failure when that replica answers one of the requests that it still has,
# of which there are fewer than tries.
PATIENCE = ("--cb-failure-threshold", "2", "--retry-max-retries", "10", "--cb-timeout-duration-secs", "5")
NUM_PREFIXES, NUM_QUESTIONS, PREFIX_CHARACTERS, FIRST_TOKENS = 8, 3, 1600, 60
NUM_CLIENTS, LOAD_TOKENS, NUM_LATER_REQUESTS = 6, 100, 8


def passed(what: str) -> None:
    print(f"router: {what}", flush=True)


@contextlib.contextmanager
def running_router(program: str, workers: list[Replica], log: Path) -> Iterator[httpx.Client]:
    port = free_port()
    command = [
        program,
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--worker-urls",
        *(worker.url for worker in workers),
    ]
    command += [
        "--policy",
        "cache_aware",
        "--prometheus-port",
        str(free_port()),
        "--health-check-interval-secs",
        "1",
        *PATIENCE,
    ]
    with (
        log.open("wb") as output,
        subprocess.Popen(command, stdout=output, stderr=output) as process,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client,
    ):

        def is_up() -> bool:
            assert process.poll() is None, log.read_text(encoding="utf-8")
            with contextlib.suppress(httpx.TransportError):
                return client.get("/health").status_code == 200
            return False

        try:
            wait_until(is_up, "the router answers")
            yield client
        finally:
            process.terminate()
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()


def check_forwarding(client: httpx.Client) -> None:
    models = client.get("/v1/models")
    assert [card["id"] for card in models.json()["data"]] == ["tiny"]
    assert models.json()["data"][0]["max_model_len"] > 0
    tokens = client.post("/tokenize", json={"model": "tiny", "prompt": "Hello a"})
    assert tokens.status_code == 200, tokens.text
    assert tokens.json()["count"] == len(tokens.json()["tokens"]) > 1
    assert tokens.json()["max_model_len"] == models.json()["data"][0]["max_model_len"]
    text = client.post("/detokenize", json={"model": "tiny", "tokens": tokens.json()["tokens"]})
    assert text.json()["prompt"].endswith("Hello a"), text.text
    passed("/health, /v1/models, /tokenize and /detokenize are ours, in vLLM's shape")


def check_lacking(client: httpx.Client, workers: list[Replica]) -> None:
    """A 404 from the replica, which the router hands on at once: after a 5xx it would try others for
    minutes."""
    for path in LACKING:
        before = sum(worker.metric("http_requests_total", method="POST", status="404") for worker in workers)
        answer = client.post(
            path, json={"model": "tiny", "input": "text", "query": "text", "documents": ["text"]}
        )
        assert answer.status_code == 404, f"{path}: {answer.status_code} {answer.text}"
        assert answer.json()["error"]["code"] == "unknown_url", answer.text
        asked = (
            sum(worker.metric("http_requests_total", method="POST", status="404") for worker in workers)
            - before
        )
        assert asked == 1, f"{path}: the replicas were asked {asked:g} times"
    passed(f"404 in OpenAI's shape for {', '.join(LACKING)}, each asked for once")


def complete(client: httpx.Client, prompt: str, max_tokens: int) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, f"{answer.status_code} {answer.text}"
    result: dict[str, Any] = answer.json()
    assert result["usage"]["completion_tokens"] == max_tokens, result
    return result


def check_prefixes(client: httpx.Client, workers: list[Replica]) -> None:
    """Conversations that begin alike go to the replica that has computed their beginning. The first of each
    come at once: the router spreads those by load, so there may have to be more of them where each is over
    before the next one comes."""
    generator = random.Random(1)
    prefixes: list[str] = []

    def each_has_computed_some() -> bool:
        new = [
            "".join(generator.choices("abcdefghijklmnop ", k=PREFIX_CHARACTERS)) for _ in range(NUM_PREFIXES)
        ]
        with ThreadPoolExecutor(NUM_PREFIXES) as pool:
            list(pool.map(lambda prefix: complete(client, prefix, FIRST_TOKENS), new))
        prefixes.extend(new)
        return all(worker.num_completions > 0 for worker in workers)

    wait_until(each_has_computed_some, "each replica has computed some prefix")
    places: list[set[int]] = [set() for _ in prefixes]
    queried, hit = (
        sum(w.metric(f"prefix_cache_{what}_tokens_total") for w in workers) for what in ("queried", "hit")
    )
    for question in range(NUM_QUESTIONS):
        for place, prefix in zip(places, prefixes, strict=True):
            before = [worker.num_completions for worker in workers]
            complete(client, f"{prefix} question {question}", 2)
            place.add(next(i for i, worker in enumerate(workers) if worker.num_completions > before[i]))
    assert all(len(place) == 1 for place in places), f"a prefix was sent to several replicas: {places}"
    queried = sum(w.metric("prefix_cache_queried_tokens_total") for w in workers) - queried
    hit = sum(w.metric("prefix_cache_hit_tokens_total") for w in workers) - hit
    # the question and an unfinished block are new
    assert hit / queried > 0.9, f"hit {hit:g} of {queried:g} tokens"
    shares = [sum(place == {index} for place in places) for index in range(len(workers))]
    passed(
        f"prefixes stay with their replica ({shares[0]} and {shares[1]}); "
        f"{hit / queried:.0%} of their tokens hit"
    )


def check_stop(client: httpx.Client, workers: list[Replica]) -> None:
    """SIGTERM to one replica while clients send without a pause, until it has ended and then some more."""
    stopped = threading.Event()

    def send(client_number: int) -> int:
        """How many requests this client sent before it knew that the replica had ended."""
        num_sent = 0
        while not stopped.is_set():
            complete(client, f"{client_number}, {num_sent}: " + "once upon a time" * 4, LOAD_TOKENS)
            num_sent += 1
        for number in range(NUM_LATER_REQUESTS):
            complete(client, f"{client_number}, later, {number}: " + "once upon a time" * 4, LOAD_TOKENS)
        return num_sent

    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        clients = [pool.submit(send, number) for number in range(NUM_CLIENTS)]

        def have_both_work() -> bool:
            for sent in clients:
                assert not sent.done(), sent.result()  # which raises what went wrong
            return all(worker.metric("requests_running") > 0 for worker in workers)

        try:
            wait_until(have_both_work, "both replicas have work")
            workers[0].terminate()
            code = workers[0].process.wait(timeout=120)
            taken = workers[1].num_completions
        finally:
            stopped.set()
        num_before = sum(sent.result() for sent in clients)
    assert code == 0, f"the stopped replica ended with {code}"
    num_later = NUM_CLIENTS * NUM_LATER_REQUESTS
    taken = workers[1].num_completions - taken
    assert taken >= num_later, f"the other replica took {taken:g} requests since"
    passed(
        f"one of two replicas stopped under load: none of {num_before} requests failed, "
        f"nor of {num_later} after it"
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.router", description=__doc__)
    parser.add_argument(
        "--router",
        default=shutil.which("vllm-router", path=str(Path(sys.executable).parent)),
        help="vllm-router",
    )
    arguments = parser.parse_args()
    if arguments.router is None:
        parser.error("vllm-router is not installed: make router-test installs it")
    with tempfile.TemporaryDirectory(prefix="gemserve-router-") as name:
        folder = Path(name)
        try:
            with (
                replicas(folder, write_tiny_folder(folder / "tiny"), 2, *FLAGS) as workers,
                running_router(arguments.router, workers, folder / "router.log") as client,
            ):
                check_forwarding(client)
                check_lacking(client, workers)
                check_prefixes(client, workers)
                check_stop(client, workers)
        except Exception:
            traceback.print_exc()
            log = folder / "router.log"
            if log.exists():
                print(
                    f"router: the end of its log:\n{log.read_text(encoding='utf-8')[-3000:]}", file=sys.stderr
                )
            print("router: FAILED", file=sys.stderr)
            return 1
    passed("passed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
