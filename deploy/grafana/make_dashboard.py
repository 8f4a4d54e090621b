"""Writes the Grafana dashboard: ``python deploy/grafana/make_dashboard.py > deploy/grafana/gemserve.json``,
or ``make docs``.

Every expression selects by the variables namespace, job and instance; the variable model narrows the
instances down to those that serve it. No data source is named: the variable datasource chooses one.
"""

import json
from collections.abc import Sequence
from typing import Any

SELECTOR = 'namespace=~"$namespace",job=~"$job",instance=~"$instance"'
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH = 24
HEIGHT = 8

Target = tuple[str, str]  # expression, legend
Panel = dict[str, Any]


def series(name: str, *matchers: str) -> str:
    return f"gemserve_{name}{{{','.join((SELECTOR, *matchers))}}}"


def rate(name: str, *matchers: str) -> str:
    return f"rate({series(name, *matchers)}[$__rate_interval])"


def total(expression: str, *by: str) -> str:
    return f"sum by ({', '.join(by)}) ({expression})" if by else f"sum({expression})"


def ratio(part: str, whole: str) -> str:
    """Nothing where the whole is zero, instead of a division by it."""
    return f"{part} / ({whole} > 0)"


def quantile(share: float, name: str, *by: str) -> str:
    return f"histogram_quantile({share:g}, {total(rate(name + '_bucket'), 'le', *by)})"


def quantiles(name: str) -> list[Target]:
    return [(quantile(share, name), f"p{100 * share:g}") for share in (0.5, 0.95, 0.99)]


def mean(name: str, *by: str) -> str:
    return ratio(total(rate(name + "_sum"), *by), total(rate(name + "_count"), *by))


def panel(
    kind: str,
    title: str,
    unit: str,
    targets: Sequence[Target],
    width: int,
    description: str = "",
    **options: Any,
) -> Panel:
    return {
        "type": kind,
        "title": title,
        "description": description,
        "datasource": DATASOURCE,
        "gridPos": {"w": width, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0, "custom": {}}, "overrides": []},
        "options": {},
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": DATASOURCE,
                "expr": expression,
                "legendFormat": legend,
                "range": True,
            }
            for index, (expression, legend) in enumerate(targets)
        ],
        **options,
    }


def graph(
    title: str, unit: str, *targets: Target, width: int = 8, description: str = "", stacked: bool = False
) -> Panel:
    result = panel("timeseries", title, unit, targets, width, description)
    result["options"] = {
        "legend": {"displayMode": "list", "placement": "bottom"},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    if stacked:
        result["fieldConfig"]["defaults"]["custom"] = {
            "fillOpacity": 30,
            "stacking": {"mode": "normal", "group": "A"},
        }
    return result


def number(title: str, unit: str, *targets: Target, width: int = 4) -> Panel:
    result = panel("stat", title, unit, targets, width)
    result["gridPos"]["h"] = HEIGHT // 2
    result["options"] = {
        "reduceOptions": {"calcs": ["lastNotNull"]},
        "colorMode": "value",
        "graphMode": "area",
    }
    return result


def heatmap(title: str, unit: str, name: str, width: int = 12) -> Panel:
    result = panel("heatmap", title, unit, [(total(rate(name + "_bucket"), "le"), "{{le}}")], width)
    result["targets"][0]["format"] = "heatmap"
    result["options"] = {
        "calculate": False,
        "yAxis": {"unit": unit},
        "color": {"mode": "scheme", "scheme": "Turbo"},
    }
    return result


def table(title: str, *expressions: str) -> Panel:
    result = panel("table", title, "none", [(expression, "") for expression in expressions], WIDTH)
    for target in result["targets"]:
        target |= {"format": "table", "instant": True, "range": False}
    result["transformations"] = [
        {"id": "joinByField", "options": {"byField": "instance", "mode": "outer"}},
        {
            "id": "filterFieldsByName",
            "options": {"exclude": {"pattern": "Time.*|Value.*|__name__.*|job .*|namespace .*"}},
        },
    ]
    return result


def overview() -> list[Panel]:
    failed = total(rate("requests_total", 'outcome="error"'))
    global_usage = series("kv_cache_usage_ratio", 'pool="global"')
    return [
        number("Ready", "none", (total(series("ready")), "ready"), (total(series("draining")), "draining")),
        number("Running", "none", (total(series("requests_running")), "running")),
        number("Waiting", "none", (total(series("requests_waiting")), "waiting")),
        number("Errors", "percentunit", (ratio(failed, total(rate("requests_total"))), "errors")),
        number("Generated", "tokens/s", (total(rate("generation_tokens_total")), "tokens/s")),
        number("Cache in use", "percentunit", (f"max({global_usage})", "global pool")),
        graph(
            "Requests by outcome",
            "reqps",
            (total(rate("requests_total"), "outcome"), "{{outcome}}"),
            stacked=True,
        ),
        graph("Time to first token", "s", *quantiles("time_to_first_token_seconds")),
        graph("Time between tokens", "s", *quantiles("inter_token_latency_seconds")),
        graph("Whole requests", "s", *quantiles("request_duration_seconds")),
        graph(
            "Tokens",
            "tokens/s",
            (total(rate("prompt_tokens_total")), "prompt"),
            (total(rate("prompt_tokens_cached_total")), "prompt, from the prefix cache"),
            (total(rate("prefill_tokens_total")), "prefilled, also again after a preemption"),
            (total(rate("generation_tokens_total")), "generated"),
        ),
        graph(
            "Sequences",
            "none",
            (total(series("requests_running")), "running"),
            (total(series("running_limit_requests")), "limit of running"),
            (total(series("requests_waiting")), "waiting"),
            (total(series("queue_limit_requests")), "limit of waiting"),
        ),
        graph(
            "Oldest waiting sequence",
            "s",
            (series("requests_waiting_oldest_age_seconds"), "{{instance}}"),
            width=12,
        ),
        graph(
            "Cache in use", "percentunit", (series("kv_cache_usage_ratio"), "{{instance}} {{pool}}"), width=12
        ),
    ]


def traffic() -> list[Panel]:
    return [
        graph(
            "Requests by endpoint",
            "reqps",
            (total(rate("requests_total"), "endpoint", "stream"), "{{endpoint}} {{stream}}"),
        ),
        graph(
            "HTTP answers",
            "reqps",
            (
                total(rate("http_requests_total"), "method", "route", "status"),
                "{{method}} {{route}} {{status}}",
            ),
        ),
        graph(
            "Refusals by reason",
            "reqps",
            (total(rate("request_rejections_total"), "reason"), "{{reason}}"),
            stacked=True,
        ),
        graph(
            "Open connections",
            "none",
            (total(series("streams_active")), "event streams"),
            (total(series("http_requests_in_flight"), "route"), "{{route}}"),
        ),
        graph(
            "Requests given up",
            "reqps",
            (
                total(rate("requests_total", 'outcome=~"client_disconnect|timeout|shutdown"'), "outcome"),
                "{{outcome}}",
            ),
        ),
        graph(
            "Choices by finish reason",
            "ops",
            (total(rate("choices_total"), "finish_reason"), "{{finish_reason}}"),
            stacked=True,
        ),
        heatmap("Prompt lengths", "none", "request_prompt_tokens"),
        heatmap("Generated lengths", "none", "request_generation_tokens"),
        graph("max_tokens", "none", *quantiles("request_max_tokens")),
        graph(
            "Structured output",
            "reqps",
            (total(rate("structured_output_requests_total"), "kind"), "{{kind}}"),
        ),
        graph("Compiling constraints", "s", *quantiles("structured_output_compile_seconds")),
    ]


def latency() -> list[Panel]:
    return [
        heatmap("Time to first token", "s", "time_to_first_token_seconds"),
        heatmap("Time between tokens", "s", "inter_token_latency_seconds"),
        graph(
            "Mean time of a sequence",
            "s",
            *((mean(f"request_{phase}_seconds"), phase) for phase in ("queue", "prefill", "decode")),
            stacked=True,
        ),
        graph("Time per output token", "s", *quantiles("request_time_per_output_token_seconds")),
        graph("In the engine without the queue", "s", *quantiles("request_inference_seconds")),
        graph(
            "HTTP answers, p95",
            "s",
            (quantile(0.95, "http_request_duration_seconds", "route"), "{{route}}"),
            width=WIDTH,
        ),
    ]


def engine() -> list[Panel]:
    return [
        graph(
            "Duration of steps",
            "s",
            (quantile(0.5, "engine_step_duration_seconds", "kind"), "{{kind}} p50"),
            (quantile(0.95, "engine_step_duration_seconds", "kind"), "{{kind}} p95"),
        ),
        graph("Steps", "ops", (total(rate("engine_steps_total"), "kind"), "{{kind}}")),
        graph(
            "Mean size of a step",
            "none",
            (mean("engine_step_tokens"), "tokens"),
            (mean("engine_step_sequences"), "sequences"),
        ),
        graph("Engine busy", "percentunit", (rate("engine_busy_seconds_total"), "{{instance}}")),
        graph(
            "Host time",
            "percentunit",
            (total(rate("engine_host_seconds_total"), "stage"), "{{stage}}"),
            stacked=True,
        ),
        graph(
            "Preemptions and faults",
            "ops",
            (total(rate("preemptions_total")), "preemptions"),
            (total(rate("numerical_faults_total")), "non-finite logits"),
        ),
        graph(
            "Time since the last step of a busy engine",
            "s",
            (
                f"(time() - {series('engine_last_step_timestamp_seconds')}) and "
                f"{series('requests_running')} > 0",
                "{{instance}}",
            ),
            width=WIDTH,
        ),
    ]


def cache() -> list[Panel]:
    hit, queried = (
        total(rate("prefix_cache_hit_tokens_total")),
        total(rate("prefix_cache_queried_tokens_total")),
    )
    return [
        graph(
            "Blocks",
            "none",
            (total(series("kv_cache_blocks"), "pool", "state"), "{{pool}} {{state}}"),
            stacked=True,
        ),
        graph("Prefix cache hits", "percentunit", (ratio(hit, queried), "hit ratio of tokens")),
        graph(
            "Blocks given to others",
            "ops",
            (total(rate("kv_cache_evicted_blocks_total"), "pool"), "evicted {{pool}}"),
            (total(rate("kv_cache_recycled_blocks_total")), "recycled behind the window"),
        ),
        graph(
            "Capacity",
            "none",
            (total(series("kv_cache_capacity_tokens"), "pool"), "{{pool}} tokens"),
            width=12,
        ),
        graph(
            "Hits ended by lack of blocks",
            "ops",
            (total(rate("prefix_cache_limited_total"), "pool"), "{{pool}}"),
            width=12,
        ),
    ]


def speculation() -> list[Panel]:
    accepted, drafts = (
        total(rate("spec_decode_accepted_tokens_total")),
        total(rate("spec_decode_drafts_total")),
    )
    by_position = total(rate("spec_decode_accepted_tokens_per_position_total"), "position")
    return [
        graph(
            "Acceptance rate",
            "percentunit",
            (ratio(accepted, total(rate("spec_decode_draft_tokens_total"))), "accepted"),
        ),
        graph(
            "Mean accepted length",
            "none",
            (f"1 + {ratio(accepted, drafts)}", "tokens per draft, with the model's own"),
        ),
        graph(
            "Acceptance by position",
            "percentunit",
            (f"{by_position} / on () group_left () ({drafts} > 0)", "{{position}}"),
        ),
    ]


def process() -> list[Panel]:
    selected = f"{{{SELECTOR}}}"
    return [
        graph("Resident memory", "bytes", (f"process_resident_memory_bytes{selected}", "{{instance}}")),
        graph("Memory by what it holds", "bytes", (series("memory_bytes"), "{{instance}} {{kind}}")),
        graph(
            "Processor time",
            "cores",
            (f"rate(process_cpu_seconds_total{selected}[$__rate_interval])", "{{instance}}"),
        ),
        graph(
            "File descriptors",
            "none",
            (f"process_open_fds{selected}", "open"),
            (f"process_max_fds{selected}", "limit"),
        ),
        graph(
            "Garbage collections",
            "ops",
            (
                f"sum by (generation) (rate(python_gc_collections_total{selected}[$__rate_interval]))",
                "generation {{generation}}",
            ),
        ),
        graph(
            "Duration of the start",
            "s",
            (series("startup_duration_seconds"), "{{instance}} {{phase}}"),
            stacked=True,
        ),
        table("Servers", series("build_info"), series("model_info"), series("cache_config_info")),
    ]


def variable(name: str, label: str, query: str) -> dict[str, Any]:
    return {
        "type": "query",
        "name": name,
        "label": label,
        "datasource": DATASOURCE,
        "query": {"query": query, "refId": name},
        "definition": query,
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def variables() -> list[dict[str, Any]]:
    served = 'gemserve_model_info{namespace=~"$namespace",job=~"$job",model=~"$model"}'
    return [
        {
            "type": "datasource",
            "name": "datasource",
            "label": "Data source",
            "query": "prometheus",
            "current": {},
        },
        variable("namespace", "Namespace", "label_values(gemserve_build_info, namespace)"),
        variable("job", "Job", 'label_values(gemserve_build_info{namespace=~"$namespace"}, job)'),
        variable(
            "model", "Model", 'label_values(gemserve_model_info{namespace=~"$namespace",job=~"$job"}, model)'
        ),
        variable("instance", "Instance", f"label_values({served}, instance)") | {"allValue": None},
    ]


def laid_out(rows: dict[str, list[Panel]]) -> list[Panel]:
    """Panels from left to right and from top to bottom, under a title for each row."""
    panels: list[Panel] = []
    top = 0
    for title, row in rows.items():
        panels.append(
            {
                "type": "row",
                "title": title,
                "collapsed": False,
                "panels": [],
                "gridPos": {"x": 0, "y": top, "w": WIDTH, "h": 1},
            }
        )
        top += 1
        left = height = 0
        for item in row:
            place = item["gridPos"]
            if left + place["w"] > WIDTH:
                left, top, height = 0, top + height, 0
            place |= {"x": left, "y": top}
            left, height = left + place["w"], max(height, place["h"])
            panels.append(item)
        top += height
    for number_of_panel, item in enumerate(panels, start=1):
        item["id"] = number_of_panel
    return panels


def dashboard() -> dict[str, Any]:
    rows = {
        "Overview": overview(),
        "Traffic": traffic(),
        "Latency": latency(),
        "Engine": engine(),
        "Cache": cache(),
        "Speculation": speculation(),
        "Process": process(),
    }
    return {
        "title": "gemserve",
        "uid": "gemserve",
        "tags": ["gemserve", "llm"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": variables()},
        "annotations": {"list": []},
        "panels": laid_out(rows),
    }


def rendered() -> str:
    return json.dumps(dashboard(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    print(rendered(), end="")
