"""``python -m tests.overload --seconds 120``: run it, print a line of what happened, exit with 1 when
something was wrong or less than nine tenths of the best was left. For a machine that does nothing else."""

import argparse
import asyncio
import sys
import tempfile
import traceback
from pathlib import Path

from tests.overload.overload import CACHE_TOKENS, FLAGS, run
from tests.soak.server_process import server_process

LEAST_SHARE = 0.9


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.overload", description=__doc__)
    parser.add_argument(
        "--seconds",
        type=float,
        default=120,
        help="duration of the overload; the whole run takes half as much more",
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gemserve-overload-") as folder:
        try:
            with server_process(Path(folder), *FLAGS, cache_tokens=CACHE_TOKENS) as server:
                summary = asyncio.run(run(server, arguments.seconds))
        except Exception:
            traceback.print_exc()
            print("overload: FAILED; the end of the server's log:", file=sys.stderr)
            print((Path(folder) / "server.log").read_text()[-4000:], file=sys.stderr)
            return 1
    print(summary.line(), flush=True)
    if not summary.keeps_deadlines:
        print("overload: FAILED: accepted requests did not keep their deadline", file=sys.stderr)
        return 1
    if summary.share < LEAST_SHARE:
        print(f"overload: FAILED: less than {LEAST_SHARE:.0%} of the best", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
