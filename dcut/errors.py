"""The one error type that a person is meant to read, and the guard that prints it as one line."""

import argparse
import contextlib
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import NoReturn


class InputError(ValueError):
    """What the user gave cannot be used; the message names the value and the remedy in one line."""


class Stopped(KeyboardInterrupt):
    """The process was told to end (SIGTERM, SIGHUP); it tidies up as on Ctrl-C. Its argument: the signal."""


class Parser(argparse.ArgumentParser):
    """A command line that refuses what it cannot read as all input is refused: in one line, no usage."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message} (see --help)")


def guard(main: Callable[[], None]) -> int:
    """Run a command's main and return its exit code.

    An InputError, an OSError or too little memory becomes one line on stderr and 2; an interrupt or a
    signal to end is raised inside main, so that nothing stays half-written, and becomes 128 + its number.
    """
    _tame_streams()
    if threading.current_thread() is threading.main_thread():
        for number in set(heeded()) - {signal.SIGINT}:
            signal.signal(number, _stop)
    try:
        main()
    except InputError as error:
        return _say(f"error: {error}", 2)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader went away (| head)
        return 141
    except OSError as error:
        name = f"{error.filename}: " if error.filename else ""
        return _say(f"error: {name}{error.strerror or error}", 2)
    except MemoryError as error:
        return _say(f"error: not enough memory ({error}); ask for less", 2)
    except KeyboardInterrupt as error:
        number = error.args[0] if isinstance(error, Stopped) else signal.SIGINT
        return _say(_ended_by(number), 128 + number)
    return 0


def heeded() -> list[signal.Signals]:
    """The signals that ask a command to end, but for those it was started to ignore, as under nohup."""
    asking = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
    return [number for number in asking if signal.getsignal(number) != signal.SIG_IGN]


def leave(number: int, _frame: object = None) -> NoReturn:
    """End the process here and now with the code of a signal: its handler while there is nothing to tidy up.

    For where an exception would not do: native code turns it into its own, or aborts at an orderly end.
    """
    with contextlib.suppress(OSError):
        os.write(2, f"{_ended_by(number)}\n".encode())  # print may be in the midst of another line
    os._exit(128 + number)


@contextlib.contextmanager
def at_once() -> Iterator[None]:
    """What is asked to end within, such as an import of much native code, does so by `leave`."""
    before = {number: signal.signal(number, leave) for number in heeded()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _ended_by(number: int) -> str:
    return "interrupted" if number == signal.SIGINT else "stopped"


def _say(line: str, code: int) -> int:
    print(" ".join(line.split()), file=sys.stderr)
    return code


def _stop(number: int, _frame: object) -> None:
    raise Stopped(number)


def _tame_streams() -> None:
    """Let output fail neither on a character that the terminal lacks nor on a stream that was closed."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 (it lives as long as the process)
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
