"""Has those functions of `memory.kernels.Kernels` that read and write states, in forms that can be differentiated.

States are tensors of a `Slot` here, not bytes of an arena, so that gradients reach them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridmem.memory.kernels.reference import prepare, rms_norm, softplus
from hybridmem.memory.kernels.signature import Erase
from hybridmem.memory.training import scans
from hybridmem.memory.training.segments import Segments

__all__ = [
    "Slot",
    "causal_conv",
    "linear_scan",
    "matrix_scan",
    "prepare",
    "rms_norm",
    "selective_scan",
    "softplus",
    "stabilise",
    "wkv4",
]

_NEVER = -1e30
"""The gate of a place after the end of a segment: it adds nothing."""


@dataclass
class Slot:
    """Holds one state tensor of S segments: its value before them, (S, *shape), and its value after a kernel."""

    segments: Segments
    before: Tensor
    after: Tensor | None = None


def causal_conv(
    rows_TR: Tensor, weight_WE: Tensor, bias_E: Tensor | None, window: Slot, *, activation: bool = True
) -> Tensor:
    segments, (n_taps, n_channels) = window.segments, weight_WE.shape
    x_SLE = torch.cat([window.before, segments.pad(rows_TR[:, :n_channels]).to(window.before.dtype)], 1)
    out_SEL = F.conv1d(x_SLE.to(rows_TR.dtype).transpose(1, 2), weight_WE.T[:, None], bias_E, groups=n_channels)
    out_TE = segments.unpad(out_SEL.transpose(1, 2))
    newest_S1 = segments.device_counts[:, None]
    at_SW = newest_S1 + torch.arange(n_taps - 1, device=newest_S1.device)
    window.after = x_SLE.gather(1, at_SW[:, :, None].expand(-1, -1, n_channels))
    return F.silu(out_TE) if activation else out_TE


def selective_scan(
    x_TE: Tensor, dt_TE: Tensor, dt_bias_E: Tensor, b_TN: Tensor, c_TN: Tensor, a_NE: Tensor, d_E: Tensor, state: Slot
) -> Tensor:
    segments, x_TE = state.segments, x_TE.float()
    dt_TE = F.softplus(dt_TE.float() + dt_bias_E.float())
    decay_TNE = torch.exp(dt_TE[:, None] * a_NE)
    added_TNE = (dt_TE * x_TE)[:, None] * b_TN.float()[:, :, None]
    h_SLNE = scans.linear_recurrence(segments.pad(decay_TNE, 1.0), segments.pad(added_TNE), state.before.float())
    state.after = h_SLNE[:, -1]
    return torch.einsum("tne,tn->te", segments.unpad(h_SLNE), c_TN.float()) + d_E * x_TE


def linear_scan(x_TE: Tensor, decay_TE: Tensor, state: Slot) -> Tensor:
    segments = state.segments
    h_SLE = scans.linear_recurrence(
        segments.pad(decay_TE.float(), 1.0), segments.pad(x_TE.float()), state.before.float()
    )
    state.after = h_SLE[:, -1]
    return segments.unpad(h_SLE)


def matrix_scan(
    q_TGN: Tensor, k_TGN: Tensor, v_THV: Tensor, log_decay: Tensor, erase: Erase | None, state: Slot, *,
    strength_TH: Tensor | None = None, skip_H: Tensor | None = None,
) -> Tensor:  # fmt: skip
    segments, n_heads, v_THV = state.segments, v_THV.shape[1], v_THV.float()

    def to_heads(x_TGN: Tensor) -> Tensor:
        return segments.pad(x_TGN.float().repeat_interleave(n_heads // x_TGN.shape[1], 1))

    # Zeros after the end of a segment neither decay a state, nor write or erase anything.
    y_SLHV, state.after = scans.matrix_recurrence(
        to_heads(q_TGN), to_heads(k_TGN), segments.pad(v_THV), segments.pad(log_decay.float()), state.before.float(),
        a=None if erase is None else to_heads(erase.a),
        b=None if erase is None or erase.b is None else to_heads(erase.b),
        strength=None if strength_TH is None else segments.pad(strength_TH.float()),
        erases_after_decay=erase is None or erase.after_decay,
    )  # fmt: skip
    y_THV = segments.unpad(y_SLHV)
    return y_THV if skip_H is None else y_THV + skip_H[:, None] * v_THV


def wkv4(k_TE: Tensor, v_TE: Tensor, decay_E: Tensor, first_E: Tensor, states: tuple[Slot, ...]) -> Tensor:
    segments = states[0].segments
    sums = tuple(slot.before.float() for slot in states)
    k_SLE, v_SLE = (segments.pad(x.float()) for x in (k_TE, v_TE))
    y_SLE, ends = scans.rwkv4(k_SLE, v_SLE, decay_E, first_E, sums, segments.device_counts)
    for slot, end in zip(states, ends, strict=True):
        slot.after = end
    return segments.unpad(y_SLE)


def stabilise(gate_TH: Tensor, log_decay_TH: Tensor, state: Slot) -> Tensor:
    segments = state.segments
    out_3SLH, state.after = scans.stabiliser(
        segments.pad(gate_TH.float(), _NEVER), segments.pad(log_decay_TH.float()), state.before.float()
    )
    return torch.stack([segments.unpad(out) for out in out_3SLH])
