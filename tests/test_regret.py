"""What a policy loses to the oracle is split into causes that add up and that name the right one."""

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from dcut.cost import CostTable, Sample
from dcut.policies import parse_policies
from sim.arrivals import request_order
from sim.engine import Engine
from sim.regret import Regret, Regrets
from traces.schema import Trace
from traces.store import open_trace


def split(trace: Trace, policies: str, batch: int, cost: CostTable | None = None) -> dict[str, Regret]:
    cost = cost or trace.cost
    assert cost is not None
    order = request_order(trace, max(64, 2 * batch), seed=0)
    regrets = Regrets(trace, cost, batch, order)
    runs = {
        name: (policy, Engine(trace, policy, cost, batch, order, True).run())
        for name, policy in parse_policies(policies).items()
    }
    return {name: regrets.split(policy, run) for name, (policy, run) in runs.items()}


@pytest.fixture(scope="module")
def h20() -> dict[str, Regret]:
    return split(open_trace("h20-qwen3-8b"), "off,full,dcut,vllm-adaptive,dcut-plus,oracle", 16)


def test_causes_add_up_and_the_oracle_misses_nothing(h20: dict[str, Regret]) -> None:
    for regret in h20.values():
        causes = asdict(regret)
        total = causes.pop("total")
        assert sum(causes.values()) == pytest.approx(total, abs=1e-9)
    assert h20["oracle"].total == pytest.approx(0, abs=1e-9)
    assert min(regret.total for name, regret in h20.items() if name != "oracle") > 0


def test_each_policy_is_charged_with_its_own_weakness(h20: dict[str, Regret]) -> None:
    assert h20["full"].rejected == pytest.approx(h20["full"].total)
    assert h20["off"].unverified == pytest.approx(h20["off"].total)
    assert h20["vllm-adaptive"].stale > 0.005 > abs(h20["dcut"].stale)
    assert abs(h20["dcut-plus"].miscalibrated) < 0.005
    assert h20["dcut-plus"].total < min(h20[name].total for name in ("off", "full", "dcut", "vllm-adaptive"))


def test_distorted_confidences_are_charged_as_miscalibration() -> None:
    trace = open_trace("h20-qwen3-8b")
    anchors = trace.anchors
    distorted = replace(
        trace, anchors=anchors.with_columns((anchors["confidences"].explode() ** 3).reshape((-1, 15)))
    )
    honest, wrong = (split(t, "dspark,vllm-adaptive,dcut-plus", 8) for t in (trace, distorted))
    assert wrong["dspark"].miscalibrated > honest["dspark"].miscalibrated + 0.02
    assert wrong["vllm-adaptive"].miscalibrated > 0.005 > abs(wrong["dcut-plus"].miscalibrated)


def test_large_graphs_are_charged_as_padding_and_a_dear_drafter_as_drafting() -> None:
    trace = open_trace("h20-qwen3-8b")
    coarse = CostTable.from_samples(
        [Sample("verify", None, n, (5 + 0.1 * n) / 1000) for n in (8, 64, 128)], max_graph_tokens=128
    )
    assert split(trace, "fixed:1", 8, coarse)["fixed:1"].padding > 0.1
    dear = CostTable.from_samples(
        [Sample("verify", b, b * k, (1 + 0.5 * b * k) / 1000) for b in (1, 64) for k in (1, 16)]
        + [Sample("draft", b, None, 0.1) for b in (1, 64)]
    )
    regret = split(trace, "fixed:1,dcut-plus", 8, dear)
    assert regret["fixed:1"].drafting > 0.5
    assert regret["dcut-plus"].total < 0.05


def test_the_command_prints_regrets_and_puts_them_into_json() -> None:
    root = Path(__file__).resolve().parents[1]
    command = [
        sys.executable,
        "-m",
        "sim.replay",
        "--policy",
        "dcut",
        "--batch-size",
        "4",
        "--requests",
        "16",
    ]
    shown = subprocess.run(
        [*command, "--regret"], cwd=root, capture_output=True, text=True, check=True
    ).stdout
    assert "missing to the oracle's throughput, and why" in shown
    done = subprocess.run(
        [*command, "--regret", "--json"], cwd=root, capture_output=True, text=True, check=True
    ).stdout
    (row,) = json.loads(done)
    assert np.isclose(sum(row["regret"].values()), 2 * row["regret"]["total"])
