"""What the server says of itself: models, health, version, documentation and metrics; unknown paths and other
methods."""

from tests.corpus.exchange import Exchange, get, request_bytes

ASSETS = ("/docs/swagger-ui.css", "/docs/swagger-ui-bundle.js", "/docs/favicon.png", "/docs/start.js")
POST_ONLY = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/embeddings",
    "/v1/decisions",
    "/tokenize",
    "/detokenize",
)
UNKNOWN = (
    ("GET", "/"),
    ("GET", "/nope"),
    ("POST", "/v1/x"),
    ("POST", "/v1/completions/"),
    ("GET", "//v1/models"),
    ("GET", "/redoc"),
    ("GET", "/docs/other.js"),
    ("GET", "/v1/messages/other"),
    ("GET", "/v1/responses/resp_1"),
    ("GET", "/v1/models/"),
    ("GET", "/V1/models"),
    ("GET", "/%2e%2e/etc/passwd"),
    ("GET", "/" + "a" * 300),
)
OTHER_METHODS = (
    ("DELETE", "/v1/models"),
    ("POST", "/health"),
    ("PUT", "/metrics"),
    ("HEAD", "/v1/models"),
    ("HEAD", "/health"),
    ("OPTIONS", "/v1/completions"),
    ("PATCH", "/version"),
    ("BREW", "/v1/completions"),
)


def any_method(method: str, path: str) -> Exchange:
    return Exchange(f"{method} {path[:60]}", request_bytes(method, path))


def models(name: str) -> list[Exchange]:
    """``name``: a model that is served."""
    return [
        get("/v1/models"),
        get(f"/v1/models/{name}"),
        get("/v1/models/other", "an unknown model"),
        get("/v1/models/a/b%2Fc", "an unknown model with slashes"),
    ]


def health() -> list[Exchange]:
    return [get(path) for path in ("/health", "/health/live", "/health/ready", "/version", "/health?a=b")]


def documents() -> list[Exchange]:
    return [get(path) for path in ("/openapi.json", "/docs", *ASSETS)]


def metrics() -> list[Exchange]:
    return [get("/metrics")]


def paths() -> list[Exchange]:
    return [
        *(any_method(method, path) for method, path in UNKNOWN),
        *(any_method(method, path) for method, path in OTHER_METHODS),
        *(any_method("GET", path) for path in POST_ONLY),
    ]
