"""The table of rules through OpenAI's clients for Python and Node and through litellm, streamed and not: each sees exactly what the
same request gets in one piece over raw HTTP, in the shape that it documents."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.http.clients.adapters import CHAT, COMPLETIONS, Adapter, LiteLLM
from tests.http.clients.rules import RULES, Rule
from tests.http.clients.seen import Seen
from tests.http.live_server import LiveServer

TABLE = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
PATHS = {COMPLETIONS: "/v1/completions", CHAT: "/v1/chat/completions"}


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("rule", RULES, ids=[f"{number}-{rule.ids.replace(' ', '-')}" for number, rule in enumerate(RULES)])
def test_a_rule_is_seen(client: Adapter, wire: LiveServer, rule: Rule, streamed: bool) -> None:
    body = {name: value for name, value in rule.body.items() if name != "stream_options"}
    reference = wire.post(PATHS[rule.kind], body)
    assert reference.status_code == 200, reference.text
    if streamed:
        chunks = client.stream(wire.url, rule.kind, {"stream_options": {"include_usage": True}, **rule.body})
    else:
        chunks = [client.ask(wire.url, rule.kind, body)]
    seen = Seen(rule.kind, streamed, chunks)
    assert seen.says() == Seen(rule.kind, False, [reference.json()]).says()
    rule.check(seen)
    if client.keeps_chunks:
        rule.shape(seen)
