"""Runs an image as an orchestrator would under the restricted profile, with nothing but Linux: its root file
system read-only, its user by number, no capability, no new privileges, a process tree of its own; /models
read-only, /cache an empty file system in memory. What is started (user, variables, command) comes from the
image's own configuration. The network is this machine's."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.image.build import output

# $1: root file system, $2: models; the rest is what runs inside.
ENTER = """
set -e
root="$1" models="$2"
shift 2
mount --make-rprivate /
mount --bind "$root" "$root"
mount -o remount,bind,ro "$root"
mount -t proc -o nosuid,nodev,noexec proc "$root/proc"
mount --rbind -o ro /dev "$root/dev"
mount --bind "$models" "$root/models"
mount -o remount,bind,ro "$root/models"
mount -t tmpfs -o "uid=$uid,gid=$gid,mode=0700,nosuid,nodev" tmpfs "$root/cache"
cd /
exec chroot "$root" /usr/bin/setpriv --reuid="$uid" --regid="$gid" --clear-groups --no-new-privs \\
    --inh-caps=-all --bounding-set=-all "$@"
"""


class Container:
    """One image, mounted; ``start`` runs its own command, ``execute`` another one beside it."""

    def __init__(
        self, root: str, config: Mapping[str, Any], models: Path, variables: Mapping[str, str], log: Path
    ) -> None:
        self.log = log
        self._root = root
        self._config = config
        self._models = models
        self._variables = [*config["Env"], *(f"{name}={value}" for name, value in variables.items())]
        self._process: subprocess.Popen[bytes] | None = None

    def _command(self, words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
        uid, gid = self._config["User"].split(":")
        enter = [
            "sh",
            "-c",
            ENTER,
            "enter",
            self._root,
            str(self._models),
            "/usr/bin/env",
            "-i",
            *self._variables,
            *words,
        ]
        return enter, {"uid": uid, "gid": gid, "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}

    def start(self) -> None:
        command, environment = self._command([*self._config["Entrypoint"], *self._config["Cmd"]])
        namespaces = ["unshare", "--mount", "--pid", "--ipc", "--uts", "--fork", "--kill-child"]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen([*namespaces, *command], env=environment, stdout=log, stderr=log)

    def execute(self, *words: str) -> subprocess.CompletedProcess[str]:
        """A command as the same user on a root file system of its own, such as a probe."""
        command, environment = self._command(words)
        namespaces = ["unshare", "--mount", "--pid", "--fork", "--kill-child"]
        return subprocess.run(
            [*namespaces, *command], env=environment, capture_output=True, text=True, timeout=60, check=False
        )

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def first_process(self) -> int:
        """Number, on this machine, of the container's process 1."""
        assert self._process is not None
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        return int(children.read_text(encoding="utf-8").split()[0])

    def status_of(self, process: int) -> dict[str, str]:
        lines = Path(f"/proc/{process}/status").read_text(encoding="utf-8").splitlines()
        return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}

    def terminate(self) -> None:
        os.kill(self.first_process, signal.SIGTERM)

    def wait(self, seconds: float) -> int:
        assert self._process is not None
        return self._process.wait(timeout=seconds)

    def close(self) -> None:
        if self._process is not None and self.is_running:
            self._process.kill()
            self._process.wait(timeout=30)


@contextlib.contextmanager
def mounted_image(image: str) -> Iterator[str]:
    """The folder of the image's root file system."""
    name = output("buildah", "from", image).strip()
    try:
        yield output("buildah", "mount", name).strip()
    finally:
        output("buildah", "umount", name)
        output("buildah", "rm", name)
