"""What stands in front of a body: hostile and odd requests in HTTP's own terms, headers that mean something,
and hosts."""

import json
from typing import Any

from tests.corpus.exchange import Exchange, get, post, request_bytes

PATH = "/v1/completions"
BODY = {"prompt": "The city", "max_tokens": 2, "temperature": 0}
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
CONTENT = json.dumps(BODY).encode()
MAX_BODY_BYTES = 16 * 1024 * 1024


def complete(name: str, headers: dict[str, str], **fields: Any) -> Exchange:
    return post(PATH, name, {**BODY, **fields}, headers)


def chunked(*pieces: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in (*pieces, b""))


def not_http() -> list[Exchange]:
    return [
        Exchange("a header of 70 kB", HEAD + b"x-a: " + b"a" * 70_000 + b"\r\n\r\n"),
        Exchange("300 headers", HEAD + b"a: b\r\n" * 300 + b"\r\n"),
        Exchange("a line of 70 kB", b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n"),
        Exchange("a line that does not end", b"GET /" + b"a" * 70_000),
        get("/health", "120 headers of 400 characters", {f"x-{number}": "a" * 400 for number in range(120)}),
        Exchange("zeros", b"\x00\x01\x02\r\n\r\n"),
        Exchange("a method alone", b"GET\r\n\r\n"),
        Exchange("blanks in a method", b"G E T / HTTP/1.1\r\n\r\n"),
        Exchange("bytes that are no text", b"\xff" * 100),
        Exchange("an unknown version", b"GET /health HTTP/9.9\r\nhost: localhost\r\n\r\n"),
        Exchange("two lengths", HEAD + b"content-length: 5\r\ncontent-length: 6\r\n\r\nabcdef"),
        Exchange("a length that is none", HEAD + b"content-length: many\r\n\r\n"),
        Exchange(
            "a length beside chunks",
            HEAD + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        ),
        Exchange("chunks without a size", HEAD + b"transfer-encoding: chunked\r\n\r\nxyz\r\n"),
        Exchange(
            "a control character in a header", b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: a\x00b\r\n\r\n"
        ),
        Exchange("a folded header", b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: a\r\n b\r\n\r\n"),
    ]


def odd_http() -> list[Exchange]:
    request = request_bytes("POST", PATH, BODY)
    return [
        Exchange("HTTP/1.0", request.replace(b"HTTP/1.1", b"HTTP/1.0")),
        Exchange("HTTP/1.0 without a host", b"GET /version HTTP/1.0\r\n\r\n"),
        Exchange(
            "a streamed answer in HTTP/1.0",
            request_bytes("POST", PATH, {**BODY, "stream": True}).replace(b"/1.1", b"/1.0"),
        ),
        Exchange("chunks", HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunked(CONTENT[:9], CONTENT[9:])),
        Exchange("two requests at once", request + request, num_answers=2),
        Exchange("a refused one before another", request_bytes("POST", PATH, b"{") + request, num_answers=2),
        Exchange(
            "a stream before another",
            request_bytes("POST", PATH, {**BODY, "stream": True}) + request,
            num_answers=2,
        ),
        Exchange("lines in front of it", b"\r\n\r\n" + request),
        Exchange(
            "100-continue",
            request.replace(b"\r\nhost", b"\r\nexpect: 100-continue\r\nhost", 1),
            num_answers=2,
        ),
        get("/health", "a wish to close", {"connection": "close"}),
        get("/health", "a wish for a web socket", {"connection": "upgrade", "upgrade": "websocket"}),
        get("http://localhost/version", "a whole address"),
        get("/version#part", "a part of a page"),
    ]


def bodies() -> list[Exchange]:
    """What is read before JSON's fields are."""
    texts = {
        "no JSON": b"{",
        "an empty body": b"",
        "a list": b"[]",
        "null": b"null",
        "no UTF-8": b"\xff\xfe",
        "a byte order mark": b"\xef\xbb\xbf{}",
        "NaN": b'{"prompt": "a", "temperature": NaN}',
        "a number without end": b'{"prompt": "a", "temperature": 1e999}',
        "5000 digits": b'{"prompt": "a", "n": ' + b"1" * 5000 + b"}",
        "65 levels": b'{"prompt": "a", "metadata": {"a": ' + b"[" * 63 + b"]" * 63 + b"}}",
        "50000 levels": b"[" * 50_000,
        "a key twice": b'{"prompt": "a", "max_tokens": 1, "max_tokens": 3, "temperature": 0}',
    }
    kinds = ("text/plain", "application/x-www-form-urlencoded", "Application/JSON; charset=utf-8", "")
    return [
        *(post(PATH, name, content) for name, content in texts.items()),
        *(post(PATH, f"content type {kind!r}", BODY, {"content-type": kind}) for kind in kinds),
        Exchange(
            "no content type",
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n\r\n{}",
        ),
        Exchange("neither length nor chunks", HEAD + b"\r\n"),
        Exchange("too large, as it says", HEAD + b"content-length: 500000000\r\n\r\n"),
        Exchange(
            "too large, in chunks",
            HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunked(*[b" " * 2**20] * 17),
        ),
        post(PATH, "as large as it may be", CONTENT + b" " * (MAX_BODY_BYTES - len(CONTENT))),
    ]


def headers() -> list[Exchange]:
    wrong = {"empty": "", "with a blank": "a b", "of 129 characters": "a" * 129, "not ASCII": "\xe9"}
    return [
        complete("a request id of the client's", {"x-request-id": "my-own-id"}),
        complete("the same, streamed", {"x-request-id": "my-own-id"}, stream=True),
        complete("the same, refused", {"x-request-id": "my-own-id"}, n=0),
        *(complete(f"a request id {name}", {"x-request-id": value}) for name, value in wrong.items()),
        complete(
            "a deadline that passes",
            {"x-request-timeout": "0.001"},
            prompt="late",
            max_tokens=1000,
            ignore_eos=True,
        ),
        complete(
            "the same, a stream", {"x-request-timeout": "0.001"}, prompt="later", max_tokens=1000, stream=True
        ),
        complete(
            "a deadline in the body", {}, prompt="latest", timeout=0.001, max_tokens=1000, ignore_eos=True
        ),
        complete("a generous deadline", {"x-request-timeout": "3600"}),
        *(
            complete(f"deadline {text!r}", {"x-request-timeout": text})
            for text in ("soon", "0", "-1", "1e9", "nan")
        ),
        complete("the patience of OpenAI's client", {"x-stainless-read-timeout": "600"}),
        complete(
            "headers of tracing", {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
        ),
        complete("an unknown origin", {"origin": "https://evil.example"}),
        complete("a key that nobody asks for", {"authorization": "Bearer any"}),
    ]


def hosts() -> list[Exchange]:
    names = (
        "LOCALHOST:8000",
        "127.1.2.3",
        "[::1]:8000",
        "app.localhost",
        "evil.example",
        "127.0.0.1.evil.example",
        "",
    )
    return [
        *(get("/version", f"host {name!r}", {"host": name}) for name in names),
        complete("an unknown host of a completion", {"host": "evil.example:8000"}),
        post("/v1/messages", "an unknown host of a message", {}, {"host": "evil.example"}),
        Exchange("no host", b"GET /version HTTP/1.1\r\n\r\n"),
        Exchange("two hosts", b"GET /version HTTP/1.1\r\nhost: localhost\r\nhost: evil.example\r\n\r\n"),
    ]


def exchanges() -> list[Exchange]:
    return [*not_http(), *odd_http(), *bodies(), *headers(), *hosts()]
