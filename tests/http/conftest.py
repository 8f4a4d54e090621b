"""Servers that tests share. Tests that break or slow a server start their own."""

from collections.abc import Iterator

import pytest

from tests.http.live_server import LiveServer, live_server
from tests.http.tool_requests import TEXTS
from tests.scripted import scripted_server


@pytest.fixture(scope="session")
def server() -> Iterator[LiveServer]:
    with live_server() as live:
        yield live


@pytest.fixture(scope="session")
def strict_server() -> Iterator[LiveServer]:
    with live_server(
        strict_params=True, strict_roles=True, strict_context=True, served_model_name=("org/name", "alias")
    ) as live:
        yield live


@pytest.fixture(scope="session")
def scripted() -> Iterator[LiveServer]:
    """Says the text of the request's seed."""
    with scripted_server(TEXTS) as live:
        yield live
