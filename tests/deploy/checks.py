"""What the manifests say about the server, held against the server itself: flags, variables, probes, ports,
metrics, drain times and the restricted profile. Each check raises AssertionError; the tests show that it does
for names that the code lacks."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from deploy.ray.arguments import RayArguments
from server.cli.common import settings_of
from server.cli.parser import build_parser
from server.cli.serving import LAST_EVENTS_SECONDS
from server.settings.settings import SETTINGS, Settings
from tests.deploy.kustomize import ROOT, Manifest

IMAGES = {"gemserve", "gemserve-ray"}
USER_ID = 10001
METRIC = re.compile(r"\bgemserve_[a-z0-9_]+\b")


@dataclass(frozen=True, slots=True)
class Pod:
    """One kind of pod that some manifest asks for. ``serves``: it runs the command line of the image."""

    name: str
    spec: dict[str, Any]
    serves: bool

    @property
    def containers(self) -> list[dict[str, Any]]:
        containers: list[dict[str, Any]] = self.spec["containers"]
        return containers


def pods(manifests: list[Manifest]) -> Iterator[Pod]:
    runtimes = {m["metadata"]["name"]: m["spec"] for m in manifests if m["kind"] == "ServingRuntime"}
    for manifest in manifests:
        name, spec = manifest["metadata"]["name"], manifest.get("spec", {})
        match manifest["kind"]:
            case "Deployment":
                yield Pod(name, spec["template"]["spec"], serves=name == "gemserve")
            case "InferenceService":  # KServe merges the predictor over the runtime
                yield Pod(
                    name, runtimes[spec["predictor"]["model"]["runtime"]] | spec["predictor"], serves=True
                )
            case "RayService":
                cluster = spec["rayClusterConfig"]
                for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
                    yield Pod(group.get("groupName", "head"), group["template"]["spec"], serves=False)


def ray_arguments(manifests: list[Manifest]) -> Iterator[RayArguments]:
    for manifest in manifests:
        if manifest["kind"] == "RayService":
            for application in yaml.safe_load(manifest["spec"]["serveConfigV2"])["applications"]:
                module, _, name = application["import_path"].partition(":")
                source = ROOT / (module.replace(".", "/") + ".py")
                functions = {
                    node.name
                    for node in ast.parse(source.read_text(encoding="utf-8")).body
                    if hasattr(node, "name")
                }
                assert name in functions, f"{source} has no {name}"
                yield RayArguments.from_mapping(application["args"])


def served_settings(pod: Pod) -> Settings:
    """What the server would make of the container's arguments. An unknown flag ends the parser with
    SystemExit."""
    try:
        return settings_of(build_parser().parse_args(pod.containers[0]["args"]))
    except SystemExit:
        raise AssertionError(
            f"{pod.name}: the command line does not take {pod.containers[0]['args']}"
        ) from None


def check_flags(manifests: list[Manifest]) -> None:
    variables = {item.variable for item in SETTINGS}
    for pod in pods(manifests):
        if pod.serves:
            served_settings(pod)
        for variable in (entry["name"] for container in pod.containers for entry in container.get("env", [])):
            assert variable in variables, f"{pod.name}: {variable} is no variable of the server"
    list(ray_arguments(manifests))


def check_ports_and_probes(manifests: list[Manifest], paths: set[str]) -> None:
    """``paths``: the GET routes of the application."""
    named: dict[str, int] = {}
    for pod in pods(manifests):
        if not pod.serves:
            continue
        container, port = pod.containers[0], served_settings(pod).port
        named |= {entry["name"]: entry["containerPort"] for entry in container["ports"]}
        assert named["http"] == port, f"{pod.name}: the server listens on {port}"
        for probe, expected in (("startup", "live"), ("liveness", "live"), ("readiness", "ready")):
            request = container[f"{probe}Probe"]["httpGet"]
            assert named.get(request["port"], request["port"]) == port, (
                f"{pod.name}: {probe} asks another port"
            )
            assert request["path"] in paths, f"{pod.name}: the server has no {request['path']}"
            assert request["path"].endswith(expected), f"{pod.name}: {probe} asks {request['path']}"
    for manifest in manifests:
        spec = manifest.get("spec", {})
        if manifest["kind"] == "Service" and manifest["metadata"]["name"] == "gemserve":
            assert [entry["targetPort"] for entry in spec["ports"]] == ["http"]
        elif manifest["kind"] == "PodMonitor" and manifest["metadata"]["name"] == "gemserve":
            for endpoint in spec["podMetricsEndpoints"]:
                assert endpoint["port"] in named, f"the PodMonitor asks an unknown port {endpoint['port']}"
                assert endpoint["path"] in paths, f"the server has no {endpoint['path']}"
        elif manifest["kind"] == "InferencePool":
            assert [entry["number"] for entry in spec["targetPorts"]] == [named["http"]]


def check_metrics(texts: list[str], metrics: set[str]) -> None:
    found = {name for text in texts for name in METRIC.findall(text)}
    assert found <= metrics, f"the server has no {sorted(found - metrics)}"


def check_drain(manifests: list[Manifest]) -> None:
    for pod in pods(manifests):
        if pod.serves:
            pause = pod.containers[0]["lifecycle"]["preStop"]["sleep"]["seconds"]
            drain = pause + served_settings(pod).shutdown_timeout + LAST_EVENTS_SECONDS
            assert pod.spec["terminationGracePeriodSeconds"] > drain, (
                f"{pod.name} is killed before its {drain:g} s are over"
            )
    for arguments in ray_arguments(manifests):
        for pod in pods(manifests):
            assert pod.spec["terminationGracePeriodSeconds"] > arguments.graceful_shutdown_seconds, pod.name


def check_restricted(manifests: list[Manifest]) -> None:
    """The restricted pod-security profile, and a root file system that nothing can be written to."""
    for pod in pods(manifests):
        security = pod.spec["securityContext"]
        assert security["runAsNonRoot"] is True, pod.name
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}, pod.name
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod.spec), pod.name
        kinds = {kind for volume in pod.spec.get("volumes", []) for kind in volume if kind != "name"}
        assert kinds <= {"configMap", "emptyDir", "persistentVolumeClaim", "secret", "projected"}, (
            f"{pod.name}: {kinds}"
        )
        for container in pod.containers:
            own = container["securityContext"]
            assert own["allowPrivilegeEscalation"] is False, pod.name
            assert own["readOnlyRootFilesystem"] is True, pod.name
            assert own["capabilities"] == {"drop": ["ALL"]}, pod.name
            assert not any("hostPort" in port for port in container.get("ports", [])), pod.name
            assert {"requests", "limits"} <= set(container["resources"]), pod.name
        if pod.containers[0]["image"].partition(":")[0] in IMAGES:
            assert security["runAsUser"] == security["fsGroup"] == USER_ID, pod.name
            assert pod.spec["enableServiceLinks"] is False, (
                f"{pod.name}: GEMSERVE_PORT would be the service's address"
            )
