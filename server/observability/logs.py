"""The log on standard error: as text, coloured on a terminal alone, or as one JSON object per line. Prompts
and answers are never logged."""

import json
import logging
import os
import sys
import time
from collections.abc import Mapping
from typing import Any, Final, TextIO

FIELDS: Final = "gemserve_fields"
_TEXT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_COLOURS: Final = {"DEBUG": "2", "WARNING": "33", "ERROR": "31", "CRITICAL": "1;31"}


def with_fields(**fields: object) -> dict[str, object]:
    """For ``extra``: what a line also says as fields of its own in JSON. None is left out."""
    return {FIELDS: {name: value for name, value in fields.items() if value is not None}}


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        seconds, fraction = divmod(record.created, 1)
        entry: dict[str, Any] = {
            "timestamp": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
            + f".{int(fraction * 1000):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, FIELDS, {}),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False, default=str)


class ColourFormatter(logging.Formatter):
    """The text form, with the level of what is not ordinary in colour."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        colour = _COLOURS.get(record.levelname)
        if colour is None:
            return text
        return text.replace(record.levelname, f"\033[{colour}m{record.levelname}\033[0m", 1)


def is_colourful(stream: TextIO, environ: Mapping[str, str]) -> bool:
    """A terminal that has colours, and a user who has not said no to them (no-color.org)."""
    return stream.isatty() and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"


def make_formatter(
    log_format: str, stream: TextIO, environ: Mapping[str, str] = os.environ
) -> logging.Formatter:
    if log_format == "json":
        return JsonFormatter()
    return ColourFormatter(_TEXT) if is_colourful(stream, environ) else logging.Formatter(_TEXT)


def configure_logging(level: str, log_format: str, stream: TextIO | None = None) -> None:
    """Sets the process's log up; called once, by the command that serves."""
    stream = sys.stderr if stream is None else stream
    handler = logging.StreamHandler(stream)
    handler.setFormatter(make_formatter(log_format, stream))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(log_format == "json")  # Python's own lines would not be JSON
