"""Load on a server, in the manner of `vllm bench serve`: many streams at once, their latencies and errors.

    python bench/serve.py                               # 500 requests, 64 at once, on a server of its own
    python bench/serve.py --policy off,full,dcut        # one server each, side by side
    python bench/serve.py --url http://127.0.0.1:8000   # on a server that runs already
    python bench/serve.py --abandon 0.5                 # half of the clients go away in the midst of it

Ends with exit code 1 if any request failed, or if a place was still taken when nothing ran any more.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]
try:
    import httpx
except ModuleNotFoundError:
    print("error: the load comes by httpx: pip install httpx", file=sys.stderr)
    sys.exit(2)

from dcut.errors import InputError, Parser, guard
from runtime.pair import weights
from runtime.text import read_texts


@dataclass
class Outcome:
    """One request as its client saw it; times in seconds since it was sent."""

    chunk_s: list[float] = field(default_factory=list)  # when each chunk of text came
    num_tokens: int = 0
    finish_s: float = 0.0
    error: str | None = None
    abandoned: bool = False

    @property
    def tpot_s(self) -> float:
        return (self.finish_s - self.chunk_s[0]) / max(1, self.num_tokens - 1)


@contextmanager
def served(*options: str) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    """A server process with these options, ready, and its address; told to end, and waited for, at exit."""
    command = [sys.executable, "-u", "-m", "dcut.runtime.serve", "--port", "0", *options]
    # The root of the checkout, so that a server runs the code that stands beside this file.
    root = Path(__file__).resolve().parents[1]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) as process:
        assert process.stdout is not None
        url = process.stdout.readline().partition(" ")[0]
        if not url:
            raise InputError(f"the server did not start, exit code {process.wait()}")
        try:
            with httpx.Client(trust_env=False, timeout=60) as client:
                while process.poll() is None and client.get(f"{url}/health").status_code != 200:
                    time.sleep(0.1)
            if process.poll() is not None:
                raise InputError(f"the server ended as it started, exit code {process.returncode}")
            yield url, process
        finally:
            process.send_signal(signal.SIGTERM)


async def stream(client: httpx.AsyncClient, body: dict[str, object], leave_after: int | None) -> Outcome:
    """Send one request and read its stream, or only as many chunks as `leave_after` says."""
    outcome, start = Outcome(), time.perf_counter()
    try:
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                outcome.error = f"{response.status_code} {(await response.aread()).decode()[:120]}"
                return outcome
            finished = False
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    finished |= line.endswith("[DONE]")
                    continue
                data = json.loads(line.removeprefix("data: "))
                if "error" in data:
                    outcome.error = data["error"]["message"]
                if data.get("usage"):
                    outcome.num_tokens = data["usage"]["completion_tokens"]
                elif data.get("choices"):
                    outcome.chunk_s.append(time.perf_counter() - start)
                if leave_after is not None and len(outcome.chunk_s) >= leave_after:
                    outcome.abandoned = True
                    return outcome
            if not finished:
                outcome.error = outcome.error or "the stream ended without [DONE]"
    except httpx.HTTPError as error:
        outcome.error = f"{type(error).__name__} {error}"
    outcome.finish_s = time.perf_counter() - start
    return outcome


async def load(
    url: str, key: str | None, prompts: Sequence[str], args: argparse.Namespace
) -> tuple[list[Outcome], float, str]:
    """Send args.requests, args.concurrency at a time: the outcomes, seconds taken, metrics at the end."""
    limits = httpx.Limits(max_connections=None, keepalive_expiry=None)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    rng = random.Random(args.seed)
    leave = [rng.randint(1, 6) if rng.random() < args.abandon else None for _ in range(args.requests)]
    async with httpx.AsyncClient(
        base_url=url, headers=headers, timeout=600, limits=limits, trust_env=False
    ) as client:
        model = (await client.get("/v1/models")).raise_for_status().json()["data"][0]["id"]
        free = asyncio.Semaphore(args.concurrency)

        async def one(number: int) -> Outcome:
            body = {
                "model": model,
                "messages": [{"role": "user", "content": prompts[number % len(prompts)]}],
                "max_tokens": args.max_tokens,
                "temperature": args.temperature,
                "seed": args.seed + number,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            async with free:
                return await stream(client, body, leave[number])

        start = time.perf_counter()
        outcomes = await asyncio.gather(*(one(number) for number in range(args.requests)))
        taken_s = time.perf_counter() - start
        metrics, deadline_s = (await client.get("/metrics")).text, time.perf_counter() + 10
        while taken(metrics) and time.perf_counter() < deadline_s:  # the last cancellations are on their way
            await asyncio.sleep(0.1)
            metrics = (await client.get("/metrics")).text
    return outcomes, taken_s, metrics


def taken(metrics: str) -> float:
    """Requests that the server says run or wait."""
    names = ("dcut_requests_running ", "dcut_requests_waiting ")
    return sum(float(line.split()[1]) for line in metrics.splitlines() if line.startswith(names))


def report(name: str, outcomes: Sequence[Outcome], taken_s: float, metrics: str) -> bool:
    """Print the figures of one run; whether it went without an error and left no place taken."""
    failed = [outcome for outcome in outcomes if outcome.error]
    whole = [o for o in outcomes if not (o.error or o.abandoned) and o.chunk_s]
    num_tokens = sum(outcome.num_tokens for outcome in whole)
    print(
        f"{name}: {len(whole)} of {len(outcomes)} requests answered in {taken_s:.1f} s, "
        f"{sum(o.abandoned for o in outcomes)} abandoned, {len(failed)} failed, "
        f"{taken(metrics):g} places still taken"
    )
    for error in sorted({outcome.error for outcome in failed if outcome.error}):
        print(f"  {error}")
    if whole:
        print(f"  {num_tokens / taken_s:.0f} output tokens/s, {len(whole) / taken_s:.2f} requests/s")
        gaps = [after - before for o in whole for before, after in pairwise(o.chunk_s)]
        for label, seconds in (
            ("ttft", [o.chunk_s[0] for o in whole]),
            ("tpot", [o.tpot_s for o in whole if o.num_tokens > 1]),
            ("itl", gaps),
            ("e2e", [o.finish_s for o in whole]),
        ):
            if seconds:
                at = np.percentile(seconds, (50, 90, 99)) * 1000
                print(f"  {label:<5} ms  median {at[0]:8.1f}  p90 {at[1]:8.1f}  p99 {at[2]:8.1f}")
    return not failed and taken(metrics) == 0


def parse_args() -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="of a server that runs already (default: start one)")
    parser.add_argument("--policy", default="dcut", help="of the servers to start (default: %(default)s)")
    parser.add_argument("--server-options", default="", help='further options, such as "--max-batch-size 8"')
    parser.add_argument("--requests", type=int, default=500, help="(%(default)s)")
    parser.add_argument("--concurrency", type=int, default=64, help="(%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=64, help="(%(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="(%(default)s)")
    parser.add_argument("--abandon", type=float, default=0.0, help="share of clients that go away")
    parser.add_argument("--prompts", type=Path, default=weights.PROMPTS, help='JSON lines {"prompt": ...}')
    parser.add_argument("--seed", type=int, default=0, help="(%(default)s)")
    args = parser.parse_args()
    for name in ("requests", "concurrency", "max_tokens"):
        if (value := getattr(args, name)) < 1:
            raise InputError(f"--{name.replace('_', '-')} {value}: give at least 1")
    if not 0 <= args.abandon <= 1:
        raise InputError(f"--abandon {args.abandon:g} is outside 0..1")
    return args


def main() -> None:
    args = parse_args()
    prompts = [text for text, _ in read_texts(args.prompts)]
    random.Random(args.seed).shuffle(prompts)
    key = os.environ.get("DCUT_API_KEY")
    good = True
    for policy in [None] if args.url else args.policy.split(","):
        options = [] if policy is None else ["--policy", policy, *args.server_options.split()]
        try:
            with nullcontext((args.url, None)) if args.url else served(*options) as (url, _):
                good &= report(policy or args.url, *asyncio.run(load(url, key, prompts, args)))
        except httpx.HTTPError as error:
            raise InputError(f"no use of the server at {args.url or 'a free port'}: {error}") from error
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    sys.exit(guard(main))
