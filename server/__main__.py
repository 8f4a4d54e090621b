"""Entry point of ``gemserve`` and ``python -m server``: parses the command line and hands over to one
command. What a user can cause ends with one line on standard error and a non-zero exit code, never with a
traceback. Imports no torch by itself."""

import sys
from collections.abc import Sequence

from model.interface.errors import ModelError
from server.cli.parser import build_parser
from server.loading.threads import configure_threads
from server.settings.settings import SettingsError

EXIT_FAILURE = 1
EXIT_USAGE = 2


def main(argv: Sequence[str] | None = None) -> int:
    configure_threads()
    arguments = build_parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except SettingsError as error:
        print(f"gemserve: error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except ModelError as error:
        print(f"gemserve: error: {error}", file=sys.stderr)
        return EXIT_FAILURE
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has left, as in `gemserve info | head -1`
        sys.stderr.close()
        return EXIT_FAILURE


if __name__ == "__main__":
    sys.exit(main())
