"""The replay command: what it prints, what it writes, and what it refuses."""

import dataclasses
import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import polars as pl
import pytest
from scenes import make_cost, make_trace

from dcut.errors import InputError, guard
from dcut.policies import POLICIES
from sim import replay, results
from sim.engine import Engine
from traces import store
from traces.schema import DECISIONS, STEPS

REQUIRED = {
    "policy",
    "batch_size",
    "throughput_tps",
    "keep_ratio",
    "mean_acceptance_length",
    "speedup_vs_off",
    "num_steps",
    "wasted_verify_ratio",
    "bucket_share",
    "sim_steps_per_s",
}


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small trace on disk, with costs for batch sizes 2, 4, 6 and 8."""
    place = tmp_path_factory.mktemp("traces") / "small"
    store.save(make_trace(list(range(20, 44)), 4), place)
    return str(place)


class Console:
    """Runs the command in this process, as `python -m sim.replay` would."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch, self.capsys = monkeypatch, capsys

    def __call__(self, *args: object) -> tuple[int, str, str]:
        """Exit code, stdout, stderr."""
        few = () if "--requests" in args else ("--requests", "16")
        self.monkeypatch.setattr(sys, "argv", ["replay", *map(str, args), *few])
        code = guard(replay.main)
        out, err = self.capsys.readouterr()
        return code, out, err


@pytest.fixture
def console(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Console:
    return Console(monkeypatch, capsys)


def digests(directory: Path) -> dict[str, str]:
    """The content of every file below a directory."""
    return {
        str(file.relative_to(directory)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(directory.rglob("*"))
        if file.is_file()
    }


def test_json_is_one_list_on_stdout_and_nothing_else(trace: str) -> None:
    command = [sys.executable, "-m", "sim.replay", "--trace", trace, "--policy", "full,dcut", "--json"]
    done = subprocess.run(
        [*command, "--batch-size", "4,2", "--requests", "8"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    rows = json.loads(done.stdout)
    assert [(row["policy"], row["batch_size"]) for row in rows] == [
        ("full", 4),
        ("dcut", 4),
        ("full", 2),
        ("dcut", 2),
    ]
    for row in rows:
        assert set(row) >= REQUIRED
        assert sum(row["bucket_share"].values()) == pytest.approx(1)
        assert row["keep_ratio"] <= 1
    assert rows[0]["keep_ratio"] == 1


def test_bad_input_ends_a_process_with_one_line_and_no_traceback() -> None:
    command = [sys.executable, "-m", "sim.replay", "--batch-size", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: --batch-size '0' is not a whole number of at least 1\n"


def test_the_table_names_every_run_and_its_speed_up(console: Console, trace: str) -> None:
    code, out, err = console("--trace", trace, "--batch-size", "2,8")
    assert (code, err) == (0, "")
    lines = [line.split() for line in out.splitlines() if line and line.split()[0] in ("2", "8")]
    assert [line[:2] for line in lines] == [[b, p] for b in "28" for p in ("off", "full", "dcut")]
    assert [line[3] for line in lines if line[1] == "off"] == ["1.00x", "1.00x"]


def test_batch_sizes_default_to_those_of_the_cost_table(console: Console, trace: str) -> None:
    _, out, _ = console("--trace", trace, "--policy", "dcut", "--json")
    assert [row["batch_size"] for row in json.loads(out)] == [2, 4, 6, 8]


def test_the_speed_up_does_not_depend_on_whether_plain_decoding_is_shown(
    console: Console, trace: str
) -> None:
    alone, beside = (
        json.loads(console("--trace", trace, "--policy", policy, "--batch-size", 4, "--json")[1])
        for policy in ("dcut", "dcut,off")
    )
    assert alone[0]["speedup_vs_off"] == beside[0]["speedup_vs_off"]
    assert beside[0]["speedup_vs_off"] == beside[0]["throughput_tps"] / beside[1]["throughput_tps"]


def test_a_cost_table_of_ones_own_prices_the_steps(console: Console, trace: str, tmp_path: Path) -> None:
    lines = ["batch_size,num_verify_tokens,step_ms,kind", "4,4,10,plain", "4,8,20,verify", "4,20,20,verify"]
    (tmp_path / "cost.csv").write_text("\n".join(lines), encoding="utf-8")
    code, out, _ = console("--trace", trace, "--policy", "full", "--cost", tmp_path / "cost.csv", "--json")
    (row,) = json.loads(out)
    assert (code, row["batch_size"]) == (0, 4)
    make_cost(5).save(tmp_path / "cost.json")
    _, other, _ = console("--trace", trace, "--policy", "full", "--cost", tmp_path / "cost.json", "--json")
    _, own, _ = console("--trace", trace, "--policy", "full", "--json")
    for row, same in zip(json.loads(other), json.loads(own), strict=True):
        assert row | {"sim_steps_per_s": 0} == same | {"sim_steps_per_s": 0}


def test_results_hold_every_run_in_the_trace_s_columns(console: Console, trace: str, tmp_path: Path) -> None:
    spec = "full,dcut:buckets=0.5/1,form=paper"
    args = ("--trace", trace, "--policy", spec, "--batch-size", 4, "--requests", 9, "--decisions")
    _, out, _ = console(*args, "--json", "--out", tmp_path / "new" / "results")
    shown = json.loads(out)
    meta, tables, documents = store.read_directory(tmp_path / "new" / "results", "replays")
    assert meta["runs"] == ["full-4", "dcut_buckets=0.5_1_form=paper-4"]
    assert documents["cost"] == make_cost(5).to_dict()
    for name, row, written in zip(meta["runs"], shown, tables["runs"].iter_rows(named=True), strict=True):
        shares = {share["bucket"]: share["share"] for share in written.pop("bucket_share")}
        assert shares == row.pop("bucket_share")
        del row["sim_steps_per_s"]
        assert row.items() <= written.items()
        assert written["seed"] == 0
        about, run, _ = store.read_directory(tmp_path / "new" / "results" / name, "replay")
        assert (about["policy"], about["batch_size"]) == (row["policy"], 4)
        assert dict(run["steps"].schema) == STEPS
        assert dict(run["decisions"].schema) == DECISIONS
        assert len(run["requests"]) == 9
        steady = run["steps"].filter(pl.col("batch_size") >= 0.85 * 4)
        emitted, seconds = steady.select("num_emitted", "step_s").sum().row(0)
        assert row["throughput_tps"] == pytest.approx(emitted / seconds)
        assert row["num_steady_steps"] == len(steady)


def test_the_same_seed_writes_the_same_bytes(console: Console, trace: str, tmp_path: Path) -> None:
    args = ("--trace", trace, "--batch-size", "2,4", "--decisions", "--seed", 7)
    for place in ("first", "second"):
        assert console(*args, "--out", tmp_path / place)[0] == 0
    assert digests(tmp_path / "first") == digests(tmp_path / "second")


def test_older_results_are_replaced_whole(console: Console, trace: str, tmp_path: Path) -> None:
    place = tmp_path / "results"
    assert console("--trace", trace, "--batch-size", "2,4", "--out", place)[0] == 0
    assert console("--trace", trace, "--batch-size", "6", "--policy", "full", "--out", place)[0] == 0
    assert {entry.name for entry in place.iterdir()} == {"meta.json", "runs.parquet", "cost.json", "full-6"}
    assert [entry.name for entry in tmp_path.iterdir()] == ["results"]


def test_an_interrupted_replay_leaves_what_was_there(
    console: Console, trace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "results"
    assert console("--trace", trace, "--batch-size", 2, "--out", place)[0] == 0
    before = digests(tmp_path)

    def stop(self: Engine, progress: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "run", stop)
    assert console("--trace", trace, "--out", place)[0] == 130
    assert console("--trace", trace, "--out", tmp_path / "deep" / "new")[0] == 130
    assert digests(tmp_path) == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["results"]


def test_a_directory_with_other_things_is_left_alone(console: Console, trace: str, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    code, _, err = console("--trace", trace, "--out", tmp_path)
    assert code == 2
    assert "notes.txt" in err
    results = tmp_path / "results"
    assert console("--trace", trace, "--batch-size", 2, "--policy", "full", "--out", results)[0] == 0
    (results / "notes.txt").write_text("mine", encoding="utf-8")
    code, _, err = console("--trace", trace, "--out", results)
    assert code == 2
    assert "notes.txt" in err
    assert (results / "notes.txt").read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--batch-size", "-4"), "--batch-size '-4' is not a whole number of at least 1"),
        (("--batch-size", "4,x"), "'x'"),
        (("--batch-size", "4,"), "''"),
        (("--batch-size", "4,8,4"), "names 4 twice"),
        (("--batch-size", "4,64"), "batch size 64 is outside the measured range 2..8"),
        (("--requests", "0"), "--requests '0' is not a whole number of at least 1"),
        (("--requests", "3000000000"), "keeps them all in memory, at most 10000000"),
        (("--batch-size", "9" * 400), "--batch-size 999999999... is too large: 400 digits"),
        (("--seed", str(2**63)), "is too large"),
        (("--requests", "3", "--batch-size", "4"), "--requests 3 cannot fill batch size 4"),
        (("--seed", "-1"), "--seed '-1'"),
        (("--policy", "dcutt"), "did you mean 'dcut'"),
        (("--policy", ""), "no policy named"),
        (("--policy", "off,fixed:5"), "fixed:5 is more than the 4 drafts"),
        (("--cost", "absent.csv"), "absent.csv"),
        (("--decisions",), "--out DIR"),
        (("--out", "/dev/null/results"), "Not a directory"),
        (("--out", "/dev/null"), "/dev/null exists and is not a directory"),
        (("--out", ""), "is the working directory or a mount point: give a directory inside it"),
        (("--trace", "absent"), "no trace 'absent'"),
    ],
)
def test_bad_input_is_refused_in_one_line_before_any_work(
    console: Console, trace: str, args: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(self: Engine, progress: object) -> None:
        raise AssertionError("the replay started")

    monkeypatch.setattr(Engine, "run", work)
    code, out, err = console("--trace", trace, *args)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert said in err


def test_a_trace_without_costs_asks_for_some(console: Console, tmp_path: Path) -> None:
    made = make_trace([9, 9], 2)
    store.save(type(made)(made.meta, made.requests, made.anchors), tmp_path / "bare")
    code, _, err = console("--trace", tmp_path / "bare")
    assert code == 2
    assert "give one with --cost FILE" in err


def test_a_rare_budget_is_not_shown_as_none(
    console: Console, trace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = replay.replay(replay.Config(trace=trace, policy="dcut", batch_sizes=(4,), requests=8))
    shown[0]["bucket_share"] = {"0.25": 0.996, "0.5": 0.0, "0.75": 0.004}
    monkeypatch.setattr(replay, "replay", lambda *_, **__: shown)
    assert "  0.25 100%, 0.75 <1%\n" in console("--trace", trace)[1]


def test_help_names_every_policy_with_its_options(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["replay", "--help"])
    with pytest.raises(SystemExit):
        replay.main()
    _, _, listed = capsys.readouterr().out.partition("policies (")
    for name, kind in POLICIES.items():
        assert f"\n  {name} " in listed
        assert all(field.name in listed for field in dataclasses.fields(cast(Any, kind)))
    words = " ".join(listed.split())
    assert "Plain decoding: no drafter, one token a request. full" in words
    assert "buckets=0.25/0.5/0.75/1, bonus=false, form=served, min_gain=0.0" in words
    assert "ratio (required), form=served" in words


def test_two_runs_in_one_directory_are_refused_before_the_work(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"policies ratio:0.5 and ratio:\+0.5 would both be .* ratio_0.5-4:"):
        results.new_directory(tmp_path / "new", [("off", 4), ("ratio:0.5", 4), ("ratio:+0.5", 4)])
    assert not any(tmp_path.iterdir())
