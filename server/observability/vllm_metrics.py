"""The names of vLLM for what /metrics has under names of its own: ``--metrics-compat vllm``. Routers,
autoscalers, dashboards and benchmark tools that know vLLM then work without configuration.

Rendered from the same objects, so that nothing is counted twice. One HTTP request counts as one in
``vllm:request_success_total``, and buckets are those of this server. Nothing is shown until the model's name
is known.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from prometheus_client import Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from server.observability.engine_metrics import EngineView, waiting_sequences
from server.observability.metrics import Metrics

LABELS: Final = ("model_name", "engine")
# How vLLM calls the ways in which a request can end here.
FINISHED_REASONS: Final = {
    "stop": ("stop", "tool_calls"),
    "length": ("length",),
    "abort": ("client_disconnect", "timeout", "shutdown"),
    "error": ("error",),
}


def total(counter: Counter, **labels: Iterable[str]) -> float:
    """Sum of a counter's series whose labels have one of the given values."""
    return sum(
        sample.value
        for family in counter.collect()
        for sample in family.samples
        if all(sample.labels[name] in values for name, values in labels.items())
    )


class VllmCollector(Collector):
    def __init__(self, metrics: Metrics, view: EngineView) -> None:
        self._metrics = metrics
        self._view = view

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        engine, infos = self._view.engine, self._view.info
        if engine is None or "model_info" not in infos:
            return
        values = (infos["model_info"].get("model", ""), "0")
        stats = engine.stats
        num_waiting, _ = waiting_sequences(engine)
        gauges = {
            "num_requests_running": ("Sequences that are running.", stats.num_running),
            "num_requests_waiting": ("Sequences that wait for admission.", num_waiting),
            "kv_cache_usage_perc": ("Share of the cache in use, 0 to 1.", stats.pools["global"].usage_ratio),
        }
        for name, (text, value) in gauges.items():
            gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=LABELS)
            gauge.add_metric(values, value)
            yield gauge
        yield _cache_config(infos.get("cache_config_info", {}), values)
        metrics = self._metrics
        counters = {
            "prompt_tokens": total(metrics.prompt_tokens),
            "prompt_tokens_cached": total(metrics.prompt_tokens_cached),
            "generation_tokens": total(metrics.generation_tokens),
            "num_preemptions": stats.preemptions_total,
            "prefix_cache_queries": stats.prefix_queried_tokens_total,
            "prefix_cache_hits": stats.prefix_hit_tokens_total,
        }
        for name, count in counters.items():
            counter = CounterMetricFamily(
                f"vllm:{name}", "See the gemserve_ metric of this meaning.", labels=LABELS
            )
            counter.add_metric(values, count)
            yield counter
        yield self._successes(values)
        yield from self._histograms(values)

    def _successes(self, values: tuple[str, str]) -> Metric:
        family = CounterMetricFamily(
            "vllm:request_success", "Requests by how they ended.", labels=(*LABELS, "finished_reason")
        )
        for reason, outcomes in FINISHED_REASONS.items():
            family.add_metric((*values, reason), total(self._metrics.requests, outcome=outcomes))
        return family

    def _histograms(self, values: tuple[str, str]) -> Iterator[Metric]:
        metrics = self._metrics
        histograms = {
            "time_to_first_token_seconds": metrics.time_to_first_token,
            "inter_token_latency_seconds": metrics.inter_token_latency,
            "request_time_per_output_token_seconds": metrics.time_per_output_token,
            "e2e_request_latency_seconds": metrics.request_duration,
            "request_queue_time_seconds": metrics.queue_seconds,
            "request_prefill_time_seconds": metrics.prefill_seconds,
            "request_decode_time_seconds": metrics.decode_seconds,
            "request_inference_time_seconds": metrics.inference_seconds,
            "request_prompt_tokens": metrics.request_prompt_tokens,
            "request_generation_tokens": metrics.request_generation_tokens,
            "request_params_max_tokens": metrics.request_max_tokens,
            "iteration_tokens_total": metrics.step_tokens,
        }
        for name, histogram in histograms.items():
            yield _merged(f"vllm:{name}", histogram, values)


def _cache_config(info: Mapping[str, str], values: tuple[str, str]) -> Metric:
    labels = {
        "block_size": info.get("block_size", ""),
        "num_gpu_blocks": info.get("num_gpu_blocks", ""),
        "cache_dtype": info.get("kv_dtype", ""),
        "enable_prefix_caching": info.get("prefix_caching", "").title(),
    }
    family = GaugeMetricFamily("vllm:cache_config_info", "Always 1.", labels=(*LABELS, *labels))
    family.add_metric((*values, *labels.values()), 1)
    return family


def _merged(name: str, histogram: Histogram, values: tuple[str, str]) -> Metric:
    """The histogram summed over its labels."""
    buckets: defaultdict[str, float] = defaultdict(float)
    total_sum = 0.0
    for source in histogram.collect():
        for sample in source.samples:
            if sample.name.endswith("_bucket"):
                buckets[sample.labels["le"]] += sample.value
            elif sample.name.endswith("_sum"):
                total_sum += sample.value
    family = HistogramMetricFamily(name, "See the gemserve_ metric of this meaning.", labels=LABELS)
    family.add_metric(values, list(buckets.items()), total_sum)
    return family
