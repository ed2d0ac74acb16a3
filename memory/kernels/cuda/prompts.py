"""Computes prompts on the GPU by libraries that are made for them: causal-conv1d and mamba-ssm.

causal-conv1d must be of version 1.4 or newer, and mamba-ssm of version 2.2 or newer. Their public functions are
called for one sequence after the other.
Matrix states are not computed by them, because mamba-ssm's scan takes time steps and rates where `matrix_scan` has
decays and strengths. Neither library can start from a tail or return a state within a prompt.
"""

from __future__ import annotations

import itertools

import numpy as np
import torch
from torch import Tensor

from hybridmem.memory.kernels.cuda.libraries import for_prompts
from hybridmem.memory.kernels.cuda.rows import read_rows, write_rows_
from hybridmem.memory.kernels.cuda.vectors import softplus
from hybridmem.memory.kernels.signature import Prepared, StateSlots

LEAST_TOKENS = 512
"""The fewest tokens of a step's shortest segment.

With fewer, the launch and the copies for each segment cost too much.
"""

_TINY = 2.0**-30
"""A time step so short that exp(dt A) is 1 in float32."""


def _are_prompts(function: str, slots: StateSlots) -> bool:
    return slots.tail is None and int(np.diff(slots.cu_rows.host).min()) >= LEAST_TOKENS and function in for_prompts()


def conv_by_library(
    rows_TR: Tensor, weight_WE: Prepared, bias_E: Prepared | None, window: StateSlots, *, activation: bool
) -> Tensor | None:
    """Compute `Kernels.causal_conv` by causal-conv1d. Return None if it is not installed or does not take such rows."""
    n_taps, n_channels = weight_WE.shape
    fits = n_taps <= 4 and n_channels % 8 == 0 and rows_TR.stride(0) % 8 == 0 and rows_TR.stride(1) == 1
    if not fits or window.flat.dtype != rows_TR.dtype or not _are_prompts("causal_conv", window):
        return None
    from causal_conv1d import causal_conv1d_fn

    before_SWE, outputs = read_rows(window.flat, window.sources, window.shape, window.initial), []
    for i, (start, end) in enumerate(itertools.pairwise(window.cu_rows.host.tolist())):
        out_1ET, after_1EW = causal_conv1d_fn(
            rows_TR[start:end, :n_channels].T[None], weight_WE.T, bias_E, initial_states=before_SWE[i].T[None],
            return_final_states=True, activation="silu" if activation else None,
        )  # fmt: skip
        write_rows_(window.flat, window.targets[i : i + 1], after_1EW[0].T.reshape(1, -1))
        outputs.append(out_1ET[0].T)
    return torch.cat(outputs)


def scan_by_library(
    x_TE: Tensor,
    dt_TE: Tensor,
    dt_bias_E: Prepared,
    b_TN: Tensor,
    c_TN: Tensor,
    a_NE: Prepared,
    d_E: Prepared,
    state: StateSlots,
) -> Tensor | None:
    """Compute `Kernels.selective_scan` by mamba-ssm. Return None if it is not installed or cannot compute this step.

    mamba-ssm starts from a state of zeros. So N tokens that write the source state are put before the prompt: token n
    writes state n of all channels, in a time step so short that nothing decays. The time step is a power of two, so the
    state is exact to the bit.
    """
    if not _are_prompts("selective_scan", state) or a_NE.shape[0] > 256:
        return None
    from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

    n_states, n_channels = a_NE.shape
    before_SNE, outputs = read_rows(state.flat, state.sources, state.shape, state.initial).float(), []
    dt_TE = softplus(dt_TE, dt_bias_E)
    ones_NN, rates_EN = torch.eye(n_states, device=x_TE.device), a_NE.float().T.contiguous()
    for i, (start, end) in enumerate(itertools.pairwise(state.cu_rows.host.tolist())):
        x_ET = torch.cat([before_SNE[i] / _TINY, x_TE[start:end].float()]).T.contiguous()
        dt_ET = torch.cat([torch.full_like(before_SNE[i], _TINY), dt_TE[start:end]]).T.contiguous()
        b_NT, c_NT = (torch.cat([ones_NN, t[start:end].float()]).T.contiguous() for t in (b_TN, c_TN))
        y_1ET, after_1EN = selective_scan_fn(
            x_ET[None], dt_ET[None], rates_EN, b_NT[None], c_NT[None], d_E.float(), return_last_state=True
        )
        write_rows_(state.flat, state.targets[i : i + 1], after_1EN[0].T.reshape(1, n_states * n_channels))
        outputs.append(y_1ET[0, :, n_states:].T)
    return torch.cat(outputs).contiguous()
