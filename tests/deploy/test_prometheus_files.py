"""Rules, alerts and dashboard fit the server: every metric, label and rule that they name exists. Needs no
Prometheus."""

import re

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.deploy import prometheus_files as files
from tests.http.live_server import LiveServer, live_server

EXPRESSIONS = [*files.panel_expressions(), *files.rule_expressions()]
every_expression = pytest.mark.parametrize(
    ("name", "expression"), EXPRESSIONS, ids=[name for name, _ in EXPRESSIONS]
)
# What Prometheus adds to every series.
TARGET_LABELS = {"namespace", "job", "instance", "le"}


@pytest.fixture(scope="module")
def labels() -> dict[str, set[str]]:
    """The labels of every sample that a fresh server has, by the name of the sample."""
    found: dict[str, set[str]] = {}
    with live_server() as server:
        for family in text_string_to_metric_families(server.client.get("/metrics").text):
            suffix = "_total" if family.type == "counter" else ""
            found.setdefault(family.name + suffix, set())
            for sample in family.samples:
                found.setdefault(sample.name, set()).update(sample.labels)
    return found


def test_the_dashboard_is_what_its_script_writes() -> None:
    assert files.DASHBOARD.read_text(encoding="utf-8") == files.make_dashboard().rendered(), "run `make docs`"


@every_expression
def test_every_metric_that_is_named_exists(labels: dict[str, set[str]], name: str, expression: str) -> None:
    named = files.named_metrics(expression)
    assert named or files.named_rules(expression) or "up{" in expression, name
    assert named <= set(labels), name


@every_expression
def test_every_label_that_is_named_exists(labels: dict[str, set[str]], name: str, expression: str) -> None:
    known = TARGET_LABELS.union(*labels.values()) | {"position"}
    for grouping in re.findall(r"\b(?:by|on) \(([^)]*)\)", expression):
        assert {label.strip() for label in grouping.split(",") if label.strip()} <= known, name
    for metric, selector in re.findall(r"((?:gemserve|process|python)_\w+)\{([^}]*)\}", expression):
        matchers = set(re.findall(r'(\w+)(?:=~|!~|!=|=)"', selector))
        assert matchers <= labels[metric] | TARGET_LABELS, (name, metric)


def test_every_rule_that_is_named_is_recorded() -> None:
    recorded = {rule["record"] for rule in files.rules() if "record" in rule}
    named = set().union(*(files.named_rules(expression) for _, expression in EXPRESSIONS))
    assert named <= recorded


def test_every_rule_and_alert_has_a_test() -> None:
    tests = yaml.safe_load((files.PROMETHEUS / "gemserve.test.yml").read_text(encoding="utf-8"))["tests"]
    checked = {case["expr"] for test in tests for case in test.get("promql_expr_test", ())}
    alerts = [case for test in tests for case in test.get("alert_rule_test", ())]
    families = {name.rpartition(":")[0] for name in checked}
    for rule in files.rules():
        if "record" in rule:
            assert rule["record"] in checked or rule["record"].rpartition(":")[0] in families, rule["record"]
        else:
            mine = [case["exp_alerts"] for case in alerts if case["alertname"] == rule["alert"]]
            assert any(mine), f"{rule['alert']} is never seen to fire"
            assert not all(mine), f"{rule['alert']} is never seen to keep quiet"


def test_alerts_say_how_bad_it_is_and_are_explained() -> None:
    page = (files.ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    for rule in files.rules():
        if "alert" in rule:
            assert rule["labels"]["severity"] in ("warning", "critical")
            assert set(rule["annotations"]) == {"summary", "description"}
            assert f"`{rule['alert']}`" in page


def test_every_metric_is_explained(server: LiveServer) -> None:
    page = (files.ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    families = text_string_to_metric_families(server.client.get("/metrics").text)
    own = [family for family in families if family.name.startswith("gemserve_")]
    for family in own:
        name = family.name.removeprefix("gemserve_") + ("_total" if family.type == "counter" else "")
        assert f"`{name}`" in page, name


def test_the_dashboard_works_with_any_data_source_and_any_server() -> None:
    dashboard = files.dashboard()
    assert dashboard["schemaVersion"] >= 30
    variables = [variable["name"] for variable in dashboard["templating"]["list"]]
    assert variables == ["datasource", "namespace", "job", "model", "instance"]
    panels = dashboard["panels"]
    assert [panel["title"] for panel in panels if panel["type"] == "row"] == [
        *("Overview", "Traffic", "Latency", "Engine", "Cache", "Speculation", "Process")
    ]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for other in panels:
            spot = other["gridPos"]
            apart = (
                place["x"] + place["w"] <= spot["x"]
                or spot["x"] + spot["w"] <= place["x"]
                or place["y"] + place["h"] <= spot["y"]
                or spot["y"] + spot["h"] <= place["y"]
            )
            assert other is panel or apart, (panel["title"], other["title"])
        for target in panel.get("targets", ()):
            assert target["datasource"]["uid"] == "${datasource}"
            for metric in files.named_metrics(target["expr"]):
                assert re.search(
                    rf'{metric}\{{namespace=~"\$namespace",job=~"\$job",instance=~"\$instance"',
                    target["expr"],
                )


def test_the_example_configuration_scrapes_a_server_and_loads_the_rules() -> None:
    config = yaml.safe_load((files.PROMETHEUS / "prometheus.yml").read_text(encoding="utf-8"))
    assert [files.PROMETHEUS / name for name in config["rule_files"]] == list(files.RULE_FILES)
    assert [job["job_name"] for job in config["scrape_configs"]] == ["gemserve"]
