"""One request of the load: its prompt, its stream, its times. Prompts are lists of random token ids, so every
server computes the same tokens and no prefix repeats unless asked for."""

import json
import random
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import httpx

from server.settings.settings import SettingsError

BOS = 2
FIRST_ID, LAST_ID = 2000, 60_000  # plain word pieces of Gemma's vocabulary
TOKENS_PER_RECORD = 12  # the least that a record of the constraint takes


@dataclass(frozen=True, slots=True)
class Workload:
    """What is asked of a server; counts are in tokens."""

    prompt_tokens: int = 128
    output_tokens: int = 128
    shared_prefix: int = 0
    temperature: float = 0.0
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1 or self.output_tokens < 1:
            raise SettingsError("bench: --prompt-tokens and --output-tokens must be at least 1")
        if not 0 <= self.shared_prefix < self.prompt_tokens:
            raise SettingsError(
                f"--shared-prefix {self.shared_prefix} leaves no room in a prompt of {self.prompt_tokens} "
                "tokens, BOS included"
            )

    def values(self) -> dict[str, object]:
        return asdict(self)

    def prompts(self) -> Iterator[list[int]]:
        """An endless row of prompts that depends on the workload alone."""
        draw = random.Random(self.seed)

        def ids(count: int) -> list[int]:
            return [draw.randrange(FIRST_ID, LAST_ID) for _ in range(count)]

        head = [BOS, *ids(self.shared_prefix)]
        while True:
            yield head + ids(self.prompt_tokens - len(head))

    def body(self, model: str, prompt: list[int]) -> dict[str, object]:
        body: dict[str, object] = {
            "model": model,
            "prompt": prompt,
            "max_tokens": self.output_tokens,
            "temperature": self.temperature,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.top_p is not None:
            body["top_p"] = self.top_p
        return body


def constraint(output_tokens: int) -> dict[str, object]:
    """A schema for a request of so many tokens: records of the usual kinds of values, in an array that cannot
    end before."""
    values: dict[str, object] = {
        "name": {"type": "string", "maxLength": 40},
        "kind": {"enum": ["animal", "plant", "mineral", "idea"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 1000},
        "weight": {"type": "number"},
        "known": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{2,8}$"}, "maxItems": 3},
    }
    record = {"type": "object", "properties": values, "required": list(values), "additionalProperties": False}
    schema = {"type": "array", "items": record, "minItems": output_tokens // TOKENS_PER_RECORD + 1}
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "records", "schema": schema}}}


@dataclass(frozen=True, slots=True)
class RequestResult:
    """Times in seconds. ``error`` is set on failure, and the other values are then without meaning."""

    time_to_first_token: float = 0.0
    time_per_output_token: float | None = None  # None when one token alone came
    num_output_tokens: int = 0
    error: str | None = None


async def send(client: httpx.AsyncClient, url: str, body: dict[str, object]) -> RequestResult:
    """Stream one completion to its end. A fault of the server or the wire is a result, not an exception."""
    started = time.perf_counter()
    first = last = 0.0
    num_chunks = 0
    completion_tokens: int | None = None
    finished = False
    try:
        async with client.stream("POST", url, json=body) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode("utf-8", errors="replace")
                return RequestResult(error=f"status {response.status_code}: {text[:200]}")
            async for line in response.aiter_lines():
                if not line.startswith("data:"):
                    continue
                data = line[5:].strip()
                if data == "[DONE]":
                    finished = True
                    break
                event = json.loads(data)
                if "error" in event:
                    return RequestResult(error=f"error event: {data[:200]}")
                usage = event.get("usage")
                if usage:
                    completion_tokens = usage.get("completion_tokens")
                if event.get("choices"):
                    last = time.perf_counter()
                    first = first or last
                    num_chunks += 1
    except (httpx.HTTPError, ValueError) as error:
        return RequestResult(error=f"{type(error).__name__}: {error}")
    if not finished or not num_chunks:
        return RequestResult(error="the stream ended without " + ("[DONE]" if num_chunks else "a token"))
    num_tokens = num_chunks if completion_tokens is None else completion_tokens
    return RequestResult(
        time_to_first_token=first - started,
        time_per_output_token=(last - first) / (num_tokens - 1) if num_tokens > 1 else None,
        num_output_tokens=num_tokens,
    )
