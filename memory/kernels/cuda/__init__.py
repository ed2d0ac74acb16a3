"""Kernels for NVIDIA GPUs, written in Triton: `memory.kernels.signature.Kernels`.

Rows, weights and queries may be float32, bfloat16 or float16; sums run in float32, and so are states. A call reads
sizes from the host arrays of its signature and never waits for the device. A request's result does not depend on what
else is in its step: how its work is divided follows from its own length.

Offsets are multiples of 16 bytes wherever a row (of a head, in pages) is a whole number of them: the arena's blocks
begin at multiples of 64 bytes.

With TRITON_INTERPRET=1 in the environment, all of it runs in Triton's interpreter on the CPU: slow, and how the tests
run it.
"""

from memory.kernels.cuda.attention import attend_rows, paged_attention, plan_attention
from memory.kernels.cuda.channel_states import selective_scan
from memory.kernels.cuda.convolution import causal_conv
from memory.kernels.cuda.matrix_states import matrix_scan
from memory.kernels.cuda.norms import rms_norm
from memory.kernels.cuda.page_choice import choose_pages, plan_choice
from memory.kernels.cuda.rows import prepare, read_rows, write_rows_
from memory.kernels.cuda.vectors import linear_scan, softplus, wkv4

__all__ = [
    "attend_rows",
    "causal_conv",
    "choose_pages",
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
    "wkv4",
    "write_rows_",
]
