"""promtool over metrics, configuration, rules and their tests, and a real Prometheus that scrapes a server
with the tiny model: every expression of the dashboard and of the rules is evaluated. ``make prometheus-test``
brings the programs; where they are missing the tests are skipped, unless GEMSERVE_NEEDS_PROMETHEUS is set."""

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.deploy import prometheus_files as files
from tests.http.cache.tiny_server import tiny_server
from tests.http.live_server import LiveServer
from tests.ports import free_port
from tests.tiny import write_tiny_folder

NEEDED = bool(os.environ.get("GEMSERVE_NEEDS_PROMETHEUS"))
# Expressions that have no value on a healthy server that does not speculate; all others must have one.
EMPTY = {
    "Acceptance rate",
    "Mean accepted length",
    "Acceptance by position",
    "Time since the last step of a busy engine",
}


def program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        assert not NEEDED, f"{name} is not on the PATH"
        pytest.skip(f"{name} is not on the PATH: `make prometheus-test` brings it")
    return found


def promtool(*arguments: str, text: str | None = None) -> None:
    done = subprocess.run(
        [program("promtool"), *arguments],
        cwd=files.PROMETHEUS,
        input=text,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_accepts_the_configuration_and_the_rules() -> None:
    promtool("check", "config", "prometheus.yml")
    promtool("check", "rules", *(str(file) for file in files.RULE_FILES))


def test_rules_and_alerts_pass_their_tests() -> None:
    promtool("test", "rules", "gemserve.test.yml")


def test_promtool_accepts_the_metrics(server: LiveServer) -> None:
    server.check_alive()
    promtool("check", "metrics", text=server.client.get("/metrics").text)


class Prometheus:
    def __init__(self, url: str) -> None:
        self._client = httpx.Client(base_url=url, timeout=60)

    def is_up(self) -> bool:
        try:
            return self._client.get("/-/ready").status_code == 200
        except httpx.TransportError:
            return False

    def query(self, expression: str) -> list[dict[str, Any]]:
        response = self._client.get("/api/v1/query", params={"query": expression})
        body = response.json()
        assert body["status"] == "success", (expression, body)
        result: list[dict[str, Any]] = body["data"]["result"]
        return result

    def last_scrape(self) -> float:
        """Unix time of the newest sample; Prometheus runs on the same clock."""
        return float(self.query("timestamp(gemserve_ready)")[0]["value"][1])

    def rule_states(self) -> dict[str, str]:
        """Health of every rule by its name."""
        groups = self._client.get("/api/v1/rules").json()["data"]["groups"]
        return {rule["name"]: rule["health"] for group in groups for rule in group["rules"]}

    def close(self) -> None:
        self._client.close()


@contextlib.contextmanager
def prometheus(folder: Path, target: int) -> Iterator[Prometheus]:
    config = yaml.safe_load((files.PROMETHEUS / "prometheus.yml").read_text(encoding="utf-8"))
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(file) for file in files.RULE_FILES]
    config["scrape_configs"][0]["static_configs"] = [{"targets": [f"127.0.0.1:{target}"]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
    command = [
        program("prometheus"),
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
        "--log.level=warn",
    ]
    with (
        (folder / "log").open("wb") as log,
        subprocess.Popen(command, cwd=folder, stdout=log, stderr=log) as process,
    ):
        found = Prometheus(f"http://{address}")
        try:
            wait_for(lambda: found.is_up() or process.poll() is not None)
            assert process.poll() is None, (folder / "log").read_text()
            yield found
        finally:
            found.close()
            process.terminate()
            process.wait(30)


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "condition not met in time"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    program("prometheus")  # no model is loaded for nothing
    folder = write_tiny_folder(tmp_path_factory.mktemp("model") / "tiny")
    with tiny_server(folder, metrics_compat="vllm") as server:
        yield server


@pytest.fixture(scope="module")
def scraped(tiny: LiveServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Has seen work of every kind between two of its scrapes."""
    with prometheus(tmp_path_factory.mktemp("prometheus"), tiny.port) as found:
        wait_for(lambda: found.query("gemserve_ready == 1"))
        for _ in range(2):
            for body in (
                {},
                {"stream": True},
                {"structured_outputs": {"choice": ["ab", "abc"]}},
                {"max_tokens": -1},
            ):
                tiny.post("/v1/completions", {"prompt": "The capital of France is", "max_tokens": 4, **body})
            tiny.chat(messages=[{"role": "user", "content": "a"}], max_tokens=4)
            done = time.time()
            wait_for(lambda done=done: found.last_scrape() > done)
        wait_for(
            lambda: found.query("gemserve:ttft:p95_5m") and found.query("gemserve:prefix_cache:hit_ratio_5m")
        )
        yield found


def test_every_panel_has_data_on_a_live_scrape(scraped: Prometheus) -> None:
    results = [
        (title, scraped.query(files.filled_in(expression, "1m")))
        for title, expression in files.panel_expressions()
    ]
    empty = {title for title, result in results if not result}
    assert empty <= EMPTY
    assert len(results) > 50


def test_every_rule_is_healthy_and_every_alert_is_silent_on_a_live_scrape(scraped: Prometheus) -> None:
    names = {name for name, _ in files.rule_expressions()}
    wait_for(lambda: set(scraped.rule_states().values()) == {"ok"})
    assert set(scraped.rule_states()) == names
    for name, expression in files.rule_expressions():
        result = scraped.query(expression)
        if name.startswith("gemserve:"):
            assert result, name
        else:
            assert result == [], name


def test_the_names_of_vllm_arrive_with_their_colons(scraped: Prometheus) -> None:
    for expression in (
        'vllm:num_requests_waiting{model_name="tiny",engine="0"}',
        "vllm:kv_cache_usage_perc",
        "vllm:cache_config_info",
        'vllm:request_success_total{finished_reason="length"} > 0',
        "vllm:iteration_tokens_total_count > 0",
        'vllm:time_to_first_token_seconds_bucket{le="+Inf"} > 0',
    ):
        assert scraped.query(expression), expression
