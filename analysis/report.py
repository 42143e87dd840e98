"""The command that turns results directories into one page of pictures."""

import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tqdm import tqdm

from analysis import page
from analysis.figures import FIGURES, LIVE, UNDER_TRAFFIC, Story, counted, headlines, pair, several, share
from analysis.results import Results, load
from dcut.errors import InputError, Parser, guard
from sim.validate import Comparison, compare, read_live
from traces.schema import Trace
from traces.store import open_trace


def report(
    paths: Sequence[str],
    out: str | None,
    png: str | None,
    live: str | None = None,
    trace: str | None = None,
    progress: bool = False,
) -> None:
    """Write the report of results directories to the file `out` and its figures into the directory `png`.

    live, trace: live runs, and a recording of their requests, to open with each run beside its replay.
    Raises InputError on what is not a results directory and, before anything is drawn, on what cannot be
    written; then nothing is written at all.
    """
    for option, place in (("--out", out), ("--png", png)):
        if place == "":
            raise InputError(f"{option} '' names no place: give one")
    for place in ([Path(out)] if out else []) + ([Path(png) / "figure.png"] if png else []):
        _check_place(place)
    if not paths and live is None:
        raise InputError("name results directories, or live runs with --live DIR --trace DIR")
    results = load(paths)
    story = Story(results, *_beside_replays(live, trace, progress))
    shown = LIVE if story.live else ()
    shown += (FIGURES if story.results else ()) + (UNDER_TRAFFIC if story.traffic else ())
    with tqdm(total=len(shown) + 2, desc="report", leave=False, disable=None if progress else True) as bar:
        figures = []
        for draw in shown:
            figures.append(draw(story))
            bar.update()
        files: dict[Path, bytes] = {}
        if png:
            files |= {Path(png) / f"{f.name}.png": page.png(f) for f in figures if f.chart is not None}
        bar.update()
        if out:
            names = [*story.traces, *(str(r.meta["trace"]) for r in story.traffic)] or [str(trace)]
            head = f"Verification budgets compared: {several([*dict.fromkeys(names)])}", _subtitle(story)
            text = page.html(*head, headlines(story), figures, _rows(story), list(story.palette))
            files[Path(out)] = text.encode()
        bar.update()
    _write(files)


def _beside_replays(
    live: str | None, trace: str | None, progress: bool
) -> tuple[list[Comparison], list[dict[str, Any]]]:
    """Every live run compared with a replay of it from the recording of its requests, and what each says."""
    if live is None and trace is None:
        return [], []
    if live is None or trace is None:
        raise InputError("live runs and the recording of their requests go together: give --live and --trace")
    runs, recording = read_live(live), open_trace(trace)
    hidden = None if progress else True
    bar = tqdm(runs, desc="replaying live runs", unit=" runs", leave=False, disable=hidden)
    return [compare(recording, run) for run in bar], [run.meta for run in runs]


def _subtitle(story: Story) -> str:
    """What was run, of which pair and where, in one line."""
    facts = [f"{counted(len(story.live), 'live run')} of {story.live_place}"] if story.live else []
    if replayed := [*story.results, *story.traffic]:
        facts.append(f"replay: {several([*dict.fromkeys(_origin(story, r) for r in replayed)])}")
        facts.append(f"D = {several([*dict.fromkeys(r.meta['draft_length'] + 1 for r in replayed)])}")
    if story.results:
        facts += [
            f"batch {', '.join(map(str, story.batch_sizes))}",
            f"{counted(len(story.runs), 'run')} from {several(story.sources)}",
        ]
    if story.traffic:
        runs = sum(len(result.runs) for result in story.traffic)
        facts.append(f"{counted(runs, 'run')} under traffic")
    return " · ".join(facts)


def _origin(story: Story, result: Results) -> str:
    """The pair that was replayed; whether its trace is generated, and its times are those of a CPU."""
    trace, notes = story.trace(result.meta["trace"]), []
    if isinstance(trace, Trace) and (engine := str(trace.meta.get("engine"))).startswith("generated"):
        notes.append(engine)
    if result.meta.get("clock") == "cpu" and result.meta["cost"] is None:
        notes.append("times are CPU seconds of one thread")
    return pair(result.meta) + (f" ({', '.join(notes)})" if notes else "")


def _rows(story: Story) -> list[dict[str, Any]]:
    """The runs as the table of the page shows them."""
    order = list(story.palette)
    runs = sorted(story.runs.iter_rows(named=True), key=lambda r: (r["batch_size"], order.index(r["policy"])))
    return [
        {
            "batch": run["batch_size"],
            "policy": run["policy"],
            **({"source": run["source"]} if len(story.sources) > 1 else {}),
            "tokens/s": f"{run['throughput_tps']:,.0f}",
            "vs off": f"{run['speedup_vs_off']:.2f} ×",
            "keep ratio": f"{run['keep_ratio']:.3f}",
            "acceptance length": f"{run['mean_acceptance_length']:.2f}",
            "wasted": share(run["wasted_verify_ratio"]),
            "steps": f"{run['num_steps']:,}",
            "seed": "–" if run["seed"] is None else run["seed"],
        }
        for run in runs
    ]


def _check_place(file: Path) -> None:
    """Raise InputError where a file cannot be written, or where something that is no file would be lost."""
    if file.exists() and not file.is_file():
        raise InputError(f"{file} exists and is not a file: give another name")
    above = next(parent for parent in file.absolute().parents if parent.exists())
    try:
        with tempfile.TemporaryFile(dir=above):
            pass
    except OSError as error:
        raise InputError(f"{file} cannot be written: {error.strerror}") from error


def _write(files: dict[Path, bytes]) -> None:
    """Write all files or none: each under a temporary name first, then all renamed."""
    for path in files:
        _check_place(path)
    parts = {path: path.with_name(f".{path.name}.{os.getpid()}.part") for path in files}
    made = dict.fromkeys(parent for path in files for parent in path.parents if not parent.exists())
    try:
        for path, part in parts.items():
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                part.write_bytes(files[path])
            except OSError as error:
                raise InputError(f"{path} cannot be written: {error.strerror}") from error
        for path, part in parts.items():
            part.replace(path)
    except BaseException:
        for part in parts.values():
            with suppress(OSError):
                part.unlink()
        for parent in made:  # deepest first; one that holds something stays
            with suppress(OSError):
                parent.rmdir()
        raise


def main() -> None:
    """Parse the command line, write the report, say where it is."""
    parser = Parser(
        prog="python -m analysis.report", description="Turn results directories into one page of pictures."
    )
    parser.add_argument(
        "results", nargs="*", metavar="RESULTS", help="directories that sim.replay --out wrote"
    )
    parser.add_argument("--live", metavar="DIR", help="live runs, to open with each beside its replay")
    parser.add_argument("--trace", help="with --live, the recording of the same requests: name or directory")
    parser.add_argument("--out", metavar="FILE", default="report.html", help="the page (%(default)s)")
    parser.add_argument("--png", metavar="DIR", help="also write each figure there as a PNG")
    args = parser.parse_args()
    report(args.results, args.out, args.png, args.live, args.trace, progress=True)
    print(f"report in {args.out}" + (f", pictures in {args.png}" if args.png else ""))


if __name__ == "__main__":
    sys.exit(guard(main))
