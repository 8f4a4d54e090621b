"""The Dockerfile against the code: what it names exists, and what the manifests expect of the image is in it.
``python -m tests.image`` builds and runs it."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from server.settings.settings import SETTINGS, Settings
from tests.deploy.checks import USER_ID
from tests.deploy.kustomize import ROOT

TEXT = re.sub(r"\\\n", " ", (ROOT / "Dockerfile").read_text(encoding="utf-8"))
LINES = [line for line in TEXT.splitlines() if line and not line.startswith("#")]
FINAL = LINES[max(i for i, line in enumerate(LINES) if line.startswith("FROM ")) :]


def instruction(name: str) -> str:
    found = [line.partition(" ")[2] for line in FINAL if line.startswith(f"{name} ")]
    assert len(found) == 1, f"{name}: {found}"
    return found[0]


def test_variables_are_settings_or_of_the_system() -> None:
    variables = set(re.findall(r"\b(GEMSERVE_\w+)=", instruction("ENV")))
    assert variables == {"GEMSERVE_CACHE", "GEMSERVE_HOST", "GEMSERVE_PORT"}
    assert variables <= {item.variable for item in SETTINGS}


def test_port_user_and_mounts() -> None:
    port = Settings().port
    assert instruction("EXPOSE") == str(port)
    assert f"GEMSERVE_PORT={port}" in instruction("ENV")
    assert instruction("USER") == f"{USER_ID}:{USER_ID}"
    assert instruction("VOLUME") == '["/models", "/cache"]'
    assert instruction("ENTRYPOINT") == '["/usr/bin/tini", "--", "gemserve"]'
    assert instruction("HEALTHCHECK").endswith('CMD ["gemserve", "health"]')


def test_torch_is_a_layer_of_its_own() -> None:
    layers = [line for line in FINAL if line.startswith("COPY --from=build ")]
    assert layers == [
        "COPY --from=build /opt/torch /opt/torch",
        "COPY --from=build /opt/gemserve /opt/gemserve",
    ]
    pinned = re.findall(
        r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert len(pinned) == 1, "the Dockerfile reads torch's version from its one line"


def test_copied_files_exist_and_reach_the_build() -> None:
    allowed = {
        line[1:]
        for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
        if line.startswith("!")
    }
    sources = {
        source
        for line in LINES
        if line.startswith("COPY ") and "--from" not in line
        for source in line.split()[1:-1]
    }
    assert sources == allowed
    assert all((ROOT / source).exists() for source in sources)


def test_default_extras_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    default = next(line.partition("=")[2] for line in LINES if line.startswith("ARG EXTRAS"))
    assert {*default.split(","), "ray"} <= set(project["optional-dependencies"])


def test_hadolint_finds_nothing() -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if hadolint is None:
        pytest.skip("no hadolint for this machine")
    done = subprocess.run(
        [hadolint, "Dockerfile"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout
