"""Sends the requests of a batch, so many at a time, and writes down each answer as it comes. Refusals for
overload and broken connections are tried again; what is wrong with a request is its answer. A server that is
gone ends the run, which can then be started again."""

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from model.interface.errors import ModelError
from server.batch.files import BatchInput, BatchOutput, BatchRequest

# How often a request is sent over connections that break, and how long refusals for overload are waited out.
MAX_ATTEMPTS = 5
MAX_OVERLOADED_SECONDS = 600.0
_RETRIED = frozenset({429, 503})


class ServerGoneError(ModelError):
    """The server does not answer any more. What was answered is written down."""


@dataclass(slots=True)
class BatchResult:
    """Of this run; ``num_before`` lines had their answer already."""

    num_before: int
    num_succeeded: int = 0
    num_failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def count_usage(self, body: object) -> None:
        usage = body.get("usage") if isinstance(body, dict) else None
        if isinstance(usage, dict):
            self.prompt_tokens += _number(usage, "prompt_tokens", "input_tokens")
            self.completion_tokens += _number(usage, "completion_tokens", "output_tokens")


def _number(usage: dict[str, Any], *names: str) -> int:
    """Of the names that the APIs have for it, the one that is there."""
    return next((usage[name] for name in names if isinstance(usage.get(name), int)), 0)


async def run_batch(
    client: httpx.AsyncClient,
    batch: BatchInput,
    output: BatchOutput,
    *,
    concurrency: int,
    progress: Callable[[BatchResult], None] = lambda result: None,
) -> BatchResult:
    """``client`` has the server's address. Raises ServerGoneError and BatchFileError."""
    result = BatchResult(num_before=len(output.done))
    before = frozenset(output.done)
    waiting = (request for request in batch.requests() if request.custom_id not in before)
    try:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(concurrency):
                tasks.create_task(_work(client, waiting, output, result, progress))
    except* ModelError as errors:
        raise errors.exceptions[0] from None
    return result


async def _work(
    client: httpx.AsyncClient,
    waiting: Iterator[BatchRequest],
    output: BatchOutput,
    result: BatchResult,
    progress: Callable[[BatchResult], None],
) -> None:
    """One request after the other, of those that nobody took yet."""
    for request in waiting:
        try:
            answer = await _send(client, request)
        except httpx.ReadTimeout:
            output.write(
                request.custom_id,
                None,
                {"code": "request_timeout", "message": "The server did not answer in time."},
            )
            result.num_failed += 1
        else:
            try:
                body = answer.json()
            except ValueError:
                body = answer.text
            request_id = answer.headers.get("x-request-id", "")
            output.write(
                request.custom_id,
                {"status_code": answer.status_code, "request_id": request_id, "body": body},
                None,
            )
            if answer.is_success:
                result.num_succeeded += 1
                result.count_usage(body)
            else:
                result.num_failed += 1
        progress(result)


async def _send(client: httpx.AsyncClient, request: BatchRequest) -> httpx.Response:
    """Raises httpx.ReadTimeout and ServerGoneError."""
    num_attempts, waited = 0, 0.0
    # As the file has it, a number such as NaN and half a character too: what is wrong with it the server
    # says.
    content = json.dumps(request.body).encode("ascii")
    while True:
        try:
            answer = await client.post(
                request.url, content=content, headers={"content-type": "application/json"}
            )
        except httpx.ReadTimeout:
            raise
        except httpx.RequestError as error:
            num_attempts += 1
            if num_attempts == MAX_ATTEMPTS:
                raise ServerGoneError(
                    f"the server at {client.base_url} does not answer ({type(error).__name__}: {error}); "
                    f"run the same command again to go on"
                ) from None
            await asyncio.sleep(0.2 * 2**num_attempts)
            continue
        if answer.status_code not in _RETRIED:
            return answer
        if waited >= MAX_OVERLOADED_SECONDS:
            raise ServerGoneError(
                f"the server at {client.base_url} has answered {answer.status_code} for {waited:.0f} "
                "seconds; run the same command again to go on"
            )
        pause = _retry_after(answer)
        waited += pause
        await asyncio.sleep(pause)


def _retry_after(answer: httpx.Response) -> float:
    try:
        return min(60.0, max(0.1, float(answer.headers.get("retry-after", "1"))))
    except ValueError:
        return 1.0
