"""/metrics: every name, type, label and bucket, what the numbers mean, and a scrape that waits for nobody."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from server.observability import metrics
from server.observability.engine_metrics import EngineCollector
from server.observability.metrics import ROUTES, route_template
from tests.fakes import BOS, HANG, FakeRunner, fake_engine_factory
from tests.http.live_server import LiveServer, live_server

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"

TTFT = "0.001 0.0025 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.15 0.25 0.5 0.75 1 2.5 5 10 20 40 80"
ITL = "0.0005 0.001 0.002 0.003 0.005 0.0075 0.01 0.015 0.02 0.03 0.05 0.075 0.1 0.15 0.25 0.5 1 2.5 5"
DURATION = "0.01 0.025 0.05 0.1 0.25 0.5 1 2 5 10 20 30 60 120 300 600"
PHASE = "0.001 0.005 0.01 0.025 0.05 0.1 0.25 0.5 1 2.5 5 10 30 60"
SIZES = "1 2 5 10 20 50 100 200 500 1000 2000 5000 10000 20000 50000 100000 131072"
POWERS = " ".join(str(2**i) for i in range(15))
STREAMS = {"stream": {"true", "false"}}
ENDPOINTS = {"endpoint": set(metrics.ENDPOINTS.values())}
POOLS = {"pool": {"global", "local"}}
KINDS = {"kind": {"prefill", "decode", "mixed"}}
ANY: set[str] = set()

GAUGES: dict[str, dict[str, set[str]]] = {
    "build_info": {"version": ANY, "commit": ANY, "python": ANY, "torch": ANY},
    "model_info": dict.fromkeys(
        ("model", "architecture", "dtype", "quantization", "max_model_len", "fingerprint"), ANY
    ),
    "cache_config_info": dict.fromkeys(("block_size", "num_gpu_blocks", "kv_dtype", "prefix_caching"), ANY),
    "startup_duration_seconds": {"phase": {"import", "weights", "compile", "warmup"}},
    "tensor_parallel_size": {},
    "ready": {},
    "draining": {},
    "engine_last_step_timestamp_seconds": {},
    "http_requests_in_flight": {"route": set(ROUTES)},
    "streams_active": {},
    "requests_running": {},
    "requests_waiting": {},
    "requests_waiting_oldest_age_seconds": {},
    "queue_limit_requests": {},
    "running_limit_requests": {},
    "kv_cache_usage_ratio": POOLS,
    "kv_cache_blocks": {**POOLS, "state": {"used", "cached", "free"}},
    "kv_cache_capacity_tokens": POOLS,
    "memory_bytes": {"kind": {"weights", "kv_cache", "device_free"}},
}
COUNTERS: dict[str, dict[str, set[str]]] = {
    "http_requests": {"method": ANY, "route": ANY, "status": ANY},
    "requests": {
        **ENDPOINTS,
        **STREAMS,
        "outcome": {"stop", "length", "tool_calls", "client_disconnect", "timeout", "shutdown", "error"},
    },
    "request_rejections": {
        **ENDPOINTS,
        "reason": {
            *(
                "invalid",
                "context_length",
                "model_not_found",
                "unauthorized",
                "queue_full",
                "token_budget",
                "draining",
            ),
            *("not_ready", "too_large"),
        },
    },
    "choices": {"finish_reason": {"stop", "length", "tool_calls"}},
    "prompt_tokens": {},
    "prompt_tokens_cached": {},
    "prefill_tokens": {},
    "generation_tokens": {},
    "engine_steps": KINDS,
    "engine_busy_seconds": {},
    "engine_host_seconds": {"stage": {"schedule", "sample", "detokenize"}},
    "preemptions": {},
    "prefix_cache_queried_tokens": {},
    "prefix_cache_hit_tokens": {},
    "prefix_cache_limited": POOLS,
    "kv_cache_evicted_blocks": POOLS,
    "kv_cache_recycled_blocks": {},
    "spec_decode_drafts": {},
    "spec_decode_draft_tokens": {},
    "spec_decode_accepted_tokens": {},
    "spec_decode_accepted_tokens_per_position": {},  # a series for each position that was ever drafted
    "structured_output_requests": {"kind": {"json", "regex", "choice", "grammar", "calls"}},
    "numerical_faults": {},
    "memory_faults": {},
}
HISTOGRAMS: dict[str, tuple[dict[str, set[str]], str]] = {
    "http_request_duration_seconds": ({"route": set(ROUTES)}, DURATION),
    "request_prompt_tokens": ({}, SIZES),
    "request_generation_tokens": ({}, SIZES),
    "request_max_tokens": ({}, SIZES),
    "time_to_first_token_seconds": (STREAMS, TTFT),
    "inter_token_latency_seconds": ({}, ITL),
    "request_time_per_output_token_seconds": ({}, ITL),
    "request_duration_seconds": ({**ENDPOINTS, **STREAMS}, DURATION),
    "request_queue_seconds": ({}, PHASE),
    "request_prefill_seconds": ({}, PHASE),
    "request_decode_seconds": ({}, PHASE),
    "request_inference_seconds": ({}, PHASE),
    "engine_step_duration_seconds": (KINDS, ITL),
    "engine_step_tokens": ({}, POWERS),
    "engine_step_sequences": ({}, POWERS),
    "structured_output_compile_seconds": ({}, "0.001 0.0025 0.005 0.01 0.025 0.05 0.1 0.25 0.5 1 1.5 2.5"),
}


def families(server: LiveServer) -> dict[str, Metric]:
    text = server.client.get("/metrics").text
    return {family.name: family for family in text_string_to_metric_families(text)}


def label_values(family: Metric) -> dict[str, set[str]]:
    values: dict[str, set[str]] = {}
    for sample in family.samples:
        for name, value in sample.labels.items():
            values.setdefault(name, set()).add(value)
    values.pop("le", None)
    return values


@pytest.fixture(scope="module")
def scraped() -> Iterator[dict[str, Metric]]:
    """A server that has served nothing yet: every series is there all the same."""
    with live_server() as server:
        yield families(server)


def test_no_metric_is_missing_or_unknown(scraped: dict[str, Metric]) -> None:
    own = {
        name.removeprefix("gemserve_"): family.type
        for name, family in scraped.items()
        if name.startswith("gemserve_")
    }
    expected = (
        dict.fromkeys(GAUGES, "gauge")
        | dict.fromkeys(COUNTERS, "counter")
        | dict.fromkeys(HISTOGRAMS, "histogram")
    )
    assert own == expected
    assert {"process_resident_memory_bytes", "process_cpu_seconds", "python_gc_collections"} <= set(scraped)
    assert all(family.documentation for family in scraped.values())


@pytest.mark.parametrize("name", [*GAUGES, *COUNTERS, *HISTOGRAMS])
def test_labels_are_fixed_sets_whose_series_exist_before_the_first_request(
    scraped: dict[str, Metric], name: str
) -> None:
    expected = {**GAUGES, **COUNTERS, **{key: labels for key, (labels, _) in HISTOGRAMS.items()}}[name]
    found = label_values(scraped[f"gemserve_{name}"])
    assert set(found) == set(expected)
    for label, values in expected.items():
        if values is not ANY:
            assert found[label] == values, label


@pytest.mark.parametrize("name", HISTOGRAMS)
def test_buckets(scraped: dict[str, Metric], name: str) -> None:
    edges = {
        sample.labels["le"]
        for sample in scraped[f"gemserve_{name}"].samples
        if sample.name.endswith("_bucket")
    }
    assert [f"{edge:g}" for edge in sorted(float(edge) for edge in edges - {"+Inf"})] == [
        f"{float(edge):g}" for edge in HISTOGRAMS[name][1].split()
    ]
    assert "+Inf" in edges


def test_buckets_can_be_chosen() -> None:
    chosen: dict[str, Any] = {
        "time_to_first_token_buckets": (0.5, 1.0),
        "inter_token_latency_buckets": (0.25,),
        "request_duration_buckets": (3.0,),
        "request_phase_buckets": (4.0,),
    }
    changed = {
        "time_to_first_token_seconds": {"0.5", "1.0", "+Inf"},
        "inter_token_latency_seconds": {"0.25", "+Inf"},
        "request_duration_seconds": {"3.0", "+Inf"},
        "request_queue_seconds": {"4.0", "+Inf"},
    }
    with live_server(**chosen) as server:
        found = families(server)
        for name, edges in changed.items():
            samples = found[f"gemserve_{name}"].samples
            assert {sample.labels["le"] for sample in samples if "le" in sample.labels} == edges


def test_every_route_has_a_label_of_its_own(server: LiveServer) -> None:
    paths = {*server.app.openapi()["paths"], "/openapi.json"}
    assert "/metrics" in paths
    for path in paths:
        assert route_template(path.replace("{model_id}", "org/name")) != "other", path


def test_host_time_and_constraints_are_counted(server: LiveServer) -> None:
    def counted() -> list[float]:
        return [
            server.metric("engine_host_seconds_total", stage="schedule"),
            server.metric("engine_host_seconds_total", stage="detokenize"),
            server.metric("request_inference_seconds_count"),
            server.metric("structured_output_requests_total", kind="choice"),
            server.metric("structured_output_requests_total", kind="regex"),
            server.metric("structured_output_compile_seconds_count"),
        ]

    before = counted()
    server.complete(prompt="a", max_tokens=3, structured_outputs={"choice": ["ab", "abc"]})
    server.refused(COMPLETIONS, {"prompt": "a", "structured_outputs": {"regex": "("}})
    gained = [now - then for now, then in zip(counted(), before, strict=True)]
    assert gained[0] > 0
    assert gained[1] > 0
    assert gained[2] >= 1
    assert gained[3:] == [1, 1, 2]


def test_memory_is_shown_by_what_it_holds(server: LiveServer) -> None:
    assert server.metric("memory_bytes", kind="weights") == 4096
    assert server.metric("memory_bytes", kind="kv_cache") == 1024


def test_a_scrape_does_not_wait_for_a_step_that_hangs() -> None:
    """It shows what the step runs, since when, and what has come in since: before the step has ended."""
    runner = FakeRunner()
    answers: list[httpx.Response] = []
    with live_server(fake_engine_factory(runner), step_timeout=0, metrics_compat="vllm") as server:
        server.check_alive()

        def post(prompt: list[int]) -> threading.Thread:
            thread = threading.Thread(
                target=lambda: answers.append(
                    httpx.post(server.url + COMPLETIONS, json={"prompt": prompt}, timeout=120)
                )
            )
            thread.start()
            return thread

        began = time.time()
        posts = [post([BOS, HANG])]
        try:
            server.wait_for(lambda: server.metric("requests_running") == 1, seconds=60)
            posts.append(post([BOS, BOS]))
            server.wait_for(lambda: server.metric("requests_waiting") == 1, seconds=60)
            assert server.metric("engine_last_step_timestamp_seconds") >= began - 1
            age = server.metric("requests_waiting_oldest_age_seconds")
            assert server.metric("requests_waiting_oldest_age_seconds") > age
            assert (
                'vllm:num_requests_waiting{engine="0",model_name="fake-gemma"} 1.0'
                in server.client.get("/metrics").text
            )
            assert server.metric("ready") == 1
            assert not answers
        finally:
            runner.released.set()
            for thread in posts:
                thread.join(60)
        assert [answer.status_code for answer in answers] == [200, 200]
        server.wait_for(server.is_idle, seconds=60)


class SlowCollector(Collector):
    def __init__(self) -> None:
        self.asked, self.released = threading.Event(), threading.Event()

    def collect(self) -> Iterator[Metric]:
        self.asked.set()
        assert self.released.wait(60)
        yield GaugeMetricFamily("slow", "Took its time.", value=1)

    def describe(self) -> list[Metric]:
        return []


def test_nobody_waits_for_a_scrape() -> None:
    slow = SlowCollector()
    texts: list[str] = []
    with live_server() as server:
        server.app.state.server.metrics.registry.register(slow)
        scrapes = [
            threading.Thread(
                target=lambda: texts.append(httpx.get(f"{server.url}/metrics", timeout=120).text)
            )
            for _ in range(3)
        ]
        for scrape in scrapes:
            scrape.start()
        try:
            assert slow.asked.wait(60)
            server.check_alive()
            assert not texts
        finally:
            slow.released.set()
            for scrape in scrapes:
                scrape.join(60)
        assert ["\nslow 1.0\n" in text for text in texts] == [True] * 3


def test_a_signal_amid_a_scrape_makes_no_server_that_is_ready_and_drains() -> None:
    values: dict[str, float] = {}
    with live_server() as server:
        state = server.app.state.server
        for metric in EngineCollector(state).collect():
            if metric.name in ("gemserve_ready", "gemserve_draining"):
                values[metric.name] = metric.samples[0].value
                state.is_stopping = True
    assert values == {"gemserve_draining": 0.0, "gemserve_ready": 0.0}


def test_metrics_can_have_a_port_of_their_own(server: LiveServer) -> None:
    with live_server(metrics_port=0) as other:
        assert httpx.get(f"{other.url}/metrics").status_code == 404
        assert "/metrics" not in other.app.openapi()["paths"]
    assert server.client.get("/metrics").status_code == 200
