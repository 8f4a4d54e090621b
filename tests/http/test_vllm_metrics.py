"""--metrics-compat vllm: the names, types and labels of vLLM, with the very numbers of our own metrics."""

import threading
from collections.abc import Iterator

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.fakes import BOS, POISON, FakeRunner, fake_engine_factory
from tests.http.live_server import LiveServer, live_server

TYPES = {
    **dict.fromkeys(
        ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "cache_config_info"), "gauge"
    ),
    **dict.fromkeys(
        (
            *(
                "prompt_tokens",
                "prompt_tokens_cached",
                "generation_tokens",
                "request_success",
                "num_preemptions",
            ),
            *("prefix_cache_queries", "prefix_cache_hits"),
        ),
        "counter",
    ),
    **dict.fromkeys(
        (
            *(
                "time_to_first_token_seconds",
                "inter_token_latency_seconds",
                "request_time_per_output_token_seconds",
            ),
            *("e2e_request_latency_seconds", "request_queue_time_seconds", "request_prefill_time_seconds"),
            *("request_decode_time_seconds", "request_inference_time_seconds", "request_prompt_tokens"),
            *("request_generation_tokens", "request_params_max_tokens", "iteration_tokens_total"),
        ),
        "histogram",
    ),
}
# Both names of the same count.
SAME = {
    "vllm:prompt_tokens_total": "gemserve_prompt_tokens_total",
    "vllm:prompt_tokens_cached_total": "gemserve_prompt_tokens_cached_total",
    "vllm:generation_tokens_total": "gemserve_generation_tokens_total",
    "vllm:num_preemptions_total": "gemserve_preemptions_total",
    "vllm:prefix_cache_queries_total": "gemserve_prefix_cache_queried_tokens_total",
    "vllm:prefix_cache_hits_total": "gemserve_prefix_cache_hit_tokens_total",
    "vllm:time_to_first_token_seconds_count": "gemserve_time_to_first_token_seconds_count",
    "vllm:time_to_first_token_seconds_sum": "gemserve_time_to_first_token_seconds_sum",
    "vllm:inter_token_latency_seconds_count": "gemserve_inter_token_latency_seconds_count",
    "vllm:request_time_per_output_token_seconds_count": (
        "gemserve_request_time_per_output_token_seconds_count"
    ),
    "vllm:e2e_request_latency_seconds_count": "gemserve_request_duration_seconds_count",
    "vllm:request_queue_time_seconds_count": "gemserve_request_queue_seconds_count",
    "vllm:request_prefill_time_seconds_count": "gemserve_request_prefill_seconds_count",
    "vllm:request_decode_time_seconds_count": "gemserve_request_decode_seconds_count",
    "vllm:request_inference_time_seconds_sum": "gemserve_request_inference_seconds_sum",
    "vllm:request_prompt_tokens_sum": "gemserve_request_prompt_tokens_sum",
    "vllm:request_generation_tokens_sum": "gemserve_request_generation_tokens_sum",
    "vllm:request_params_max_tokens_sum": "gemserve_request_max_tokens_sum",
    "vllm:iteration_tokens_total_sum": "gemserve_engine_step_tokens_sum",
}


@pytest.fixture(scope="module")
def compat() -> Iterator[LiveServer]:
    with live_server(metrics_compat="vllm", served_model_name=("org/gemma",)) as server:
        yield server


def families(server: LiveServer) -> dict[str, Metric]:
    text = server.client.get("/metrics").text
    return {family.name: family for family in text_string_to_metric_families(text)}


def sums(found: dict[str, Metric]) -> dict[str, float]:
    """By the name of the sample, over all labels."""
    result: dict[str, float] = {}
    for family in found.values():
        for sample in family.samples:
            result[sample.name] = result.get(sample.name, 0.0) + sample.value
    return result


def test_names_types_and_labels_are_those_of_vllm(compat: LiveServer) -> None:
    found = {name: family for name, family in families(compat).items() if name.startswith("vllm:")}
    assert {name.removeprefix("vllm:"): family.type for name, family in found.items()} == TYPES
    for family in found.values():
        assert family.samples
        for sample in family.samples:
            assert sample.labels["model_name"] == "fake-gemma"
            assert sample.labels["engine"] == "0"
            assert set(sample.labels) - {"le", "finished_reason"} == {
                "model_name",
                "engine",
            } or family.name.endswith("_info")
    config = found["vllm:cache_config_info"].samples[0].labels
    assert (config["block_size"], config["enable_prefix_caching"], config["cache_dtype"]) == (
        "8",
        "True",
        "float32",
    )
    assert int(config["num_gpu_blocks"]) > 1


def test_both_names_have_one_number(compat: LiveServer) -> None:
    compat.complete(prompt="The capital of France is", max_tokens=5, n=2, temperature=1)
    compat.complete(prompt="The capital of France is", max_tokens=5)
    compat.chat(messages=[{"role": "user", "content": "a"}], max_tokens=3, stream=False)
    compat.post("/v1/completions", {"prompt": "a", "max_tokens": 4, "stream": True})
    compat.wait_for(compat.is_idle, seconds=60)
    found = sums(families(compat))
    for theirs, ours in SAME.items():
        assert found[theirs] == pytest.approx(found[ours]), theirs
    assert found["vllm:prefix_cache_hits_total"] > 0
    assert found["vllm:iteration_tokens_total_sum"] > 0


def test_buckets_are_cumulative_sums_over_the_labels(compat: LiveServer) -> None:
    compat.post("/v1/completions", {"prompt": "a", "max_tokens": 4, "stream": True})
    compat.complete(prompt="a", max_tokens=4)
    found = families(compat)
    theirs = [
        sample
        for sample in found["vllm:time_to_first_token_seconds"].samples
        if sample.name.endswith("_bucket")
    ]
    ours = [
        sample
        for sample in found["gemserve_time_to_first_token_seconds"].samples
        if sample.name.endswith("_bucket")
    ]
    for bucket in theirs:
        assert bucket.value == sum(
            sample.value for sample in ours if sample.labels["le"] == bucket.labels["le"]
        )
    values = [sample.value for sample in theirs]
    assert values == sorted(values)
    assert theirs[-1].labels["le"] == "+Inf"


def test_ways_to_end_have_the_names_of_vllm(compat: LiveServer) -> None:
    def counted() -> dict[str, float]:
        samples = families(compat)["vllm:request_success"].samples
        return {sample.labels["finished_reason"]: sample.value for sample in samples}

    before = counted()
    assert set(before) == {"stop", "length", "abort", "error"}
    compat.complete(prompt="a", max_tokens=2)
    compat.complete(prompt="a", max_tokens=40, stop=["e"], temperature=0)
    compat.post("/v1/completions", {"prompt": [BOS, POISON], "max_tokens": 2})
    after = counted()
    assert {reason: after[reason] - before[reason] for reason in after} == {
        "stop": 1,
        "length": 1,
        "abort": 0,
        "error": 1,
    }


def test_nothing_of_it_is_shown_while_loading_or_without_the_flag(server: LiveServer) -> None:
    release = threading.Event()
    factory = fake_engine_factory(FakeRunner(), before_load=lambda: assert_set(release))
    with live_server(factory, wait=False, metrics_compat="vllm") as loading:
        assert "vllm:" not in loading.client.get("/metrics").text
        release.set()
        loading.wait_for(
            lambda: "vllm:num_requests_running" in loading.client.get("/metrics").text, seconds=60
        )
    assert "vllm:" not in server.client.get("/metrics").text


def assert_set(event: threading.Event) -> None:
    assert event.wait(60)
