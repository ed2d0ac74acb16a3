"""Computes root-mean-square norms in one pass on the GPU, for which torch takes six operators."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridmem.memory.blocks.arrays import ceil_div
from hybridmem.memory.kernels import checks
from hybridmem.memory.kernels.cuda.launch import absent, launch, next_power_of_2, with_contiguous_rows
from hybridmem.memory.kernels.signature import Prepared


def rms_norm(
    x_TE: Tensor, weight_E: Prepared | None, eps: float, *, n_groups: int = 1, gate_TE: Tensor | None = None
) -> Tensor:
    checks.rms_norm(x_TE, weight_E, n_groups, gate_TE, checks.FLOATS)
    n_rows, n_elements = x_TE.shape
    dtype = x_TE.dtype if weight_E is None else torch.promote_types(x_TE.dtype, weight_E.dtype)
    out_TE = torch.empty(x_TE.shape, dtype=dtype, device=x_TE.device)
    x_TE = with_contiguous_rows(x_TE)
    gate = x_TE if gate_TE is None else with_contiguous_rows(gate_TE)
    n_part = n_elements // n_groups
    columns = next_power_of_2(n_part)
    # Each part of a row is summed alone, so its bits do not depend on how many parts a program has.
    parts = max(1, 1024 // columns)
    launch(
        _rms_norm, (ceil_div(n_rows * n_groups, parts),), x_TE, x_TE.stride(0), gate, gate.stride(0),
        absent(weight_E, x_TE), out_TE, eps, n_rows * n_groups, n_groups, n_part, HAS_GATE=gate_TE is not None,
        HAS_WEIGHT=weight_E is not None, PARTS=parts, COLUMNS=columns, num_warps=8 if columns > 2048 else 4,
    )  # fmt: skip
    return out_TE


@triton.jit
def _rms_norm(
    x, x_stride, gate, gate_stride, weight, out, eps, n_parts, n_groups, n_part,
    HAS_GATE: tl.constexpr, HAS_WEIGHT: tl.constexpr, PARTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    parts = tl.program_id(0) * PARTS + tl.arange(0, PARTS)
    rows, groups = (parts // n_groups).to(tl.int64), parts % n_groups
    within = tl.arange(0, COLUMNS)
    columns = groups[:, None] * n_part + within[None, :]
    mask = (parts < n_parts)[:, None] & (within < n_part)[None, :]
    z = tl.load(x + rows[:, None] * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    if HAS_GATE:
        z *= tl.load(gate + rows[:, None] * gate_stride + columns, mask=mask, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt_rn(tl.sum(z * z, axis=1) / n_part + eps)
    z = (z * scale[:, None]).to(x.dtype.element_ty).to(tl.float32)
    if HAS_WEIGHT:
        z *= tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + rows[:, None] * (n_groups * n_part) + columns, z.to(out.dtype.element_ty), mask=mask)
