"""What two answers of one server to one request may differ in, and all of it: ids, times, durations, and what
follows from them. Each gives way to a placeholder. Everything else is compared byte by byte."""

import hashlib
import json
import math
import re
from dataclasses import dataclass

from tests.corpus.wire import Answer

# Ids. Each gets a number where it first appears in an exchange, so that one that comes twice is known again.
_PREFIX = rb"(?:cmpl-|chatcmpl-|resp_|msg_|fc_|call_|toolu_|embd-|dec_)"
_ID_IN_BODY = re.compile(rb'(?<=")' + _PREFIX + rb'[0-9a-f]{32}(?=")|(?<="request_id":")[0-9a-f]{32}(?=")')
_ID_HEADERS = ("x-request-id", "request-id")
_ID_IN_HEADER = re.compile(_PREFIX + rb"?[0-9a-f]{32}")

# Fields of JSON whose numbers are times or durations; null stays null.
_TIMES = ("created", "created_at", "completed_at")
_DURATIONS = ("queue_ms", "prefill_ms", "decode_ms", "prefill_tokens_per_second", "decode_tokens_per_second")
_TIMED_FIELDS = re.compile(rb'(?<!\\)("(?:%s)":)[0-9.e+-]+' % "|".join((*_TIMES, *_DURATIONS)).encode())
# A stream says so while it waits for its next token.
_KEEP_ALIVE = b": keep-alive\n\n"

# Headers that are a time or a duration as a whole; those of files tell when their package was installed.
_TIMED_HEADERS = ("date", "openai-processing-ms", "last-modified", "etag")
_TIMING_HEADER = "server-timing"
_DURATION = re.compile(r"(?<=;dur=)[0-9.]+")

# Worked out from how fast work has been leaving the queue.
_BUSY_STATUSES = (429, 503)
_BUSY_CODE = b'"server_overloaded"'

# Of /metrics only the names and labels of the samples, as a set: not their values and order, nor the commit
# of the server. The probe that waits for the start is answered with 503 or not.
_METRICS_TYPE = "text/plain; version=0.0.4"
_SAMPLE_VALUE = re.compile(r"^([a-z][^ {]*(?:\{.*\})?) \S+$", re.MULTILINE)
_COMMIT = re.compile(r'(?<=commit=")[^"]*')
_PROBE = 'gemserve_http_requests_total{method="GET",route="/health/ready",status="503"}'

# A long body that is neither JSON nor events, a script of the documentation, is kept as its digest.
_LONGEST_BODY = 20_000


@dataclass(frozen=True, slots=True)
class NormalAnswer:
    """An answer in which nothing is left that may differ. As text: bytes that are no UTF-8 stand as
    escapes."""

    status_line: str
    headers: tuple[tuple[str, str], ...]
    body: str


def normal_answers(answers: list[Answer], *, is_interleaved: bool) -> list[NormalAnswer]:
    """The answers of one exchange."""
    ids: dict[bytes, bytes] = {}
    return [_normal_answer(answer, ids, is_interleaved) for answer in answers]


def _normal_answer(answer: Answer, ids: dict[bytes, bytes], is_interleaved: bool) -> NormalAnswer:
    body = answer.body
    content_type = answer.header("content-type")
    is_stream = content_type.startswith("text/event-stream")
    if is_stream:
        body = body.replace(_KEEP_ALIVE, b"")
        body = _by_choice(body) if is_interleaved else body
    if is_stream or content_type.startswith("application/json"):
        body = _ID_IN_BODY.sub(lambda match: _numbered(match[0], ids), body)
        body = _TIMED_FIELDS.sub(rb"\1<time>", body)
    elif content_type.startswith(_METRICS_TYPE):
        body = _series(body.decode()).encode()
    elif len(body) > _LONGEST_BODY:
        body = f"<{len(body)} bytes, SHA-256 {hashlib.sha256(body).hexdigest()}>".encode()
    is_changed = body != answer.body
    headers = tuple(
        (name, _normal_header(name.lower(), value, answer, ids, is_changed)) for name, value in answer.headers
    )
    return NormalAnswer(answer.status_line, headers, body.decode("utf-8", "backslashreplace"))


def _normal_header(name: str, value: str, answer: Answer, ids: dict[bytes, bytes], is_changed: bool) -> str:
    """``is_changed``: there are placeholders in the body, whose length is then as much a matter of chance as
    they are."""
    if name in _TIMED_HEADERS:
        return "<time>"
    if name == _TIMING_HEADER:
        return _DURATION.sub("<time>", value)
    if name in _ID_HEADERS:
        found = value.encode("latin-1")
        return _ID_IN_HEADER.sub(lambda match: _numbered(match[0], ids), found).decode("latin-1")
    if name == "content-length" and is_changed and int(value) == len(answer.body):
        return "<length of the body>"
    if name == "retry-after" and answer.status in _BUSY_STATUSES and _BUSY_CODE in answer.body:
        return "<time>"
    return value


def _numbered(found: bytes, ids: dict[bytes, bytes]) -> bytes:
    prefix = found[:-32]
    return ids.setdefault(found, b"%s<id %d>" % (prefix, len(ids) + 1))


def _by_choice(body: bytes) -> bytes:
    """The events of a stream, those of the first choice first; behind them those that belong to no choice, as
    they came."""
    events = body.split(b"\n\n")
    events.sort(key=_choice_of)
    return b"\n\n".join(events)


def _choice_of(event: bytes) -> float:
    choices = json.loads(event.removeprefix(b"data: "))["choices"] if event.startswith(b'data: {"id"') else []
    return choices[0]["index"] if choices else math.inf


def _series(text: str) -> str:
    """The lines of a scrape as a set, each without its value."""
    lines = {_COMMIT.sub("<commit>", line) for line in _SAMPLE_VALUE.sub(r"\1", text).splitlines()}
    return "\n".join(sorted(lines - {_PROBE}))
