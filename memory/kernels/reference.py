"""Kernels in plain torch, on any device and in any dtype: slow, short, and the oracle for all others."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from memory.kernels.signature import PagedBatch, StateSlots


def prepare(tensor: Tensor) -> Tensor:
    return tensor


def write_rows_(flat: Tensor, offsets_T: Tensor, rows_TR: Tensor) -> None:
    flat[_elements(offsets_T, rows_TR.shape[1])] = rows_TR.to(flat.dtype)


def read_rows(flat: Tensor, offsets_T: Tensor, shape: tuple[int, ...], initial: float) -> Tensor:
    rows_TR = flat[_elements(offsets_T.clamp(min=0), math.prod(shape))]
    rows_TR[offsets_T < 0] = initial
    return rows_TR.reshape(len(offsets_T), *shape)


def _elements(offsets_T: Tensor, n_elements: int) -> Tensor:
    return offsets_T[:, None] + torch.arange(n_elements, device=offsets_T.device)


def paged_attention(q_THD: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch, n_kv_heads: int, scale: float) -> Tensor:
    out_THD = torch.empty_like(q_THD)
    n_groups, head_dim = q_THD.shape[1] // n_kv_heads, q_THD.shape[2]
    for i, n_rows in enumerate(batch.kv_lengths.tolist()):
        start, end = batch.cu_seqlens[i : i + 2].tolist()
        k_HRD, v_HRD = (
            gather_rows(flat, batch, i, n_kv_heads, head_dim).float().repeat_interleave(n_groups, dim=1).transpose(0, 1)
            for flat in (keys, values)
        )
        scores_HTR = q_THD[start:end].float().transpose(0, 1) @ k_HRD.transpose(1, 2) * scale
        scores_HTR += causal_mask(end - start, n_rows, q_THD.device)
        out_THD[start:end] = (scores_HTR.softmax(-1) @ v_HRD).transpose(0, 1).to(q_THD.dtype)
    return out_THD


def gather_rows(flat: Tensor, batch: PagedBatch, request: int, n_kv_heads: int, head_dim: int) -> Tensor:
    """The rows a request can see, in order: (rows, G, D), a copy."""
    n_rows = int(batch.kv_lengths[request])
    pages = torch.as_tensor(batch.pages)[batch.cu_pages[request] : batch.cu_pages[request + 1]]
    rows = flat[_elements(pages, batch.page_tokens * n_kv_heads * head_dim)]
    return rows.reshape(-1, n_kv_heads, head_dim)[:n_rows]


def causal_mask(n_queries: int, n_rows: int, device: torch.device) -> Tensor:
    """(n_queries, n_rows), 0 or -inf. Aligned at the bottom right: the last query sees every row."""
    mask = torch.full((n_queries, n_rows), float("-inf"), device=device)
    return mask.triu(n_rows - n_queries + 1)


def causal_conv(rows_TE: Tensor, weight_WE: Tensor, bias_E: Tensor | None, window: StateSlots) -> Tensor:
    before = read_rows(window.flat, window.sources, window.shape, window.initial)
    out_TE, after = torch.empty_like(rows_TE), torch.empty_like(before)
    for i in range(len(before)):
        start, end = window.cu_rows[i : i + 2].tolist()
        padded = torch.cat([before[i], rows_TE[start:end].to(before.dtype)])
        out = F.conv1d(padded.T.to(rows_TE.dtype)[None], weight_WE.T[:, None], bias_E, groups=rows_TE.shape[1])
        out_TE[start:end] = F.silu(out[0].T)
        after[i] = padded[len(padded) - len(before[i]) :]
    write_rows_(window.flat, window.targets, after.flatten(1))
    return out_TE


def selective_scan(
    x_TE: Tensor, dt_TE: Tensor, dt_bias_E: Tensor, b_TN: Tensor, c_TN: Tensor, a_NE: Tensor, d_E: Tensor, state: StateSlots
) -> Tensor:
    x_TE, b_TN, c_TN = x_TE.float(), b_TN.float(), c_TN.float()
    dt_TE = F.softplus(dt_TE.float() + dt_bias_E.float())
    h_SNE = read_rows(state.flat, state.sources, state.shape, state.initial).float()
    y_TE = torch.empty_like(x_TE)
    for i, h_NE in enumerate(h_SNE):
        for t in range(*state.cu_rows[i : i + 2].tolist()):
            h_NE = torch.exp(dt_TE[t] * a_NE) * h_NE + (dt_TE[t] * x_TE[t]) * b_TN[t, :, None]
            y_TE[t] = (h_NE * c_TN[t, :, None]).sum(0) + d_E * x_TE[t]
        h_SNE[i] = h_NE
    write_rows_(state.flat, state.targets, h_SNE.flatten(1))
    return y_TE
