"""The manifests of deploy/kubernetes: valid, safe, draining in time, and true to the server that they run."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from deploy.kubernetes.make_prometheusrule import FILES, resource
from server.app import create_app
from server.settings.settings import Settings
from server.version import __version__
from tests.deploy import checks
from tests.deploy.kustomize import API_KEY, BASE, KUBERNETES, OVERLAYS, ROOT, Manifest, render
from tests.http.live_server import live_server

# The oldest version whose preStop can sleep without a feature gate, and the newest that the validator knows.
VERSIONS = ("1.32", "1.37")
# Kinds of others, and what each must have for the controller that reads it.
CUSTOM = {
    ("monitoring.coreos.com/v1", "PodMonitor"): {"selector", "podMetricsEndpoints"},
    ("monitoring.coreos.com/v1", "PrometheusRule"): {"groups"},
    ("keda.sh/v1alpha1", "ScaledObject"): {
        "scaleTargetRef",
        "triggers",
        "minReplicaCount",
        "maxReplicaCount",
    },
    ("inference.networking.k8s.io/v1", "InferencePool"): {"selector", "targetPorts", "endpointPickerRef"},
    ("gateway.networking.k8s.io/v1", "HTTPRoute"): {"parentRefs", "rules"},
    ("serving.kserve.io/v1alpha1", "ServingRuntime"): {"supportedModelFormats", "containers"},
    ("serving.kserve.io/v1beta1", "InferenceService"): {"predictor"},
    ("ray.io/v1", "RayService"): {"serveConfigV2", "rayClusterConfig"},
}
CORE_GROUPS = ("apps/", "autoscaling/", "policy/", "networking.k8s.io/", "rbac.authorization.k8s.io/")
FOLDERS = [BASE, *OVERLAYS]


def is_core(manifest: Manifest) -> bool:
    version: str = manifest["apiVersion"]
    return version == "v1" or version.startswith(CORE_GROUPS)


def kinds(manifests: list[Manifest]) -> set[str]:
    return {manifest["kind"] for manifest in manifests}


def named(manifests: list[Manifest], kind: str, name: str = "gemserve") -> Manifest:
    return next(m for m in manifests if m["kind"] == kind and m["metadata"]["name"] == name)


@pytest.fixture(scope="module")
def paths() -> set[str]:
    described = create_app(Settings()).openapi()["paths"]
    return {path for path, operations in described.items() if "get" in operations}


@pytest.fixture(scope="module")
def metrics() -> Iterator[set[str]]:
    """Every series of a running server, with the suffixes under which Prometheus knows them."""
    with live_server() as server:
        lines = server.client.get("/metrics").text.splitlines()
        yield {line.partition("{")[0].partition(" ")[0] for line in lines if not line.startswith("#")}


@pytest.fixture(params=FOLDERS, ids=lambda folder: folder.name)
def manifests(request: pytest.FixtureRequest) -> list[Manifest]:
    return render(request.param)


@pytest.mark.parametrize("version", VERSIONS)
def test_core_kinds_are_valid(manifests: list[Manifest], version: str) -> None:
    for manifest in manifests:
        if is_core(manifest):
            kubernetes_validate.validate(manifest, version, strict=True)


def test_the_validator_refuses_an_unknown_field(manifests: list[Manifest]) -> None:
    namespace = copy.deepcopy(named(manifests, "Namespace"))
    namespace["spce"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(namespace, VERSIONS[-1], strict=True)


def test_custom_kinds_have_their_shape(manifests: list[Manifest]) -> None:
    for manifest in manifests:
        if not is_core(manifest):
            assert set(manifest) == {"apiVersion", "kind", "metadata", "spec"}
            assert set(manifest["spec"]) >= CUSTOM[manifest["apiVersion"], manifest["kind"]]


def test_every_resource_lies_in_the_namespace(manifests: list[Manifest]) -> None:
    namespace = named(manifests, "Namespace")
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    others = [manifest for manifest in manifests if manifest is not namespace]
    assert {manifest["metadata"]["namespace"] for manifest in others} == {namespace["metadata"]["name"]}


def test_pods_keep_to_the_restricted_profile(manifests: list[Manifest]) -> None:
    assert list(checks.pods(manifests))
    checks.check_restricted(manifests)


def test_flags_and_variables_are_those_of_the_server(manifests: list[Manifest]) -> None:
    checks.check_flags(manifests)


def test_ports_and_probes_are_those_of_the_server(manifests: list[Manifest], paths: set[str]) -> None:
    checks.check_ports_and_probes(manifests, paths)


def test_pods_live_longer_than_their_drain(manifests: list[Manifest]) -> None:
    checks.check_drain(manifests)


def test_metrics_are_those_of_the_server(metrics: set[str]) -> None:
    texts = [file.read_text(encoding="utf-8") for file in KUBERNETES.rglob("*.yaml")]
    assert sum(len(checks.METRIC.findall(text)) for text in texts) > 6
    checks.check_metrics(texts, metrics)


def test_the_prometheus_rule_says_what_the_rule_files_say() -> None:
    written = (BASE / "prometheusrule.yaml").read_text(encoding="utf-8")
    assert written == resource(), "make docs writes it"
    folder = KUBERNETES.parent / "prometheus"
    loaded = [yaml.safe_load((folder / name).read_text(encoding="utf-8"))["groups"] for name in FILES]
    assert named(render(BASE), "PrometheusRule")["spec"]["groups"] == [
        group for groups in loaded for group in groups
    ]


def test_selectors_find_the_pods(manifests: list[Manifest]) -> None:
    """Disruption budget, monitor, policy and pool select labels that some pod has."""
    template_labels: list[dict[str, str]] = []
    for manifest in manifests:
        match manifest["kind"]:
            case "Deployment":
                template_labels.append(manifest["spec"]["template"]["metadata"]["labels"])
            case "InferenceService":
                template_labels.append(manifest["spec"]["predictor"]["labels"])
            case "RayService":
                groups = manifest["spec"]["rayClusterConfig"]["workerGroupSpecs"]
                template_labels += [
                    g["template"]["metadata"]["labels"] | {"ray.io/is-ray-node": "yes"} for g in groups
                ]
    for kind in ("PodDisruptionBudget", "PodMonitor", "NetworkPolicy", "InferencePool"):
        for manifest in (m for m in manifests if m["kind"] == kind):
            selector = manifest["spec"].get("selector") or manifest["spec"]["podSelector"]
            assert any(selector["matchLabels"].items() <= labels.items() for labels in template_labels), (
                manifest
            )


def test_the_models_claim_is_read_only_everywhere(manifests: list[Manifest]) -> None:
    claim = named(manifests, "PersistentVolumeClaim", "gemserve-models")["metadata"]["name"]
    for pod in checks.pods(manifests):
        for volume in pod.spec.get("volumes", []):
            if "persistentVolumeClaim" in volume:
                assert volume["persistentVolumeClaim"] == {"claimName": claim, "readOnly": True}
    services = [m for m in manifests if m["kind"] == "InferenceService"]
    assert all(m["spec"]["predictor"]["model"]["storageUri"] == f"pvc://{claim}" for m in services)


def test_each_overlay_has_one_owner_of_the_replica_count() -> None:
    expected = {
        "base": {"Deployment", "HorizontalPodAutoscaler"},
        "gateway": {"Deployment", "HorizontalPodAutoscaler"},
        "keda": {"Deployment", "ScaledObject"},
        "kserve": {"InferenceService"},
        "rayservice": {"RayService"},
    }
    owners = {"Deployment", "HorizontalPodAutoscaler", "ScaledObject", "InferenceService", "RayService"}
    assert {folder.name: kinds(render(folder)) & owners for folder in FOLDERS} == expected


def test_the_api_key_reaches_the_server_and_the_monitoring() -> None:
    manifests = render(BASE, components=(API_KEY,))
    for manifest in manifests:
        if is_core(manifest):
            kubernetes_validate.validate(manifest, VERSIONS[-1], strict=True)
    checks.check_flags(manifests)
    container = named(manifests, "Deployment")["spec"]["template"]["spec"]["containers"][0]
    secret = next(entry for entry in container["env"] if entry["name"] == "GEMSERVE_API_KEY")["valueFrom"][
        "secretKeyRef"
    ]
    monitored = named(manifests, "PodMonitor")["spec"]["podMetricsEndpoints"][0]["authorization"][
        "credentials"
    ]
    assert secret == monitored


def test_images_are_of_this_version(manifests: list[Manifest]) -> None:
    images = {container["image"] for pod in checks.pods(manifests) for container in pod.containers}
    for image in images:
        name, _, tag = image.partition(":")
        assert name not in checks.IMAGES or tag == __version__, f"{image} is not of version {__version__}"


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_documentation_names_every_kustomization(folder: Path) -> None:
    text = (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8")
    assert str(folder.relative_to(ROOT)) in text


class TestRenames:
    """Each check fails once the code no longer has what a manifest names."""

    @staticmethod
    def changed(old: str, new: str, folder: Path = BASE) -> list[Manifest]:
        text = yaml.safe_dump_all(render(folder))
        assert old in text
        loaded: list[Any] = list(yaml.safe_load_all(text.replace(old, new)))
        return loaded

    @pytest.mark.parametrize(
        "flag", ["--shutdown-timeout", "--served-model-name", "--kv-cache-memory", "--max-queued-requests"]
    )
    def test_flag(self, flag: str) -> None:
        with pytest.raises(AssertionError, match="does not take"):
            checks.check_flags(self.changed(flag, flag + "-x"))

    def test_variable(self) -> None:
        with pytest.raises(AssertionError, match="no variable"):
            checks.check_flags(self.changed("GEMSERVE_NUM_THREADS", "GEMSERVE_NUM_THREAD"))

    @pytest.mark.parametrize("path", ["/health/ready", "/health/live", "/metrics"])
    def test_path(self, path: str, paths: set[str]) -> None:
        with pytest.raises(AssertionError, match="has no"):
            checks.check_ports_and_probes(render(BASE), paths - {path})

    def test_port(self, paths: set[str]) -> None:
        with pytest.raises(AssertionError, match="listens on"):
            checks.check_ports_and_probes(self.changed("containerPort: 8000", "containerPort: 8001"), paths)

    def test_metric(self, metrics: set[str]) -> None:
        with pytest.raises(AssertionError, match="gemserve_requests_waiting"):
            checks.check_metrics([yaml.safe_dump_all(render(BASE))], metrics - {"gemserve_requests_waiting"})

    def test_drain(self) -> None:
        with pytest.raises(AssertionError, match="is killed before"):
            checks.check_drain(
                self.changed("terminationGracePeriodSeconds: 150", "terminationGracePeriodSeconds: 132")
            )

    def test_ray_argument(self) -> None:
        rayservice = KUBERNETES / "overlays" / "rayservice"
        with pytest.raises(ValueError, match="kv_cache_memry"):
            list(checks.ray_arguments(self.changed("kv_cache_memory", "kv_cache_memry", rayservice)))
