"""What several commands share: adding a subcommand, and reading the settings from its arguments."""

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

from server.settings.settings import Settings, load_settings

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

Run = Callable[[argparse.Namespace], int]


def add_command(commands: "Subparsers", name: str, summary: str, run: Run) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=summary, description=summary[0].upper() + summary[1:] + ".", allow_abbrev=False
    )
    parser.set_defaults(run=run)
    return parser


def settings_of(arguments: argparse.Namespace) -> Settings:
    return load_settings(vars(arguments))
