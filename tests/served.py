"""``gemserve serve`` with a model as its users run it, in a process of its own, for checks that ask a running
server."""

import contextlib
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.deploy.kustomize import ROOT
from tests.deploy.replicas import Replica, wait_until


@contextlib.contextmanager
def served(model: str | None, arguments: str) -> Iterator[str]:
    """The address of the server, once it is ready. Without a model it is the demo model; ``arguments`` are
    more of its own."""
    command = [
        sys.executable,
        "-m",
        "server",
        "serve",
        *([model] if model else []),
        "--port",
        "0",
        *shlex.split(arguments),
    ]
    with tempfile.TemporaryDirectory(prefix="gemserve-served-") as folder:
        log = Path(folder) / "server.log"
        with (
            log.open("wb") as output,
            subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT) as process,
        ):
            replica = Replica(process, log)
            try:
                wait_until(replica.listen, "the server listens")
                wait_until(replica.is_ready, "the server is ready", seconds=600)
                yield replica.url
            finally:
                replica.client.close()
                process.terminate()
