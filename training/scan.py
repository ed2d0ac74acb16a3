"""Computes a differentiable selective scan, for training on a CPU.

Same formula as `memory.recurrences.mamba1` (Gu & Dao 2023, eq. 2): h = exp(dt A) h + dt B x, y = C h, with a backward
pass. States of all positions are kept for the backward pass: B * T * N * E float32 values.

Shapes: B sequences, T positions, E channels, N states a channel.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import prange
from torch import Tensor

from memory.kernels.cpu.compiled import compiled
from memory.kernels.cpu.vector_math import exp_f32

_ZERO = np.float32(0.0)


@compiled(parallel=True, fastmath=True)
def _forward(x_BTE, dt_BTE, a_NE, b_BTN, c_BTN, h_BTNE, y_BTE):  # type: ignore[no-untyped-def]
    n_batch, n_steps, n_channels = x_BTE.shape
    n_states = a_NE.shape[0]
    for b in prange(n_batch):
        h_NE = np.zeros((n_states, n_channels), np.float32)
        for t in range(n_steps):
            y_BTE[b, t, :] = _ZERO
            for n in range(n_states):
                b_n, c_n = b_BTN[b, t, n], c_BTN[b, t, n]
                for e in range(n_channels):
                    dt = dt_BTE[b, t, e]
                    h = exp_f32(dt * a_NE[n, e]) * h_NE[n, e] + dt * x_BTE[b, t, e] * b_n
                    h_NE[n, e] = h
                    h_BTNE[b, t, n, e] = h
                    y_BTE[b, t, e] += h * c_n


@compiled(parallel=True, fastmath=True)
def _backward(dy_BTE, x_BTE, dt_BTE, a_NE, b_BTN, c_BTN, h_BTNE, dx_BTE, ddt_BTE, da_BNE, db_BTN, dc_BTN):  # type: ignore[no-untyped-def]
    n_batch, n_steps, n_channels = x_BTE.shape
    n_states = a_NE.shape[0]
    for b in prange(n_batch):
        g_NE = np.zeros((n_states, n_channels), np.float32)
        zero_E = np.zeros(n_channels, np.float32)
        for step in range(n_steps):
            t = n_steps - 1 - step
            for n in range(n_states):
                b_n, c_n = b_BTN[b, t, n], c_BTN[b, t, n]
                db_n, dc_n = _ZERO, _ZERO
                h_before_E = h_BTNE[b, t - 1, n] if t > 0 else zero_E
                for e in range(n_channels):
                    dt, x, dy = dt_BTE[b, t, e], x_BTE[b, t, e], dy_BTE[b, t, e]
                    decay = exp_f32(dt * a_NE[n, e])
                    g = g_NE[n, e] + dy * c_n
                    dc_n += dy * h_BTNE[b, t, n, e]
                    through = g * decay * h_before_E[e]
                    da_BNE[b, n, e] += through * dt
                    ddt_BTE[b, t, e] += through * a_NE[n, e] + g * x * b_n
                    dx_BTE[b, t, e] += g * dt * b_n
                    db_n += g * dt * x
                    g_NE[n, e] = g * decay
                db_BTN[b, t, n] = db_n
                dc_BTN[b, t, n] = dc_n


class SelectiveScan(torch.autograd.Function):
    """Computes y from (x, dt, A, B, C), with a backward pass.

    x, dt (B, T, E); A (N, E); B, C (B, T, N); all float32 and contiguous.
    """

    @staticmethod
    def forward(ctx, x_BTE: Tensor, dt_BTE: Tensor, a_NE: Tensor, b_BTN: Tensor, c_BTN: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        n_batch, n_steps, n_channels = x_BTE.shape
        h_BTNE = torch.empty(n_batch, n_steps, a_NE.shape[0], n_channels)
        y_BTE = torch.empty_like(x_BTE)
        _forward(*(t.detach().numpy() for t in (x_BTE, dt_BTE, a_NE, b_BTN, c_BTN, h_BTNE, y_BTE)))
        ctx.save_for_backward(x_BTE, dt_BTE, a_NE, b_BTN, c_BTN, h_BTNE)
        return y_BTE

    @staticmethod
    def backward(ctx, dy_BTE: Tensor):  # type: ignore[no-untyped-def]
        x_BTE, dt_BTE, a_NE, b_BTN, c_BTN, h_BTNE = ctx.saved_tensors
        dx, ddt, db, dc = (torch.zeros_like(t) for t in (x_BTE, dt_BTE, b_BTN, c_BTN))
        da_BNE = torch.zeros(x_BTE.shape[0], *a_NE.shape)
        inputs = (dy_BTE.contiguous(), x_BTE, dt_BTE, a_NE, b_BTN, c_BTN, h_BTNE, dx, ddt, da_BNE, db, dc)
        _backward(*(t.detach().numpy() for t in inputs))
        return dx, ddt, da_BNE.sum(0), db, dc


def selective_scan(hidden_states, dt, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False, **_):  # type: ignore[no-untyped-def]
    """Replace `mamba_selective_scan` of transformers while training.

    It has the same arguments, (B, E, T) in and out.
    """
    dt = dt + delta_bias[None, :, None] if delta_bias is not None else dt
    dt = torch.nn.functional.softplus(dt) if delta_softplus else dt
    arguments = (hidden_states.transpose(1, 2), dt.transpose(1, 2), A.T, B.transpose(1, 2), C.transpose(1, 2))
    y = SelectiveScan.apply(*(t.contiguous() for t in arguments)).transpose(1, 2)
    y = y + hidden_states * D[None, :, None] if D is not None else y
    return y * torch.nn.functional.silu(z) if z is not None else y
