"""Every size at its true widths and with its whole vocabulary, one local and one global layer of each:
``python -m tests.sizes``. Takes minutes; 27B needs 5 GB of disk and 8 GB of memory.
"""

import argparse
import time

from model.config.gemma3_config import SIZES
from tests.sizes.checks import run_sizes

COLUMNS = "{:>5} {:>9} {:>9} {:>9} {:>9} {:>10} {:>8}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    print("MiB; tokens that 4 GiB of cache hold")
    print(COLUMNS.format("size", "weights", "peak", "kept", "matrix", "tokens", "seconds"))
    for size in arguments.sizes:
        began = time.monotonic()
        measured = run_sizes([size], dtype=arguments.dtype, num_threads=arguments.threads)[size]
        sizes = (measured.weights, measured.peak, measured.kept, measured.largest)
        seconds = time.monotonic() - began
        print(
            COLUMNS.format(
                size, *(number >> 20 for number in sizes), measured.capacity_tokens, f"{seconds:.0f}"
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
