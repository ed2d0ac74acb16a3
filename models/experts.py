"""Mixtures of experts: each token goes through a few of many feed-forward layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from memory import FormatError

Function = Callable[[Tensor], Tensor]
Route = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Logits (T, experts) in float32 -> weights and indices of the chosen experts, (T, K) each."""


def softmax_then_choose(n_chosen: int, *, renormalise: bool = False) -> Route:
    """The softmax over all experts, of which the best are chosen; their weights need not sum to one, unless renormalised."""

    def route(logits: Tensor) -> tuple[Tensor, Tensor]:
        weights_TK, experts_TK = logits.softmax(-1).topk(n_chosen)
        return (weights_TK / weights_TK.sum(-1, keepdim=True) if renormalise else weights_TK), experts_TK

    return route


def choose_then_softmax(n_chosen: int) -> Route:
    """The best experts, weighted by the softmax over themselves."""

    def route(logits: Tensor) -> tuple[Tensor, Tensor]:
        chosen_TK, experts_TK = logits.topk(n_chosen)
        return chosen_TK.softmax(-1), experts_TK

    return route


class MixtureOfExperts:
    """Each token goes through the experts that `route` chooses for it, and their outputs are summed by its weights.

    Args:
        shared: one more that every token goes through, with a weight of one.
    """

    def __init__(
        self, router: Tensor, experts: Sequence[Function], n_chosen: int, route: Callable[[int], Route], *, shared: Function | None = None
    ) -> None:
        if not 1 <= n_chosen <= len(experts):
            raise FormatError(f"num_experts_per_tok is {n_chosen}, but there are {len(experts)} experts")
        self._router = router
        self._experts = experts
        self._n_chosen = n_chosen
        self._route = route(n_chosen)
        self._shared = shared

    def __call__(self, x_TM: Tensor) -> Tensor:
        weights_TK, experts_TK = self._route(F.linear(x_TM, self._router).float())
        # Sorted by expert, the (token, choice) pairs of each expert are one contiguous run.
        order = experts_TK.flatten().argsort(stable=True)
        counts = experts_TK.flatten().bincount(minlength=len(self._experts)).tolist()
        y_TM = torch.zeros_like(x_TM) if self._shared is None else self._shared(x_TM)
        for expert, pairs in zip(self._experts, torch.split(order, counts), strict=True):
            if len(pairs):
                tokens = pairs // self._n_chosen
                weights = weights_TK.flatten()[pairs].to(x_TM.dtype)
                y_TM.index_add_(0, tokens, expert(x_TM[tokens]) * weights[:, None])
        return y_TM
