"""The Prometheus and Grafana files of deploy/, read as data: their expressions and the metrics these name."""

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

ROOT = Path(__file__).parent.parent.parent
PROMETHEUS = ROOT / "deploy" / "prometheus"
GRAFANA = ROOT / "deploy" / "grafana"
DASHBOARD = GRAFANA / "gemserve.json"
RULE_FILES = (PROMETHEUS / "gemserve.rules.yml", PROMETHEUS / "gemserve.alerts.yml")

_METRIC = re.compile(r"\b(?:gemserve|process|python)_\w+")
_RULE = re.compile(r"\bgemserve:[\w:]+")


def make_dashboard() -> ModuleType:
    """The script that writes the dashboard, as a module."""
    spec = importlib.util.spec_from_file_location("make_dashboard", GRAFANA / "make_dashboard.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def dashboard() -> dict[str, Any]:
    result: dict[str, Any] = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    return result


def panel_expressions() -> list[tuple[str, str]]:
    """Title of the panel and expression, as they stand in the dashboard."""
    panels = [panel for panel in dashboard()["panels"] if panel["type"] != "row"]
    return [(panel["title"], target["expr"]) for panel in panels for target in panel["targets"]]


def filled_in(expression: str, interval: str) -> str:
    """The expression with everything chosen, as Grafana would send it."""
    for variable in ("namespace", "job", "instance", "model"):
        expression = expression.replace(f"${variable}", ".*")
    expression = expression.replace("$__rate_interval", interval)
    assert "$" not in expression, expression
    return expression


def rules() -> list[dict[str, Any]]:
    groups = [
        group for file in RULE_FILES for group in yaml.safe_load(file.read_text(encoding="utf-8"))["groups"]
    ]
    return [rule for group in groups for rule in group["rules"]]


def rule_expressions() -> list[tuple[str, str]]:
    return [(rule.get("record") or rule["alert"], rule["expr"]) for rule in rules()]


def named_metrics(expression: str) -> set[str]:
    """Metrics of a server that an expression names; texts between quotes are values of labels."""
    return set(_METRIC.findall(re.sub(r'"[^"]*"', "", expression)))


def named_rules(expression: str) -> set[str]:
    return set(_RULE.findall(expression))
