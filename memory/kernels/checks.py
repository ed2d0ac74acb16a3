"""Checks the arguments of kernels before they run, because compiled code does not check where it reads and writes.

There is one function for each kernel that models or recurrences call with their own tensors. It takes one or two
microseconds. Offsets of blocks and pages come from the memory's plan and are not checked.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from hybridmem.memory.errors import StepError
from hybridmem.memory.kernels.signature import Erase, PageChoice, PagedBatch, Prepared, Scoring, StateSlots

FLOATS_UP_TO_32_BITS = frozenset({torch.float32, torch.bfloat16, torch.float16})
FLOATS = FLOATS_UP_TO_32_BITS | {torch.float64}

_Dtypes = frozenset[torch.dtype]
_Shapes = Iterable[tuple[int, ...]]


def causal_conv(
    rows_TR: Tensor, weight_WE: Prepared, bias_E: Prepared | None, window: StateSlots, dtypes: _Dtypes
) -> None:
    rows, weight = rows_TR.shape, weight_WE.shape
    if len(rows) != 2 or len(weight) != 2 or rows[1] < weight[1]:
        shapes = f"rows {tuple(rows)} and taps {tuple(weight)}"
        raise StepError(f"causal_conv: {shapes}; give (tokens, channels or more) and (taps, channels)")
    n_taps, n_channels = weight
    bias = (n_channels,) if bias_E is None else bias_E.shape
    found, expected = (rows, window.shape, bias), ((_tokens(window), rows[1]), (n_taps - 1, n_channels), (n_channels,))
    if found != expected:
        _refuse("causal_conv", ("rows", "window", "bias"), found, expected)
    _require_dtypes("causal_conv", dtypes, rows_TR.dtype)


def rms_norm(x_TE: Tensor, weight_E: Prepared | None, n_groups: int, gate_TE: Tensor | None, dtypes: _Dtypes) -> None:
    x = x_TE.shape
    if len(x) != 2 or n_groups < 1 or x[1] % n_groups:
        raise StepError(f"rms_norm: {n_groups} parts of rows {tuple(x)}; give (rows, elements) and equal parts")
    found = (x[1:] if weight_E is None else weight_E.shape, x if gate_TE is None else gate_TE.shape)
    if found != (x[1:], x):
        _refuse("rms_norm", ("weight", "gate"), found, (x[1:], x))
    _require_dtypes("rms_norm", dtypes, x_TE.dtype, None if gate_TE is None else gate_TE.dtype)


def softplus(x_TH: Tensor, bias_H: Prepared, dtypes: _Dtypes) -> None:
    found, expected = (x_TH.shape, bias_H.shape), ((len(x_TH), x_TH.shape[-1]), (x_TH.shape[-1],))
    if found != expected:
        _refuse("softplus", ("x", "bias"), found, expected)
    _require_dtypes("softplus", dtypes, x_TH.dtype)


def ssd(
    rows_TR: Tensor, weight_WE: Prepared, bias_E: Prepared | None, window: StateSlots, dt_bias_H: Prepared,
    a_H: Prepared, skip_H: Prepared | None, n_groups: int, state: StateSlots,
) -> None:  # fmt: skip
    causal_conv(rows_TR, weight_WE, bias_E, window, FLOATS_UP_TO_32_BITS)
    n_heads, head_dim, n_columns = state.shape
    _require_sharing("ssd", n_heads, n_groups)
    n_channels, head = n_heads * head_dim + 2 * n_groups * n_columns, (n_heads,)
    found = (rows_TR.shape, weight_WE.shape[1:], dt_bias_H.shape, a_H.shape, head if skip_H is None else skip_H.shape)
    expected = ((_tokens(state), n_channels + n_heads), (n_channels,), head, head, head)
    if found != expected:
        _refuse("ssd", ("rows", "channels", "dt_bias", "a", "skip"), found, expected)


def selective_scan(
    x_TE: Tensor, dt_TE: Tensor, dt_bias_E: Prepared, b_TN: Tensor, c_TN: Tensor, a_NE: Prepared, d_E: Prepared,
    state: StateSlots, dtypes: _Dtypes,
) -> None:  # fmt: skip
    x, b, n_tokens = x_TE.shape, b_TN.shape, _tokens(state)
    row, key, sizes, channels = (n_tokens, x[-1]), (n_tokens, b[-1]), (b[-1], x[-1]), (x[-1],)
    found = (x, dt_TE.shape, b, c_TN.shape, state.shape, a_NE.shape, dt_bias_E.shape, d_E.shape)
    expected = (row, row, key, key, sizes, sizes, channels, channels)
    if found != expected:
        _refuse("selective_scan", ("x", "dt", "b", "c", "state", "a", "dt_bias", "d"), found, expected)
    _require_dtypes("selective_scan", dtypes, x_TE.dtype, dt_TE.dtype, b_TN.dtype, c_TN.dtype)


def matrix_scan(
    q_TGN: Tensor, k_TGN: Tensor, v_THV: Tensor, log_decay: Tensor, erase: Erase | None, state: StateSlots,
    strength_TH: Tensor | None, skip_H: Prepared | None, dtypes: _Dtypes,
) -> None:  # fmt: skip
    q, k, v, decay = q_TGN.shape, k_TGN.shape, v_THV.shape, log_decay.shape
    if len(q) != 3 or len(k) != 3 or len(v) != 3:
        shapes = f"queries {tuple(q)}, keys {tuple(k)} and values {tuple(v)}"
        raise StepError(f"matrix_scan: {shapes}; give (tokens, heads, channels)")
    n_tokens, n_heads, n_columns = _tokens(state), v[1], q[2]
    head, column = (n_tokens, n_heads), (n_tokens, n_heads, n_columns)
    _require_sharing("matrix_scan", n_heads, q[1])
    _require_sharing("matrix_scan", n_heads, k[1])
    strength, skip = head if strength_TH is None else strength_TH.shape, (n_heads,) if skip_H is None else skip_H.shape
    found = (q, k, v, decay, state.shape, strength, skip)
    expected = (
        (n_tokens, q[1], n_columns), (n_tokens, k[1], n_columns), (n_tokens, n_heads, v[2]),
        head if len(decay) == 2 else column, (n_heads, v[2], n_columns), head, (n_heads,),
    )  # fmt: skip
    if found != expected:
        _refuse("matrix_scan", ("queries", "keys", "values", "log_decay", "state", "strength", "skip"), found, expected)
    _require_dtypes(
        "matrix_scan",
        dtypes,
        q_TGN.dtype,
        k_TGN.dtype,
        v_THV.dtype,
        log_decay.dtype,
        None if strength_TH is None else strength_TH.dtype,
    )
    if erase is not None:
        a, b = erase.a.shape, column if erase.b is None else erase.b.shape
        if len(a) != 3 or (a[0], a[2], b) != (n_tokens, n_columns, column):
            _refuse("matrix_scan", ("a", "b"), (a, b), ((n_tokens, *a[1:-1], n_columns), column))
        _require_sharing("matrix_scan", n_heads, a[1])
        _require_dtypes("matrix_scan", dtypes, erase.a.dtype, None if erase.b is None else erase.b.dtype)


def linear_scan(x_TE: Tensor, decay_TE: Tensor, state: StateSlots, dtypes: _Dtypes) -> None:
    x = x_TE.shape
    row = (_tokens(state), x[-1])
    found, expected = (x, decay_TE.shape, state.shape), (row, row, row[1:])
    if found != expected:
        _refuse("linear_scan", ("x", "decay", "state"), found, expected)
    _require_dtypes("linear_scan", dtypes, x_TE.dtype, decay_TE.dtype)


def stabilise(gate_TH: Tensor, log_decay_TH: Tensor, state: StateSlots, dtypes: _Dtypes) -> None:
    gate = gate_TH.shape
    row = (_tokens(state), gate[-1])
    found, expected = (gate, log_decay_TH.shape, state.shape), (row, row, row[1:])
    if found != expected:
        _refuse("stabilise", ("gate", "log_decay", "state"), found, expected)
    _require_dtypes("stabilise", dtypes, gate_TH.dtype, log_decay_TH.dtype)


def wkv4(
    k_TE: Tensor, v_TE: Tensor, decay_E: Prepared, first_E: Prepared, states: tuple[StateSlots, ...], dtypes: _Dtypes
) -> None:
    if len(states) != 3:
        raise StepError(f"wkv4: {len(states)} states; give numerator, denominator and exponent")
    k, v, n_tokens = k_TE.shape, v_TE.shape, [_tokens(state) for state in states]
    row, channels = (n_tokens[0], v[-1]), (v[-1],)
    found = (k, v, decay_E.shape, first_E.shape, *(state.shape for state in states), tuple(n_tokens))
    expected = (row, row, *[channels] * 5, row[:1] * 3)
    if found != expected:
        names = ("keys", "values", "decay", "first", "numerator", "denominator", "exponent", "tokens of the states")
        _refuse("wkv4", names, found, expected)
    _require_dtypes("wkv4", dtypes, k_TE.dtype, v_TE.dtype)


def paged_attention(q_THD: Tensor, batch: PagedBatch, n_kv_heads: int, scoring: Scoring, dtypes: _Dtypes) -> None:
    q, n_tokens, n_requests = q_THD.shape, batch.cu_seqlens.item(-1), len(batch.cu_seqlens) - 1
    if len(q) != 3 or q[0] != n_tokens:
        raise StepError(f"attention: queries have shape {tuple(q)}, not ({n_tokens}, heads, channels): one a token")
    if len(batch.kv_lengths) != n_requests or len(batch.cu_pages) != n_requests + 1:
        found = f"lengths of {len(batch.kv_lengths)} and pages of {len(batch.cu_pages) - 1}"
        raise StepError(f"attention: {n_requests} requests have {found}")
    _require_scoring(q[0], q[1], n_kv_heads, scoring)
    _require_dtypes("attention", dtypes, q_THD.dtype)


def attend_rows(q_THD: Tensor, k_RGD: Tensor, v_RGD: Tensor, scoring: Scoring, dtypes: _Dtypes) -> None:
    q, k, v = q_THD.shape, k_RGD.shape, v_RGD.shape
    if len(q) != 3 or len(k) != 3 or (k, k[2]) != (v, q[2]) or k[0] < q[0]:
        shapes = f"queries {tuple(q)}, keys {tuple(k)} and values {tuple(v)}"
        wanted = "(rows, heads, channels), as many values as keys and as many queries or fewer"
        raise StepError(f"attention: {shapes}; give {wanted}")
    _require_scoring(q[0], q[1], k[1], scoring)
    _require_dtypes("attention", dtypes, q_THD.dtype, k_RGD.dtype, v_RGD.dtype)


def choose_pages(q_QHD: Tensor, choice: PageChoice, n_kv_heads: int, dtypes: _Dtypes) -> None:
    q, n_queries = q_QHD.shape, len(choice.cu_pages) - 1
    if len(q) != 3 or q[0] != n_queries or len(choice.n_last) != n_queries or len(choice.cu_chosen) != n_queries + 1:
        raise StepError(f"choose_pages: queries have shape {tuple(q)}, not ({n_queries}, heads, channels)")
    _require_sharing("choose_pages", q[1], n_kv_heads)
    _require_dtypes("choose_pages", dtypes, q_QHD.dtype)


def choose_rows(q_THD: Tensor, weights_TH: Tensor, batch: PagedBatch, dtypes: _Dtypes) -> None:
    q, n_tokens = q_THD.shape, batch.cu_seqlens.item(-1)
    if len(q) != 3 or q[0] != n_tokens or weights_TH.shape != q[:2]:
        shapes = f"queries {tuple(q)} and weights {tuple(weights_TH.shape)}"
        raise StepError(f"choose_rows: {shapes}; give ({n_tokens}, heads, channels) and a weight for each head")
    _require_dtypes("choose_rows", dtypes, q_THD.dtype)


def _tokens(slots: StateSlots) -> int:
    """Count the tokens of all segments.

    Raises StepError unless each segment has a source and a target for its state.
    """
    n_runs = len(slots.cu_rows.host) - 1
    if len(slots.sources) != n_runs or len(slots.targets) != n_runs:
        found = f"{len(slots.sources)} states to begin and {len(slots.targets)} to end with"
        raise StepError(f"{n_runs} runs have {found}; take `States.slots` as they are")
    return int(slots.cu_rows.host[-1])


def _require_scoring(n_queries: int, n_heads: int, n_kv_heads: int, scoring: Scoring) -> None:
    _require_sharing("attention", n_heads, n_kv_heads)
    sinks_H, bias_HL = scoring.sinks_H, scoring.bias_HL
    if sinks_H is not None and sinks_H.shape != (n_heads,):
        _refuse("attention", ("sinks",), (sinks_H.shape,), ((n_heads,),))
    if bias_HL is not None:
        wanted = (n_queries, n_heads, max(1, bias_HL.shape[-1]))[-2 if len(bias_HL.shape) < 3 else 0 :]
        if bias_HL.shape != wanted:
            _refuse("attention", ("bias",), (bias_HL.shape,), (wanted,))


def _require_sharing(what: str, n_heads: int, n_groups: int) -> None:
    if n_groups < 1 or n_heads % n_groups:
        raise StepError(f"{what}: {n_heads} heads cannot share {n_groups} evenly; give a divisor of the heads")


def _require_dtypes(what: str, dtypes: _Dtypes, *found: torch.dtype | None) -> None:
    for dtype in found:
        if dtype not in dtypes and dtype is not None:
            raise StepError(f"{what}: an input is {dtype}; these kernels take {', '.join(sorted(map(str, dtypes)))}")


def _refuse(what: str, names: Iterable[str], found: _Shapes, expected: _Shapes) -> None:
    """Raise StepError for the first wrong shape. The caller has found that there is one."""
    pairs = zip(names, found, expected, strict=True)
    name, own, wanted = next(wrong for wrong in pairs if wrong[1] != wrong[2])
    raise StepError(
        f"{what}: {name} has shape {tuple(own)}, not {tuple(wanted)}; there must be a row for each token, and a "
        "layer's weights must fit its spec and its rows"
    )
