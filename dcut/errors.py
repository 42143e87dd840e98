"""The one error type that a person is meant to read, and the guard that prints it as one line."""

import sys
from collections.abc import Callable


class InputError(ValueError):
    """What the user gave cannot be used; the message names the value and the remedy in one line."""


def guard(main: Callable[[], None]) -> int:
    """Run a command's main; an InputError or an OSError becomes one line on stderr and exit code 2."""
    try:
        main()
    except InputError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        sys.stderr.close()  # the reader went away (| head); nothing is left to say
        return 141
    except OSError as error:
        name = f"{error.filename}: " if error.filename else ""
        print(f"error: {name}{error.strerror or error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0
