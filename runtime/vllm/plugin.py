# pyright: reportMissingImports=false
"""The vLLM plugin: where a policy is asked for, vLLM starts with our worker, or ends with one line."""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from types import TracebackType
from typing import Any

from dcut.errors import InputError

WORKER = "runtime.vllm.worker.Worker"
ADAPTIVE_WORKER = "runtime.vllm.worker.AdaptiveWorker"

HOOKS = (
    "engine.arg_utils:EngineArgs.create_engine_config",
    "config.speculative:SpeculativeConfig.max_num_new_slots_for_drafting",
    "v1.engine.core:EngineCore._initialize_effective_attention_block_size",
    "v1.worker.gpu_worker:Worker.load_model",
    "v1.worker.gpu_worker:Worker.execute_model",
    "v1.worker.gpu_worker:Worker.sample_tokens",
    "v1.worker.gpu_worker:Worker.take_draft_token_ids",
    "v1.worker.gpu_model_runner:GPUModelRunner.propose_draft_token_ids",
    "v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer.propose",
    "v1.spec_decode.dflash:DFlashProposer.set_inputs_first_pass",
    "v1.spec_decode.dflash:DFlashProposer.build_model_inputs_first_pass",
    "v1.spec_decode.ngram_proposer:NgramProposer.propose",
    "v1.sample.rejection_sampler:expand_batch_to_tokens",
)
"""What of vLLM the worker and this plugin hold on to."""


def register() -> None:
    """The entry point in vllm.general_plugins, which vLLM calls in every one of its processes.

    It changes how an engine's configuration is made and what happens at the end of its start; both do
    nothing where neither DCUT_POLICY nor additional_config {"dcut": ...} asks for a policy. A second call
    changes nothing.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.core import EngineCore

    if getattr(EngineArgs.create_engine_config, "dcut", False):
        return
    EngineArgs.create_engine_config = _configuring(EngineArgs.create_engine_config)
    start = getattr(EngineCore, "_initialize_effective_attention_block_size", None)
    if start is not None:  # else create_engine_config says so, where a policy is asked for
        EngineCore._initialize_effective_attention_block_size = _starting(start)


def _configuring(create: Callable[..., Any]) -> Callable[..., Any]:
    """EngineArgs.create_engine_config, which every way to start vLLM comes through before any model loads."""

    @functools.wraps(create)
    def configure(args: Any, *rest: Any, **named: Any) -> Any:
        if not (os.environ.get("DCUT_POLICY") or "dcut" in (args.additional_config or {})):
            return create(args, *rest, **named)  # without a look at numba, see let_vllm_scan_llvmlite
        try:
            check_interface()
            return _configure(create, args, *rest, **named)
        except InputError:
            sys.excepthook = _one_line(sys.excepthook)
            raise

    setattr(configure, "dcut", True)  # noqa: B010
    return configure


def _configure(create: Callable[..., Any], args: Any, *rest: Any, **named: Any) -> Any:
    from vllm.platforms import current_platform

    from runtime.vllm import adaptive
    from runtime.vllm.options import Options, check

    options = Options.read(args.additional_config)
    policy = options.parsed
    asynchronous = any(
        value and key.replace("-", "_") == "enable_adaptive_verification"
        for key, value in (args.speculative_config or {}).items()
    )
    worker = ADAPTIVE_WORKER if asynchronous else WORKER
    if args.worker_cls not in ("auto", worker):
        raise InputError(f"worker_cls {args.worker_cls!r} leaves no place for dcut's worker: take it out")
    if not asynchronous:
        _take_the_first_runner(args)
    if current_platform.is_cpu():
        let_vllm_scan_llvmlite()
    args.worker_cls = worker
    args.additional_config = {**args.additional_config, "dcut": asdict(options)}
    config = create(args, *rest, **named)
    if asynchronous:
        adaptive.check(policy, config)
    else:
        check(options, config)
    return config


def _take_the_first_runner(args: Any) -> None:
    """Have vLLM use its V1 runner, one step at a time: drafts stay on the GPU otherwise."""
    if args.async_scheduling or os.environ.get("VLLM_USE_V2_MODEL_RUNNER", "0") not in ("0", ""):
        raise InputError(
            "dcut prunes in vLLM's asynchronous V2 runner only through adaptive verification: add "
            '"enable_adaptive_verification": true to --speculative-config, '
            "or take out --async-scheduling and VLLM_USE_V2_MODEL_RUNNER"
        )
    args.async_scheduling = False
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"


def check_interface() -> None:
    """Raise InputError, naming the version, where vLLM lacks something that HOOKS lists."""
    from vllm.version import __version__

    for hook in HOOKS:
        module, _, path = hook.partition(":")
        try:
            functools.reduce(getattr, path.split("."), importlib.import_module(f"vllm.{module}"))
        except (ImportError, AttributeError) as error:
            raise InputError(
                f"vLLM {__version__} has no {path} in vllm.{module}, which dcut relies on: "
                "install vllm 0.32, or unset DCUT_POLICY"
            ) from error


def let_vllm_scan_llvmlite() -> None:
    """Make llvmlite's library object bear the scan of all modules with which vLLM starts a worker on CPUs.

    That scan (vLLM 0.32, triton_utils/dispatcher.py) calls vars() on every attribute of every module;
    llvmlite, which numba brings, has an object that answers any name with a function, __dict__ too.
    """
    from llvmlite.binding import ffi

    ffi.lib._fntab.setdefault("__dict__", {})  # pyright: ignore[reportAttributeAccessIssue]


def _starting(initialize: Callable[[Any], None]) -> Callable[[Any], None]:
    """The last step of an EngineCore's start but for its queues: scheduler and workers are there."""

    @functools.wraps(initialize)
    def complete(core: Any) -> None:
        initialize(core)
        if core.vllm_config.parallel_config.worker_cls == WORKER:
            from runtime.vllm.profiler import start

            start(core)

    return complete


def _one_line(usual: Callable[..., Any]) -> Callable[..., Any]:
    """An excepthook that tells an InputError as one line."""

    def tell(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if isinstance(error, InputError):
            print(f"error: {error}", file=sys.stderr)
        else:
            usual(kind, error, traceback)

    return tell
