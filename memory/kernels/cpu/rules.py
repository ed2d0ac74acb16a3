"""Says which floating-point rules the compiler may relax, for every kernel and every function that kernels call.

A function of numba without rules of its own takes those of the kernel that compiles it first in this process, so that
its bits would depend on the order in which kernels are compiled. Therefore kernels are made by `compiled`, and the
functions that they call by `subroutine` or `inlined`. A test of the house looks for others.
"""

from __future__ import annotations

from typing import Any

import numba

AS_WRITTEN: set[str] = set()
# Reassociation lets sums use vector registers. In kernels without sums it stays off, because together with "nsz" it
# would let LLVM remove the rounding steps of `exp2_f32`. "nnan" and "ninf" stay off, because NaN must reach the output.
REDUCING = {"reassoc", "contract"}
ELEMENTWISE = {"contract", "arcp", "nsz"}


def subroutine(rules: set[str] = AS_WRITTEN, **options: Any) -> Any:
    """Decorate a function that kernels call. Divisions do not check for zero, and `options` are those of numba."""
    return numba.njit(fastmath=rules, error_model="numpy", **options)


inlined = numba.njit(inline="always", error_model="numpy")
"""Decorates a function that becomes part of its callers, and has their rules."""
