"""The sweep: the same cells by whatever workers, kept when it is run again, summed up with intervals."""

import dataclasses
import hashlib
import json
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from scenes import make_cost, make_trace
from scipy import stats

from dcut.errors import InputError, guard
from sim import replay, sweep
from sim.latencies import Slo
from sim.load import Load, replay_load
from sim.scheduler import Limits
from sim.sweep import CELLS, Cell, Config
from traces import store

Command = Callable[..., int]


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small trace on disk, with costs for batch sizes 2, 4, 6 and 8."""
    place = tmp_path_factory.mktemp("traces") / "small"
    store.save(make_trace(list(range(20, 44)), 4), place)
    return str(place)


@pytest.fixture
def config(trace: str, tmp_path: Path) -> Config:
    return Config(
        str(tmp_path / "out"), trace, "full,dcut:buckets=0.5/1", (2, 4), seeds=3, requests=12, workers=1
    )


def test_more_drafts_than_the_trace_holds_are_refused_before_any_cell(config: Config) -> None:
    with pytest.raises(InputError, match="fixed:5 is more than the 4 drafts"):
        sweep.sweep(dataclasses.replace(config, policy="full,fixed:5"))
    assert not Path(config.out).exists()


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Command:
    """Run the command with these arguments; its exit status."""

    def call(*arguments: object) -> int:
        monkeypatch.setattr(sys, "argv", ["sweep", *map(str, arguments)])
        return guard(sweep.main)

    return call


def digests(directory: str) -> dict[str, str]:
    """The content of every file below a directory."""
    return {
        str(file.relative_to(directory)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in Path(directory).rglob("*")
        if file.is_file()
    }


def test_cells_are_one_data_set_with_a_row_for_each_run(config: Config) -> None:
    sweep.sweep(config)
    cells = pl.scan_parquet(Path(config.out) / CELLS).collect()
    keys = cells.select("policy", "batch_size", "seed").rows()
    policies = ("full", "dcut:buckets=0.5/1", "off")
    assert sorted(keys) == sorted((p, b, s) for p in policies for b in (2, 4) for s in range(3))
    one = pl.scan_parquet(Path(config.out) / CELLS).filter(policy="full", batch_size=4).collect()
    assert (
        one["throughput_tps"].to_list()
        == cells.filter(policy="full", batch_size=4)["throughput_tps"].to_list()
    )


def test_a_cell_is_the_replay_of_that_seed(config: Config) -> None:
    (row,) = sweep.sweep(dataclasses.replace(config, policy="full", batch_sizes=(4,), seeds=1))
    (same,) = replay.replay(replay.Config(config.trace, "full", (4,), requests=12, seed=0))
    for name in ("throughput_tps", "speedup_vs_off", "keep_ratio", "mean_acceptance_length"):
        assert row[name] == same[name]
        assert row[f"{name}_ci95"] is None


def test_intervals_are_student_s_and_the_speed_up_is_of_pairs(config: Config) -> None:
    rows = {(row["policy"], row["batch_size"]): row for row in sweep.sweep(config)}
    cells = pl.read_parquet(Path(config.out) / CELLS).sort("seed")
    tps = cells.filter(policy="full", batch_size=4)["throughput_tps"].to_numpy()
    off = cells.filter(policy="off", batch_size=4)["throughput_tps"].to_numpy()
    row = rows["full", 4]
    for name, values in (("throughput_tps", tps), ("speedup_vs_off", tps / off)):
        low, high = stats.t.interval(0.95, 2, values.mean(), stats.sem(values))
        assert row[name] == pytest.approx(values.mean())
        assert row[f"{name}_ci95"] == pytest.approx((high - low) / 2)
    assert pl.read_parquet(Path(config.out) / "summary.parquet").rows(named=True) == list(rows.values())


def test_two_processes_write_the_same_bytes_as_one(config: Config, tmp_path: Path) -> None:
    other = dataclasses.replace(config, out=str(tmp_path / "other"), workers=2)
    assert sweep.sweep(config) == sweep.sweep(other)
    assert digests(config.out) == digests(other.out)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray: pip install -e '.[sweep]'")
@pytest.mark.filterwarnings("ignore")
def test_ray_writes_the_same_bytes_as_one_process(config: Config, tmp_path: Path) -> None:
    other = dataclasses.replace(config, out=str(tmp_path / "other"), workers=2, ray="local")
    assert sweep.sweep(config) == sweep.sweep(other)
    assert digests(config.out) == digests(other.out)


def test_without_ray_the_extra_is_named(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match=r"--ray needs Ray: pip install -e '\.\[sweep\]'"):
        sweep.sweep(dataclasses.replace(config, ray="local"))


def test_a_stopped_sweep_goes_on_where_it_was_and_may_grow(
    config: Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole = sweep.sweep(dataclasses.replace(config, out=str(tmp_path / "whole")))
    computed: list[Cell] = []
    run = sweep.run

    def fails_after_five(cell: Cell) -> dict[str, object]:
        if len(computed) == 5:
            raise KeyboardInterrupt
        computed.append(cell)
        return run(cell)

    monkeypatch.setattr(sweep, "run", fails_after_five)
    with pytest.raises(KeyboardInterrupt):
        sweep.sweep(config)
    assert len(list(Path(config.out).rglob("seed-*.parquet"))) == 5
    monkeypatch.setattr(sweep, "run", lambda cell: computed.append(cell) or run(cell))
    assert sweep.sweep(config) == whole
    assert len(computed) == len({sweep.place(cell) for cell in computed}) == 18
    assert digests(config.out) == digests(str(tmp_path / "whole"))
    sweep.sweep(dataclasses.replace(config, seeds=4))
    assert {cell.seed for cell in computed[18:]} == {3}


def test_under_traffic_a_cell_is_the_replay_of_that_rate_and_seed(config: Config) -> None:
    load = Load("poisson", limit=20, limits=Limits(max_num_seqs=4), slo=Slo(tpot=0.02))
    config = dataclasses.replace(config, policy="full", batch_sizes=None, rates=(5.0, 20.0), load=load)
    rows = {row["rate"]: row for row in sweep.sweep(config)}
    cells = pl.read_parquet(Path(config.out) / CELLS)
    assert sorted(cells.select("rate", "seed", "policy").rows()) == sorted(
        (rate, seed, policy) for rate in (5, 20) for seed in range(3) for policy in ("full", "off")
    )
    asked = dataclasses.replace(load, trace=config.trace, policy="full,off", seed=1, rate=20.0)
    full, off = replay_load(asked)
    (cell,) = cells.filter(rate=20, seed=1, policy="full").rows(named=True)
    for name in ("e2e_s_mean", "ttft_s_p99", "token_goodput_tps", "num_steps"):
        assert cell[name] == full[name]
    ratios = cells.filter(rate=20).sort("seed").group_by("policy", maintain_order=True).agg("e2e_s_mean")
    means = {policy: np.array(values) for policy, values in ratios.rows()}
    assert off["e2e_s_mean"] == means["off"][1]
    assert rows[20]["speedup_vs_off"] == pytest.approx((means["off"] / means["full"]).mean())
    other = dataclasses.replace(config, load=dataclasses.replace(load, limit=21))
    with pytest.raises(InputError, match="another limit: give another place"):
        sweep.sweep(other)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"requests": 13}, "another requests"),
        ({"cost": "cost"}, "another cost"),
        ({"trace": "tiny-pair"}, "trace"),
    ],
)
def test_cells_of_another_sweep_are_not_mixed_in(
    config: Config, tmp_path: Path, change: dict[str, object], said: str
) -> None:
    small = dataclasses.replace(config, policy="off", batch_sizes=(2,), seeds=1)
    sweep.sweep(small)
    if "cost" in change:
        make_cost(5, context_token_s=1e-6).save(tmp_path / "cost.json")
        change = {"cost": str(tmp_path / "cost.json")}
    with pytest.raises(InputError, match=f"{said}.*: give another place"):
        sweep.sweep(dataclasses.replace(small, **change))  # pyright: ignore[reportArgumentType]


def test_the_command_prints_a_table_or_json(
    command: Command, trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ("--trace", trace, "--policy", "dcut", "--batch-size", "2,4", "--seeds", 2, "--requests", 8)
    args = (*args, "--workers", 1, "--out", tmp_path / "out")
    assert command(*args) == 0
    lines = [line.split()[:2] for line in capsys.readouterr().out.splitlines() if line]
    assert lines[1:3] == [["2", "dcut"], ["4", "dcut"]]
    assert command(*args, "--json") == 0
    shown = capsys.readouterr()
    assert [row["batch_size"] for row in json.loads(shown.out)] == [2, 4]
    assert shown.err == ""


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--policy", "dcutt"), "did you mean 'dcut'"),
        (("--batch-size", "64"), "batch size 64 is outside the measured range 2..8"),
        (("--requests", "3", "--batch-size", "4"), "--requests 3 cannot fill batch size 4"),
        (("--seeds", "0"), "--seeds '0' is not a whole number of at least 1"),
        (("--workers", "0"), "--workers '0'"),
        (("--trace", "absent"), "no trace 'absent'"),
        (("--out", "/dev/null/x"), "/dev/null/x cannot be written: Not a directory"),
        (("--rate", "2,x"), "--rate '2,x' is not a list of numbers"),
        (("--rate", "2,2"), "names 2 twice"),
        (("--rate", "0", "--limit", "9"), "rate 0 is not a number above 0"),
        (("--rate", "2", "--batch-size", "4"), "--batch-size has no meaning with --rate"),
        (("--slo", "ttft=1"), "--slo has no meaning without --rate"),
        (("--out", "/dev"), "/dev exists and is not a sweep: give another place"),
    ],
)
def test_bad_input_is_refused_in_one_line_before_any_work(
    command: Command,
    trace: str,
    tmp_path: Path,
    args: tuple[str, ...],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sweep, "run", lambda cell: pytest.fail("the sweep started"))
    assert command("--trace", trace, "--workers", 1, "--out", tmp_path / "out", *args) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("error: ")
    assert shown.err.count("\n") == 1
    assert said in shown.err
