"""``python -m tests.schema --examples 100``: all phases of schemathesis on the API; exits with 1 when it
finds something."""

import argparse
import random
import sys
import tempfile
from pathlib import Path

from tests.schema.check import ALL_PHASES, send


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.schema", description=__doc__)
    parser.add_argument(
        "--examples", type=int, default=100, help="requests drawn at random for each route, of each kind"
    )
    parser.add_argument(
        "--seed", type=int, default=None, help="the same seed sends the same requests; default: a new one"
    )
    parser.add_argument(
        "--path", action="append", default=[], help="only this path; may be given several times"
    )
    arguments = parser.parse_args()
    seed = random.randrange(2**31) if arguments.seed is None else arguments.seed
    print(f"schema: seed {seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="gemserve-schema-") as folder:
        code, report = send(Path(folder), arguments.examples, seed, ALL_PHASES, paths=arguments.path)
    print(report)
    return code


if __name__ == "__main__":
    sys.exit(main())
