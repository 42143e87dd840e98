"""The command that records a real run as a trace, for replays to start from."""

import sys
from dataclasses import dataclass
from math import inf

from dcut.errors import InputError, Parser, at_once, guard


@dataclass(frozen=True, slots=True)
class Config:
    """One recording, as the command line asks for it."""

    out: str
    target: str | None = None  # None: the built-in pair
    drafter: str | None = None
    prompts: str | None = None  # None: the built-in held-out prompts
    concurrency: int = 8
    max_tokens: int = 256
    temperature: float = 0.0
    requests: int | None = None  # None: every prompt once
    resume: bool = False
    seed: int = 0
    device: str = "cpu"
    dtype: str | None = None  # None: float32 on a CPU, bfloat16 elsewhere
    cpu_time: bool = False
    profile_s: float = 30.0
    engine: str = "torch"  # or vllm

    def __post_init__(self) -> None:
        for name in ("concurrency", "max_tokens", "requests"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"--{name.replace('_', '-')} {value}: give at least 1")
        if self.target is not None and self.drafter is None:
            raise InputError(f"--target {self.target} needs a --drafter: a directory, or ngram")
        if self.seed < 0:
            raise InputError(f"--seed {self.seed} is negative: give 0 or more")
        if not 0 <= self.temperature < inf:
            raise InputError(f"--temperature {self.temperature:g}: give 0 or more")
        if not 0 <= self.profile_s < inf:
            raise InputError(f"--profile-s {self.profile_s:g}: give 0 or more seconds")


def main() -> None:
    """Parse the command line, record, say what was recorded."""
    default = Config(out="")
    parser = Parser(
        prog="python -m dcut.record", description="Record a real run of a target and a drafter as a trace."
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="where the trace goes")
    parser.add_argument(
        "--engine", choices=("torch", "vllm"), default=default.engine, help="our own, or vLLM's (%(default)s)"
    )
    parser.add_argument("--target", metavar="DIR", help="Hugging Face directory (the built-in target)")
    parser.add_argument(
        "--drafter",
        metavar="DIR",
        help="Hugging Face directory or ngram (the built-in target: DFlash-16)",
    )
    parser.add_argument(
        "--prompts", metavar="FILE", help='JSON lines of {"prompt": ..., "domain": ...} (built-in, held out)'
    )
    parser.add_argument(
        "--concurrency", type=int, default=default.concurrency, help="requests in flight (%(default)s)"
    )
    parser.add_argument(
        "--max-tokens", type=int, default=default.max_tokens, help="of an output (%(default)s)"
    )
    parser.add_argument("--temperature", type=float, default=default.temperature, help="(%(default)s)")
    parser.add_argument("--requests", type=int, metavar="N", help="the first so many prompts (all)")
    parser.add_argument("--resume", action="store_true", help="carry on with an interrupted recording")
    parser.add_argument("--seed", type=int, default=default.seed, help="(%(default)s)")
    parser.add_argument("--device", default=default.device, help="cpu, cuda, cuda:1, ... (%(default)s)")
    parser.add_argument("--dtype", help="float32, bfloat16 or float16 (float32 on a CPU, else bfloat16)")
    parser.add_argument(
        "--cpu-time", action="store_true", help="time in CPU seconds of one thread: for a shared machine"
    )
    parser.add_argument(
        "--profile-s", type=float, default=default.profile_s, help="for the cost profile (%(default)s s)"
    )
    config = Config(**vars(parser.parse_args()))
    try:
        with at_once():
            from runtime.recorder import record, summary

            if config.engine == "vllm":
                from runtime.vllm.recorder import record
    except ModuleNotFoundError as error:
        if str(error.name).startswith("runtime"):  # this folder's own runtime/ came first
            raise InputError("run it as a module: python -m dcut.record") from error
        needed = str(error.name).partition(".")[0]
        extra = "vllm" if needed == "vllm" else "runtime"
        raise InputError(
            f"recording needs {needed}: install the {extra} extra, pip install -e '.[{extra}]'"
        ) from error
    print(summary(record(config, progress=True), config.out))


if __name__ == "__main__":
    sys.exit(guard(main))
