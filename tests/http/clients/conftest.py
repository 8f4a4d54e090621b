"""One server for all clients, with a key, and two that refuse: one whose queue is full, one that has no model
yet."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from tests.fakes import FakeRunner, fake_engine_factory
from tests.http.clients.adapters import KEY, Adapter, LiteLLM, OpenAINode, OpenAIPython
from tests.http.clients.texts import TEXTS
from tests.http.live_server import LiveServer, live_server
from tests.scripted import scripted_server

# What litellm itself does: schemas and dumps that pydantic complains of, sockets and loops that it leaves
# open.
LITELLM_WARNINGS = (
    "ignore:.*`ReadOnly` qualifier:UserWarning",
    "ignore:Pydantic serializer warnings:UserWarning",
    "ignore:Accessing the 'model_:DeprecationWarning",
    "ignore:unclosed:ResourceWarning",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent and "litellm" in item.nodeid:
            for warning in LITELLM_WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(warning))


def _holds(live: LiveServer, count: int) -> bool:
    """Whether so many requests run or wait."""
    return live.metric("requests_running") + live.metric("requests_waiting") == count


@pytest.fixture(scope="session")
def wire() -> Iterator[LiveServer]:
    """Says the text of the request's seed, see ``texts``; other seeds draw. Refuses fields that it does not
    know: whatever a client sends of its own must be one that it does."""
    with scripted_server(TEXTS, api_key=(KEY,), strict_params=True) as live:
        live.client.headers["authorization"] = f"Bearer {KEY}"
        yield live


@pytest.fixture(scope="module")
def busy() -> Iterator[LiveServer]:
    """One request runs and one waits, for as long as the tests do, so that every other one is refused."""
    endless = {"prompt": "a", "max_tokens": 8000, "stream": True}
    factory = fake_engine_factory(FakeRunner(step_delay=0.25), max_model_len=8192, max_num_seqs=1)
    with live_server(factory, max_queued_requests=1) as live, ExitStack() as held:
        for count in (1, 2):
            held.enter_context(live.open_request(endless))
            live.wait_for(partial(_holds, live, count))
        yield live


@pytest.fixture(scope="module")
def loading() -> Iterator[LiveServer]:
    release = threading.Event()

    def load() -> None:
        release.wait()

    with live_server(fake_engine_factory(before_load=load), wait=False) as live:
        yield live
        release.set()
        live.wait_for(lambda: live.client.get("/health/ready").status_code == 200)


@pytest.fixture(scope="session")
def node() -> Iterator[OpenAINode]:
    client = OpenAINode()
    yield client
    client.close()


@pytest.fixture(scope="session", params=["openai-python", "openai-node", "litellm"])
def client(request: pytest.FixtureRequest) -> Iterator[Adapter]:
    if request.param == "openai-python":
        python = OpenAIPython()
        yield python
        python.close()
    elif request.param == "litellm":
        yield LiteLLM()
    else:
        yield request.getfixturevalue("node")
