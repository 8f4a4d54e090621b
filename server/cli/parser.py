"""The commands of ``gemserve``. Each module adds its arguments to the parser and imports what it needs only
when it runs, so that ``--help`` and ``health`` answer at once. Nothing here imports torch."""

import argparse

from server.cli import bench, health, info, run_batch, serve
from server.version import __version__


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gemserve",
        description="Serves Gemma 3 text models over an OpenAI-style HTTP API.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"gemserve {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (serve, info, health, bench, run_batch):
        command.add_parser(commands)
    return parser
