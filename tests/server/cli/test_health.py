"""``gemserve health``: its exit code is what container probes read."""

import pytest

from server.__main__ import main
from tests.server.cli.fake_server import fake_server


def test_ready_server_gives_0(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server() as server:
        assert main(["health", "--url", server.url + "/"]) == 0
    assert '"ready"' in capsys.readouterr().out


def test_loading_server_gives_1_but_is_alive(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server(ready=False) as server:
        assert main(["health", "--url", server.url]) == 1
        assert "weights" in capsys.readouterr().err
        assert main(["health", "--live", "--url", server.url]) == 0


def test_the_port_is_that_of_the_servers_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with fake_server() as server:
        monkeypatch.setenv("GEMSERVE_PORT", server.url.rpartition(":")[2])
        assert main(["health"]) == 0
    assert '"ready"' in capsys.readouterr().out


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:1", "127.0.0.1:8000", "http://127.0.0.1:port", "ftp://127.0.0.1"]
)
def test_no_answer_and_no_address_give_1(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["health", "--url", url]) == 1
    assert "not ready" in capsys.readouterr().err
