"""Computes all kernels in plain torch, on any device and in any dtype.

It is slow and short. The other kernels are tested against it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor

from hybridmem.memory.blocks.arrays import ceil_div
from hybridmem.memory.blocks.staging import object_to_replays
from hybridmem.memory.kernels import checks
from hybridmem.memory.kernels.blocked import Rows, attend, scored
from hybridmem.memory.kernels.eight_bits import LARGEST, read_states, write_state_
from hybridmem.memory.kernels.signature import (
    Erase,
    FoldedRows,
    PageChoice,
    PagedBatch,
    Prepared,
    Scoring,
    StateSlots,
    Tail,
    TreePaths,
    as_tensor,
)


def prepare(tensor: Tensor) -> Tensor:
    return tensor


def plan_attention(*_: object) -> None:
    """Do nothing, because no kernel here prepares a step."""


def plan_choice(*_: object) -> None:
    """Do nothing, like `plan_attention`."""


def write_rows_(flat: Tensor, offsets_T: Tensor, rows_TR: Tensor) -> None:
    flat[_elements(offsets_T, rows_TR.shape[1])] = rows_TR.to(flat.dtype)


def read_rows(flat: Tensor, offsets_T: Tensor, shape: tuple[int, ...], initial: float) -> Tensor:
    rows_TR = flat[_elements(offsets_T.clamp(min=0), math.prod(shape))]
    rows_TR[offsets_T < 0] = initial
    return rows_TR.reshape(len(offsets_T), *shape)


def _elements(offsets_T: Tensor, n_elements: int) -> Tensor:
    return offsets_T[:, None] + torch.arange(n_elements, device=offsets_T.device)


def paged_attention(
    q_THD: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch, n_kv_heads: int, scoring: Scoring,
    folded: FoldedRows | None = None,
) -> Tensor:  # fmt: skip
    checks.paged_attention(q_THD, batch, n_kv_heads, scoring, checks.FLOATS)
    out_THD = torch.empty_like(q_THD)
    for i in range(len(batch.kv_lengths)):
        own = slice(*batch.cu_seqlens[i : i + 2].tolist())
        n_rows, read = row_reader(gather_rows, keys, values, batch, i, n_kv_heads, q_THD.shape[2], folded)
        out_THD[own] = attend(q_THD[own], n_rows, n_kv_heads, read, scoring.of(own))
    return out_THD


def tree_attention(
    q_QHD: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch, paths: TreePaths, n_kv_heads: int, scoring: Scoring
) -> Tensor:  # fmt: skip
    checks.paged_attention(q_QHD, batch, n_kv_heads, scoring, checks.FLOATS)
    out_QHD = torch.empty_like(q_QHD)
    for i, start in enumerate(paths.starts.tolist()):
        read = partial(gather_rows, batch=batch, request=i, n_kv_heads=n_kv_heads, head_dim=q_QHD.shape[2])
        k_RGD, v_RGD = read(keys), read(values)
        for t in range(*batch.cu_seqlens[i : i + 2].tolist()):
            path = torch.from_numpy(start + paths.rows[paths.cu_rows[t] : paths.cu_rows[t + 1]]).to(k_RGD.device)
            k_own, v_own = (torch.cat([x_RGD[:start], x_RGD[path]]) for x_RGD in (k_RGD, v_RGD))
            own = slice(t, t + 1)
            out_QHD[own] = attend_rows(q_QHD[own], k_own, v_own, scoring.of(own))
    return out_QHD


def row_reader(
    gather: Callable[..., Tensor], keys: Prepared, values: Prepared, batch: PagedBatch, request: int, n_kv_heads: int,
    head_dim: int, folded: FoldedRows | None,
) -> tuple[int, Rows]:  # fmt: skip
    """Return how many rows a request sees, and a function that reads them: folded rows first, then rows in pages.

    `gather` is the `gather_rows` of a set of kernels.
    """
    object_to_replays("attention in plain torch reads the lengths of sequences on the host")
    n_folded = 0 if folded is None else int(folded.lengths[request])

    def read_pages(begin: int, end: int) -> tuple[Tensor, Tensor]:
        own = batch, request, n_kv_heads, head_dim, begin, end
        k_RGD = gather(keys, *own)
        return k_RGD, k_RGD if values is keys else gather(values, *own)

    def read(begin: int, end: int) -> tuple[Tensor, Tensor]:
        if folded is None or begin >= n_folded:
            return read_pages(begin - n_folded, end - n_folded)
        old = gather_folded(folded, request, begin, min(end, n_folded))
        if end <= n_folded:
            return old
        k_RGD, v_RGD = (
            torch.cat([x.to(new.dtype), new]) for x, new in zip(old, read_pages(0, end - n_folded), strict=True)
        )
        return k_RGD, v_RGD

    return n_folded + int(batch.kv_lengths[request]), read


def gather_folded(folded: FoldedRows, request: int, begin: int = 0, end: int | None = None) -> tuple[Tensor, Tensor]:
    """Decode keys and values [begin, end) of a request from a storage: (rows, G, D) float32 each, in order."""
    begin, end = slice(begin, end).indices(int(folded.lengths[request]))[:2]
    first, last = begin // folded.block_rows, ceil_div(end, folded.block_rows)
    blocks = folded.blocks[..., folded.cu_blocks[request] : folded.cu_blocks[request + 1]][..., first:last]
    parts = []
    for flat, (n_heads, n_rows, size) in zip(map(as_tensor, folded.flats), folded.shapes, strict=True):
        of_head_G1 = torch.arange(n_heads)[:, None] * (n_rows * size)
        offsets_GB = (blocks // flat.element_size()).to(flat.device) + of_head_G1.to(flat.device)
        found_XS = flat[_elements(offsets_GB.flatten(), n_rows * size)]
        parts.append(rearrange(found_XS, "(g b) (r d) -> b g r d", g=n_heads, r=n_rows))
    halves = parts[: len(parts) // 2], parts[len(parts) // 2 :]
    k_BGRD, v_BGRD = (folded.storage.decode(tuple(half)) for half in halves)
    own = slice(begin - first * folded.block_rows, end - first * folded.block_rows)
    return k_BGRD.transpose(1, 2).flatten(0, 1)[own], v_BGRD.transpose(1, 2).flatten(0, 1)[own]


def attend_rows(
    q_THD: Tensor, k_RGD: Tensor, v_RGD: Tensor, scoring: Scoring, batch: PagedBatch | None = None
) -> Tensor:
    checks.attend_rows(q_THD, k_RGD, v_RGD, scoring, checks.FLOATS)
    return attend(q_THD, len(k_RGD), k_RGD.shape[1], lambda begin, end: (k_RGD[begin:end], v_RGD[begin:end]), scoring)


def attention_weights(q_HTD: Tensor, k_HRD: Tensor, scoring: Scoring) -> Tensor:
    """Return the weights (H, T, R), float32, of R rows for each query. The queries belong to the last T rows."""
    scores_HTR = scored(q_HTD @ k_HRD.transpose(1, 2), scoring, k_HRD.shape[1] - q_HTD.shape[1])
    if scoring.sinks_H is None:
        return scores_HTR.softmax(-1)
    sinks_HT1 = torch.as_tensor(scoring.sinks_H).float()[:, None, None].expand(-1, scores_HTR.shape[1], 1)
    return torch.cat([scores_HTR, sinks_HT1], -1).softmax(-1)[:, :, :-1]


def gather_rows(
    flat: Tensor, batch: PagedBatch, request: int, n_kv_heads: int, head_dim: int, begin: int = 0,
    end: int | None = None,
) -> Tensor:  # fmt: skip
    """Copy rows [begin, end) of the rows that a request sees in pages, in order: (rows, G, D)."""
    begin, end = slice(begin, end).indices(int(batch.kv_lengths[request]))[:2]
    row_R = torch.arange(begin, end)
    pages = torch.as_tensor(batch.pages)[..., batch.cu_pages[request] : batch.cu_pages[request + 1]]
    page_R, slot_R = row_R.to(pages.device) // batch.page_tokens, row_R.to(pages.device) % batch.page_tokens
    head_G1 = torch.arange(n_kv_heads, device=pages.device)[:, None]
    offsets_GR = pages[..., page_R] + (head_G1 * batch.page_tokens + slot_R) * head_dim
    return rearrange(flat[_elements(offsets_GR.flatten(), head_dim)], "(g r) d -> r g d", g=n_kv_heads)


def choose_pages(q_QHD: Tensor, least: Tensor, greatest: Tensor, choice: PageChoice, n_kv_heads: int) -> Tensor:
    checks.choose_pages(q_QHD, choice, n_kv_heads, checks.FLOATS)
    parts = []
    for i, q_HD in enumerate(q_QHD):
        pages = torch.as_tensor(choice.pages)[choice.cu_pages[i] : choice.cu_pages[i + 1]]
        n_chosen, n_last = int(choice.cu_chosen[i + 1] - choice.cu_chosen[i]), int(choice.n_last[i])
        if n_chosen == len(pages):
            parts.append(pages.expand(n_kv_heads, -1))
            continue
        first, middle, last = torch.split(pages, [choice.n_first, len(pages) - choice.n_first - n_last, n_last])
        scores_GN = page_scores(
            q_HD, *(read_rows(flat, middle, (n_kv_heads, q_HD.shape[1]), 0.0) for flat in (least, greatest))
        )
        best_first = scores_GN.sort(dim=-1, descending=True, stable=True).indices
        best = middle[best_first[:, : n_chosen - choice.n_first - n_last].sort(dim=-1).values]
        parts.append(torch.cat([first.expand(n_kv_heads, -1), best, last.expand(n_kv_heads, -1)], 1))
    return torch.cat(parts, 1)


def choose_rows(
    q_THD: Tensor, weights_TH: Tensor, keys: Tensor, batch: PagedBatch, n_chosen: int, scale: float,
    span_tokens: int = 1,
) -> Tensor:  # fmt: skip
    checks.choose_rows(q_THD, weights_TH, batch, checks.FLOATS)
    found = []
    in_keys = replace(batch, kv_lengths=batch.kv_lengths // span_tokens)
    for i, n_tokens in enumerate(batch.kv_lengths.tolist()):
        k_RD = gather_rows(as_tensor(keys), in_keys, i, 1, q_THD.shape[2])[:, 0].float()
        begin, end = batch.cu_seqlens[i : i + 2].tolist()
        for t in range(begin, end):
            n_rows = (n_tokens - (end - 1 - t)) // span_tokens
            scores_R = weights_TH[t] @ (scale * (q_THD[t].float() @ k_RD[:n_rows].T)).relu()
            best_first = (
                scores_R.nan_to_num(torch.inf, torch.inf, -torch.inf).sort(descending=True, stable=True).indices
            )
            found.append(best_first[:n_chosen].sort().values)
    return torch.cat(found)


def page_scores(q_HD: Tensor, least_NGD: Tensor, greatest_NGD: Tensor) -> Tensor:
    """Compute the scores (G, N) float32 of `Kernels.choose_pages`.
    Positive elements of q are multiplied by the greatest key, negative ones by the least key.
    """
    q_GSD = rearrange(q_HD.float(), "(g s) d -> g s d", g=least_NGD.shape[1])
    least_GDN, greatest_GDN = (rearrange(x.float(), "n g d -> g d n") for x in (least_NGD, greatest_NGD))
    scores_GSN = q_GSD.clamp(min=0) @ greatest_GDN + q_GSD.clamp(max=0) @ least_GDN
    return scores_GSN.amax(1)


def causal_conv(
    rows_TR: Tensor, weight_WE: Tensor, bias_E: Tensor | None, window: StateSlots, *, activation: bool = True
) -> Tensor:
    checks.causal_conv(rows_TR, weight_WE, bias_E, window, checks.FLOATS)
    before = read_rows(window.flat, window.sources, window.shape, window.initial)
    if window.tail is not None:
        return _causal_conv_with_tail(before, rows_TR, weight_WE, bias_E, window, window.tail, activation)
    rows_TE = rows_TR[:, : weight_WE.shape[1]]
    out_TE, after = torch.empty_like(rows_TE), torch.empty_like(before)
    for i in range(len(before)):
        start, end = window.cu_rows.host[i : i + 2].tolist()
        padded = torch.cat([before[i], rows_TE[start:end].to(before.dtype)])
        out_TE[start:end] = _convolved(padded.to(rows_TE.dtype), weight_WE, bias_E, activation)
        after[i] = padded[len(padded) - len(before[i]) :]
    write_rows_(window.flat, window.targets, after.flatten(1))
    return out_TE


def _convolved(x_TE: Tensor, weight_WE: Tensor, bias_E: Tensor | None, activation: bool) -> Tensor:
    out_TE = F.conv1d(x_TE.T[None], weight_WE.T[:, None], bias_E, groups=x_TE.shape[1])[0].T
    return F.silu(out_TE) if activation else out_TE


def _causal_conv_with_tail(
    before: Tensor, rows_TR: Tensor, weight_WE: Tensor, bias_E: Tensor | None, window: StateSlots, tail: Tail,
    activation: bool,
) -> Tensor:  # fmt: skip
    """Convolve segments that come after a tail, whose ring holds whole rows."""
    n_before, n_channels = window.shape
    rows_TE = rows_TR[:, :n_channels]
    out_TE = torch.empty_like(rows_TE)
    for i, own in enumerate(_segments(rows_TE, window)):
        (past,) = tail_rows(tail, i, (rows_TR.shape[1:],))
        seen = torch.cat([before[i], past[:, :n_channels].to(before.dtype), own.to(before.dtype)])
        fold, (start, end) = int(tail.folds[i]), window.cu_rows.host[i : i + 2].tolist()
        out_TE[start:end] = _convolved(seen[len(past) :].to(rows_TE.dtype), weight_WE, bias_E, activation)
        if window.targets[i] >= 0:
            write_rows_(window.flat, window.targets[i : i + 1], seen[fold : fold + n_before].reshape(1, -1))
    return out_TE


def _segments(x: Tensor, slots: StateSlots) -> tuple[Tensor, ...]:
    return torch.split(x, (slots.cu_rows.host[1:] - slots.cu_rows.host[:-1]).tolist())


def _slots(tail: Tail, run: int, begin: int, end: int) -> Tensor:
    first: Tensor = tail.firsts[run]
    return (first + torch.arange(begin, end, device=first.device)) % tail.ring_rows


def tail_rows(tail: Tail, run: int, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Read what each ring holds of the tokens between a state and a segment, oldest first: (tokens, *shape)."""
    slots = _slots(tail, run, 0, int(tail.counts[run]))
    return [
        read_rows(flat, source[run] + slots * math.prod(shape), shape, 0.0)
        for flat, source, shape in zip(tail.flats, tail.sources, shapes, strict=True)
    ]


def write_tail_rows_(tail: Tail, run: int, *rows: Tensor, first: int = 0) -> None:
    """Write a segment's tokens, from number `first` on, into each ring."""
    count = int(tail.counts[run])
    slots = _slots(tail, run, count + first, count + len(rows[0]))
    for flat, target, x in zip(tail.flats, tail.targets, rows, strict=True):
        write_rows_(flat, target[run] + slots * x[0].numel(), x[first:].flatten(1))


def rms_norm(
    x_TE: Tensor, weight_E: Tensor | None, eps: float, *, n_groups: int = 1, gate_TE: Tensor | None = None
) -> Tensor:
    checks.rms_norm(x_TE, weight_E, n_groups, gate_TE, checks.FLOATS)
    z_TE = x_TE.float() if gate_TE is None else x_TE.float() * gate_TE.float()
    z_TGE = z_TE.reshape(len(z_TE), n_groups, z_TE.shape[1] // n_groups)
    normed = (z_TGE * torch.rsqrt(z_TGE.square().mean(-1, keepdim=True) + eps)).view(x_TE.shape).to(x_TE.dtype)
    return normed if weight_E is None else weight_E * normed


def softplus(x_TH: Tensor, bias_H: Tensor) -> Tensor:
    checks.softplus(x_TH, bias_H, checks.FLOATS)
    return F.softplus(x_TH.float() + bias_H.float())


def selective_scan(
    x_TE: Tensor, dt_TE: Tensor, dt_bias_E: Tensor, b_TN: Tensor, c_TN: Tensor, a_NE: Tensor, d_E: Tensor,
    state: StateSlots,
) -> Tensor:  # fmt: skip
    checks.selective_scan(x_TE, dt_TE, dt_bias_E, b_TN, c_TN, a_NE, d_E, state, checks.FLOATS)
    y_TE = torch.empty_like(x_TE, dtype=torch.float32)
    rings = [x.shape[1:] for x in (x_TE, dt_TE, b_TN)]
    for i, h_NE in enumerate(_read_states(state)):
        start, end = state.cu_rows.host[i : i + 2].tolist()
        own = [x[start:end] for x in (x_TE, dt_TE, b_TN)]
        past = [] if state.tail is None else tail_rows(state.tail, i, rings)
        tokens = [torch.cat(pair) for pair in zip(past, own, strict=True)] if past else own
        first, body_at = end - len(tokens[0]), _body_at(state, i)
        for t, x_E, dt_E, b_N in zip(range(first, end), *(x.float() for x in tokens), strict=True):
            if t == first + body_at:
                _write_state_(state, i, h_NE)
            dt_E = F.softplus(dt_E + dt_bias_E.float())
            h_NE = torch.exp(dt_E * a_NE) * h_NE + (dt_E * x_E) * b_N[:, None]
            if t >= start:
                y_TE[t] = (h_NE * c_TN[t, :, None].float()).sum(0) + d_E * x_E
        if end == first + body_at:
            _write_state_(state, i, h_NE)
        _write_tail_(state, i, own)
    return y_TE


def matrix_scan(
    q_TGN: Tensor, k_TGN: Tensor, v_THV: Tensor, log_decay: Tensor, erase: Erase | None, state: StateSlots, *,
    strength_TH: Tensor | None = None, skip_H: Tensor | None = None,
) -> Tensor:  # fmt: skip
    checks.matrix_scan(q_TGN, k_TGN, v_THV, log_decay, erase, state, strength_TH, skip_H, checks.FLOATS)
    n_heads, tail, y_THV = v_THV.shape[1], state.tail, torch.empty_like(v_THV, dtype=torch.float32)
    rings = [x.shape[1:] for x in (k_TGN, v_THV, log_decay)]
    if erase is not None and erase.b is not None:
        rings += [erase.b.shape[1:], v_THV.shape[1:]]
    q_THN = _to_heads(q_TGN, n_heads)
    for i, s_HVN in enumerate(_read_states(state)):
        start, end = state.cu_rows.host[i : i + 2].tolist()
        updates = [] if tail is None else list(zip(*tail_rows(tail, i, rings), strict=True))
        first, body_at = start - len(updates), _body_at(state, i)
        for t in range(first, end):
            if t == first + body_at:
                _write_state_(state, i, s_HVN)
            if t >= start:
                update = _update(s_HVN, t, k_TGN, v_THV, log_decay, erase, strength_TH)
                if tail is not None:  # The update is added as the ring stores it, rounded to its dtype.
                    update = tuple(x.to(flat.dtype) for x, flat in zip(update, tail.flats, strict=True))
                updates.append(update)
            s_HVN = _updated(s_HVN, *updates[t - first])
            if t >= start:
                y_THV[t] = (s_HVN * q_THN[t, :, None]).sum(-1)
        if end == first + body_at:
            _write_state_(state, i, s_HVN)
        _write_tail_(state, i, [torch.stack(x) for x in zip(*updates[start - first :], strict=True)])
    return y_THV if skip_H is None else y_THV + skip_H[:, None] * v_THV.float()


def _read_states(state: StateSlots) -> Tensor:
    read = read_states if state.flat.dtype in LARGEST else read_rows
    return read(state.flat, state.sources, state.shape, state.initial).float()


def _write_state_(state: StateSlots, run: int, own: Tensor) -> None:
    """Write the state of a segment at its body's new position."""
    if state.flat.dtype in LARGEST:
        assert state.tail is not None, "states of 8 bits come before tails"
        write_state_(state.flat, state.targets[run], own, int(state.tail.firsts[run] + state.tail.folds[run]))
    else:
        write_rows_(state.flat, state.targets[run : run + 1], own.reshape(1, -1))


def _update(
    s_HVN: Tensor, t: int, k_TGN: Tensor, v_THV: Tensor, log_decay: Tensor, erase: Erase | None,
    strength_TH: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return what token t changes in a matrix state: its key, the written value, its decays; with b, also b and S a."""
    u_HV, strength_H1 = v_THV[t].float(), 1.0 if strength_TH is None else strength_TH[t, :, None].float()
    if erase is None:
        return k_TGN[t], u_HV * strength_H1, log_decay[t]
    read_HVN = _decayed(s_HVN, log_decay[t]) if erase.after_decay else s_HVN
    found_HV = (read_HVN * _to_heads(erase.a[t : t + 1], len(s_HVN))[0, :, None]).sum(-1)
    if erase.b is None:
        return k_TGN[t], (u_HV - found_HV) * strength_H1, log_decay[t]
    return k_TGN[t], u_HV * strength_H1, log_decay[t], erase.b[t], found_HV


def _updated(s_HVN: Tensor, k_GN: Tensor, u_HV: Tensor, log_decay: Tensor, *erased: Tensor) -> Tensor:
    s_HVN = _decayed(s_HVN, log_decay) + u_HV[:, :, None].float() * _to_heads(k_GN[None], len(s_HVN))[0, :, None]
    if not erased:
        return s_HVN
    b_HN, found_HV = erased
    return s_HVN + found_HV[:, :, None].float() * b_HN[:, None].float()


def _decayed(s_HVN: Tensor, log_decay: Tensor) -> Tensor:
    return s_HVN * log_decay.float().exp().view(len(s_HVN), 1, -1)


def _to_heads(x_TGN: Tensor, n_heads: int) -> Tensor:
    return repeat(x_TGN.float(), "t g n -> t (g s) n", s=n_heads // x_TGN.shape[1])


def _body_at(state: StateSlots, run: int) -> int:
    """Return the position of the state to write, counted from a segment's source state on; -1 if none is written.

    It is the segment's end or, with a tail, the position up to which rows fold.
    """
    n_rows = int(state.cu_rows.host[run + 1] - state.cu_rows.host[run])
    if state.tail is None:
        return n_rows
    return int(state.tail.folds[run]) if state.targets[run] >= 0 else -1


def _write_tail_(state: StateSlots, run: int, own: list[Tensor]) -> None:
    """Write a segment's tokens into the rings of its tail, at least those after the fold."""
    if state.tail is not None:
        first = int(state.tail.folds[run] - state.tail.counts[run]) if state.targets[run] >= 0 else 0
        write_tail_rows_(state.tail, run, *own, first=max(0, first))


def linear_scan(x_TE: Tensor, decay_TE: Tensor, state: StateSlots) -> Tensor:
    checks.linear_scan(x_TE, decay_TE, state, checks.FLOATS)
    h_SE = read_rows(state.flat, state.sources, state.shape, state.initial).float()
    y_TE = torch.empty_like(x_TE, dtype=torch.float32)
    for i, h_E in enumerate(h_SE):
        for t in range(*state.cu_rows.host[i : i + 2].tolist()):
            h_E = decay_TE[t].float() * h_E + x_TE[t].float()
            y_TE[t] = h_E
        h_SE[i] = h_E
    write_rows_(state.flat, state.targets, h_SE)
    return y_TE


def wkv4(k_TE: Tensor, v_TE: Tensor, decay_E: Tensor, first_E: Tensor, states: tuple[StateSlots, ...]) -> Tensor:
    checks.wkv4(k_TE, v_TE, decay_E, first_E, states, checks.FLOATS)
    sums = [read_rows(s.flat, s.sources, s.shape, s.initial).float() for s in states]
    k_TE, v_TE, y_TE = k_TE.float(), v_TE.float(), torch.empty_like(v_TE, dtype=torch.float32)
    for i in range(len(sums[0])):
        top, below, exponent = (s[i] for s in sums)
        for t in range(*states[0].cu_rows.host[i : i + 2].tolist()):
            k, v = k_TE[t], v_TE[t]
            highest = torch.maximum(exponent, k + first_E)
            old, new = torch.exp(exponent - highest), torch.exp(k + first_E - highest)
            y_TE[t] = (old * top + new * v) / (old * below + new)
            highest = torch.maximum(exponent + decay_E, k)
            old, new = torch.exp(exponent + decay_E - highest), torch.exp(k - highest)
            top, below, exponent = old * top + new * v, old * below + new, highest
        for s, end in zip(sums, (top, below, exponent), strict=True):
            s[i] = end
    for slots, s in zip(states, sums, strict=True):
        write_rows_(slots.flat, slots.targets, s)
    return y_TE


def stabilise(gate_TH: Tensor, log_decay_TH: Tensor, state: StateSlots) -> Tensor:
    checks.stabilise(gate_TH, log_decay_TH, state, checks.FLOATS)
    out_3TH = gate_TH.new_empty(3, *gate_TH.shape, dtype=torch.float32)
    for i, m_H in enumerate(read_rows(state.flat, state.sources, state.shape, state.initial).float()):
        start, end = state.cu_rows.host[i : i + 2].tolist()
        # Entry p is m after p of the tokens that follow the state.
        behind = [m_H] if state.tail is None else [m_H, *tail_rows(state.tail, i, [state.shape])[0].float()]
        for t in range(start, end):
            faded_H = behind[-1] + log_decay_TH[t].float()
            m_H = torch.maximum(faded_H, gate_TH[t].float())
            out_3TH[:, t] = torch.stack([faded_H - m_H, torch.exp(gate_TH[t].float() - m_H), torch.exp(-m_H)])
            behind.append(m_H)
        if (body_at := _body_at(state, i)) >= 0:
            write_rows_(state.flat, state.targets[i : i + 1], behind[body_at].reshape(1, -1))
        _write_tail_(state, i, [torch.stack(behind[len(behind) - (end - start) :])])
    return out_3TH
