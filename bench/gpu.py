"""A Qwen3-8B-shaped pair on a GPU: graphs, C(batch, ratio), and tokens a second under each policy.

    python bench/gpu.py --out out/gpu            # on CUDA, bf16, a few minutes
    python bench/gpu.py --out out/gpu --tiny     # the same code on a CPU, without graphs, in seconds

Weights are random: they cost what trained ones cost but agree on nothing, so drafts and acceptance are
taken from the trace of --trace (acceptance of published figures) while both models run in full. Writes
cost.csv (kind, batch_size, num_verify_tokens, step_s; what `CostTable.load` reads), cost.json, and runs.csv.
"""

import csv
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from dcut.cost import CostTable
from dcut.errors import InputError, Parser, guard
from dcut.policies import parse_policies
from runtime.drafter import DFlashDrafter, Drafts
from runtime.engine import Engine, Request, Step, Verified
from runtime.graphs import Graphs
from runtime.models import CausalLM, DFlash, ModelConfig, Rotary
from runtime.profiler import device_name, profile
from runtime.verifier import TorchVerifier
from traces.schema import Trace
from traces.store import open_trace

QWEN3_8B = ModelConfig(
    vocab_size=151_936,
    hidden_size=4096,
    intermediate_size=12_288,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    rope_theta=1e6,
    tie_word_embeddings=False,
    block_size=16,
    mask_token_id=151_669,
    target_layer_ids=(1, 9, 17, 25, 33),
)
TINY = replace(
    QWEN3_8B,
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    mask_token_id=1,
    target_layer_ids=(0, 1, 2),
)
DRAFTER_LAYERS = 5


class TracedEngine(Engine):
    """Runs both models in full, then puts the trace's confidences and acceptance in place of theirs."""

    trace: Trace
    rows: np.ndarray  # int64 [batch], anchors of the step

    def draft(self, slots: np.ndarray, lengths: np.ndarray, anchors: np.ndarray) -> Drafts:
        drafts, arrays = super().draft(slots, lengths, anchors), self.trace.arrays
        places = [(r.request.request_id % len(arrays.first_row), len(r.output) - 1) for r in self.batch]
        request, position = np.array(places).T
        self.rows = arrays.first_row[request] + position
        return replace(drafts, confidences=arrays.confidences[self.rows, : drafts.tokens.shape[1]])

    def verify(
        self,
        slots: np.ndarray,
        lengths: np.ndarray,
        anchors: np.ndarray,
        drafts: Drafts,
        keep_depth: np.ndarray,
    ) -> Verified:
        verified = super().verify(slots, lengths, anchors, drafts, keep_depth)
        accepted = np.minimum(self.trace.arrays.num_accepted[self.rows], verified.keep_depth)
        return verified._replace(num_accepted=accepted)


def build(kind: Any, config: ModelConfig, device: str) -> Any:
    """A model of random weights, made on the device."""
    with torch.device("meta"):
        model = kind(config)
    model = model.to(torch.bfloat16).to_empty(device=device)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02) if parameter.ndim > 1 else nn.init.ones_(parameter)
    model.rotary = Rotary(config).to(device)  # computed, not a weight
    return model.eval()


def main() -> None:
    """Profile, run every policy at every batch size, write the tables."""
    parser = Parser(description="Cost of a Qwen3-8B-shaped pair on a GPU, and what policies bring.")
    parser.add_argument("--out", default="out/gpu", metavar="DIR")
    parser.add_argument("--trace", default="h20-qwen3-8b", help="drafts and acceptance (%(default)s)")
    parser.add_argument("--policy", default="off,full,ratio:0.5,dcut")
    parser.add_argument(
        "--context", type=int, default=512, help="tokens of the profiled contexts (%(default)s)"
    )
    parser.add_argument("--profile-s", type=float, default=120.0)
    parser.add_argument(
        "--run-s", type=float, default=6.0, help="of every policy and batch size (%(default)s)"
    )
    parser.add_argument("--tiny", action="store_true", help="a tiny shape on the CPU")
    args = parser.parse_args()
    if not (args.tiny or torch.cuda.is_available()):
        raise InputError("no CUDA device here: --tiny runs the same code on the CPU")
    device, config = ("cpu", TINY) if args.tiny else ("cuda", QWEN3_8B)
    most = 8 if args.tiny else 256
    if args.tiny:
        args.context, args.profile_s, args.run_s = 64, 2.0, 0.5
        torch.set_num_threads(1)
    trace = open_trace(args.trace)
    if trace.draft_length != config.draft_length:
        raise InputError(f"trace {args.trace} drafts {trace.draft_length}, the drafter {config.draft_length}")

    target = build(CausalLM, config, device)
    model = build(DFlash, replace(config, num_hidden_layers=DRAFTER_LAYERS), device)
    room = 2 * args.context + config.draft_length
    drafter = DFlashDrafter(model, target, most, room, padded=True)
    verifier = TorchVerifier(target, most, room, drafter.taps, drafter.draft_length, padded=True)
    size = sum(p.numel() for m in (target, model) for p in m.parameters())
    print(f"{device_name(verifier.device)}: {size / 1e9:.2f} G parameters in bf16, context {args.context}")

    rng = np.random.default_rng(0)
    prompts = rng.integers(0, config.vocab_size, (most, args.context)).tolist()
    measured = profile(verifier, drafter, prompts, args.context, budget_s=args.profile_s, progress=True)
    print(measured)
    for name, graphs in (("target", verifier.graphs), ("drafter", drafter.graphs)):
        print(f"{name}: {graphs if graphs and graphs.graphs else 'no graphs on a CPU, the same shapes'}")
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    measured.cost.save(out / "cost.json")
    write_cost(measured.cost, out / "cost.csv")

    rows = []
    sizes = [n for n in (1, 8, 16, 32, 64, 128, 256) if n <= most]
    runs = [(n, name, policy) for n in sizes for name, policy in parse_policies(args.policy).items()]
    for batch_size, name, policy in tqdm(runs, desc="runs", disable=None):
        engine = TracedEngine(verifier, drafter, policy, measured.cost, batch_size)
        engine.trace = trace
        graphs = verifier.graphs, drafter.graphs
        figures = run(engine, graphs, args.run_s, args.context, rng)
        rows.append({"policy": name, "batch_size": batch_size, **figures})
    with (out / "runs.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    off = {row["batch_size"]: row["tokens_per_s"] for row in rows if row["policy"] == "off"}
    print("batch  policy       tok/s  vs off  step ms  draft ms  select us  own share")
    for row in rows:
        print(
            f"{row['batch_size']:>5}  {row['policy']:<10} {row['tokens_per_s']:>7.0f} "
            f"{row['tokens_per_s'] / off.get(row['batch_size'], float('nan')):>6.2f}x {row['step_ms']:>8.2f} "
            f"{row['draft_ms']:>9.2f} {row['select_us']:>10.0f} {row['own_share']:>9.1%}"
        )
    about = {"device": device_name(verifier.device), "torch": torch.__version__, "trace": args.trace}
    about |= {"context": args.context, "spread": measured.spread, "tiny": args.tiny}
    (out / "about.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


def run(
    engine: TracedEngine,
    graphs: Sequence[Graphs | None],
    run_s: float,
    context: int,
    rng: np.random.Generator,
) -> dict[str, float]:
    """Serve the trace's requests for a while; figures of steps with a full batch that captured nothing."""
    output_tokens = engine.trace.arrays.output_tokens
    began, number = time.perf_counter(), 0
    steps: list[Step] = []
    while len(steps) < 5 or time.perf_counter() - began < run_s:
        while len(engine.waiting) < engine.max_batch_size:
            prompt = rng.integers(0, TINY.vocab_size, context // 2).tolist()
            most = min(int(output_tokens[number % len(output_tokens)]), context)
            engine.add(Request(number, prompt, most, stop_token_ids=()))
            number += 1
        known = [len(g.inputs) for g in graphs if g]
        step = engine.step()
        full = step and len(step.request_id) == engine.max_batch_size
        if step and full and known == [len(g.inputs) for g in graphs if g]:
            steps.append(step)
    steps = steps[2:]
    total_s = sum(s.step_s for s in steps)
    models_s = sum(s.draft_s + s.verify_s for s in steps)
    return {
        "steps": len(steps),
        "tokens_per_s": sum(s.num_emitted for s in steps) / total_s,
        "step_ms": 1e3 * total_s / len(steps),
        "draft_ms": 1e3 * sum(s.draft_s for s in steps) / len(steps),
        "select_us": 1e6 * float(np.median([s.select_s for s in steps])),
        "own_share": 1 - models_s / total_s,
        "keep_ratio": sum(s.selection.num_verify_tokens for s in steps)
        / (sum(len(s.request_id) for s in steps) * (engine.draft_length + 1)),
    }


def write_cost(cost: CostTable, file: Path) -> None:
    """The table as rows of kind, batch_size, num_verify_tokens, step_s."""
    entries = cost.to_dict()
    with file.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(["kind", "batch_size", "num_verify_tokens", "step_s"])
        writer.writerows(["verify", *row] for row in entries["verify"])
        for kind in ("draft", "plain"):
            writer.writerows([kind, batch_size, "", seconds] for batch_size, seconds in entries[kind])


if __name__ == "__main__":
    sys.exit(guard(main))
