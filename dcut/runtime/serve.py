"""Command that serves a model with a budget policy over the OpenAI API: python -m dcut.runtime.serve."""

import argparse
import os
import sys
from pathlib import Path

from dcut.errors import InputError, guard


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m dcut.runtime.serve", description=__doc__)
    parser.add_argument("--target", type=Path, help="Hugging Face directory of the model (default: built in)")
    parser.add_argument("--drafter", help='directory of its drafter, or "ngram" (default: built in)')
    parser.add_argument("--policy", default="dcut", help="off, full, fixed:3, ratio:0.5, dcut (default)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one (default: %(default)s)")
    parser.add_argument(
        "--api-key",
        default=os.environ.get("DCUT_API_KEY"),
        help="ask clients for this key, and let who has it change the policy (default: $DCUT_API_KEY)",
    )
    parser.add_argument("--record", type=Path, metavar="DIR", help="write a trace of what was served")
    parser.add_argument(
        "--max-batch-size",
        type=int,
        default=32,
        metavar="N",
        help="requests in one step (default: %(default)s)",
    )
    parser.add_argument(
        "--max-waiting",
        type=int,
        default=256,
        metavar="N",
        help="requests that may wait for a place; further ones get 503 (default: %(default)s)",
    )
    parser.add_argument(
        "--max-context",
        type=int,
        default=2048,
        metavar="N",
        help="tokens of a prompt and its output (default: %(default)s, or what the model allows)",
    )
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--dtype", help="float32, bfloat16 or float16 (default: float32 on a CPU)")
    args = parser.parse_args()
    if not 0 <= args.port < 65536:
        raise InputError(f"--port {args.port} is outside 0..65535")
    for name in ("max_batch_size", "max_waiting", "max_context"):
        if getattr(args, name) < 1:
            raise InputError(f"--{name.replace('_', '-')} {getattr(args, name)} is less than 1")
    if bool(args.drafter) != bool(args.target):
        raise InputError("give --target and --drafter together, or neither for the built-in pair")
    return args


def main() -> None:
    args = parse_args()
    try:
        from runtime.server import run
    except ModuleNotFoundError as error:
        raise InputError(f"serving needs {error.name}: pip install 'dcut[runtime]'") from error
    run(**vars(args))


if __name__ == "__main__":
    sys.exit(guard(main))
