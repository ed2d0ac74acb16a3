"""Says which instructions of this processor compiled code may use."""

from __future__ import annotations

from functools import cache

from numba.core.registry import cpu_target


@cache
def features() -> str:
    """Return the features of this processor that numba is not told to do without, under LLVM's names."""
    return str(cpu_target.target_context.codegen().magic_tuple())


def has_wide_products() -> bool:
    """True if compiled code may use AVX2 with FMA, which multiply eight numbers or more and add the products."""
    return "+avx2" in features() and "+fma" in features()


def has_many_registers() -> bool:
    """True if compiled code may use AVX-512, whose 32 registers hold a vector of sixteen numbers each."""
    return "+avx512f" in features()
