"""Renders the kustomizations of deploy/kubernetes: resources, components, a namespace, and patches that are
deletions or lists of "add" operations, which is all that they use. Anything else is an error, so that nothing
is silently left out."""

import copy
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parent.parent.parent
KUBERNETES = ROOT / "deploy" / "kubernetes"
BASE = KUBERNETES / "base"
OVERLAYS = sorted(file.parent for file in (KUBERNETES / "overlays").glob("*/kustomization.yaml"))
API_KEY = KUBERNETES / "components" / "api-key"

Manifest = dict[str, Any]

_KEYS = {"apiVersion", "kind", "namespace", "resources", "components", "patches"}
_WITHOUT_NAMESPACE = {"Namespace"}


def render(folder: Path, components: tuple[Path, ...] = ()) -> list[Manifest]:
    """The manifests of a kustomization, with further ``components`` applied as if it listed them."""
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text(encoding="utf-8"))
    assert set(kustomization) <= _KEYS, (
        f"{folder.name}: the renderer does not know {set(kustomization) - _KEYS}"
    )
    manifests: list[Manifest] = []
    for name in kustomization.get("resources", []):
        path = (folder / name).resolve()
        assert path.is_dir() or path.parent == folder.resolve(), (
            f"kustomize reads no file outside {folder}: {name}"
        )
        manifests += (
            render(path) if path.is_dir() else list(yaml.safe_load_all(path.read_text(encoding="utf-8")))
        )
    names = [(manifest["kind"], manifest["metadata"]["name"]) for manifest in manifests]
    assert len(names) == len(set(names)), f"{folder.name}: a resource is there twice: {names}"
    for component in [*(folder / name for name in kustomization.get("components", [])), *components]:
        patches = yaml.safe_load((component / "kustomization.yaml").read_text(encoding="utf-8"))["patches"]
        manifests = _patched(manifests, patches)
    manifests = _patched(manifests, kustomization.get("patches", []))
    if "namespace" in kustomization:
        for manifest in manifests:
            if manifest["kind"] not in _WITHOUT_NAMESPACE:
                manifest["metadata"]["namespace"] = kustomization["namespace"]
    return manifests


def _patched(manifests: list[Manifest], patches: list[Manifest]) -> list[Manifest]:
    for patch in patches:
        assert set(patch) == {"target", "patch"}, patch
        target, change = patch["target"], yaml.safe_load(patch["patch"])
        found = [
            m for m in manifests if (m["kind"], m["metadata"]["name"]) == (target["kind"], target["name"])
        ]
        assert len(found) == 1, f"a patch's target is not there: {target}"
        if isinstance(change, list):
            for operation in change:
                _add(found[0], operation)
        else:
            assert change["$patch"] == "delete", change
            assert (change["kind"], change["metadata"]["name"]) == (target["kind"], target["name"]), change
            manifests = [manifest for manifest in manifests if manifest is not found[0]]
    return manifests


def _add(manifest: Manifest, operation: dict[str, Any]) -> None:
    assert operation["op"] == "add", operation
    *parents, last = operation["path"].strip("/").split("/")
    place: Any = manifest
    for part in parents:
        place = place[int(part)] if isinstance(place, list) else place[part]
    value = copy.deepcopy(operation["value"])
    if isinstance(place, list):
        place.append(value) if last == "-" else place.insert(int(last), value)
    else:
        place[last] = value
