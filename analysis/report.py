"""The command that turns results directories into one page of pictures."""

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tqdm import tqdm

from analysis import page
from analysis.figures import FIGURES, Story, counted, headlines, several, share
from analysis.results import load
from dcut.errors import InputError, guard


def report(paths: Sequence[str], out: str | None, png: str | None, progress: bool = False) -> None:
    """Write the report of results directories to the file `out` and its figures into the directory `png`.

    Raises InputError on what is not a results directory and, before anything is drawn, on what cannot be
    written; then nothing is written at all.
    """
    for option, place in (("--out", out), ("--png", png)):
        if place == "":
            raise InputError(f"{option} '' names no place: give one")
    for place in ([Path(out)] if out else []) + ([Path(png) / "figure.png"] if png else []):
        _check_place(place)
    story = Story(load(paths))
    with tqdm(total=len(FIGURES) + 2, desc="report", leave=False, disable=None if progress else True) as bar:
        figures = []
        for draw in FIGURES:
            figures.append(draw(story))
            bar.update()
        files: dict[Path, bytes] = {}
        if png:
            files |= {Path(png) / f"{f.name}.png": page.png(f) for f in figures if f.chart is not None}
        bar.update()
        if out:
            text = page.html(_title(story), _subtitle(story), headlines(story), figures, _rows(story))
            files[Path(out)] = text.encode()
        bar.update()
    _write(files)


def _title(story: Story) -> str:
    return f"Verification budgets compared: {several(story.traces)}"


def _subtitle(story: Story) -> str:
    """What was run, in one line."""
    meta = story.results[0].meta
    facts = [
        " with ".join(str(meta[key]) for key in ("target", "drafter") if meta.get(key)),
        f"D = {story.runs['draft_length'][0] + 1}",
        f"batch {', '.join(map(str, story.batch_sizes))}",
        f"{counted(len(story.runs), 'run')} from {several(story.sources)}",
    ]
    return " · ".join(filter(None, facts))


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
    parser = argparse.ArgumentParser(
        prog="python -m analysis.report", description="Turn results directories into one page of pictures."
    )
    parser.add_argument(
        "results", nargs="+", metavar="RESULTS", help="directories that sim.replay --out wrote"
    )
    parser.add_argument("--out", metavar="FILE", default="report.html", help="the page (%(default)s)")
    parser.add_argument("--png", metavar="DIR", help="also write each figure there as a PNG")
    args = parser.parse_args()
    report(args.results, args.out, args.png, progress=True)
    print(f"report in {args.out}" + (f", pictures in {args.png}" if args.png else ""))


if __name__ == "__main__":
    sys.exit(guard(main))
