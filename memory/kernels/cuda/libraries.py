"""Which functions leave prompts to a library, where it is installed."""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec

_FOR_PROMPTS = {
    "causal_conv": ("causal_conv1d", "causal_conv1d_cuda"),
    "selective_scan": ("mamba_ssm", "selective_scan_cuda"),
}
"""Function of `Kernels` -> the package whose public functions it calls for prompts, and the extension that it needs:
mamba-ssm may come without."""


def for_prompts() -> dict[str, str]:
    """Function -> package, of those that are installed; none under HYBRID_MEMORY_KERNELS=triton."""
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
