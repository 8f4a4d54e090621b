"""``gemserve health``: asks a running server whether it is ready. Exit code 0 when it is, 1 otherwise, for
container probes: it asks the port that the server of the same environment listens on. Uses the standard
library only."""

import argparse
import json
import os
import sys
from typing import TYPE_CHECKING

from server.cli.common import add_command

if TYPE_CHECKING:
    from server.cli.common import Subparsers

DEFAULT_PORT = "8000"


def add_parser(commands: "Subparsers") -> None:
    parser = add_command(commands, "health", "ask a running server whether it is ready", run)
    url = f"http://127.0.0.1:{os.environ.get('GEMSERVE_PORT') or DEFAULT_PORT}"
    parser.add_argument(
        "--url", default=url, help="Address of the server. Default: this machine, at GEMSERVE_PORT or 8000."
    )
    parser.add_argument(
        "--live", action="store_true", help="Ask only whether the process answers, not whether it is ready."
    )
    parser.add_argument(
        "--timeout", type=float, default=5.0, metavar="SECONDS", help="Longest wait. Default: 5."
    )


def run(arguments: argparse.Namespace) -> int:
    path = "/health/live" if arguments.live else "/health/ready"
    status, text = get(arguments.url.rstrip("/") + path, arguments.timeout)
    if status == 200:
        print(text)
        return 0
    print(f"gemserve: not {'alive' if arguments.live else 'ready'}: {text}", file=sys.stderr)
    return 1


def get(url: str, timeout: float) -> tuple[int | None, str]:
    """Status and body of a GET; status None and the reason when there was no answer."""
    import http.client
    from urllib.parse import urlsplit

    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return None, f"{url} is not an http address"
    connection_class = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    try:
        connection = connection_class(parts.hostname, parts.port, timeout=timeout)
    except ValueError as error:
        return None, f"{url} is not an http address: {error}"
    try:
        connection.request("GET", parts.path)
        response = connection.getresponse()
        return response.status, _summary(response.status, response.read(65536))
    except (OSError, http.client.HTTPException) as error:
        return None, f"no answer from {parts.netloc}: {error or type(error).__name__}"
    finally:
        connection.close()


def _summary(status: int, body: bytes) -> str:
    text = body.decode("utf-8", errors="replace").strip()
    try:
        return json.dumps(json.loads(text), ensure_ascii=False)
    except ValueError:
        return text or f"status {status}"
