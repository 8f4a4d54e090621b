"""On a loopback address only loopback names are served, so that no page can reach the server under a name of
its own; and pages of other origins get no permission."""

import pytest

from server.http.host_check import host_of, is_loopback
from tests.http.live_server import LiveServer, error_of, live_server

COMPLETIONS = "/v1/completions"
BODY = {"prompt": "a", "max_tokens": 1}


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LOCALHOST:8000",
        "127.0.0.1",
        "127.0.0.1:9",
        "127.1.2.3",
        "[::1]",
        "[::1]:8000",
        "app.localhost:80",
    ],
)
def test_loopback_hosts_are_served(server: LiveServer, host: str) -> None:
    assert server.post(COMPLETIONS, BODY, headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8000",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "10.0.0.1",
        "[2001:db8::1]",
        "",
    ],
)
@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/models", "/metrics", "/health", "/nope"])
def test_other_hosts_are_refused_on_loopback(server: LiveServer, host: str, path: str) -> None:
    method = "POST" if path == COMPLETIONS else "GET"
    before = server.rejections("unauthorized")
    response = server.client.request(method, path, headers={"host": host}, json=BODY)
    assert response.status_code == 403
    error = error_of(response)
    assert error["code"] == "host_not_allowed"
    assert "--allowed-hosts" in error["message"]
    assert server.rejections("unauthorized") == before + (path == COMPLETIONS)


def test_configured_hosts_are_served() -> None:
    with live_server(allowed_hosts=("models.example", "Proxy.Example:8443")) as server:
        for host, status in (
            ("models.example", 200),
            ("MODELS.example:80", 200),
            ("proxy.example", 200),
            ("x.example", 403),
        ):
            assert server.client.get("/v1/models", headers={"host": host}).status_code == status, host


def test_elsewhere_every_host_is_served() -> None:
    with live_server(host="0.0.0.0") as server:
        assert server.client.get("/v1/models", headers={"host": "anything.example"}).status_code == 200


def test_hosts_are_read_without_port_and_brackets() -> None:
    assert [host_of(text) for text in ("A:1", "a", "[::1]:8", "::1", " b ")] == ["a", "a", "::1", "::1", "b"]
    assert not is_loopback("127.0.0.1.nip.io")
    assert not is_loopback("localhost.")


@pytest.mark.parametrize("method", ["OPTIONS", "POST", "GET"])
def test_other_origins_get_no_permission(server: LiveServer, method: str) -> None:
    headers = {
        "origin": "https://evil.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": "content-type",
    }
    response = server.client.request(method, COMPLETIONS, headers=headers, json=BODY)
    assert response.status_code == (200 if method == "POST" else 405)
    assert not [name for name in response.headers if name.startswith("access-control-")]


@pytest.mark.parametrize(
    "content_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"]
)
def test_what_a_page_may_send_without_asking_is_refused(server: LiveServer, content_type: str) -> None:
    headers = {"origin": "https://evil.example", "content-type": content_type}
    assert server.client.post(COMPLETIONS, content=b'{"prompt": "a"}', headers=headers).status_code == 400
