"""Replays of traffic from the command line: figures, files, the timeline, and what is refused."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from scenes import make_trace
from test_replay import digests

from dcut.errors import InputError, guard
from sim import replay
from sim.latencies import LOADS, TIMES, Slo
from traces import store
from traces.schema import REQUESTS, STEPS

WORKLOAD = [(0.0, 30, 8), (0.01, 12, 20), (0.011, 40, 1), (0.2, 9, 30), (0.5, 33, 60)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace and a workload on disk."""
    place = tmp_path_factory.mktemp("load")
    store.save(make_trace([20, 25, 30, 41], 4), place / "trace")
    lines = [",".join(map(str, row)) for row in WORKLOAD]
    (place / "work.csv").write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *lines]) + "\n")
    return place


class Console:
    """Runs the command in this process."""

    def __init__(
        self, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.place, self.monkeypatch, self.capsys = place, monkeypatch, capsys

    def __call__(self, *args: object) -> tuple[int, str, str]:
        """Exit code, stdout, stderr."""
        given = () if "--arrivals" in args else ("--arrivals", self.place / "work.csv")
        words = map(str, ("replay", "--trace", self.place / "trace", *given, *args))
        self.monkeypatch.setattr(sys, "argv", list(words))
        code = guard(replay.main)
        out, err = self.capsys.readouterr()
        return code, out, err

    def rows(self, *args: object) -> list[dict[str, Any]]:
        code, out, err = self(*args, "--json")
        assert (code, err) == (0, "")
        return json.loads(out)


@pytest.fixture
def console(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Console:
    return Console(place, monkeypatch, capsys)


def test_figures_follow_from_the_requests_that_are_written(console: Console, tmp_path: Path) -> None:
    slo = "ttft=0.05,tpot=0.02"
    shown = console.rows("--policy", "off,full", "--slo", slo, "--out", tmp_path / "out", "--kv-blocks", 8)
    meta, tables, _ = store.read_directory(tmp_path / "out", "services")
    assert meta["runs"] == ["off-8", "full-8"]
    assert tables["runs"]["policy"].to_list() == ["off", "full"]
    for row in shown:
        _, run, _ = store.read_directory(tmp_path / "out" / f"{row['policy']}-8", "service")
        requests, steps = run["requests"], run["steps"]
        assert dict(requests.schema) == REQUESTS | TIMES
        assert dict(steps.schema) == STEPS | LOADS
        assert requests.select("arrival_s", "prompt_tokens", "output_tokens").rows() == WORKLOAD
        ttft = (requests["first_token_s"] - requests["arrival_s"]).to_numpy()
        n = requests["output_tokens"].to_numpy()
        tpot = (requests["finish_s"] - requests["first_token_s"]).to_numpy() / np.maximum(n - 1, 1)
        kept = (ttft <= 0.05) & (tpot <= 0.02)
        seconds = requests["finish_s"].to_numpy().max()  # the first comes at 0
        assert row["ttft_s_p90"] == pytest.approx(np.percentile(ttft, 90))
        assert row["tpot_s_mean"] == pytest.approx(tpot[n > 1].mean())
        assert row["request_goodput_rps"] == pytest.approx(kept.sum() / seconds)
        assert row["token_goodput_tps"] == pytest.approx(n[kept].sum() / seconds)
        assert row["throughput_tps"] == pytest.approx(n.sum() / seconds)
        assert row["num_preempted"] == requests["num_preempted"].sum() == steps["num_preempted"].sum()
        assert row["num_tokens"] == n.sum()
        recorded = dict(zip((10, 13, 16, 19), (20, 25, 30, 41), strict=True))  # make_trace's ids and lengths
        reused = [long > recorded[at] for long, at in zip(n.tolist(), requests["source_id"], strict=True)]
        assert row["num_reused_anchors"] == sum(reused) >= 1  # 60 tokens are longer than any
        decoding = steps.filter(pl.col("batch_size") > 0)
        assert decoding["bucket"].null_count() == 0
        assert sum(row["bucket_share"].values()) == pytest.approx(1)
        gaps = np.sort(np.repeat(decoding["step_s"].to_numpy(), decoding["batch_size"].to_numpy()))
        assert row["itl_s_p50"] >= 0.98 * gaps[len(gaps) // 2]


def test_the_same_seed_writes_the_same_bytes(console: Console, tmp_path: Path) -> None:
    args = ("--arrivals", "bursty", "--rate", 30, "--limit", 40, "--replicas", 2, "--seed", 3)
    for name in ("one", "two"):
        console.rows(*args, "--router", "least-loaded", "--out", tmp_path / name)
    assert digests(tmp_path / "one") == digests(tmp_path / "two")


def test_the_table_says_how_many_met_anchors_again(console: Console) -> None:
    code, out, err = console("--policy", "off,dcut", "--async-scheduling")
    assert (code, err) == (0, "")
    assert [line.split()[0] for line in out.splitlines()[1:3]] == ["off", "dcut"]
    num = console.rows("--policy", "off", "--async-scheduling")[0]["num_reused_anchors"]
    assert f"{num} requests ({num / len(WORKLOAD):.1%}) are longer than what was recorded" in out


def test_users_of_a_closed_loop_send_one_request_after_the_other(console: Console, tmp_path: Path) -> None:
    console.rows(
        "--policy", "full", "--arrivals", "closed:users=3,think_s=0.1", "--limit", 30, "--out", tmp_path / "c"
    )
    requests = store.read_directory(tmp_path / "c" / "full-8", "service")[1]["requests"]
    starts, ends = requests["arrival_s"].to_numpy(), requests["finish_s"].to_numpy()
    there = (starts[:, None] <= starts) & (starts < ends[:, None])  # [request, moment of an arrival]
    assert there.sum(axis=0).max() <= 3
    assert len(requests) == 30


@pytest.mark.parametrize("name", ["line.json", "line.json.gz"])
def test_the_timeline_holds_every_step_and_every_phase(console: Console, tmp_path: Path, name: str) -> None:
    row, _ = console.rows("--policy", "dcut,off", "--timeline", tmp_path / name)
    if name.endswith("gz"):
        import gzip

        text = gzip.decompress((tmp_path / name).read_bytes()).decode()
    else:
        text = (tmp_path / name).read_text()
    events = [event for event in json.loads(text)["traceEvents"] if event]
    slices = [event for event in events if event["ph"] == "X" and event["pid"] == 0]
    assert len(slices) == row["num_steps"]
    assert sum(event["dur"] for event in slices) / 1e6 == pytest.approx(row["busy_s"])
    starts = [event for event in events if event["ph"] == "b" and event["pid"] == 0]
    assert len(starts) == 3 * len(WORKLOAD)
    assert {event["args"]["name"] for event in events if event["ph"] == "M"} == {"dcut", "off"}
    assert [entry.name for entry in tmp_path.iterdir()] == [name]


def test_a_promise_is_parsed_and_others_are_refused() -> None:
    assert Slo.parse("ttft=0.5, tpot=0.05") == Slo(0.5, 0.05)
    assert Slo.parse("e2e=30") == Slo(e2e=30)
    for text in ("ttft", "ttft=fast", "ttft=-1", "latency=3", ""):
        with pytest.raises(InputError, match="is not a promise in seconds"):
            Slo.parse(text)


def test_faster_arrivals_and_smaller_memory_only_make_requests_wait_longer(console: Console) -> None:
    args = ("--arrivals", "poisson", "--rate", 3, "--limit", 120, "--policy", "full")
    calm, busy = (console.rows(*args, "--rate-scale", scale)[0] for scale in (1, 8))
    assert calm["e2e_s_mean"] < busy["e2e_s_mean"]
    roomy, tight = (console.rows(*args, "--rate-scale", 8, "--kv-blocks", blocks)[0] for blocks in (1000, 12))
    assert roomy["e2e_s_mean"] == busy["e2e_s_mean"] < tight["e2e_s_mean"]
    assert tight["kv_share_max"] <= 1


def test_prompts_computed_elsewhere_cost_nothing(console: Console) -> None:
    here, elsewhere = (console.rows("--policy", "off", *more)[0] for more in ((), ("--prefill-elsewhere",)))
    assert elsewhere["prefill_tokens"] == 0
    assert elsewhere["ttft_s_mean"] < here["ttft_s_mean"]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--kv-blocks", 5), "line 6: 33 prompt and 60 output tokens outgrow the KV memory of 64 tokens"),
        (("--kv-blocks", 4, "--arrivals", "poisson", "--rate", 5), "outgrow the KV memory of 48 tokens"),
        (("--max-num-seqs", 9), "batch size 9 is outside the measured range 2..8"),
        (("--policy", "full,dsd:1x5"), "dsd:1x5 names 5 drafts, the drafter proposes 4 at most"),
        (("--slo", "ttft=0"), "--slo 'ttft=0'"),
        (("--batch-size", 4), "--max-num-seqs"),
        (("--arrivals", "poisson"), "rate"),
        (("--rate", 3), "--rate-scale"),
        (("--out", "/dev/null/results"), "Not a directory"),
        (("--replicas", 0), "--replicas '0' is not a whole number of at least 1"),
        (("--replicas", 10**8), "requests keep no more servers busy"),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_line(
    console: Console, args: tuple[object, ...], said: str
) -> None:
    code, out, err = console(*args)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert said in err
