"""Chooses the kernels for a device and dtype: `cpu` (numba), `cuda` (Triton) or `reference` (plain torch).

All three have one signature, and `cpu` and `cuda` are tested against `reference`. The environment variable
HYBRID_MEMORY_KERNELS overrides the choice: `reference`, `cpu`, `cuda`, or `triton`. For prompts, `cuda` calls libraries
if they are installed; `triton` is `cuda` without these libraries. `chosen_kernels` returns what was chosen.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import cache, lru_cache
from importlib.util import find_spec

import torch
from torch import Tensor

from hybridmem.memory.blocks.arrays import Int64s
from hybridmem.memory.errors import SpecError
from hybridmem.memory.kernels import checks, reference
from hybridmem.memory.kernels.double_precision import precision_for
from hybridmem.memory.kernels.signature import (
    Erase,
    FoldedRows,
    Kernels,
    PageChoice,
    PagedBatch,
    Prepared,
    Scoring,
    StateSlots,
    Tail,
    TreePaths,
    as_tensor,
)
from hybridmem.memory.kernels.steady import (
    HeadProducts,
    RowProduct,
    head_products,
    multiply_by_row,
    steady,
    wants_reproducible,
)
from hybridmem.memory.kernels.weights import Weights

__all__ = [
    "OF_STATES",
    "Erase",
    "FoldedRows",
    "HeadProducts",
    "Kernels",
    "PageChoice",
    "PagedBatch",
    "Prepared",
    "RowProduct",
    "Scoring",
    "StateSlots",
    "Tail",
    "TreePaths",
    "Weights",
    "as_tensor",
    "chosen_kernels",
    "head_products",
    "multiply_by_row",
    "norm_parts",
    "precision_for",
    "rms_norm",
    "select_kernels",
    "steady",
    "wants_reproducible",
    "warm_up",
    "why_not_reproducible",
]

OF_STATES = ("causal_conv", "selective_scan", "matrix_scan", "linear_scan", "wkv4", "stabilise")
"""The functions that read and write states."""

_OVERRIDE = "HYBRID_MEMORY_KERNELS"
_SETS = ("reference", "cpu", "cuda", "triton")


def rms_norm(
    x: Tensor, weight: Tensor | Weights | None, eps: float, *, n_groups: int = 1, gate: Tensor | None = None
) -> Tensor:
    """Compute `Kernels.rms_norm` over the last axis of x (..., E), by the kernels for the device and dtype of x.

    `Weights` of one tensor are prepared only once for these kernels.
    """
    if x.dim() == 2:
        kernels = _kernels_of_norms(x, weight, gate)
        own = weight.prepared(kernels)[0] if isinstance(weight, Weights) else weight
        return kernels.rms_norm(x, own, eps, n_groups=n_groups, gate_TE=gate)
    return rms_norm(x.reshape(-1, x.shape[-1]), weight, eps, n_groups=n_groups, gate=gate).view(x.shape)


def norm_parts(x: Tensor, weights: Weights, eps: float, sizes: tuple[int, ...], ends: Int64s) -> list[Tensor]:
    """Compute `rms_norm` of parts of each row of x (T, E), with one weight per element. On the CPU it is a single call.

    Args:
        weights: a `Weights` of one tensor, (E,).
        sizes, ends: the size of each part, and the end of each part in a row.
    """
    kernels = _kernels_of_norms(x, weights)
    weight = weights.prepared(kernels)[0]
    if (at_once := getattr(kernels, "norm_parts", None)) is not None:
        return list(at_once(x, weight, eps, ends).split_with_sizes(sizes, -1))
    parts = zip(x.split_with_sizes(sizes, -1), weight.split_with_sizes(sizes, -1), strict=True)
    return [kernels.rms_norm(part, own, eps) for part, own in parts]


def _kernels_of_norms(x: Tensor, *others: Tensor | Weights | None) -> Kernels:
    """Return the fastest kernels, or those of plain torch where gradients of `x` or of others are computed."""
    if torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in (x, *others)):
        return reference
    return select_kernels(x.device, x.dtype)


def select_kernels(device: torch.device, *dtypes: torch.dtype, reproducible: bool = False) -> Kernels:
    """Return the fastest kernels for tensors of these dtypes on `device`, unless HYBRID_MEMORY_KERNELS names others.

    The choice is numba on the CPU if all dtypes are floats of 16 or 32 bits, Triton on a CUDA device if Triton is
    installed, and otherwise plain torch.

    Args:
        reproducible: chooses those of the CPU whose bits do not depend on how many tokens a step has.
    Raises:
        SpecError: HYBRID_MEMORY_KERNELS names unknown kernels, or kernels that cannot work on these tensors.
    """
    kernels = _known(device, dtypes, os.environ.get(_OVERRIDE))
    if not reproducible or device.type == "meta":
        return kernels
    if _choice(device, dtypes) != "cpu":
        raise SpecError(f"{why_not_reproducible(device, *dtypes)}; leave reproducible out")
    from hybridmem.memory.kernels.cpu import reproducible as by_row

    return by_row


def why_not_reproducible(device: torch.device, *dtypes: torch.dtype) -> str | None:
    """Return why kernels for these tensors give a row other bits in other steps; None if they do not."""
    if device.type == "meta" or (name := _choice(device, dtypes)) == "cpu":
        return None
    floats = ", ".join(sorted({str(dtype).removeprefix("torch.") for dtype in dtypes}))
    return f"the kernels on {device} for {floats} ({name!r}) compute prompts and single tokens in different ways"


def warm_up(names: Iterable[str], device: torch.device, dtype: torch.dtype) -> None:
    """Compile these kernels now if the device uses those of the CPU. See `memory.kernels.cpu.warm_up`."""
    if _choice(device, (dtype,)) == "cpu":
        from hybridmem.memory.kernels import cpu

        cpu.warm_up(names, dtype)


def chosen_kernels(device: torch.device | str, *dtypes: torch.dtype, behind_tails: bool = False) -> dict[str, str]:
    """Return what `select_kernels` chooses for each function: a set of kernels, and the library for prompts, if any.

    With `behind_tails` no library computes prompts. The errors are those of `select_kernels`.
    """
    kernels, helpers = select_kernels(torch.device(device), *dtypes), dict[str, str]()
    if _choice(torch.device(device), dtypes) == "cuda":
        from hybridmem.memory.kernels.cuda import libraries

        helpers = libraries.for_prompts()
    functions = [name for name in vars(Kernels) if not name.startswith("_")]
    sets = {name: getattr(kernels, name).__module__.split(".")[3] for name in functions}
    if behind_tails:
        helpers = {}
    return {name: sets[name] + (f", prompts by {helpers[name]}" if name in helpers else "") for name in functions}


@lru_cache
def _known(device: torch.device, dtypes: tuple[torch.dtype, ...], override: str | None) -> Kernels:
    """Cache what `select_kernels` returns while the environment names `override`, because steps ask often."""
    name = _choice(device, dtypes)
    if name == "cpu":
        # This is not imported at the top, because a dry run or another device needs no compiler.
        from hybridmem.memory.kernels import cpu

        return cpu
    if name in ("cuda", "triton"):
        # This is not imported at the top either, because triton may be missing.
        from hybridmem.memory.kernels import cuda

        return cuda
    return reference


def _choice(device: torch.device, dtypes: tuple[torch.dtype, ...]) -> str:
    is_numba = device.type == "cpu" and checks.FLOATS_UP_TO_32_BITS.issuperset(dtypes)
    wanted = os.environ.get(_OVERRIDE)
    if not wanted:
        return "cpu" if is_numba else "cuda" if device.type == "cuda" and _has_triton() else "reference"
    if wanted not in _SETS:
        raise SpecError(f"{_OVERRIDE}={wanted!r} names no kernels; choose {', '.join(_SETS)}, or unset it")
    if device.type == "meta":
        return "reference"
    on = f"on {device} in {', '.join(str(dtype).removeprefix('torch.') for dtype in sorted(set(dtypes), key=str))}"
    if wanted == "cpu" and not is_numba:
        raise SpecError(
            f"{_OVERRIDE}=cpu cannot work {on}: those kernels are for floats of 16 and 32 bits on the "
            "CPU; choose 'reference', or unset it"
        )
    if wanted in ("cuda", "triton"):
        if not _has_triton():
            raise SpecError(
                f"{_OVERRIDE}={wanted} needs triton, which is not installed; install hybridmem[cuda], or unset it"
            )
        if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            raise SpecError(
                f"{_OVERRIDE}={wanted} cannot work {on} but in Triton's interpreter (TRITON_INTERPRET=1); unset it"
            )
    return wanted


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
