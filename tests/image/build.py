"""Builds the image of the Dockerfile without a Docker daemon: buildah with chroot isolation, on a base that
mmdebstrap makes from the package mirror this machine is set up for. Needs root and both tools (``apt-get
install buildah mmdebstrap``)."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
BASE_IMAGE = "localhost/gemserve-base"
IMAGE = "localhost/gemserve-test"
APT_SOURCES = ("/etc/apt/sources.list.d/debian.sources", "/etc/apt/sources.list")


def require_tools() -> None:
    missing = [tool for tool in ("buildah", "mmdebstrap", "unshare") if shutil.which(tool) is None]
    if missing:
        raise SystemExit(
            f"image: {', '.join(missing)} not found; on Debian: apt-get install buildah mmdebstrap util-linux"
        )


def run(*command: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(word) for word in command], check=True, text=True, **options)


def output(*command: str | Path) -> str:
    return run(*command, stdout=subprocess.PIPE).stdout


def debian_release() -> str:
    found = re.search(
        r"^VERSION_CODENAME=(\w+)$", Path("/etc/os-release").read_text(encoding="utf-8"), re.MULTILINE
    )
    if found is None:
        raise SystemExit("image: this machine is no Debian; name a base image with --base-image")
    return found[1]


def make_base(folder: Path) -> str:
    """The name of a minimal Debian with Python, made once; remove ``folder`` to have it made again."""
    name = f"{BASE_IMAGE}:{debian_release()}"
    archive = folder / "base.tar"
    if not archive.exists():
        unfinished = folder / "base.tmp.tar"
        sources = next(source for source in APT_SOURCES if Path(source).exists())
        packages = "--include=python3,python3-venv,ca-certificates"
        run(
            "mmdebstrap", "--variant=minbase", packages, "--format=tar", debian_release(), unfinished, sources
        )
        unfinished.rename(archive)
    if subprocess.run(
        ["buildah", "inspect", "--type", "image", name], capture_output=True, check=False
    ).returncode:
        (folder / "Dockerfile").write_text(
            'FROM scratch\nADD base.tar /\nCMD ["/bin/sh"]\n', encoding="utf-8"
        )
        run("buildah", "build", "--isolation", "chroot", "--format", "docker", "--tag", name, folder)
    return name


def pip_volumes(folder: Path) -> list[str]:
    """This machine's configuration of pip for the build: mirrors, certificates and folders of wheels that it
    names."""
    settings: dict[str, dict[str, str]] = {}
    for line in output(sys.executable, "-m", "pip", "config", "list").splitlines():
        key, _, value = line.partition("=")
        section, _, name = key.replace(":env:", "global").partition(".")
        settings.setdefault(section, {})[name] = value.strip("'")
    text = "".join(
        f"[{section}]\n" + "".join(f"{name} = {value}\n" for name, value in values.items())
        for section, values in settings.items()
    )
    (folder / "pip.conf").write_text(text, encoding="utf-8")
    named = {Path(found) for found in re.findall(r"(?<![:/\w])(?:file://)?(/[\w./-]+)", text)}
    tops = {Path(*path.parts[:3]) for path in named if path.exists()}
    volumes = [f"{path}:{path}:ro" for path in sorted(tops)]
    return [f"--volume={volume}" for volume in [*volumes, f"{folder / 'pip.conf'}:/etc/pip.conf:ro"]]


def build_image(folder: Path, base_image: str, variant: str, torch_index_url: str) -> str:
    run(
        *("buildah", "build", "--isolation", "chroot", "--format", "docker", "--layers", "--tag", IMAGE),
        *("--build-arg", f"BASE_IMAGE={base_image}", "--build-arg", f"VARIANT={variant}"),
        *("--build-arg", f"TORCH_INDEX_URL={torch_index_url}"),
        *pip_volumes(folder),
        ROOT,
    )
    return IMAGE


def image_config(image: str) -> dict[str, Any]:
    """The configuration as Docker would read it: User, Entrypoint, Cmd, Env, Healthcheck, Volumes."""
    config: dict[str, Any] = json.loads(output("buildah", "inspect", "--type", "image", image))["Docker"][
        "config"
    ]
    return config
