"""Computes `memory.kernels.signature.Kernels` on NVIDIA GPUs, in Triton.

Rows, weights and queries may be float32, bfloat16 or float16. Sums and states are float32. A call reads sizes from the
host arrays of its arguments and never waits for the device. A request's result does not depend on other requests of the
step, because its work is divided by its own length alone.

Offsets are multiples of 16 bytes if a row (in pages, a row of a head) is a whole number of 16 bytes, because the
arena's blocks begin at multiples of 64 bytes.

With TRITON_INTERPRET=1 in the environment, all kernels run in Triton's interpreter on the CPU. That is slow, but tests
can use it.
"""

from hybridmem.memory.kernels.cuda.attention import attend_rows, paged_attention, plan_attention
from hybridmem.memory.kernels.cuda.channel_states import selective_scan
from hybridmem.memory.kernels.cuda.convolution import causal_conv
from hybridmem.memory.kernels.cuda.matrix_states import matrix_scan
from hybridmem.memory.kernels.cuda.norms import rms_norm
from hybridmem.memory.kernels.cuda.page_choice import choose_pages, plan_choice
from hybridmem.memory.kernels.cuda.row_choice import choose_rows
from hybridmem.memory.kernels.cuda.rows import prepare, read_rows, write_rows_
from hybridmem.memory.kernels.cuda.tree_attention import tree_attention
from hybridmem.memory.kernels.cuda.vectors import linear_scan, softplus, stabilise, wkv4

__all__ = [
    "attend_rows",
    "causal_conv",
    "choose_pages",
    "choose_rows",
    "linear_scan",
    "matrix_scan",
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
    "wkv4",
    "write_rows_",
]
