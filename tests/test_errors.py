"""Whatever ends a command, a person reads one line and nothing stays half-done."""

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
WAITING = """
import sys, time
from dcut.errors import guard
def main():
    try:
        print("ready", flush=True)
        time.sleep(60)
    finally:
        print("tidied up", flush=True)
sys.exit(guard(main))
"""


def run(body: str) -> subprocess.CompletedProcess[str]:
    """A command whose main has this body."""
    head = "import sys\nfrom dcut.errors import InputError, guard\n"
    program = f"{head}def main():\n    {body}\nsys.exit(guard(main))"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)


@pytest.mark.parametrize(
    ("body", "code", "line"),
    [
        ("raise InputError('two\\n  lines')", 2, "error: two lines\n"),
        ("open('/nowhere/at/all')", 2, "error: /nowhere/at/all: No such file or directory\n"),
        ("raise MemoryError('8 TiB')", 2, "error: not enough memory (8 TiB); ask for less\n"),
        ("raise KeyboardInterrupt", 130, "interrupted\n"),
        ("pass", 0, ""),
    ],
)
def test_an_expected_end_is_one_line_and_a_code(body: str, code: int, line: str) -> None:
    done = run(body)
    assert (done.returncode, done.stderr) == (code, line)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--count", "many"], "error: argument --count: invalid int value: 'many' (see --help)\n"),
        (["--cuont", "3"], "error: unrecognized arguments: --cuont 3 (see --help)\n"),
        ([], ""),
    ],
)
def test_a_command_line_that_cannot_be_read_is_refused_in_one_line(words: list[str], line: str) -> None:
    body = "p = Parser(); p.add_argument('--count', type=int); p.parse_args()"
    program = (
        f"import sys\nfrom dcut.errors import Parser, guard\ndef main():\n    {body}\nsys.exit(guard(main))"
    )
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (2 if line else 0, "", line)


COMMANDS = [
    path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
    for room in ("dcut", "traces", "sim", "analysis")
    for path in sorted((ROOT / room).rglob("*.py"))
    if "__main__" in path.read_text(encoding="utf-8")
]


BENCH = [path.stem for path in sorted((ROOT / "bench").glob("*.py"))]


@pytest.mark.parametrize("name", BENCH)
def test_every_benchmark_refuses_an_unknown_option_in_one_line(name: str) -> None:
    if name not in ("policies", "replay", "robustness", "selector", "simulators", "sweep"):
        pytest.importorskip("torch")
    done = subprocess.run(
        [sys.executable, f"bench/{name}.py", "--no-such-option=1"], capture_output=True, text=True, cwd=ROOT
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("error: ")


@pytest.mark.parametrize("module", COMMANDS)
def test_every_command_refuses_an_unknown_option_in_one_line(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", module, "--no-such-option=1"], capture_output=True, text=True, cwd=ROOT
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("error: ")


def test_an_unexpected_error_keeps_its_traceback() -> None:
    done = run("raise AssertionError('a bug')")
    assert done.returncode == 1
    assert "Traceback" in done.stderr


@pytest.mark.parametrize(
    ("number", "line"),
    [(signal.SIGTERM, "stopped\n"), (signal.SIGHUP, "stopped\n"), (signal.SIGINT, "interrupted\n")],
)
def test_a_signal_lets_the_command_tidy_up(number: signal.Signals, line: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WAITING], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    ) as command:
        assert command.stdout is not None
        assert command.stdout.readline() == "ready\n"
        command.send_signal(number)
        out, err = command.communicate(timeout=30)
    assert (command.returncode, out, err) == (128 + number, "tidied up\n", line)


@pytest.mark.parametrize(
    ("number", "line"),
    [(signal.SIGTERM, "stopped\n"), (signal.SIGHUP, "stopped\n"), (signal.SIGINT, "interrupted\n")],
)
def test_a_signal_ends_at_once_what_would_take_an_exception_for_something_else(
    number: signal.Signals, line: str
) -> None:
    program = f"""import signal, sys
from dcut.errors import at_once, guard
def main():
    with at_once():
        try:
            signal.raise_signal({number:d})
        except BaseException as error:
            raise ImportError from error
sys.exit(guard(main))"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (128 + number, "", line)


def test_what_a_command_was_started_to_ignore_it_ignores() -> None:
    program = """import signal, sys
from dcut.errors import at_once, guard
signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
def main():
    signal.raise_signal(signal.SIGHUP)
    with at_once():
        signal.raise_signal(signal.SIGHUP)
sys.exit(guard(main))"""
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT).returncode == 0


def test_output_survives_a_terminal_without_the_character_and_a_closed_stream() -> None:
    program = "import sys\nfrom dcut.errors import guard\nsys.exit(guard(lambda: print('caf\\u00e9')))"
    ascii_only = {"PYTHONIOENCODING": "ascii", "PATH": ""}
    shown = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, env=ascii_only
    )
    assert (shown.returncode, shown.stdout) == (0, "caf\\xe9\n")
    closed = subprocess.run(["sh", "-c", f"exec '{sys.executable}' -c \"$0\" 2>&-", program], cwd=ROOT)
    assert closed.returncode == 0


def test_kernels_compile_where_there_is_no_place_for_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    import numba

    from dcut.jit import compiled

    real = numba.njit

    def without_cache(function: Any, **options: Any) -> Any:
        if options.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return real(function, **options)

    monkeypatch.setattr(numba, "njit", without_cache)

    @compiled
    def double(x: int) -> int:
        return 2 * x

    assert double(21) == 42
