"""What kernels are given, checked before they run: compiled code does not look where it reads and writes.

One function for each kernel that a recurrence may call with rows and weights of its own. Where blocks and pages lie is the memory's plan,
and is not looked at.
"""

from __future__ import annotations

from collections.abc import Container

import torch
from torch import Tensor

from memory.errors import StepError
from memory.kernels.signature import Erase, PageChoice, PagedBatch, Prepared, Scoring, StateSlots

FLOAT32 = frozenset({torch.float32})
"""What kernels for the CPU take, and only there."""
FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64})

_Shape = tuple[int, ...]


def causal_conv(rows_TR: Tensor, weight_WE: Prepared, bias_E: Prepared | None, window: StateSlots, dtypes: Container[torch.dtype]) -> None:
    _rows("causal_conv", window, dtypes, 2, rows=rows_TR)
    if len(weight_WE.shape) != 2:
        raise StepError(f"causal_conv: weight has shape {tuple(weight_WE.shape)}; give (taps, channels)")
    n_taps, n_channels = weight_WE.shape
    _shapes(
        "causal_conv", window=(window.shape, (n_taps - 1, n_channels)), row=((min(rows_TR.shape[1], n_channels),), (n_channels,)),
        bias=((n_channels,) if bias_E is None else bias_E.shape, (n_channels,)),
    )  # fmt: skip


def rms_norm(x_TE: Tensor, weight_E: Prepared | None, n_groups: int, gate_TE: Tensor | None, dtypes: Container[torch.dtype]) -> None:
    _inputs("rms_norm", None, dtypes, 2, x=x_TE, gate=gate_TE)
    n_elements = x_TE.shape[1]
    if n_groups < 1 or n_elements % n_groups:
        raise StepError(f"rms_norm: rows of {n_elements} elements have no {n_groups} equal parts")
    _shapes(
        "rms_norm", weight=((n_elements,) if weight_E is None else weight_E.shape, (n_elements,)),
        gate=(x_TE.shape if gate_TE is None else gate_TE.shape, x_TE.shape),
    )  # fmt: skip


def softplus(x_TH: Tensor, bias_H: Prepared, dtypes: Container[torch.dtype]) -> None:
    _inputs("softplus", None, dtypes, 2, x=x_TH)
    _shapes("softplus", bias=(bias_H.shape, x_TH.shape[1:]))


def selective_scan(
    x_TE: Tensor, dt_TE: Tensor, dt_bias_E: Prepared, b_TN: Tensor, c_TN: Tensor, a_NE: Prepared, d_E: Prepared, state: StateSlots,
    dtypes: Container[torch.dtype],
) -> None:  # fmt: skip
    _rows("selective_scan", state, dtypes, 2, x=x_TE, dt=dt_TE, b=b_TN, c=c_TN)
    (n_channels,), sizes = x_TE.shape[1:], (b_TN.shape[1], x_TE.shape[1])
    _shapes(
        "selective_scan", state=(state.shape, sizes), a=(a_NE.shape, sizes), dt=(dt_TE.shape, x_TE.shape), c=(c_TN.shape, b_TN.shape),
        dt_bias=(dt_bias_E.shape, (n_channels,)), d=(d_E.shape, (n_channels,)),
    )  # fmt: skip


def matrix_scan(
    q_TGN: Tensor, k_TGN: Tensor, v_THV: Tensor, log_decay: Tensor, erase: Erase | None, state: StateSlots, strength_TH: Tensor | None,
    skip_H: Prepared | None, dtypes: Container[torch.dtype],
) -> None:  # fmt: skip
    a, b = (None, None) if erase is None else erase[:2]
    _rows("matrix_scan", state, dtypes, 3, queries=q_TGN, keys=k_TGN, values=v_THV, a=a, b=b)
    n_tokens, n_heads, n_rows = v_THV.shape
    n_columns = q_TGN.shape[2]
    by_head = n_tokens, n_heads
    _inputs("matrix_scan", None, dtypes, None, log_decay=log_decay, strength=strength_TH)
    _shapes(
        "matrix_scan", state=(state.shape, (n_heads, n_rows, n_columns)), keys=(k_TGN.shape[2:], (n_columns,)),
        log_decay=(log_decay.shape, by_head if log_decay.dim() == 2 else (*by_head, n_columns)),
        skip=((n_heads,) if skip_H is None else skip_H.shape, (n_heads,)),
        strength=(by_head if strength_TH is None else strength_TH.shape, by_head),
        b=((*by_head, n_columns) if b is None else b.shape, (*by_head, n_columns)),
        a=((n_columns,) if a is None else a.shape[2:], (n_columns,)),
    )  # fmt: skip
    for x in (q_TGN, k_TGN, a):
        _heads("matrix_scan", n_heads, n_heads if x is None else x.shape[1])


def linear_scan(x_TE: Tensor, decay_TE: Tensor, state: StateSlots, dtypes: Container[torch.dtype]) -> None:
    _rows("linear_scan", state, dtypes, 2, x=x_TE, decay=decay_TE)
    _shapes("linear_scan", state=(state.shape, x_TE.shape[1:]), decay=(decay_TE.shape, x_TE.shape))


def wkv4(
    k_TE: Tensor, v_TE: Tensor, decay_E: Prepared, first_E: Prepared, states: tuple[StateSlots, ...], dtypes: Container[torch.dtype]
) -> None:
    if len(states) != 3:
        raise StepError(f"wkv4: {len(states)} states; give numerator, denominator and exponent")
    for state in states:
        _rows("wkv4", state, dtypes, 2, keys=k_TE, values=v_TE)
    n_channels = v_TE.shape[1:]
    _shapes(
        "wkv4", keys=(k_TE.shape, v_TE.shape), decay=(decay_E.shape, n_channels), first=(first_E.shape, n_channels),
        numerator=(states[0].shape, n_channels), denominator=(states[1].shape, n_channels), exponent=(states[2].shape, n_channels),
    )  # fmt: skip


def paged_attention(q_THD: Tensor, batch: PagedBatch, n_kv_heads: int, scoring: Scoring, dtypes: Container[torch.dtype]) -> None:
    _inputs("attention", batch.cu_seqlens.item(-1), dtypes, 3, queries=q_THD)
    n_heads, n_requests = q_THD.shape[1], len(batch.cu_seqlens) - 1
    _heads("attention", n_heads, n_kv_heads)
    if len(batch.kv_lengths) != n_requests or len(batch.cu_pages) != n_requests + 1:
        raise StepError(f"attention: {n_requests} requests have lengths of {len(batch.kv_lengths)} and pages of {len(batch.cu_pages) - 1}")
    _scoring(n_heads, scoring)


def attend_rows(q_THD: Tensor, k_RGD: Tensor, v_RGD: Tensor, scoring: Scoring, dtypes: Container[torch.dtype]) -> None:
    _inputs("attention", None, dtypes, 3, queries=q_THD, keys=k_RGD, values=v_RGD)
    _shapes("attention", values=(v_RGD.shape, k_RGD.shape), keys=(k_RGD.shape[2:], q_THD.shape[2:]))
    if len(k_RGD) < len(q_THD):
        raise StepError(f"attention: {len(q_THD)} queries are of the last of {len(k_RGD)} rows; give a row for each")
    _heads("attention", q_THD.shape[1], k_RGD.shape[1])
    _scoring(q_THD.shape[1], scoring)


def choose_pages(q_QHD: Tensor, choice: PageChoice, n_kv_heads: int, dtypes: Container[torch.dtype]) -> None:
    _inputs("choose_pages", len(choice.cu_pages) - 1, dtypes, 3, queries=q_QHD)
    _heads("choose_pages", q_QHD.shape[1], n_kv_heads)


def _scoring(n_heads: int, scoring: Scoring) -> None:
    if scoring.sinks_H is not None:
        _shapes("attention", sinks=(scoring.sinks_H.shape, (n_heads,)))
    if scoring.bias_HL is not None:
        _shapes("attention", bias=(scoring.bias_HL.shape, (n_heads, max(1, scoring.bias_HL.shape[-1]))))


def _rows(what: str, slots: StateSlots, dtypes: Container[torch.dtype], dim: int, **inputs: Tensor | None) -> None:
    """Raise StepError unless inputs have a row for each token of the runs, and each run a state to begin with and one to end with."""
    n_runs = len(slots.cu_rows) - 1
    if slots.sources.shape[0] != n_runs or slots.targets.shape[0] != n_runs:
        raise StepError(
            f"{what}: {n_runs} runs have {slots.sources.shape[0]} states to begin and {slots.targets.shape[0]} to end with; "
            "take `States.slots` as they are"
        )
    _inputs(what, slots.cu_rows.item(-1), dtypes, dim, **inputs)


def _inputs(what: str, n_rows: int | None, dtypes: Container[torch.dtype], dim: int | None, **inputs: Tensor | None) -> None:
    for name, x in inputs.items():
        if x is None:
            continue
        if x.dtype not in dtypes or (dtypes is FLOAT32 and not x.is_cpu):
            wanted = "float32 on the CPU" if dtypes is FLOAT32 else "floating-point numbers"
            raise StepError(f"{what}: {name} is {x.dtype} on {x.device}; these kernels take {wanted}")
        if dim is not None and x.dim() != dim:
            raise StepError(f"{what}: {name} has shape {tuple(x.shape)}; give {dim} axes, the first of them tokens")
        if n_rows is not None and x.shape[0] != n_rows:
            raise StepError(f"{what}: {name} has {x.shape[0]} rows where the step has {n_rows} tokens; give a row for each token")


def _heads(what: str, n_heads: int, n_groups: int) -> None:
    if n_groups < 1 or n_heads % n_groups:
        raise StepError(f"{what}: {n_heads} heads cannot share {n_groups} evenly; give a divisor of the heads")


def _shapes(what: str, **pairs: tuple[_Shape, _Shape]) -> None:
    """Raise StepError unless each (found, expected) agrees."""
    for name, (found, expected) in pairs.items():
        if found != expected:
            raise StepError(
                f"{what}: {name} has shape {tuple(found)}, not {tuple(expected)}; a layer's weights must fit its spec and its rows"
            )
