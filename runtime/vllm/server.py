# pyright: reportMissingImports=false
"""vLLM's OpenAI server with a budget policy in its worker, and the policy's figures in its /metrics."""

import errno
import json
import logging
import os
import re
import shutil
import signal
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from pydantic import ValidationError

from dcut.errors import InputError, heeded, leave
from dcut.runtime.serve import GRACE_S, Config
from runtime.pair import weights
from runtime.vllm.options import KV_CACHE_BYTES, Options
from runtime.vllm.speculation import speculation


def run(config: Config, flags: Sequence[str]) -> None:
    """Serve until SIGTERM or SIGINT.

    config: its policy, address, key and time to profile count. flags: `vllm serve`'s own; without a model
    among them the built-in pair is served. Raises InputError where vLLM does not understand them or where
    it cannot run the policy as configured, before the model loads.
    """
    options = Options(config.policy, config.profile_s)
    _ = options.parsed
    os.environ |= {"DCUT_POLICY": options.policy, "DCUT_PROFILE_S": str(options.profile_s)}
    with tempfile.TemporaryDirectory(prefix="dcut-metrics-") as directory:
        # vLLM's worker and server are two processes. Only where this is set before prometheus_client is
        # imported do their figures meet, and vLLM's /metrics then shows all that it finds there.
        os.environ.setdefault("PROMETHEUS_MULTIPROC_DIR", directory)
        key = [] if config.api_key is None else ["--api-key", config.api_key]
        _serve([*flags, "--host", config.host, "--port", str(config.port), *key], directory)


def _serve(flags: list[str], directory: str) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.platforms import current_platform
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    command = ServeSubcommand()
    parser = command.subparser_init(FlexibleArgumentParser().add_subparsers())
    parser.error = _refuse
    # By itself vLLM gives running requests no time, and then waits for their connections for ever.
    flags = ["--shutdown-timeout", str(GRACE_S), *flags]
    args = parser.parse_args(flags)
    if args.model_tag is None and args.model == parser.get_default("model"):
        pair = [str(weights.path("target")), "--served-model-name", "tiny-pair"]
        if args.speculative_config is None:
            pair += ["--speculative-config", json.dumps(speculation(weights.path("dflash16")))]
        if current_platform.is_cpu():
            pair += ["--enforce-eager", "--dtype", "float32", "--kv-cache-memory-bytes", str(KV_CACHE_BYTES)]
        args = parser.parse_args([*pair, *flags])
    model = args.model_tag or args.model
    if model.startswith(("/", ".")) and not Path(model).is_dir():
        raise InputError(f"there is no directory {model}: give a model's directory or its name")
    try:
        with _unheard():
            command.validate(args)
            args.model = model
            AsyncEngineArgs.from_cli_args(args).create_engine_config()
    except InputError:
        raise
    except (ValueError, TypeError) as error:
        raise InputError(f"vLLM refuses this configuration: {_reason(error)}") from error
    _end_at_once(directory)
    try:
        command.cmd(args)
    except RuntimeError as error:
        if not str(error).startswith("Engine core initialization failed"):
            raise
        raise InputError("vLLM's engine did not start: the lines of its EngineCore above say why") from error
    except OSError as error:
        if error.errno not in (errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EACCES):
            raise
        reason = f"cannot listen on port {args.port}: {error.strerror}"
        raise OSError(error.errno, reason, args.host) from error


@contextmanager
def _unheard() -> Iterator[None]:
    """Log no warnings and less: a refusal is to stand alone, and what is accepted vLLM configures again."""
    import vllm.logger as logger

    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
        for once in (logger._print_info_once, logger._print_warning_once):
            once.cache_clear()  # it was not heard


def _end_at_once(directory: str) -> None:
    """Let SIGTERM and SIGINT end vLLM's start with all its processes, until its server takes them over.

    By itself it waits for the model to load and the profile to be measured, and may lose the signal.
    directory: to be removed.
    """
    import psutil
    from vllm.entrypoints.launchers.api_server import entry

    def end(number: int, _frame: FrameType | None) -> None:
        tracker = getattr(resource_tracker._resource_tracker, "_pid", None)  # frees what they shared
        for child in psutil.Process().children(recursive=True):
            if child.pid != tracker:
                with suppress(psutil.NoSuchProcess):
                    child.kill()
        shutil.rmtree(directory, ignore_errors=True)
        leave(number)

    def setting_up(*given: Any, **named: Any) -> Any:
        """In place of setup_server, which vLLM calls once its own handler is set."""
        for number in set(heeded()) - {signal.SIGHUP}:
            signal.signal(number, end)
        return setup(*given, **named)

    setup, entry.setup_server = entry.setup_server, setting_up


def _refuse(message: str) -> NoReturn:
    message = re.sub(r"<function loads at \w+>\.?", "JSON", message)
    raise InputError(
        f"{message}; python -m dcut.runtime.serve --engine vllm --help tells ours, vLLM has its own"
    )


def _reason(error: Exception) -> str:
    """What is wrong, without the frame that pydantic puts around it."""
    return "; ".join(e["msg"] for e in error.errors()) if isinstance(error, ValidationError) else str(error)
