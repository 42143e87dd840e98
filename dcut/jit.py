"""Compilation of the hot loops: cached on disk where there is a place to write, else once a process."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numba


def compiled(function: Callable[..., Any] | None = None, **options: Any) -> Callable[..., Any]:
    """`function` compiled by numba without the GIL; a decorator, also as @compiled(option=...)."""
    if function is None:
        return partial(compiled, **options)
    try:
        return numba.njit(function, cache=True, nogil=True, **options)
    except RuntimeError:  # no place for a cache: a read-only installation without a home
        return numba.njit(function, nogil=True, **options)
