"""The table of rules through OpenAI's clients for Python and Node and through litellm, streamed and not: each
sees exactly what the same request gets in one piece over raw HTTP, in the shape that it documents."""

import re
from pathlib import Path

import pytest

from server.api.generation import endpoint, event_stream
from tests.fakes import FakeRunner, fake_engine_factory
from tests.http.clients.adapters import CHAT, COMPLETIONS, Adapter
from tests.http.clients.rules import RULES, Rule, rule
from tests.http.clients.seen import Seen
from tests.http.clients.test_errors import REFUSALS
from tests.http.live_server import LiveServer, live_server

TABLE = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
PATHS = {COMPLETIONS: "/v1/completions", CHAT: "/v1/chat/completions"}


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    "asked", RULES, ids=[f"{number}-{item.ids.replace(' ', '-')}" for number, item in enumerate(RULES)]
)
def test_a_rule_is_seen(client: Adapter, wire: LiveServer, asked: Rule, streamed: bool) -> None:
    body = {name: value for name, value in asked.body.items() if name != "stream_options"}
    reference = wire.post(PATHS[asked.kind], body)
    assert reference.status_code == 200, reference.text
    if streamed:
        chunks = client.stream(
            wire.url, asked.kind, {"stream_options": {"include_usage": True}, **asked.body}
        )
    else:
        chunks = [client.ask(wire.url, asked.kind, body)]
    seen = Seen(asked.kind, streamed, chunks)
    raw = Seen(asked.kind, False, [reference.json()]).says()
    assert client.comparable(seen.says(), asked.kind, streamed) == client.comparable(
        raw, asked.kind, streamed
    )
    if asked.kind == COMPLETIONS and "logprobs" in asked.body and streamed and not client.keeps_chunks:
        return  # see LiteLLM.comparable
    asked.check(seen)
    if client.keeps_chunks:
        asked.shape(seen)


@pytest.mark.parametrize("kind", [COMPLETIONS, CHAT])
def test_comments_of_an_idle_stream_are_not_seen(
    client: Adapter, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_stream, "KEEP_ALIVE_SECONDS", 0.05)
    monkeypatch.setattr(endpoint, "KEEP_ALIVE_SECONDS", 0.05)
    body = rule(kind=kind, temperature=0, max_tokens=2).body
    with live_server(fake_engine_factory(FakeRunner(step_delay=0.3))) as slow:
        chunks = client.stream(slow.url, kind, {**body, "stream_options": {"include_usage": True}})
        raw = slow.post(PATHS[kind], body).json()
    assert Seen(kind, True, chunks).says() == Seen(kind, False, [raw]).says()


def test_the_readme_says_which_rules_clients_see() -> None:
    """And which they can't: none is left out."""
    table, _, section = TABLE.partition("## Through the clients")
    rules = set(re.findall(r"^\| ([A-Z]\d+) \|", table, re.M))
    rows = {
        test: set(ids.split(", "))
        for ids, test in re.findall(r"^\| ([A-Z]\d+(?:, [A-Z]\d+)*) \| (.*) \|$", section, re.M)
    }
    unseen = set(re.findall(r"[A-Z]\d+", section.partition("Not seen:")[2])) - {"L1", "H5"}
    assert len(rules) > 90
    assert set().union(*rows.values()) == rules - unseen
    assert rows["`http/clients/test_rules.py::test_a_rule_is_seen`"] == {
        name for rule in RULES for name in rule.ids.split()
    }
    assert rows["`http/clients/test_errors.py::test_a_refusal_is_the_clients_exception`"] == {
        name for refusal in REFUSALS for name in refusal.ids.split()
    }
