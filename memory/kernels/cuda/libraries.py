"""Lists the functions that call a library for prompts if it is installed."""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec

_FOR_PROMPTS = {
    "causal_conv": ("causal_conv1d", "causal_conv1d_cuda"),
    "selective_scan": ("mamba_ssm", "selective_scan_cuda"),
}
"""Function of `Kernels` -> the package that it calls for prompts, and the compiled extension that this needs: mamba-ssm
may be installed without."""


def for_prompts() -> dict[str, str]:
    """Return function -> package for those packages that are installed.

    With HYBRID_MEMORY_KERNELS=triton there are none.
    """
    if os.environ.get("HYBRID_MEMORY_KERNELS") == "triton":
        return {}
    return _installed()


@cache
def _installed() -> dict[str, str]:
    return {
        function: names[0]
        for function, names in _FOR_PROMPTS.items()
        if all(find_spec(name) is not None for name in names)
    }
