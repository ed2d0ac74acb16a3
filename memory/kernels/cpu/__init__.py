"""Computes `memory.kernels.signature.Kernels` on the CPU, for float32, bfloat16 and float16, compiled by numba.

Everything is computed in float32. Only what is read and written may have 16 bits (see `numbers`).

Pages, rows and states are read and written in place. Each output element is computed by one thread, in an order that
does not depend on other rows of the batch. So the bits of a request's result do not depend on other requests of the
step.

The code is written so that LLVM uses full vector registers. Arrays are contiguous, because numba would compile other
arrays for any stride. An inner loop runs from 0 over slices made for it, because numba would check other indices for
being negative (but not unsigned ones). No array is read through one slice and written through another that may overlap.
Divisions do not check for zero.

Machine code is kept on disk until a source file of `memory.kernels` changes; see `compiled`.
"""

from hybridmem.memory.kernels.cpu.attention import attend_rows, paged_attention
from hybridmem.memory.kernels.cpu.channel_states import linear_scan, softplus, wkv4
from hybridmem.memory.kernels.cpu.mamba2 import SSDLayer
from hybridmem.memory.kernels.cpu.matrix_states import matrix_scan
from hybridmem.memory.kernels.cpu.norms import norm_parts, rms_norm
from hybridmem.memory.kernels.cpu.page_choice import choose_pages
from hybridmem.memory.kernels.cpu.query_attention import tree_attention
from hybridmem.memory.kernels.cpu.recurrences import causal_conv, selective_scan
from hybridmem.memory.kernels.cpu.row_choice import choose_rows
from hybridmem.memory.kernels.cpu.rows import plan_attention, plan_choice, prepare, read_rows, write_rows_
from hybridmem.memory.kernels.cpu.stabiliser import stabilise
from hybridmem.memory.kernels.cpu.warm_up import warm_up

__all__ = [
    "SSDLayer",
    "attend_rows",
    "causal_conv",
    "choose_pages",
    "choose_rows",
    "linear_scan",
    "matrix_scan",
    "norm_parts",
    "paged_attention",
    "plan_attention",
    "plan_choice",
    "prepare",
    "read_rows",
    "rms_norm",
    "selective_scan",
    "softplus",
    "stabilise",
    "tree_attention",
    "warm_up",
    "wkv4",
    "write_rows_",
]
