"""Documents that follow a schema, drawn at temperature 1 by many clients at once, and what becomes of them:
each is complete, and then parses and validates, or was cut at the limit of its length."""

import asyncio
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import jsonschema

from tests.documents.schemas import CASES, Case

SHOWN_FAULTS = 10
MAX_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Document:
    schema: str
    seed: int
    text: str
    finish_reason: str
    num_tokens: int
    fault: str | None  # why a complete one is not what was asked for

    @property
    def outcome(self) -> str:
        return (
            "invalid"
            if self.fault is not None
            else "complete"
            if self.finish_reason == "stop"
            else self.finish_reason
        )


@dataclass(slots=True)
class Summary:
    seconds: float
    documents: list[Document] = field(default_factory=list)

    def counts(self) -> Counter[str]:
        return Counter(document.outcome for document in self.documents)

    def faults(self) -> list[Document]:
        return [document for document in self.documents if document.outcome not in ("complete", "length")]

    def lines(self) -> Iterator[str]:
        """One per schema, the faults, and the sum."""
        for name in CASES:
            of_schema = [document for document in self.documents if document.schema == name]
            counts = Counter(document.outcome for document in of_schema)
            num_texts = len({document.text for document in of_schema})
            yield f"{name:<24}{_counted(counts)}, {num_texts} different"
        for document in self.faults()[:SHOWN_FAULTS]:
            yield (
                f"{document.schema}, seed {document.seed}: {document.fault or document.finish_reason}: "
                f"{document.text!r}"
            )
        tokens = sum(document.num_tokens for document in self.documents)
        yield (
            f"documents: {len(self.documents)} over {len(CASES)} schemas: {_counted(self.counts())}; "
            f"{tokens} tokens in {self.seconds:.0f} s"
        )


def _counted(counts: Counter[str]) -> str:
    rest = [
        f"{count} {outcome}"
        for outcome, count in counts.items()
        if outcome not in ("complete", "length", "invalid")
    ]
    return ", ".join(
        [
            f"{counts['complete']} complete",
            f"{counts['length']} length",
            f"{counts['invalid']} invalid",
            *rest,
        ]
    )


async def run(
    url: str,
    count: int,
    *,
    concurrency: int,
    max_tokens: int = MAX_TOKENS,
    seed: int = 0,
    progress: Callable[[str], None] = print,
) -> Summary:
    """``count`` documents, the schemas in turn; every second one is streamed."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    summary = Summary(0.0)
    numbers = iter(range(count))
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=3600, limits=limits, trust_env=False) as client:

        async def worker() -> None:
            for number in numbers:
                name = list(CASES)[number % len(CASES)]
                body = _body(CASES[name], seed + number, max_tokens, stream=number // len(CASES) % 2 == 1)
                summary.documents.append(await _document(client, name, body))
                if len(summary.documents) % 100 == 0:
                    progress(f"{len(summary.documents)} of {count}: {_counted(summary.counts())}")

        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(worker())
    summary.seconds = loop.time() - began
    return summary


def _body(case: Case, seed: int, max_tokens: int, *, stream: bool) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": f"Describe {case.subject} in JSON."}],
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "document", "schema": case.schema},
        },
        "temperature": 1,
        "top_p": 1,
        "top_k": 0,
        "seed": seed,
        "max_tokens": max_tokens,
        "stream": stream,
        **({"stream_options": {"include_usage": True}} if stream else {}),
    }


async def _document(client: httpx.AsyncClient, name: str, body: dict[str, Any]) -> Document:
    response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, f"{name}: status {response.status_code}: {response.text[:400]}"
    text, reason, num_tokens = _streamed(response.text) if body["stream"] else _whole(response.json())
    fault = fault_of(text, CASES[name].schema) if reason == "stop" else None
    return Document(name, body["seed"], text, reason, num_tokens, fault)


def _whole(answer: dict[str, Any]) -> tuple[str, str, int]:
    choice = answer["choices"][0]
    return choice["message"]["content"], choice["finish_reason"], answer["usage"]["completion_tokens"]


def _streamed(events: str) -> tuple[str, str, int]:
    datas = [line.removeprefix("data: ") for line in events.splitlines() if line.startswith("data: ")]
    assert datas.pop() == "[DONE]", events[-400:]
    chunks = [json.loads(data) for data in datas]
    assert not any("error" in chunk for chunk in chunks), datas[-1]
    usage = chunks.pop()["usage"]
    text = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
    return text, chunks[-1]["choices"][0]["finish_reason"], usage["completion_tokens"]


# -- what is valid -------------------------------------------------------------------------------------------

_FORMATS = jsonschema.FormatChecker(formats=["date", "uuid", "ipv4", "ipv6", "email"])
_TIME = re.compile(
    r"([01]\d|2[0-3]):[0-5]\d:([0-5]\d|60)(\.\d+)?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)", re.IGNORECASE | re.ASCII
)
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", re.IGNORECASE | re.ASCII)


def _is_time(value: object) -> bool:
    """RFC 3339."""
    return not isinstance(value, str) or _TIME.fullmatch(value) is not None


def _is_date_time(value: object) -> bool:
    """RFC 3339."""
    if not isinstance(value, str):
        return True
    return _FORMATS.conforms(value[:10], "date") and value[10:11] in ("T", "t") and _is_time(value[11:])


def _is_hostname(value: object) -> bool:
    """RFC 1123."""
    return not isinstance(value, str) or (
        len(value) <= 253 and all(_LABEL.fullmatch(label) for label in value.split("."))
    )


_FORMATS.checks("time")(_is_time)
_FORMATS.checks("date-time")(_is_date_time)
_FORMATS.checks("hostname")(_is_hostname)


def fault_of(text: str, schema: dict[str, Any]) -> str | None:
    """Why a text is no document of a schema; formats are asserted. None: it is one."""
    try:
        jsonschema.Draft202012Validator(schema, format_checker=_FORMATS).validate(json.loads(text))
    except ValueError as error:
        return f"does not parse: {error}"
    except jsonschema.ValidationError as error:
        return str(error.message)
    return None
