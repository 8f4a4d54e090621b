"""With keys, every route but the probes needs one of them, in whatever way its path is written; keys are
nowhere shown."""

import logging
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from server.http.api_keys import api_keys
from server.settings.settings import Settings, SettingsError
from tests.http.live_server import LiveServer, error_of, live_server

COMPLETIONS = "/v1/completions"
KEYS = ("first-key", "zweiter-schlüssel")
FILE = "# of the batch jobs\n  third-key  \n\nfourth-key\n"
PROBES = {"/health", "/health/live", "/health/ready"}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(FILE)
    with live_server(api_key=KEYS, api_key_file=file) as live:
        yield live


def test_every_route_but_the_probes_needs_a_key(guarded: LiveServer) -> None:
    routes = set(guarded.app.openapi()["paths"])
    assert {COMPLETIONS, "/v1/models", "/metrics", "/tokenize"} | PROBES <= routes
    odd = {
        "/openapi.json",
        "/docs",
        "/nope",
        "//v1/completions",
        "/v1/completions/",
        "/V1/models",
        "/health/",
        "/health/live/x",
    }
    for path in sorted(routes | odd):
        for method in ("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE"):
            status = guarded.client.request(method, guarded.url + path).status_code
            if path in PROBES:
                assert status in (200, 405)
            else:
                assert status == 401, (method, path)


@pytest.mark.parametrize(
    "target",
    [
        "/v1/../health",
        "/health/../metrics",
        "/metrics?x=/health",
        "/metrics#/health",
        "/%6detrics",
        "/health%2f..%2fmetrics",
    ],
)
def test_a_path_in_disguise_needs_one_too(guarded: LiveServer, target: str) -> None:
    """Sent as it is: clients would tidy it up."""
    with socket.create_connection(("127.0.0.1", guarded.port), timeout=60) as connection:
        connection.sendall(f"GET {target} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode())
        assert connection.recv(65536).startswith(b"HTTP/1.1 401 ")


@pytest.mark.parametrize(
    ("value", "status"),
    [
        (b"Bearer first-key", 200),
        (b"bearer first-key", 200),
        (b"Bearer  first-key", 200),
        ("Bearer zweiter-schlüssel".encode(), 200),
        (b"Bearer third-key", 200),
        (b"Bearer fourth-key", 200),
        (b"Bearer # of the batch jobs", 401),
        (b"Bearer first-ke", 401),
        (b"Bearer first-keyy", 401),
        (b"Bearer \xff\xfe", 401),
        (b"Bearer", 401),
        (b"Basic first-key", 401),
        (b"", 401),
    ],
)
def test_keys_are_compared_whole(guarded: LiveServer, value: bytes, status: int) -> None:
    response = guarded.client.get("/v1/models", headers=[(b"authorization", value)])
    assert response.status_code == status
    if status == 401:
        assert response.headers["www-authenticate"] == "Bearer"
        assert error_of(response)["code"] == "invalid_api_key"


def test_keys_are_compared_in_constant_time(guarded: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every one of them, whichever matches, by their digests."""
    compared: list[tuple[bytes, bytes]] = []

    def compare(left: bytes, right: bytes) -> bool:
        compared.append((left, right))
        return left == right

    monkeypatch.setattr("server.http.middleware.hmac.compare_digest", compare)
    for key in ("first-key", "fourth-key", "none-of-them"):
        compared.clear()
        guarded.client.get("/v1/models", headers={"authorization": f"Bearer {key}"})
        assert len(compared) == 4
        assert {len(value) for pair in compared for value in pair} == {32}


def test_two_keys_in_one_request_are_refused(guarded: LiveServer) -> None:
    headers = [("authorization", "Bearer first-key")] * 2
    assert guarded.client.get("/v1/models", headers=headers).status_code == 401


def test_a_missing_key_has_no_code_and_is_counted(guarded: LiveServer) -> None:
    response = guarded.post(COMPLETIONS, {"prompt": "a"})
    assert response.status_code == 401
    assert error_of(response)["code"] is None
    guarded.client.headers["authorization"] = "Bearer first-key"
    assert guarded.metric("request_rejections_total", endpoint="completions", reason="unauthorized") >= 1
    del guarded.client.headers["authorization"]


def test_keys_stand_in_no_log(guarded: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        for key in ("first-key", "third-key", "wrong-key"):
            headers = {"authorization": f"Bearer {key}"}
            guarded.client.get("/v1/models", headers=headers)
            guarded.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1}, headers=headers)
            guarded.post(COMPLETIONS, {"prompt": "a", "max_tokens": -1}, headers=headers)
    assert caplog.records
    own = [
        record.getMessage() for record in caplog.records if not record.name.startswith(("httpx", "httpcore"))
    ]
    assert not [message for message in own if "-key" in message]


@pytest.mark.parametrize("content", [b"", b"\n \n# none yet\n", b"\xff\xfe"])
def test_a_file_without_a_key_ends_the_start_instead_of_opening_the_server(
    tmp_path: Path, content: bytes
) -> None:
    file = tmp_path / "keys"
    file.write_bytes(content)
    with pytest.raises(SettingsError, match="--api-key-file"):
        api_keys(Settings(api_key_file=file))
    with pytest.raises(SettingsError, match="--api-key-file"):
        Settings(api_key_file=tmp_path / "missing")
