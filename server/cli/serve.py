"""``gemserve serve``: checks the settings and the checkpoint's headers, binds the port, then loads the model while the server
already answers that it is not ready yet. Any fault of the start ends the process with one line and a non-zero exit code."""

import argparse
import gc
import os
import sys
from typing import TYPE_CHECKING

from server.cli.common import add_command, settings_of
from server.settings import add_arguments, unknown_variables

if TYPE_CHECKING:
    from server.cli.common import Subparsers


def add_parser(commands: "Subparsers") -> None:
    add_arguments(add_command(commands, "serve", "serve a model over HTTP", run))


def run(arguments: argparse.Namespace) -> int:
    settings = settings_of(arguments)
    for line in unknown_variables(os.environ):
        print(f"gemserve: warning: {line}", file=sys.stderr)
    # What a start makes is kept; looking for garbage in it again and again takes time. Turned on again once all is loaded.
    gc.disable()
    from model.torch_import import defer_unused_modules

    defer_unused_modules()
    from server.cli.serving import serve

    return serve(settings)
