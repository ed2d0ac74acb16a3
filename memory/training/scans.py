"""Computes recurrences in plain torch, in forms that can be differentiated.

S segments advance at once. Sums over many tokens are cut into blocks: in a block all tokens are computed by products of
matrices, and the state goes from block to block.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_BLOCK, _CHANNEL_BLOCK = 64, 16
"""How many tokens a block of `matrix_recurrence` has; fewer if each key channel decays by itself, because then a block
takes as many numbers for each channel as it has pairs of tokens.
"""


class _Linear(torch.autograd.Function):
    """Computes h_t = a_t h_(t-1) + b_t for all tokens. Backward, the gradient of h runs through the same recurrence."""

    @staticmethod
    def forward(ctx: Any, a_LX: Tensor, b_LX: Tensor, h_X: Tensor) -> Tensor:
        h_LX = torch.empty_like(b_LX)
        before = h_X
        for a, b, h in zip(a_LX.unbind(), b_LX.unbind(), h_LX.unbind(), strict=True):
            before = torch.addcmul(b, a, before, out=h)
        ctx.save_for_backward(a_LX, h_LX, h_X)
        return h_LX

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a_LX, h_LX, h_X = ctx.saved_tensors
        grad_LX = grads[0].clone(memory_format=torch.contiguous_format)
        rows = grad_LX.unbind()
        for t in range(len(rows) - 2, -1, -1):
            rows[t].addcmul_(a_LX[t + 1], rows[t + 1])
        before_LX = torch.cat([h_X[None], h_LX[:-1]])
        return grad_LX * before_LX, grad_LX, a_LX[0] * grad_LX[0]


def linear_recurrence(a_SLX: Tensor, b_SLX: Tensor, h_SX: Tensor) -> Tensor:
    """Return h (S, L, ...) of h_t = a_t h_(t-1) + b_t. Cost: one small operation for each token of the longest."""
    a_LSX, b_LSX = (x.transpose(0, 1).contiguous() for x in (a_SLX, b_SLX))
    h_LSX: Tensor = _Linear.apply(a_LSX, b_LSX, h_SX)  # type: ignore[no-untyped-call]
    return h_LSX.transpose(0, 1)


def matrix_recurrence(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, s: Tensor, *, a: Tensor | None = None, b: Tensor | None = None,
    strength: Tensor | None = None, erases_after_decay: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the outputs (S, L, H, V), and the last states (S, H, V, N), of `Kernels.matrix_scan` without its skip.

    Args:
        q, k, a, b: (S, L, H, N); a and b as in `memory.kernels.Erase`.
        v: (S, L, H, V).
        log_decay: (S, L, H), or (S, L, H, N) for one decay per key channel.
        s: (S, H, V, N), the first states.
        strength: (S, L, H).
    """
    if log_decay.dim() == 3:
        log_decay = log_decay[..., None]
    size = _BLOCK if log_decay.shape[-1] == 1 else _CHANNEL_BLOCK
    # Tokens go to the axis before the last one, where products of matrices expect them: (S, H, L, channels).
    q, k, v, log_decay = (x.transpose(1, 2) for x in (q, k, v, log_decay))
    a, b = (None if x is None else x.transpose(1, 2) for x in (a, b))
    strength = None if strength is None else strength.transpose(1, 2)[..., None]
    ys = []
    for begin in range(0, q.shape[2], size):
        own = slice(begin, begin + size)
        own_a, own_b, own_strength = (None if x is None else x[:, :, own] for x in (a, b, strength))
        y, s = _block(
            q[:, :, own], k[:, :, own], v[:, :, own], log_decay[:, :, own], s, own_a, own_b, own_strength,
            erases_after_decay=erases_after_decay,
        )  # fmt: skip
        ys.append(y)
    return torch.cat(ys, 2).transpose(1, 2), s


def _block(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, s: Tensor, a: Tensor | None, b: Tensor | None,
    strength: Tensor | None, *, erases_after_decay: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute one block: (S, H, L, V) and the next states.

    What an erasing token finds, S a, depends on what earlier tokens of the block have written. All of it is found at
    once, as the solution of a triangular system (Yang et al. 2024, "Parallelizing Linear Transformers with the Delta
    Rule", eq. 8 to 11).
    """
    # Only small differences of these large sums matter, and float32 would lose the digits of the differences.
    sums = log_decay.double().cumsum(2)
    up_to = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()
    written = v if strength is None else v * strength
    faded = sums.exp().float()
    last = sums[:, :, -1:]
    to_end = (last - sums).exp().float()
    found = None
    if a is not None:
        read_at = sums if erases_after_decay else sums - log_decay.double()
        before = up_to.tril(-1)
        found = (a * read_at.exp().float()) @ s.transpose(2, 3)
        of_keys = _pairs(a, k, read_at, sums, before)
        if b is None:
            held = strength if strength is not None else 1.0
            written = _solve(of_keys * held, held * (v - found))
        else:
            found = _solve(-_pairs(a, b, read_at, sums, before), found + of_keys @ written)
    y = (q * faded) @ s.transpose(2, 3) + _pairs(q, k, sums, sums, up_to) @ written
    s = s * last.exp().float() + written.transpose(2, 3) @ (k * to_end)
    if b is not None and found is not None:
        y = y + _pairs(q, b, sums, sums, up_to) @ found
        s = s + found.transpose(2, 3) @ (b * to_end)
    return y, s


def _pairs(read: Tensor, key: Tensor, read_at: Tensor, sums: Tensor, is_seen: Tensor) -> Tensor:
    """Return (S, H, L, L): the product of each reader with each key that it sees, after the decay between both."""
    decays = (read_at[:, :, :, None] - sums[:, :, None]).masked_fill(~is_seen[..., None], -torch.inf).exp().float()
    if decays.shape[-1] == 1:
        return (read @ key.transpose(2, 3)) * decays[..., 0]
    return torch.einsum("shln,shjn,shljn->shlj", read, key, decays)


def _solve(below: Tensor, right: Tensor) -> Tensor:
    """Return x of (I + below) x = right, where `below` is strictly lower triangular."""
    eye = torch.eye(below.shape[-1], dtype=below.dtype, device=below.device)
    solution: Tensor = torch.linalg.solve_triangular(below + eye, right, upper=False, unitriangular=True)
    return solution


def rwkv4(
    k_SLE: Tensor, v_SLE: Tensor, decay_E: Tensor, first_E: Tensor, sums: tuple[Tensor, ...], counts_S: Tensor
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the outputs (S, L, E) of `Kernels.wkv4`, and the states at the end of each segment."""
    top, below, exponent = sums
    states, ys = [sums], []
    for k, v in zip(k_SLE.unbind(1), v_SLE.unbind(1), strict=True):
        highest = torch.maximum(exponent, k + first_E)
        old, new = torch.exp(exponent - highest), torch.exp(k + first_E - highest)
        ys.append((old * top + new * v) / (old * below + new))
        highest = torch.maximum(exponent + decay_E, k)
        old, new = torch.exp(exponent + decay_E - highest), torch.exp(k - highest)
        top, below, exponent = old * top + new * v, old * below + new, highest
        states.append((top, below, exponent))
    segments = torch.arange(len(counts_S), device=counts_S.device)
    ends = tuple(torch.stack(parts)[counts_S, segments] for parts in zip(*states, strict=True))
    return torch.stack(ys, 1), ends


def stabiliser(gate_SLH: Tensor, log_decay_SLH: Tensor, m_SH: Tensor) -> tuple[Tensor, Tensor]:
    """Return `Kernels.stabilise`'s three outputs (3, S, L, H), and the last m (S, H)."""
    sums = log_decay_SLH.double().cumsum(1)
    highest = torch.maximum(m_SH.double()[:, None], (gate_SLH - sums).cummax(1).values)
    m_SLH = (sums + highest).float()
    faded = torch.cat([m_SH[:, None], m_SLH[:, :-1]], 1) + log_decay_SLH
    return torch.stack([faded - m_SLH, torch.exp(gate_SLH - m_SLH), torch.exp(-m_SLH)]), m_SLH[:, -1]
