"""``python -m tests.soak --seconds 600``: run the soak, print a line of what happened, exit with 1 when
something was wrong."""

import argparse
import asyncio
import random
import sys
import tempfile
import traceback
from pathlib import Path

from tests.soak.server_process import server_process
from tests.soak.soak import Soak


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600, help="duration of the load after the warm-up")
    parser.add_argument("--warm-up", type=float, default=30, help="seconds of load before memory is measured")
    parser.add_argument(
        "--seed", type=int, default=None, help="the same seed sends the same requests; default: a new one"
    )
    arguments = parser.parse_args()
    seed = random.randrange(2**31) if arguments.seed is None else arguments.seed
    print(f"soak: seed {seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="gemserve-soak-") as folder:
        try:
            with server_process(Path(folder), "--debug-invariants") as server:
                summary = asyncio.run(Soak(server, seed).run(arguments.warm_up, arguments.seconds))
        except Exception:
            traceback.print_exc()
            print(f"soak: FAILED with seed {seed}; the end of the server's log:", file=sys.stderr)
            print((Path(folder) / "server.log").read_text()[-4000:], file=sys.stderr)
            return 1
    print(summary.line(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
