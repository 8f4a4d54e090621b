"""What is sent: pieces of bytes with pauses between them. Each kind of attack is a method; ``answered`` says
that the request is whole and its head is sound, so that the server owes it an answer."""

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from server.api.generation.validation import MAX_BODY_BYTES
from tests.fuzz.bodies import encoded, mutated, valid

METHODS = (
    "GET",
    "POST",
    "PUT",
    "PATCH",
    "DELETE",
    "HEAD",
    "OPTIONS",
    "TRACE",
    "CONNECT",
    "BREW",
    "get",
    "M" * 300,
)
CONTENT_TYPES = (
    "text/plain",
    "application/x-www-form-urlencoded",
    "multipart/form-data; boundary=x",
    "",
    "application/jsonx",
    "\xff",
)
PATHS = (
    *(
        "/",
        "//v1/completions",
        "/v1/completions/",
        "/V1/completions",
        "/v1/../metrics",
        "/%2e%2e/etc/passwd",
        "/v1/models/%00",
    ),
    *(
        "/v1/models/" + "a" * 3000,
        "/\xff\xfe",
        "*",
        "http://localhost/health",
        "/health?" + "a=b&" * 500,
        "/v1%2fcompletions",
        "/%zz",
    ),
    *(
        "/v1/models/é",
        "/v1/models/%ff%fe",
        "/health#x",
        "",
        "relative",
        "/openapi.json",
        "/docs",
        "/metrics?name[]=x",
    ),
)


@dataclass(frozen=True, slots=True)
class Attack:
    """``leaves``: closes without waiting for an answer, by a reset or not."""

    kind: str
    pieces: Sequence[bytes]
    pause: float = 0.0
    leaves: bool = False
    resets: bool = False
    answered: bool = False
    is_head: bool = False  # answers have no bodies


@dataclass(frozen=True, slots=True)
class Route:
    method: str
    path: str
    schema: dict[str, Any] | None  # of the body


@dataclass(slots=True)
class Attacks:
    """An endless supply from a seed, over every route of an OpenAPI description."""

    openapi: dict[str, Any]
    seed: int
    _random: random.Random = field(init=False)
    _routes: list[Route] = field(init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._routes = [
            Route(method.upper(), path.replace("{model_id}", "tiny"), _body_schema(operation))
            for path, operations in self.openapi["paths"].items()
            for method, operation in operations.items()
        ]

    def next(self) -> Attack:
        kinds: list[tuple[int, Callable[[], Attack]]] = [
            (30, self._mutated),
            (8, self._valid),
            (10, self._flipped),
            (8, self._half),
            (4, self._slow),
            (4, self._huge_head),
            (6, self._broken_text),
            (6, self._wrong_type),
            (8, self._wrong_method),
            (6, self._wrong_path),
            (6, self._wrong_length),
            (6, self._broken_chunks),
            (6, self._pipelined),
            (4, self._junk),
            (4, self._upgrade),
            (2, self._large),
        ]
        weights, makers = zip(*kinds, strict=True)
        maker: Callable[[], Attack] = self._random.choices(makers, weights)[0]
        return maker()

    def _route(self) -> Route:
        """Those with bodies more often: there is more to them."""
        with_body = [route for route in self._routes if route.schema is not None]
        return self._random.choice(with_body if self._random.random() < 0.8 else self._routes)

    def _body(self, route: Route) -> Any:
        if route.schema is None:
            return {}
        return copy.deepcopy(valid(route.schema, self.openapi["components"]["schemas"], self._random))

    def _request(
        self, route: Route, body: bytes, *headers: str, content_type: str = "application/json"
    ) -> bytes:
        """Whole and sound but for its body. The time in the header keeps what is valid by chance from running
        on."""
        lines = [
            f"{route.method} {route.path} HTTP/1.1",
            "host: localhost",
            f"content-type: {content_type}",
            f"content-length: {len(body)}",
            "x-request-timeout: 2",
            "connection: close",
            *headers,
        ]
        return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body

    def _valid(self) -> Attack:
        route = self._route()
        leaves = self._random.random() < 0.3
        request = self._request(route, encoded(self._body(route)))
        return Attack(
            "valid", [request], leaves=leaves, resets=self._random.random() < 0.5, answered=not leaves
        )

    def _mutated(self) -> Attack:
        route = self._route()
        body = self._body(route)
        for _ in range(self._random.choice((1, 1, 2, 5))):
            body = mutated(body, self._random)
        request = self._request(route, encoded(body))
        return Attack("mutated", [request], answered=len(request) < MAX_BODY_BYTES)

    def _flipped(self) -> Attack:
        """Bytes of a whole request are changed, doubled or lost, in its head as well as in its body."""
        route = self._route()
        request = bytearray(self._request(route, encoded(self._body(route))))
        for _ in range(self._random.choice((1, 2, 8))):
            place = self._random.randrange(len(request))
            match self._random.randrange(4):
                case 0:
                    request[place] = self._random.randrange(256)
                case 1:
                    del request[place : place + self._random.randint(1, 20)]
                case 2:
                    request[place:place] = request[place : place + 20]
                case _:
                    request[place:place] = self._random.choice(
                        (b"\r\n", b"\n", b"\0", b":", b" ", b"\r", b"\xff")
                    )
            if not request:
                break
        return Attack("flipped", [bytes(request)])

    def _half(self) -> Attack:
        route = self._route()
        request = self._request(route, encoded(self._body(route)))
        cut = self._random.randrange(len(request))
        leaves = self._random.random() < 0.7  # the others wait until the server closes
        return Attack("half", [request[:cut]], leaves=leaves, resets=self._random.random() < 0.5)

    def _slow(self) -> Attack:
        route = self._route()
        request = self._request(route, encoded(self._body(route)))
        cuts = sorted(self._random.sample(range(len(request)), k=6))
        pieces = [request[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(request)], strict=True)]
        pause = self._random.choice((0.01, 0.05, 0.4))  # the last one is slower than the server waits
        return Attack("slow", pieces, pause, answered=pause < 0.1)

    def _huge_head(self) -> Attack:
        choose = self._random
        match choose.randrange(4):
            case 0:
                head = (
                    "GET /health HTTP/1.1\r\nhost: localhost\r\n"
                    f"x-a: {'a' * choose.choice((60_000, 70_000, 500_000))}\r\n\r\n"
                )
            case 1:
                head = (
                    "GET /health HTTP/1.1\r\nhost: localhost\r\n"
                    + "x-a: b\r\n" * choose.choice((200, 300, 5000))
                    + "\r\n"
                )
            case 2:
                head = f"GET /{'a' * choose.choice((60_000, 200_000))} HTTP/1.1\r\nhost: localhost\r\n\r\n"
            case _:
                head = "GET /health HTTP/1.1\r\nhost: localhost\r\n" + "a" * 70_000
        return Attack("huge head", [head.encode()])

    def _broken_text(self) -> Attack:
        """Bodies that are no UTF-8 or no JSON, cut or deep."""
        route, choose = self._route(), self._random
        body = encoded(self._body(route))
        place = choose.randrange(len(body) + 1)
        match choose.randrange(5):
            case 0:
                body = (
                    body[:place]
                    + choose.choice((b"\xff\xfe", b"\xc3", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80"))
                    + body[place:]
                )
            case 1:
                body = body[:place]
            case 2:
                opening = choose.choice((b"[", b'{"a":', b'{"prompt":['))
                body = opening * choose.choice((70, 1000, 200_000))
            case 3:
                body = choose.choice(
                    (
                        b"\xef\xbb\xbf" + body,
                        body.decode().encode("utf-16"),
                        body + body,
                        b"\0" * 100,
                        b" " * 100_000,
                    )
                )
            case _:
                body = choose.choice((b"NaN", b"null", b"[]", b"5", b'"x"', b"{", b"", b"{}", b"\xff\xfe"))
        return Attack("broken text", [self._request(route, body)], answered=True)

    def _wrong_type(self) -> Attack:
        route = self._route()
        request = self._request(
            route, encoded(self._body(route)), content_type=self._random.choice(CONTENT_TYPES)
        )
        return Attack("wrong type", [request], answered=True)

    def _wrong_method(self) -> Attack:
        method = self._random.choice(METHODS)
        route = Route(method, self._route().path, None)
        return Attack("wrong method", [self._request(route, b"{}")], is_head=method == "HEAD")

    def _wrong_path(self) -> Attack:
        route = Route(self._random.choice(("GET", "POST")), self._random.choice(PATHS), None)
        return Attack("wrong path", [self._request(route, b"{}")])

    def _wrong_length(self) -> Attack:
        route, choose = self._route(), self._random
        body = encoded(self._body(route))
        length = choose.choice(
            (
                "-1",
                "0",
                str(len(body) + 5),
                str(len(body) // 2),
                "1e3",
                "99999999999999999999",
                "abc",
                "",
                "+5",
                "0x10",
            )
        )
        head = self._request(route, b"").replace(b"content-length: 0", b"content-length: " + length.encode())
        if choose.random() < 0.3:
            head = head.replace(b"host:", b"content-length: 3\r\nhost:")
        if choose.random() < 0.3:
            head = head.replace(b"host:", b"transfer-encoding: chunked\r\nhost:")
        return Attack("wrong length", [head + body])

    def _broken_chunks(self) -> Attack:
        route, choose = self._route(), self._random
        body = encoded(self._body(route))
        coding = choose.choice(
            ("chunked", "chunked, chunked", "gzip", "gzip, chunked", "identity", "xchunked")
        )
        head = self._request(route, b"", f"transfer-encoding: {coding}").replace(
            b"content-length: 0\r\n", b""
        )
        size = choose.choice(
            (
                f"{len(body):x}",
                f"{len(body) + 3:x}",
                "ffffffffffffffffffff",
                "-5",
                "g",
                "",
                f"{len(body):x};ext={'a' * 500}",
            )
        )
        end = choose.choice((b"\r\n0\r\n\r\n", b"\r\n0\r\n", b"0\r\n\r\n", b"\r\n0\r\nx: y\r\n\r\n", b""))
        return Attack("broken chunks", [head + size.encode() + b"\r\n" + body + end])

    def _pipelined(self) -> Attack:
        pieces = []
        for _ in range(self._random.randint(2, 30)):
            route = self._route()
            request = self._request(route, encoded(self._body(route))).replace(b"connection: close\r\n", b"")
            pieces.append(request)
        if self._random.random() < 0.5:
            pieces.append(self._junk().pieces[0])
        return Attack("pipelined", [b"".join(pieces)], leaves=self._random.random() < 0.3)

    def _junk(self) -> Attack:
        choose = self._random
        size = choose.choice((1, 10, 1000, 70_000))
        junk = choose.choice(
            (
                choose.randbytes(size),
                b"\r\n" * size,
                b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + choose.randbytes(size),
            )
        )
        return Attack("junk", [junk], leaves=choose.random() < 0.3)

    def _upgrade(self) -> Attack:
        route = self._route()
        headers = self._random.choice(
            (
                (
                    "upgrade: websocket",
                    "connection: upgrade",
                    "sec-websocket-version: 13",
                    "sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==",
                ),
                ("upgrade: h2c", "connection: upgrade, http2-settings", "http2-settings: AAMAAABkAAQAAP__"),
                ("expect: 100-continue",),
                ("expect: 200-ok",),
                ("te: trailers", "trailer: x"),
            )
        )
        request = self._request(route, encoded(self._body(route)), *headers).replace(
            b"connection: close\r\n", b""
        )
        version = self._random.choice(
            (b"HTTP/1.1", b"HTTP/1.0", b"HTTP/0.9", b"HTTP/2.0", b"HTTP/1.99", b"HTTX/1.1")
        )
        return Attack("upgrade", [request.replace(b"HTTP/1.1", version, 1)])

    def _large(self) -> Attack:
        """Close to the limit of a body or beyond it."""
        route, choose = self._route(), self._random
        size = choose.choice((1 << 20, 17 << 20))
        body = choose.choice(
            (b'{"prompt":"' + b"a" * size, b"[" + b"1," * (size // 2), b'{"prompt":[' + b"[]," * (size // 8))
        )
        return Attack("large", [self._request(route, body)])


def _body_schema(operation: dict[str, Any]) -> dict[str, Any] | None:
    schema: dict[str, Any] | None = (
        operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    )
    return schema
