"""Computes Mamba-2's recurrence in one call on the CPU: convolution, time steps and scan.

It runs the three separate kernels one after the other, so its results have the same bits as theirs. For one token,
calling a kernel from Python takes as long as the kernel itself, and here there is one call instead of three.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hybridmem.memory.kernels import checks
from hybridmem.memory.kernels.cpu.channel_states import softplus_rows
from hybridmem.memory.kernels.cpu.compiled import compiled
from hybridmem.memory.kernels.cpu.matrix_states import NOTHING, is_long, scan_states
from hybridmem.memory.kernels.cpu.numbers import array_at
from hybridmem.memory.kernels.cpu.recurrences import channels_at_once, convolve_rows
from hybridmem.memory.kernels.cpu.rows import LIKE, as_array, close, copy_, opened
from hybridmem.memory.kernels.cpu.threads import use_threads
from hybridmem.memory.kernels.signature import Prepared, StateSlots, as_tensor


class SSDLayer:
    """Computes the recurrence of one Mamba-2 layer: convolution, time steps and scan. See `memory.recurrences.SSD`.

    It holds the weights in one float32 array, because passing five arrays takes Python longer, most of all if the
    matrix products between two calls have pushed Python's own data out of the caches.

    Args:
        weight_WE, bias_E, activation: as for `causal_conv`.
        dt_bias_H, a_H, skip_H: float32 weights.
        dt_limits: the least and the greatest dt.
        n_groups: how many groups of heads share B and C.
    """

    def __init__(
        self, weight_WE: Prepared, bias_E: Prepared | None, dt_bias_H: Prepared, a_H: Prepared,
        skip_H: Prepared | None, dt_limits: tuple[float, float], n_groups: int, *, activation: bool,
    ) -> None:  # fmt: skip
        self._conv, self._of_heads = (weight_WE, bias_E), (dt_bias_H, a_H, skip_H)
        bias = torch.zeros(weight_WE.shape[1]) if bias_E is None else bias_E
        given = (as_tensor(x) for x in (weight_WE, bias, dt_bias_H, a_H, skip_H) if x is not None)
        self._weights: np.ndarray = torch.cat([x.detach().float().flatten() for x in given]).numpy()
        self._least, self._most = map(float, dt_limits)
        self._n_groups, self._activation = n_groups, activation
        self._fitting: object = None  # These sizes were found to fit the weights at the last check.

    def __call__(self, rows_TR: Tensor, window: StateSlots, state: StateSlots) -> Tensor:
        """Advance windows and states by rows. Return outputs (T, H P) in the rows' dtype.

        Args:
            rows_TR: (T, E + H): the channels to convolve, and dt before its bias is added.
            window: as for `causal_conv`.
            state: h, (H, P, N).
        Neither `window` nor `state` may come after a tail. Raises StepError if sizes do not fit the weights.
        """
        n_rows, cu_rows = rows_TR.shape[0], state.cu_rows.host
        sizes = rows_TR.shape[1:], rows_TR.dtype, window.shape, state.shape
        if sizes != self._fitting or n_rows != cu_rows[-1]:
            checks.ssd(rows_TR, *self._conv, window, *self._of_heads, self._n_groups, state)
            self._fitting = sizes
        (n_heads, head_dim, n_columns), (n_before, n_channels) = state.shape, window.shape
        n_threads = use_threads(4 * n_rows * n_heads * head_dim * n_columns)
        rows, out = rows_TR.contiguous(), torch.empty(n_rows, n_heads * head_dim, dtype=rows_TR.dtype)
        own = opened(state)
        _ssd(
            rows.data_ptr(), n_rows, LIKE[rows.dtype], cu_rows, self._weights, n_before + 1, n_channels,
            self._activation, self._least, self._most, as_array(window.flat), as_array(window.sources),
            as_array(window.targets), float(window.initial), channels_at_once(cu_rows, n_rows, n_channels, n_threads),
            as_array(own.flat), as_array(own.sources), as_array(own.targets), float(own.initial), n_heads, head_dim,
            self._n_groups, n_columns, is_long(cu_rows), NOTHING, out.data_ptr(),
        )  # fmt: skip
        close(own, state)
        return out


@compiled()
def _ssd(
    rows_at, n_rows, like, cu_rows, weights, n_taps, n_channels, activation, least, most, window, window_sources,
    window_targets, window_initial, at_once, flat, sources, targets, initial, n_heads, head_dim, n_groups, n_columns,
    is_long, nothing, out_at,
):  # fmt: skip
    width, n_inner, n_keys = n_channels + n_heads, n_heads * head_dim, n_groups * n_columns
    end = n_taps * n_channels
    taps, bias, of_heads = weights[:end], weights[end : end + n_channels], weights[end + n_channels :]
    dt_bias, a, skip = of_heads[:n_heads], of_heads[n_heads : 2 * n_heads], of_heads[2 * n_heads :]
    rows_TR = array_at(rows_at, n_rows * width, like).reshape((n_rows, width))
    x_TE = np.empty((n_rows, n_channels), like.dtype)
    convolve_rows(
        rows_TR, taps.reshape((n_taps, n_channels)), bias, cu_rows, window, window_sources, window_targets,
        np.float32(window_initial), x_TE, at_once, activation,
    )  # fmt: skip
    raw_TH, dt_TH = np.empty((n_rows, n_heads), like.dtype), np.empty((n_rows, n_heads), np.float32)
    for t in range(n_rows):
        copy_(raw_TH[t], rows_TR[t, n_channels:])
    softplus_rows(raw_TH, dt_bias, dt_TH)
    log_decay, lowest, highest = np.empty((n_rows, n_heads, 1), np.float32), np.float32(least), np.float32(most)
    for t in range(n_rows):
        for h in range(n_heads):
            dt = dt_TH[t, h]
            dt = lowest if dt < lowest else dt  # A NaN stays a NaN.
            dt = highest if dt > highest else dt
            dt_TH[t, h] = dt
            log_decay[t, h, 0] = dt * a[h]
    x, y_THP = np.empty(n_rows * n_channels, np.float32), np.empty((n_rows, n_heads, head_dim), np.float32)
    copy_(x, x_TE.reshape(-1))
    scan_states(
        x[n_inner + n_keys :], n_channels, n_heads // n_groups, x[n_inner:], n_channels, n_heads // n_groups, x,
        n_channels, log_decay, nothing, 0, 1, nothing, False, dt_TH.reshape(-1), n_heads, skip, cu_rows, flat, sources,
        targets, np.float32(initial), n_columns, is_long, y_THP,
    )  # fmt: skip
    copy_(array_at(out_at, n_rows * n_inner, like), y_THP.reshape(-1))
