"""Computes the loss of a Jamba and the gradients on one core of a CPU, several times as fast as transformers.

Matrix products are in bfloat16. All operations between two products are one compiled loop forward and one backward,
which read and write bfloat16 too. The residual stream, the recurrent states, and the parameters stay float32.

Shapes: B sequences, T positions, R = B * T rows, D the model's width, E channels of a Mamba layer, N states a channel,
I the width between the two products of a feed-forward layer, K taps of the convolution.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F
from transformers import JambaForCausalLM

from hybridmem.memory.kernels.cpu.compiled import compiled
from hybridmem.memory.kernels.cpu.rules import ELEMENTWISE, REDUCING, inlined, subroutine
from hybridmem.memory.kernels.cpu.vector_math import _bits_from_float, exp_f32, float_from_bits, softplus_f32

_ZERO, _ONE = np.float32(0.0), np.float32(1.0)


@inlined
def _wide(bits):
    """Return the float32 number that the bits of a bfloat16 stand for."""
    return float_from_bits(np.int32(np.int32(bits) << np.int32(16)))


@inlined
def _narrow(x):
    """Return the bits of the bfloat16 number nearest to a float32 number."""
    bits = _bits_from_float(x)
    odd = np.int32(np.int32(bits >> np.int32(16)) & np.int32(1))
    return np.uint16(np.int32(np.int32(bits + np.int32(0x7FFF)) + odd) >> np.int32(16))


@subroutine(REDUCING)
def _dot(x, y):
    """Add up products in any order. Other loops keep the order of operations, because the exponential depends on it."""
    total = _ZERO
    for i in range(len(x)):
        total += x[i] * y[i]
    return total


@inlined
def _sigmoid(x):
    return _ONE / (_ONE + exp_f32(-x))


@compiled(ELEMENTWISE)
def _norm_forward(x_RD, w_D, eps, y_RD, inverse_R):
    for r in range(x_RD.shape[0]):
        inverse = _ONE / np.sqrt(_dot(x_RD[r], x_RD[r]) / np.float32(x_RD.shape[1]) + eps)
        inverse_R[r] = inverse
        for d in range(x_RD.shape[1]):
            y_RD[r, d] = _narrow(x_RD[r, d] * inverse * w_D[d])


@compiled(ELEMENTWISE)
def _norm_backward(dy_RD, x_RD, w_D, inverse_R, dx_RD, dw_D):
    weighted_D = np.empty_like(w_D)
    for r in range(x_RD.shape[0]):
        inverse = inverse_R[r]
        for d in range(x_RD.shape[1]):
            dy = _wide(dy_RD[r, d])
            dw_D[d] += dy * x_RD[r, d] * inverse
            weighted_D[d] = dy * w_D[d]
        along = _dot(weighted_D, x_RD[r]) * inverse * inverse / np.float32(x_RD.shape[1])
        for d in range(x_RD.shape[1]):
            dx_RD[r, d] = inverse * (weighted_D[d] - x_RD[r, d] * along)


@compiled(ELEMENTWISE)
def _gate_forward(g_RI, u_RI, y_RI):
    for r in range(g_RI.shape[0]):
        for i in range(g_RI.shape[1]):
            g = _wide(g_RI[r, i])
            y_RI[r, i] = _narrow(g * _sigmoid(g) * _wide(u_RI[r, i]))


@compiled(ELEMENTWISE)
def _gate_backward(dy_RI, g_RI, u_RI, dg_RI, du_RI):
    for r in range(g_RI.shape[0]):
        for i in range(g_RI.shape[1]):
            g, dy = _wide(g_RI[r, i]), _wide(dy_RI[r, i])
            s = _sigmoid(g)
            dg_RI[r, i] = _narrow(dy * _wide(u_RI[r, i]) * s * (_ONE + g * (_ONE - s)))
            du_RI[r, i] = _narrow(dy * g * s)


@compiled(ELEMENTWISE)
def _conv_forward(x_BTE, w_KE, bias_E, y_BTE):
    """Convolve and apply SiLU; tap 0 belongs to the newest position."""
    n_channels = x_BTE.shape[2]
    a_E = np.empty(n_channels, np.float32)
    for b in range(x_BTE.shape[0]):
        for t in range(x_BTE.shape[1]):
            a_E[:] = bias_E
            for k in range(min(w_KE.shape[0], t + 1)):
                for e in range(n_channels):
                    a_E[e] += w_KE[k, e] * _wide(x_BTE[b, t - k, e])
            for e in range(n_channels):
                y_BTE[b, t, e] = _narrow(a_E[e] * _sigmoid(a_E[e]))


@compiled(ELEMENTWISE)
def _conv_backward(dy_BTE, x_BTE, w_KE, bias_E, dx_BTE, dw_KE, dbias_E):
    n_steps, n_channels = x_BTE.shape[1], x_BTE.shape[2]
    n_taps = w_KE.shape[0]
    da_TE = np.empty((n_steps, n_channels), np.float32)
    a_E = np.empty(n_channels, np.float32)
    for b in range(x_BTE.shape[0]):
        for t in range(n_steps):
            a_E[:] = bias_E
            for k in range(min(n_taps, t + 1)):
                for e in range(n_channels):
                    a_E[e] += w_KE[k, e] * _wide(x_BTE[b, t - k, e])
            for e in range(n_channels):
                s = _sigmoid(a_E[e])
                da = _wide(dy_BTE[b, t, e]) * s * (_ONE + a_E[e] * (_ONE - s))
                da_TE[t, e] = da
                dbias_E[e] += da
            for k in range(min(n_taps, t + 1)):
                for e in range(n_channels):
                    dw_KE[k, e] += da_TE[t, e] * _wide(x_BTE[b, t - k, e])
        for t in range(n_steps):
            a_E[:] = _ZERO
            for k in range(min(n_taps, n_steps - t)):
                for e in range(n_channels):
                    a_E[e] += w_KE[k, e] * da_TE[t + k, e]
            for e in range(n_channels):
                dx_BTE[b, t, e] = _narrow(a_E[e])


@compiled(ELEMENTWISE)
def _scan_forward(x_BTE, z_BTE, dt_BTE, bias_E, a_NE, b_BTN, c_BTN, d_E, h_BTNE, y_BTE):
    """Compute h = exp(dt A) h + dt B x and y = (C h + D x) silu(z), with dt = softplus(dt + bias)."""
    n_batch, n_steps, n_channels = x_BTE.shape
    n_states = a_NE.shape[0]
    rows = np.empty((3, n_channels), np.float32)
    dt_E, dtx_E, sum_E = rows[0], rows[1], rows[2]
    for b in range(n_batch):
        h_NE = np.zeros((n_states, n_channels), np.float32)
        for t in range(n_steps):
            for e in range(n_channels):
                x = _wide(x_BTE[b, t, e])
                dt_E[e] = softplus_f32(_wide(dt_BTE[b, t, e]) + bias_E[e])
                dtx_E[e] = dt_E[e] * x
                sum_E[e] = d_E[e] * x
            for n in range(n_states):
                b_n, c_n = b_BTN[b, t, n], c_BTN[b, t, n]
                for e in range(n_channels):
                    h = exp_f32(dt_E[e] * a_NE[n, e]) * h_NE[n, e] + dtx_E[e] * b_n
                    h_NE[n, e] = h
                    h_BTNE[b, t, n, e] = h
                    sum_E[e] += h * c_n
            for e in range(n_channels):
                z = _wide(z_BTE[b, t, e])
                y_BTE[b, t, e] = _narrow(sum_E[e] * z * _sigmoid(z))


@compiled(ELEMENTWISE)
def _scan_backward(
    dy_BTE, x_BTE, z_BTE, dt_BTE, bias_E, a_NE, b_BTN, c_BTN, d_E, h_BTNE,
    dx_BTE, dz_BTE, ddt_BTE, dbias_E, da_NE, db_BTN, dc_BTN, dd_E,
):  # fmt: skip
    n_batch, n_steps, n_channels = x_BTE.shape
    n_states = a_NE.shape[0]
    rows = np.empty((6, n_channels), np.float32)
    dt_E, x_E, sum_E, ds_E, dtotal_E, dx_E = rows[0], rows[1], rows[2], rows[3], rows[4], rows[5]
    dtx_E, g_E = np.empty(n_channels, np.float32), np.empty(n_channels, np.float32)
    zero_E = np.zeros(n_channels, np.float32)
    for b in range(n_batch):
        g_NE = np.zeros((n_states, n_channels), np.float32)
        for step in range(n_steps):
            t = n_steps - 1 - step
            for e in range(n_channels):
                x = _wide(x_BTE[b, t, e])
                x_E[e] = x
                dt_E[e] = softplus_f32(_wide(dt_BTE[b, t, e]) + bias_E[e])
                dtx_E[e] = dt_E[e] * x
                sum_E[e] = d_E[e] * x
            for n in range(n_states):
                c_n = c_BTN[b, t, n]
                for e in range(n_channels):
                    sum_E[e] += h_BTNE[b, t, n, e] * c_n
            for e in range(n_channels):
                z, dy = _wide(z_BTE[b, t, e]), _wide(dy_BTE[b, t, e])
                s = _sigmoid(z)
                ds = dy * z * s
                dz_BTE[b, t, e] = _narrow(dy * sum_E[e] * s * (_ONE + z * (_ONE - s)))
                ds_E[e] = ds
                dd_E[e] += ds * x_E[e]
                dx_E[e] = ds * d_E[e]
                dtotal_E[e] = _ZERO
            for n in range(n_states):
                b_n, c_n = b_BTN[b, t, n], c_BTN[b, t, n]
                h_before_E = h_BTNE[b, t - 1, n] if t > 0 else zero_E
                for e in range(n_channels):
                    decay = exp_f32(dt_E[e] * a_NE[n, e])
                    g = g_NE[n, e] + ds_E[e] * c_n
                    through = g * decay * h_before_E[e]
                    da_NE[n, e] += through * dt_E[e]
                    dtotal_E[e] += through * a_NE[n, e] + g * x_E[e] * b_n
                    dx_E[e] += g * dt_E[e] * b_n
                    g_NE[n, e] = g * decay
                    g_E[e] = g
                db_BTN[b, t, n] = _dot(g_E, dtx_E)
                dc_BTN[b, t, n] = _dot(ds_E, h_BTNE[b, t, n])
            for e in range(n_channels):
                ddt = dtotal_E[e] * _sigmoid(_wide(dt_BTE[b, t, e]) + bias_E[e])
                dbias_E[e] += ddt
                ddt_BTE[b, t, e] = _narrow(ddt)
                dx_BTE[b, t, e] = _narrow(dx_E[e])


def _array(tensor: Tensor) -> NDArray[Any]:
    """View a tensor as a numpy array; bfloat16 numbers appear as their bits."""
    tensor = tensor.detach()
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _run(kernel: Any, *arguments: Any) -> None:
    kernel(*(_array(a) if isinstance(a, Tensor) else a for a in arguments))


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_RD: Tensor, w_D: Tensor, eps: float) -> Tensor:
        y_RD, inverse_R = torch.empty_like(x_RD, dtype=torch.bfloat16), torch.empty(x_RD.shape[0])
        _run(_norm_forward, x_RD, w_D, np.float32(eps), y_RD, inverse_R)
        ctx.save_for_backward(x_RD, w_D, inverse_R)
        return y_RD

    @staticmethod
    def backward(ctx, dy_RD: Tensor):
        x_RD, w_D, inverse_R = ctx.saved_tensors
        dx_RD, dw_D = torch.empty_like(x_RD), torch.zeros_like(w_D)
        _run(_norm_backward, dy_RD, x_RD, w_D, inverse_R, dx_RD, dw_D)
        return dx_RD, dw_D, None


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, g_RI: Tensor, u_RI: Tensor) -> Tensor:
        y_RI = torch.empty_like(g_RI)
        _run(_gate_forward, g_RI, u_RI, y_RI)
        ctx.save_for_backward(g_RI, u_RI)
        return y_RI

    @staticmethod
    def backward(ctx, dy_RI: Tensor):
        g_RI, u_RI = ctx.saved_tensors
        dg_RI, du_RI = torch.empty_like(g_RI), torch.empty_like(u_RI)
        _run(_gate_backward, dy_RI, g_RI, u_RI, dg_RI, du_RI)
        return dg_RI, du_RI


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_BTE: Tensor, w_KE: Tensor, bias_E: Tensor) -> Tensor:
        y_BTE = torch.empty_like(x_BTE)
        _run(_conv_forward, x_BTE, w_KE, bias_E, y_BTE)
        ctx.save_for_backward(x_BTE, w_KE, bias_E)
        return y_BTE

    @staticmethod
    def backward(ctx, dy_BTE: Tensor):
        x_BTE, w_KE, bias_E = ctx.saved_tensors
        dx_BTE, dw_KE, dbias_E = torch.empty_like(x_BTE), torch.zeros_like(w_KE), torch.zeros_like(bias_E)
        _run(_conv_backward, dy_BTE, x_BTE, w_KE, bias_E, dx_BTE, dw_KE, dbias_E)
        return dx_BTE, dw_KE, dbias_E


class _Scan(torch.autograd.Function):
    """Computes the selective scan (Gu & Dao 2023, eq. 2) and its gate. The states of all positions are kept."""

    @staticmethod
    def forward(ctx, x_BTE, z_BTE, dt_BTE, bias_E, a_NE, b_BTN, c_BTN, d_E):
        inputs = (x_BTE, z_BTE, dt_BTE, bias_E, a_NE, b_BTN, c_BTN, d_E)
        h_BTNE = torch.empty(*x_BTE.shape[:2], *a_NE.shape)
        y_BTE = torch.empty_like(x_BTE)
        _run(_scan_forward, *inputs, h_BTNE, y_BTE)
        ctx.save_for_backward(*inputs, h_BTNE)
        return y_BTE

    @staticmethod
    def backward(ctx, dy_BTE: Tensor):
        *inputs, h_BTNE = ctx.saved_tensors
        grads = [torch.zeros_like(t, memory_format=torch.contiguous_format) for t in inputs]
        _run(_scan_backward, dy_BTE, *inputs, h_BTNE, *grads)
        return tuple(grads)


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight.bfloat16())


def _mamba(mixer: Any, x_BTD: Tensor) -> Tensor:
    n_channels, eps = mixer.intermediate_size, mixer.dt_layernorm.variance_epsilon
    x_in, z_in = mixer.in_proj.weight.split(n_channels)
    taps_KE = mixer.conv1d.weight[:, 0].flip(1).T.contiguous()
    x_BTE = _Convolution.apply(_linear(x_BTD, x_in), taps_KE, mixer.conv1d.bias)
    sizes = [mixer.time_step_rank, mixer.ssm_state_size, mixer.ssm_state_size]
    dt, b, c = _linear(x_BTE, mixer.x_proj.weight).float().split(sizes, dim=-1)
    norms = (mixer.dt_layernorm, mixer.b_layernorm, mixer.c_layernorm)
    dt, b, c = (F.rms_norm(t, t.shape[-1:], n.weight, eps) for t, n in zip((dt, b, c), norms, strict=True))
    dt_BTE = _linear(dt.bfloat16(), mixer.dt_proj.weight)
    a_NE = -torch.exp(mixer.A_log.T)
    y_BTE = _Scan.apply(x_BTE, _linear(x_BTD, z_in), dt_BTE, mixer.dt_proj.bias, a_NE, b, c, mixer.D)
    return _linear(y_BTE, mixer.out_proj.weight)


def _attention(layer: Any, x_BTD: Tensor) -> Tensor:
    q, k, v = (
        _linear(x_BTD, projection.weight).float().unflatten(-1, (-1, layer.head_dim)).transpose(1, 2)
        for projection in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    n_shared = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(n_shared, 1), v.repeat_interleave(n_shared, 1)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return _linear(y.transpose(1, 2).flatten(2).bfloat16(), layer.o_proj.weight)


def loss_of(model: JambaForCausalLM, ids_BT: Tensor, labels_BT: Tensor) -> Tensor:
    """Return the mean loss of the tokens whose labels are not negative, as the model's own `forward` does."""
    base, eps = model.model, model.config.rms_norm_eps
    x_RD = F.embedding(ids_BT, base.embed_tokens.weight).flatten(0, 1)
    for layer in base.layers:
        y_BTD = _Norm.apply(x_RD, layer.input_layernorm.weight, eps).unflatten(0, ids_BT.shape)
        mixed = _mamba(layer.mamba, y_BTD) if hasattr(layer, "mamba") else _attention(layer.self_attn, y_BTD)
        x_RD = x_RD + mixed.flatten(0, 1)
        y_RD = _Norm.apply(x_RD, layer.pre_ff_layernorm.weight, eps)
        mlp = layer.feed_forward
        y_RI = _Gate.apply(_linear(y_RD, mlp.gate_proj.weight), _linear(y_RD, mlp.up_proj.weight))
        x_RD = x_RD + _linear(y_RI, mlp.down_proj.weight)
    # A token is predicted from the row before it.
    targets_R = F.pad(labels_BT[:, 1:], (0, 1), value=-100).flatten()
    rows = torch.nonzero(targets_R >= 0)[:, 0]
    y_RD = _Norm.apply(x_RD[rows], base.final_layernorm.weight, eps)
    return F.cross_entropy(_linear(y_RD, model.lm_head.weight).float(), targets_R[rows])
