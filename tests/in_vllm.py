# pyright: reportMissingImports=false
"""For tests inside vLLM, imported before it: skips them without it, sets its environment, bears warnings."""

import importlib.util
import os
import warnings

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not installed: make test-vllm has an environment with it", allow_module_level=True)

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
os.environ |= ENVIRONMENT

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import vllm.v1.engine.llm_engine  # noqa: F401
