"""``python -m tests.corpus record FILE`` writes down what the server says; ``compare FILE`` asks again,
prints every difference and exits with 1 when there is any."""

import argparse
import sys
from pathlib import Path

from tests.corpus.recording import (
    counts,
    differences,
    make_recording,
    read_recording,
    write_recording,
)
from tests.corpus.servers import SERVERS, ServerError, chosen_servers

ROOT = Path(__file__).parent.parent.parent


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.corpus", description=__doc__)
    parser.add_argument("command", choices=("record", "compare"))
    parser.add_argument("file", type=Path, metavar="FILE", help="the recording")
    parser.add_argument(
        "--server-root", type=Path, default=ROOT, metavar="DIR", help="tree of the server; default: this one"
    )
    parser.add_argument(
        "--servers", nargs="+", default=[], choices=[spec.name for spec in SERVERS], help="only these"
    )
    arguments = parser.parse_args()
    specs, root = chosen_servers(arguments.servers), arguments.server_root.resolve()
    if arguments.command == "record":
        recording = make_recording(specs, root)
        write_recording(arguments.file, recording, root)
        areas = ", ".join(f"{area} {count}" for area, count in counts(recording).items())
        print(f"corpus: {len(recording)} exchanges recorded ({areas})")
        return 0
    commit, recorded = read_recording(arguments.file)
    names = {spec.name for spec in specs}
    recorded = {name: entry for name, entry in recorded.items() if name.split("/")[0] in names}
    found = make_recording(specs, root)
    num_differences = 0
    for difference in differences(recorded, found):
        num_differences += 1
        print(difference, end="\n\n")
    print(f"corpus: {len(found)} exchanges, {num_differences} differ from those of {commit}")
    return 1 if num_differences else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ServerError as error:
        sys.exit(f"corpus: FAILED: {error}")
