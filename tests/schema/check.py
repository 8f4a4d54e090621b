"""Lets schemathesis read /openapi.json of a real server with a fake model and send what it makes of it: for
every route requests that follow the description, and ones that break it in one place. No answer may be a 5xx;
each has a status, a media type, headers and a body that are described; what breaks the description is
refused; wrong methods are a 405 with Allow.

Only one of its checks is left out: that all that follows the description is accepted. A description can't say
that a model must be served, a prompt fit the context, or a deadline be met.
"""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.fakes import fake_engine_factory
from tests.http.live_server import LiveServer, live_server

SHORT_PHASES, ALL_PHASES = ("fuzzing",), ("examples", "coverage", "fuzzing", "stateful")
_START = "from schemathesis.cli import schemathesis; schemathesis()"
# A request with a deadline may be given up before it is found to be wrong.
_CONFIG = """
[checks]
positive_data_acceptance.enabled = false
negative_data_rejection.expected-statuses = ["4xx"]
"""


def send(
    folder: Path, examples: int, seed: int, phases: Sequence[str], *, paths: Sequence[str] = ()
) -> tuple[int, str]:
    """(exit code, report). ``examples`` per route of the phases that draw at random; ``paths``: none for all.
    What schemathesis writes goes to ``folder``."""
    # A short context, so that time goes into requests, not into answers.
    with live_server(
        fake_engine_factory(max_model_len=256, max_num_seqs=16, max_num_batched_tokens=256)
    ) as server:
        result = run_schemathesis(server, folder, examples, seed, phases, paths=paths)
        server.check_alive()
        return result


def run_schemathesis(
    server: LiveServer,
    folder: Path,
    examples: int,
    seed: int,
    phases: Sequence[str],
    *,
    paths: Sequence[str] = (),
) -> tuple[int, str]:
    command = [sys.executable, "-c", _START, "run", f"{server.url}/openapi.json"]
    command += ["--phases", ",".join(phases), "-n", str(examples), "--seed", str(seed)]
    # How fast requests are made up is nobody's fault on a busy machine.
    command += ["--suppress-health-check", "all", "--request-timeout", "120", "--no-color"]
    (folder / "schemathesis.toml").write_text(_CONFIG, encoding="utf-8")
    for path in paths:
        command += ["--include-path", path]
    done = subprocess.run(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    return done.returncode, done.stdout
