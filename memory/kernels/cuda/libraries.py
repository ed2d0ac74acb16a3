"""Which functions leave prompts to a library, where it is installed."""

from __future__ import annotations

import os
from importlib.util import find_spec

_FOR_PROMPTS: dict[str, str] = {}
"""Function of `Kernels` -> importable package whose public functions it calls for prompts."""


def for_prompts() -> dict[str, str]:
    """Those of `_FOR_PROMPTS` that are installed; none under HYBRID_MEMORY_KERNELS=triton."""
    if os.environ.get("HYBRID_MEMORY_KERNELS") == "triton":
        return {}
    return {function: package for function, package in _FOR_PROMPTS.items() if find_spec(package) is not None}
