"""Computes Mamba-2's recurrence in one call on the CPU: convolution, steps, scan.

It runs the kernels of these one after the other, on the same numbers, so its results have their bits. For one token the
way from Python to a kernel takes as long as what it computes, and here there is one way instead of three.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from memory.kernels import checks
from memory.kernels.cpu.channel_states import softplus_rows
from memory.kernels.cpu.compiled import compiled
from memory.kernels.cpu.matrix_states import NOTHING, is_long, scan_states
from memory.kernels.cpu.numbers import array_at
from memory.kernels.cpu.recurrences import channels_at_once, convolve_rows
from memory.kernels.cpu.rows import LIKE, as_array, close, copy_, opened
from memory.kernels.cpu.threads import use_threads
from memory.kernels.signature import Prepared, StateSlots


def ssd(
    rows_TR: Tensor, weight_WE: Prepared, bias_E: Prepared | None, window: StateSlots, dt_bias_H: Prepared,
    a_H: Prepared, skip_H: Prepared | None, dt_limits: tuple[float, float], n_groups: int, state: StateSlots, *,
    activation: bool = True,
) -> Tensor:  # fmt: skip
    """Compute what `memory.recurrences.SSD` describes.

    Args:
        rows_TR: (T, E + H): the channels to convolve, and dt before its bias.
        weight_WE, bias_E, window, activation: as for `causal_conv`.
        dt_bias_H, a_H, skip_H: float32.
        dt_limits: least and greatest dt.
        n_groups: groups of heads that share B and C.
        state: h, (H, P, N).
    Returns (T, H P) in the dtype of the rows. Neither `window` nor `state` may stand behind a tail.
    """
    checks.ssd(rows_TR, weight_WE, bias_E, window, dt_bias_H, a_H, skip_H, n_groups, state)
    (n_rows, row_width), (n_heads, head_dim, n_columns) = rows_TR.shape, state.shape
    rows, out = rows_TR.contiguous(), torch.empty(n_rows, n_heads * head_dim, dtype=rows_TR.dtype)
    n_channels = weight_WE.shape[1]
    at_once = channels_at_once(
        window.cu_rows.host, n_rows, n_channels, use_threads(4 * n_rows * n_heads * head_dim * n_columns)
    )
    weight, own = as_array(weight_WE), opened(state)
    _ssd(
        rows.data_ptr(), n_rows, row_width, LIKE[rows.dtype], weight,
        np.zeros(n_channels, weight.dtype) if bias_E is None else as_array(bias_E), window.cu_rows.host,
        as_array(window.flat), as_array(window.sources), as_array(window.targets), np.float32(window.initial), at_once,
        activation, as_array(dt_bias_H), as_array(a_H), NOTHING if skip_H is None else as_array(skip_H),
        np.float32(dt_limits[0]), np.float32(dt_limits[1]), as_array(own.flat), as_array(own.sources),
        as_array(own.targets), np.float32(own.initial), n_heads, head_dim, n_groups, n_columns,
        is_long(own.cu_rows.host), NOTHING, out.data_ptr(),
    )  # fmt: skip
    close(own, state)
    return out


@compiled(error_model="numpy")
def _ssd(  # type: ignore[no-untyped-def]
    rows_at, n_rows, row_width, like, weight, bias, cu_rows, window, window_sources, window_targets, window_initial,
    at_once, activation, dt_bias, a, skip, least, most, flat, sources, targets, initial, n_heads, head_dim, n_groups,
    n_columns, is_long, nothing, out_at,
):  # fmt: skip
    rows_TR = array_at(rows_at, n_rows * row_width, like).reshape((n_rows, row_width))
    n_channels, n_inner, n_keys = weight.shape[1], n_heads * head_dim, n_groups * n_columns
    x_TE = np.empty((n_rows, n_channels), like.dtype)
    convolve_rows(
        rows_TR, weight, bias, cu_rows, window, window_sources, window_targets, window_initial, x_TE, at_once,
        activation,
    )  # fmt: skip
    raw_TH, dt_TH = np.empty((n_rows, n_heads), like.dtype), np.empty((n_rows, n_heads), np.float32)
    for t in range(n_rows):
        copy_(raw_TH[t], rows_TR[t, n_channels:])
    softplus_rows(raw_TH, dt_bias, dt_TH)
    log_decay = np.empty((n_rows, n_heads, 1), np.float32)
    for t in range(n_rows):
        for h in range(n_heads):
            dt = dt_TH[t, h]
            dt = least if dt < least else dt  # NaN stays
            dt = most if dt > most else dt
            dt_TH[t, h] = dt
            log_decay[t, h, 0] = dt * a[h]
    x, y_THP = np.empty(n_rows * n_channels, np.float32), np.empty((n_rows, n_heads, head_dim), np.float32)
    copy_(x, x_TE.reshape(-1))
    scan_states(
        x[n_inner + n_keys :], n_channels, n_heads // n_groups, x[n_inner:], n_channels, n_heads // n_groups, x,
        n_channels, log_decay, nothing, 0, 1, nothing, False, dt_TH.reshape(-1), n_heads, skip, cu_rows, flat, sources,
        targets, initial, n_columns, is_long, y_THP,
    )  # fmt: skip
    copy_(array_at(out_at, n_rows * n_inner, like), y_THP.reshape(-1))
