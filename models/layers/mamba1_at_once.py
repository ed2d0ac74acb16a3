"""Runs a Mamba-1 recurrence over few rows in one compiled call: convolution, small projections, norms, scan."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from hybridmem.memory import States
from hybridmem.memory.kernels import Prepared, cpu
from hybridmem.memory.kernels.cpu.parts import (
    LIKE,
    address_of,
    array_at,
    as_array,
    call_at,
    channels_at_once,
    compiled,
    convolve_at,
    get,
    norm_parts_at,
    put,
    scan_at,
    use_threads,
)
from hybridmem.models.layers.norms import SplitNorm
from hybridmem.models.products.few_rows import CompiledProduct
from hybridmem.models.products.few_rows_kernels import codes_like, product_by
from hybridmem.models.products.fields import FIELDS, N_PADDED, keep

if TYPE_CHECKING:
    from hybridmem.memory.recurrences import Mamba1

PASSES_ADDRESSES = True
"""Declares that arrays and addresses taken from tensors here go only to kernels (`memory.kernels.cpu.recording`)."""


class Mamba1AtOnce:
    """Runs the recurrence of one layer over few rows. Each object serves one layer only.

    The results have the same bits as those of the separate functions.
    """

    def __init__(self, x_proj: CompiledProduct, dt_proj: CompiledProduct) -> None:
        self._x_proj, self._dt_proj = x_proj, dt_proj
        self._last: tuple[np.dtype | None, _Call | None] = None, None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the cached call, because a copy's weights are at other addresses."""
        return {**vars(self), "_last": (None, None)}

    def __call__(self, recurrence: Mamba1, states: States, rows_TE: Tensor) -> Tensor | None:
        """Return outputs (T, E) in the rows' dtype, and write the end states.

        Return None for cases not for this kernel.
        """
        if states.kernels is not cpu or states.tails is not None or len(states.flats) != 2:
            return None  # A convolution with a single tap has no window.
        if rows_TE.dtype is not self._x_proj.dtype or not self._x_proj.takes(rows_TE):
            return None
        window: np.ndarray = as_array(states.flats[0])
        state: np.ndarray = as_array(states.flats[1])
        window_dtype, call = self._last
        if window_dtype != window.dtype:
            call = _Call.of(recurrence, self._x_proj, self._dt_proj, rows_TE.dtype, window.dtype)
            self._last = window.dtype, call
        if call is None or state.dtype != np.float32:
            return None
        n_rows, n_channels = rows_TE.shape
        n_threads, cu_rows = use_threads(n_rows * call.n_multiplications), states.cu_rows
        y_TE, initial = torch.empty_like(rows_TE), states.spec.states
        _advance(
            call.fields, call.codes_like, call.taps_like, call.bias_like, LIKE[rows_TE.dtype], rows_TE.data_ptr(),
            n_rows, call.eps, recurrence.conv.activation, cu_rows,
            window, as_array(states.sources[0]), as_array(states.targets[0]), float(initial[0].initial),
            state, as_array(states.sources[1]), as_array(states.targets[1]), float(initial[1].initial),
            self._x_proj.shape(n_rows), n_threads, channels_at_once(cu_rows, n_rows, n_channels, n_threads),
            y_TE.data_ptr(),
        )  # fmt: skip
        return y_TE


_X, _DT = 0, FIELDS
_TAPS, _N_TAPS, _N_CHANNELS, _CONV_BIAS, _NORM, _DT_RANK, _DT_BIAS, _A, _N_STATES, _D, _CONVOLVE, _SCAN = range(
    2 * FIELDS, 2 * FIELDS + 12
)
"""Indices of what `_advance` reads: the fields of two products, addresses of weights and kernels, and sizes."""


@dataclass(frozen=True)
class _Call:
    """Holds those arguments of a recurrence's calls that stay the same.

    Attributes:
        arrays: arrays that are kept alive, because `fields` contains their addresses.
        fields: the integers that `_advance` reads.
        codes_like, taps_like, bias_like: arrays with the dtypes of codes, of taps and of dt's bias.
        n_multiplications: how many multiplications one row takes.
    """

    arrays: tuple[np.ndarray | None, ...]
    fields: np.ndarray
    codes_like: np.ndarray
    taps_like: np.ndarray
    bias_like: np.ndarray
    eps: float
    n_multiplications: int

    @staticmethod
    def of(
        recurrence: Mamba1, x_proj: CompiledProduct, dt_proj: CompiledProduct, dtype: torch.dtype, window: np.dtype
    ) -> _Call | None:
        """Make it for rows of this dtype and a window of another dtype.

        Return None if `_advance` cannot run the recurrence.
        """
        norms, like = recurrence.norms, LIKE[dtype]
        taps, conv_bias = map(_whole, recurrence.conv.prepared(cpu))
        dt_bias, a, d = map(_whole, recurrence.prepared(cpu))
        assert taps is not None and dt_bias is not None and a is not None and d is not None, "only a bias is missing"
        (n_taps, n_channels), n_states, dt_rank = taps.shape, a.shape[0], dt_proj.n_in
        conv_bias = np.zeros(n_channels, taps.dtype) if conv_bias is None else conv_bias
        norm = _whole(norms.weights.prepared(cpu)[0]) if isinstance(norms, SplitNorm) else None
        is_for_it = (
            isinstance(norms, SplitNorm | None)
            and (norm is None or (norm.dtype == like.dtype and len(norm) == x_proj.n_out))
            and x_proj.kind.is_called_like(dt_proj.kind)
            and x_proj.n_padded == x_proj.n_in == n_channels
            and x_proj.n_out == dt_rank + 2 * n_states
            and conv_bias.dtype == taps.dtype
            and a.dtype == d.dtype == np.float32
            and not len(x_proj.bias)
            and not len(dt_proj.bias)
        )
        if not is_for_it:
            return None
        kernels = _addresses(dtype, taps.dtype, window, dt_bias.dtype)
        fields = [
            *x_proj.fields(), *dt_proj.fields(), taps.ctypes.data, n_taps, n_channels, conv_bias.ctypes.data,
            0 if norm is None else norm.ctypes.data, dt_rank, dt_bias.ctypes.data, a.ctypes.data, n_states,
            d.ctypes.data, *kernels,
        ]  # fmt: skip
        return _Call(
            (taps, conv_bias, norm, dt_bias, a, d), np.array(fields, np.int64),
            codes_like(x_proj.kind.codes), codes_like(taps.dtype), codes_like(dt_bias.dtype),
            float(norms.eps) if isinstance(norms, SplitNorm) else 0.0, 10 * n_channels * n_states,
        )  # fmt: skip


def _whole(array: Prepared | None) -> np.ndarray | None:
    return None if array is None else np.ascontiguousarray(as_array(array))


@cache
def _addresses(rows: torch.dtype, taps: np.dtype, window: np.dtype, bias: np.dtype) -> tuple[int, int]:
    """Return the addresses of the convolution kernel and the scan kernel for these dtypes."""
    i, x, like, ids = 0, np.float32(0.0), LIKE[rows], np.empty(0, np.int64)
    table, row, biases = np.empty((0, 0), np.float32), np.empty(0, np.float32), np.empty(0, bias)
    places = np.empty(0, window), ids, ids
    return (
        address_of(convolve_at, i, i, i, like, np.empty((0, 0), taps), np.empty(0, taps), ids, *places, x, i, i, True),
        address_of(scan_at, i, i, i, i, like, i, biases, table, row, ids, row, ids, ids, x, row, i, i),
    )


@compiled()
def _advance(
    fields, codes_like, taps_like, bias_like, like, rows_at, n_rows, eps, activation, cu_rows, window, window_sources,
    window_targets, window_initial, state, sources, targets, initial, shape, n_threads, at_once, y_at,
):  # fmt: skip
    """Advance a window and a state by rows, whose dtype is that of `like`."""
    n_channels, n_states, dt_rank = fields[_N_CHANNELS], fields[_N_STATES], fields[_DT_RANK]
    n_parts, n_dt_padded = dt_rank + 2 * n_states, fields[_DT + N_PADDED]
    x, n_taps = np.empty(n_rows * n_channels, like.dtype), fields[_N_TAPS]
    taps = array_at(fields[_TAPS], n_taps * n_channels, taps_like).reshape((n_taps, n_channels))
    call_at(fields[_CONVOLVE], (
        rows_at, n_rows, n_channels, like, taps, array_at(fields[_CONV_BIAS], n_channels, taps_like), cu_rows, window,
        window_sources, window_targets, window_initial, x.ctypes.data, at_once, activation,
    ))  # fmt: skip
    parts, normed = np.empty(n_rows * n_parts, like.dtype), np.empty(n_rows * n_parts, like.dtype)
    x_at, parts_at = x.ctypes.data, parts.ctypes.data
    product_by(fields, _X, codes_like, x_at, n_rows, shape, n_threads, parts_at, like)
    if fields[_NORM] != 0:
        ends = np.empty(3, np.int64)
        ends[0], ends[1], ends[2] = dt_rank, dt_rank + n_states, n_parts
        norm_weight = array_at(fields[_NORM], n_parts, like)
        norm_parts_at(parts_at, like, norm_weight, np.float32(eps), ends, normed.ctypes.data, n_rows)
    else:
        normed[:] = parts
    dt_rows, dt = np.zeros(n_rows * n_dt_padded, like.dtype), np.empty(n_rows * n_channels, like.dtype)
    b, c = np.empty(n_rows * n_states, like.dtype), np.empty(n_rows * n_states, like.dtype)
    for t in range(n_rows):
        first = t * n_parts
        dt_rows[t * n_dt_padded : t * n_dt_padded + dt_rank] = normed[first : first + dt_rank]
        first += dt_rank
        b[t * n_states : (t + 1) * n_states] = normed[first : first + n_states]
        c[t * n_states : (t + 1) * n_states] = normed[first + n_states : first + 2 * n_states]
    dt_at = dt.ctypes.data
    product_by(fields, _DT, codes_like, dt_rows.ctypes.data, n_rows, shape, n_threads, dt_at, like)
    y = np.empty(n_rows * n_channels, np.float32)
    a = array_at(fields[_A], n_states * n_channels, y).reshape((n_states, n_channels))
    call_at(fields[_SCAN], (
        x_at, dt_at, b.ctypes.data, c.ctypes.data, like, n_rows, array_at(fields[_DT_BIAS], n_channels, bias_like), a,
        array_at(fields[_D], n_channels, y), cu_rows, state, sources, targets, initial, y[:0], y.ctypes.data, at_once,
    ))  # fmt: skip
    out = array_at(y_at, n_rows * n_channels, like)
    for i in range(len(y)):
        put(out, i, get(y, i))
    keep(x)
    keep(parts)
    keep(normed)
    keep(dt_rows)
    keep(dt)
    keep(b)
    keep(c)
    keep(y)
