"""The server that these tests share."""

from collections.abc import Iterator

import pytest

from tests.http.live_server import LiveServer, live_server


@pytest.fixture(scope="session")
def server() -> Iterator[LiveServer]:
    with live_server() as live:
        yield live
