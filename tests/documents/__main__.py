"""``python -m tests.documents --documents 1000``: have so many written, print a line per schema, exit with 1
when one that is complete is not valid. Serves the demo model itself unless told of a server or another
model."""

import argparse
import asyncio
import contextlib
import sys

from tests.documents.documents import MAX_TOKENS, run
from tests.served import served


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.documents", description=__doc__)
    parser.add_argument("--documents", type=int, default=1000, help="how many; the schemas take turns")
    parser.add_argument("--concurrency", type=int, default=32, help="documents being written at a time")
    parser.add_argument("--max-tokens", type=int, default=MAX_TOKENS, help="longest document")
    parser.add_argument("--seed", type=int, default=0, help="of the first document; each has the next one")
    parser.add_argument("--model", help="model to serve; default: the demo model")
    parser.add_argument(
        "--serve-arguments", default="", metavar="TEXT", help="more arguments for 'gemserve serve'"
    )
    parser.add_argument("--url", help="a server that runs already")
    arguments = parser.parse_args()
    with contextlib.ExitStack() as stack:
        url = arguments.url or stack.enter_context(served(arguments.model, arguments.serve_arguments))
        summary = asyncio.run(
            run(
                url,
                arguments.documents,
                concurrency=arguments.concurrency,
                max_tokens=arguments.max_tokens,
                seed=arguments.seed,
                progress=lambda line: print(line, file=sys.stderr, flush=True),
            )
        )
    print("\n".join(summary.lines()), flush=True)
    return 1 if summary.faults() else 0


if __name__ == "__main__":
    sys.exit(main())
