"""``python -m tests.fuzz --requests 20000``: run it, print a line of what happened, exit with 1 when
something was wrong."""

import argparse
import asyncio
import random
import sys
import tempfile
import traceback
from pathlib import Path

from tests.fuzz.fuzz import FLAGS, run
from tests.soak.server_process import server_process


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--requests", type=int, default=20_000, help="how many hostile requests are sent")
    parser.add_argument(
        "--seed", type=int, default=None, help="the same seed sends the same requests; default: a new one"
    )
    arguments = parser.parse_args()
    seed = random.randrange(2**31) if arguments.seed is None else arguments.seed
    print(f"fuzz: seed {seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="gemserve-fuzz-") as folder:
        try:
            with server_process(Path(folder), *FLAGS) as server:
                summary = asyncio.run(run(server, arguments.requests, seed))
        except Exception:
            traceback.print_exc()
            print(f"fuzz: FAILED with seed {seed}; the end of the server's log:", file=sys.stderr)
            print((Path(folder) / "server.log").read_text(errors="replace")[-4000:], file=sys.stderr)
            return 1
    print(summary.line(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
