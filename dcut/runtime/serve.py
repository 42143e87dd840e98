"""The command that serves a model with a budget policy over the OpenAI API."""

import argparse
import os
import sys
from dataclasses import dataclass
from math import inf

from dcut.errors import InputError, Parser, at_once, guard

GRACE_S = 300  # for running requests to end after SIGTERM


@dataclass(frozen=True, slots=True)
class Config:
    """One server, as the command line asks for it."""

    target: str | None = None  # None: the built-in pair
    drafter: str | None = None
    policy: str = "dcut"
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    record: str | None = None
    max_batch_size: int = 32
    max_waiting: int = 256
    max_context: int | None = None  # None: 2048, or what the model allows
    device: str = "cpu"
    dtype: str = "float32"
    profile_s: float = 30.0


def main() -> None:
    """Parse the command line and serve until told to end."""
    default = Config(api_key=os.environ.get("DCUT_API_KEY"))
    both = Parser(add_help=False, allow_abbrev=False)
    both.add_argument(
        "--engine", choices=("torch", "vllm"), default="torch", help="our own, or vLLM's (%(default)s)"
    )
    both.add_argument("--policy", default=default.policy, help="such as off, full, ratio:0.5 (%(default)s)")
    both.add_argument("--host", default=default.host, help="address to listen on (%(default)s)")
    both.add_argument("--port", type=int, default=default.port, help="0: any free one (%(default)s)")
    both.add_argument(
        "--api-key",
        default=default.api_key,
        metavar="KEY",
        help="what clients must show; with it our engine changes policy ($DCUT_API_KEY, else no check)",
    )
    both.add_argument(
        "--profile-s", type=float, default=default.profile_s, help="for the cost profile (%(default)s s)"
    )
    if both.parse_known_args()[0].engine == "vllm":
        _serve_vllm(both)
    else:
        _serve(both, default)


def _serve_vllm(both: argparse.ArgumentParser) -> None:
    parser = Parser(
        prog="python -m dcut.runtime.serve --engine vllm",
        usage="%(prog)s [MODEL] [options of this command or of `vllm serve`]",
        description="Serve a model with vLLM, verifying as a policy decides.",
        epilog="Anything else goes to `vllm serve`, such as MODEL, --speculative-config or "
        "--tensor-parallel-size; without MODEL the built-in pair is served.",
        parents=[both],
        allow_abbrev=False,
    )
    known, flags = parser.parse_known_args()
    options = vars(known)
    del options["engine"]
    config = _checked(Config(**options))
    try:
        from runtime.vllm.server import run
    except ModuleNotFoundError as error:
        raise _incomplete(error, "runtime") from error
    try:
        run(config, flags)
    except ModuleNotFoundError as error:
        raise _incomplete(error, "vllm") from error


def _serve(both: argparse.ArgumentParser, default: Config) -> None:
    parser = Parser(
        prog="python -m dcut.runtime.serve",
        description="Serve a target with its drafter over the OpenAI API, verifying as a policy decides.",
        parents=[both],
    )
    parser.add_argument("--target", metavar="DIR", help="Hugging Face directory (the built-in target)")
    parser.add_argument(
        "--drafter",
        metavar="DIR",
        help="Hugging Face directory or ngram (the built-in target: DFlash-16)",
    )
    parser.add_argument("--record", metavar="DIR", help="write what was served there, as a trace")
    parser.add_argument(
        "--max-batch-size", type=int, default=default.max_batch_size, metavar="N", help="(%(default)s)"
    )
    parser.add_argument(
        "--max-waiting",
        type=int,
        default=default.max_waiting,
        metavar="N",
        help="requests that may wait for a place; further ones get a 503 (%(default)s)",
    )
    parser.add_argument(
        "--max-context",
        type=int,
        metavar="N",
        help="tokens of a prompt and its output (2048, or what the model allows)",
    )
    parser.add_argument("--device", default=default.device, help="cpu, cuda, cuda:1, ... (%(default)s)")
    parser.add_argument("--dtype", default=default.dtype, help="float32, bfloat16 or float16; (%(default)s)")
    options = vars(parser.parse_args())
    del options["engine"]
    config = _checked(Config(**options))
    try:
        with at_once():
            from runtime.server import run
    except ModuleNotFoundError as error:
        raise _incomplete(error, "runtime") from error
    run(config)


def _checked(config: Config) -> Config:
    """The configuration; InputError where it cannot be meant."""
    if not 0 <= config.port < 65536:
        raise InputError(f"--port {config.port} is outside 0..65535")
    for name in ("max_batch_size", "max_waiting", "max_context"):
        if (value := getattr(config, name)) is not None and value < 1:
            raise InputError(f"--{name.replace('_', '-')} {value}: give at least 1")
    if not 0 <= config.profile_s < inf:
        raise InputError(f"--profile-s {config.profile_s:g}: give 0 or more seconds")
    if config.target is not None and config.drafter is None:
        raise InputError(f"--target {config.target} needs a --drafter: a directory, or ngram")
    return config


def _incomplete(error: ModuleNotFoundError, extra: str) -> InputError:
    """What to do about a module that is missing."""
    needed = str(error.name).partition(".")[0]
    if needed == "runtime":  # this file's own folder came first
        return InputError("run it as a module: python -m dcut.runtime.serve")
    return InputError(f"serving needs {needed}: install the {extra} extra, pip install -e '.[{extra}]'")


if __name__ == "__main__":
    sys.exit(guard(main))
