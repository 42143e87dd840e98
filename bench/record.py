"""What recording adds to a step: the time spent in the log, tables included, over the time of the steps.

    python bench/record.py

The dense pass is not part of it: it runs between steps, and the log's clock stands still meanwhile.
Times are CPU seconds of one thread.
"""

import sys
import time
from pathlib import Path

import torch

from dcut.errors import Parser, guard
from dcut.policies import Full
from runtime.engine import Engine, Request
from runtime.pair import weights
from runtime.recorder import Log, read_prompts
from runtime.text import Codec
from runtime.verifier import open_pair
from sim.arrivals import whole_number


def main() -> None:
    """Serve under full verification at a few batch sizes and print the recorder's share."""
    parser = Parser(description="What recording adds to a step.")
    parser.add_argument("--target", default=str(weights.HERE / "weights/target"), metavar="DIR")
    parser.add_argument("--drafter", default=str(weights.HERE / "weights/dflash16"), metavar="DIR")
    parser.add_argument("--prompts", default=str(weights.PROMPTS), metavar="FILE")
    parser.add_argument("--max-tokens", default="64", metavar="N", help="(%(default)s)")
    args = parser.parse_args()
    max_tokens = whole_number("--max-tokens", args.max_tokens, 2)
    torch.set_num_threads(1)
    prompts = read_prompts(args.prompts, Codec.load(Path(args.target)), 48)
    longest = max(len(prompt.tokens) for prompt in prompts) + max_tokens
    verifier, drafter = open_pair(args.target, args.drafter, 32, longest)
    print("batch  steps  step ms  recorder us a step  share")
    for batch_size in (1, 8, 32):
        engine = Engine(verifier, drafter, Full(), max_batch_size=batch_size, clock=time.thread_time)
        log, log_s = Log(), 0.0
        for i, prompt in enumerate(prompts[: 16 + batch_size]):
            request = Request(i, prompt.tokens, max_tokens)
            log.expect(request, prompt.domain)
            engine.add(request)
        while step := engine.step():
            began = time.thread_time()
            log.add(step, "full")
            log_s += time.thread_time() - began
        began = time.thread_time()
        steps = log.tables()["steps"]
        log_s += time.thread_time() - began
        step_s = float(steps["step_s"].to_numpy().sum())
        print(
            f"{batch_size:>5} {len(steps):>6} {1e3 * step_s / len(steps):>8.1f} "
            f"{1e6 * log_s / len(steps):>19.0f} {log_s / step_s:>6.2%}"
        )


if __name__ == "__main__":
    sys.exit(guard(main))
