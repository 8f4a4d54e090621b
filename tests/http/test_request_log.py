"""What a running server logs of requests: one line for each that ended, figures while there is work, never a
prompt."""

import json
import logging
import re

import pytest

from server.observability.logs import JsonFormatter
from tests.http.live_server import LiveServer, live_server

LINE = re.compile(
    r"cmpl-[0-9a-f]{32} request_id=abc completions length prompt_tokens=(\d+) generated_tokens=3 "
    r"ttft=\d+\.\d{3} seconds=\d+\.\d{3}"
)


def test_a_finished_request_is_one_line_in_both_forms(
    server: LiveServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gemserve.request")
    server.client.post(
        "/v1/completions", json={"prompt": "secret words", "max_tokens": 3}, headers={"x-request-id": "abc"}
    ).raise_for_status()
    server.wait_for(lambda: bool(caplog.records), seconds=60)
    (record,) = [entry for entry in caplog.records if "request_id=abc" in entry.getMessage()]
    match = LINE.fullmatch(record.getMessage())
    assert match is not None, record.getMessage()
    entry = json.loads(JsonFormatter().format(record))
    told = {
        name: entry[name]
        for name in ("request_id", "endpoint", "stream", "outcome", "prompt_tokens", "generated_tokens")
    }
    assert told == {
        "request_id": "abc",
        "endpoint": "completions",
        "stream": False,
        "outcome": "length",
        "prompt_tokens": int(match[1]),
        "generated_tokens": 3,
    }
    assert 0 <= entry["ttft_seconds"] <= entry["seconds"]
    assert "trace_id" not in entry


def test_neither_prompts_nor_answers_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with live_server() as server:
        texts = [
            server.complete(prompt="Zanzibar", max_tokens=8, stop=["Xylophon"])["choices"][0]["text"],
            server.chat(messages=[{"role": "user", "content": "Zanzibar"}], max_tokens=8)["choices"][0][
                "message"
            ]["content"],
        ]
        server.refused("/v1/completions", {"prompt": "Zanzibar", "max_tokens": -1})
        server.refused("/v1/chat/completions", {"messages": [{"role": "Zanzibar", "content": "Zanzibar"}]})
        server.refused("/v1/completions", {"prompt": "a", "structured_outputs": {"regex": "Zanzibar("}})
    logged = "\n".join(
        JsonFormatter().format(record) for record in caplog.records if record.name.startswith("gemserve")
    )
    assert "gemserve.request" in logged
    assert not any(text in logged for text in ("Zanzibar", "Xylophon", *texts))


def test_a_busy_server_logs_its_figures(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gemserve.stats")
    with live_server(log_stats_interval=0.05) as server:
        server.complete(prompt="a", max_tokens=8)
        server.wait_for(
            lambda: any(record.name == "gemserve.stats" for record in list(caplog.records)), seconds=60
        )
