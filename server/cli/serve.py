"""``gemserve serve``: checks the settings and the checkpoint's headers, binds the port, then loads the model
while the server already answers that it is not ready yet. Any fault of the start ends the process with one
line and a non-zero exit code."""

import argparse
import gc
import os
import signal
import sys
from types import FrameType
from typing import TYPE_CHECKING

from server.cli.common import add_command, settings_of
from server.settings.settings import add_arguments, unknown_variables

if TYPE_CHECKING:
    from server.cli.common import Subparsers


def add_parser(commands: "Subparsers") -> None:
    add_arguments(add_command(commands, "serve", "serve a model over HTTP", run))


def run(arguments: argparse.Namespace) -> int:
    signal.signal(signal.SIGTERM, _end_before_serving)
    settings = settings_of(arguments)
    for line in unknown_variables(os.environ):
        print(f"gemserve: warning: {line}", file=sys.stderr)
    _refuse_shared_metrics()
    # What a start makes is kept; looking for garbage in it again and again takes time. Turned on again once
    # all is loaded.
    gc.disable()
    from server.cli.serving import serve

    return serve(settings)


def _end_before_serving(signum: int, frame: FrameType | None) -> None:
    """Nothing has begun that would have to be finished. Output is not flushed: the signal may have
    interrupted a write."""
    os._exit(0)


def _refuse_shared_metrics() -> None:
    """prometheus_client would keep the counters in files of that folder, where those of crashed processes
    come back, and fail when it is not there. One process is all there is to count."""
    for name in ("PROMETHEUS_MULTIPROC_DIR", "prometheus_multiproc_dir"):
        if os.environ.pop(name, None) is not None:
            print(f"gemserve: warning: {name} is ignored: the server is one process", file=sys.stderr)
