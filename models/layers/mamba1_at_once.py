"""Runs a Mamba-1 recurrence over few rows in one compiled call: convolution, small projections, norms, scan."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from memory.kernels import cpu
from memory.kernels.cpu.addresses import address_of, call_at
from memory.kernels.cpu.compiled import compiled
from memory.kernels.cpu.norms import norm_parts_at
from memory.kernels.cpu.numbers import array_at, get, put
from memory.kernels.cpu.recurrences import channels_at_once, convolve_at, scan_at
from memory.kernels.cpu.rows import LIKE, as_array
from memory.kernels.cpu.threads import use_threads
from memory.state.access import States
from models.layers.few_rows_kernels import keep, multiply, product_address
from models.layers.finishing import NO_BIAS
from models.layers.linear import Linear
from models.layers.norms import SplitNorm

if TYPE_CHECKING:
    from memory.recurrences import Mamba1

_FLOATS, _NO_ENDS = LIKE[torch.float32], np.empty(0, np.int64)


def advance(recurrence: Mamba1, states: States, rows_TE: Tensor) -> Tensor | None:
    """Return outputs (T, E) in the rows' dtype, and write the end states; None if that is not for this kernel."""
    x_proj, dt_proj, norms = recurrence.x_proj, recurrence.dt_proj, recurrence.norms
    if not isinstance(x_proj, Linear) or not isinstance(dt_proj, Linear):
        return None
    x_plan, dt_plan = x_proj.compiled, dt_proj.compiled
    if x_plan is None or dt_plan is None or states.kernels is not cpu or states.tails is not None:
        return None
    if len(states.flats) != 2 or not isinstance(norms, SplitNorm | None) or not x_plan.takes(rows_TE):
        return None  # a single tap has no window
    window, state = states.slots(0), states.slots(1)
    if as_array(state.flat).dtype != np.float32 or not rows_TE.dtype is x_plan.dtype is dt_plan.dtype:
        return None
    if x_plan.kind != dt_plan.kind or x_plan.n_in % x_plan.n_multiple or len(x_plan.bias) or len(dt_plan.bias):
        return None
    weight, bias = recurrence.conv.prepared(cpu)
    dt_bias, a, d = recurrence.prepared(cpu)
    (n_rows, n_channels), n_states = rows_TE.shape, a.shape[0]
    like, cu_rows = LIKE[rows_TE.dtype], window.cu_rows.host
    y_TE = torch.empty_like(rows_TE)
    _, n_x, shape, _ = x_plan.sizes(n_rows, 0)
    n_dt_padded, n_dt, _, _ = dt_plan.sizes(n_rows, 0)
    n_threads = use_threads(10 * n_rows * n_channels * n_states)
    at_once = channels_at_once(cu_rows, n_rows, n_channels, n_threads)
    taps = as_array(weight)
    conv_bias = np.zeros(n_channels, taps.dtype) if bias is None else as_array(bias)
    addresses = _addresses(rows_TE.dtype, taps.dtype, as_array(window.flat).dtype, as_array(dt_bias).dtype)
    _advance(
        addresses, rows_TE.data_ptr(), n_rows, like, taps, conv_bias, recurrence.conv.activation, cu_rows,
        (as_array(window.flat), as_array(window.sources), as_array(window.targets)), np.float32(window.initial),
        x_plan.weight, n_x, x_plan.n_out, dt_plan.weight, dt_plan.n_in, n_dt_padded, n_dt, shape, n_threads, NO_BIAS,
        product_address(x_plan.kind), like if norms is None else as_array(norms.weights.prepared(cpu)[0]),
        np.float32(0.0 if norms is None else norms.eps), _NO_ENDS if norms is None else norms.ends,
        as_array(dt_bias), as_array(a), as_array(d),
        (as_array(state.flat), as_array(state.sources), as_array(state.targets)), np.float32(state.initial), _FLOATS,
        at_once, y_TE.data_ptr(),
    )  # fmt: skip
    return y_TE


@cache
def _addresses(rows: torch.dtype, taps: np.dtype, window: np.dtype, bias: np.dtype) -> tuple[int, int]:
    """Return the addresses of the convolution's and the scan's kernel for these dtypes."""
    i, x, like, ids = 0, np.float32(0.0), LIKE[rows], np.empty(0, np.int64)
    table, row, biases = np.empty((0, 0), np.float32), np.empty(0, np.float32), np.empty(0, bias)
    places = np.empty(0, window), ids, ids
    return (
        address_of(convolve_at, i, i, i, like, np.empty((0, 0), taps), np.empty(0, taps), ids, *places, x, i, i, True),
        address_of(scan_at, i, i, i, i, like, i, biases, table, row, ids, row, ids, ids, x, _FLOATS, i, i),
    )


@compiled(error_model="numpy")
def _advance(  # type: ignore[no-untyped-def]
    addresses, rows_at, n_rows, like, conv_weight, conv_bias, activation, cu_rows, window, window_initial, x_weight,
    n_x, n_parts, dt_weight, dt_rank, n_dt_padded, n_dt, shape, n_threads, no_bias, product_at, norm_weight, eps, ends,
    dt_bias, a, d, state,
    initial, floats, at_once, y_at,
):  # fmt: skip
    """Advance a window and a state by rows of the type of `like`; weights are those of `multiply`."""
    n_channels, n_states = conv_weight.shape[1], a.shape[0]
    x = np.empty(n_rows * n_channels, like.dtype)
    call_at(addresses[0], (
        rows_at, n_rows, n_channels, like, conv_weight, conv_bias, cu_rows, window[0], window[1], window[2],
        window_initial, x.ctypes.data, at_once, activation,
    ))  # fmt: skip
    parts, normed = np.empty(n_rows * n_parts, like.dtype), np.empty(n_rows * n_parts, like.dtype)
    x_at, parts_at = x.ctypes.data, parts.ctypes.data
    multiply(product_at, x_weight, x_at, n_rows, n_x, shape, no_bias, 0, n_threads, parts_at, n_parts, like)
    if len(ends) > 0:
        norm_parts_at(parts_at, like, norm_weight, eps, ends, normed.ctypes.data, n_rows)
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
    dt_rows_at, dt_at = dt_rows.ctypes.data, dt.ctypes.data
    multiply(product_at, dt_weight, dt_rows_at, n_rows, n_dt, shape, no_bias, 0, n_threads, dt_at, n_channels, like)
    y = np.empty(n_rows * n_channels, np.float32)
    call_at(addresses[1], (
        x_at, dt_at, b.ctypes.data, c.ctypes.data, like, n_rows, dt_bias, a, d, cu_rows, state[0],
        state[1], state[2], initial, floats, y.ctypes.data, at_once,
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
