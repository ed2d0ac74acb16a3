"""Implements mixtures of experts: each token passes through a few of many feed-forward layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hybridmem.memory import FormatError
from hybridmem.memory.kernels import RowProduct, steady
from hybridmem.models.layers.linear import Linear
from hybridmem.models.layers.mlp import GatedMLP
from hybridmem.models.weights.checkpoint import Checkpoint
from hybridmem.models.weights.coded import as_floats

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_FEW_TOKENS = 256
"""The number of tokens up to which a GPU may run all experts on all tokens.

Products of so few rows hardly take longer than reading the weights, and all weights are read anyway if most experts are
chosen.
"""

Function = Callable[[Tensor], Tensor]
Route = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Maps logits (T, experts) in float32 to weights and indices of the chosen experts, (T, K) each."""


def softmax_then_choose(
    n_chosen: int, *, renormalise: bool = False, n_groups: int = 1, n_chosen_groups: int = 1, scale: float = 1.0
) -> Route:
    """Return a route that takes the softmax over all experts and chooses the best.

    The weights of the chosen experts sum to less than one unless they are renormalized.

    Args:
        n_groups, n_chosen_groups: experts are chosen only from the best groups. Groups are ranked by their best expert
            (DeepSeek-AI 2024, "DeepSeek-V2").
    """

    def route(logits: Tensor) -> tuple[Tensor, Tensor]:
        weights_TK, experts_TK = _close_groups(logits.softmax(-1), n_groups, n_chosen_groups, n_judged=1).topk(n_chosen)
        return (weights_TK / weights_TK.sum(-1, keepdim=True) if renormalise else weights_TK) * scale, experts_TK

    return route


def _close_groups(ranks: Tensor, n_groups: int, n_chosen_groups: int, *, n_judged: int) -> Tensor:
    """Return ranks (T, experts), with -inf outside of the groups whose `n_judged` best experts sum highest."""
    if n_chosen_groups >= n_groups:
        return ranks
    grouped = ranks.view(len(ranks), n_groups, -1)
    best = grouped.topk(n_judged).values.sum(-1).topk(n_chosen_groups).indices
    is_open = torch.zeros_like(grouped[:, :, 0], dtype=torch.bool).scatter_(1, best, True)
    return grouped.masked_fill(~is_open[:, :, None], -torch.inf).flatten(1)


def choose_then_softmax(n_chosen: int) -> Route:
    """Return a route that chooses the best experts and weights them by the softmax over the chosen ones."""

    def route(logits: Tensor) -> tuple[Tensor, Tensor]:
        chosen_TK, experts_TK = logits.topk(n_chosen)
        return chosen_TK.softmax(-1), experts_TK

    return route


def sigmoid_then_choose(
    n_chosen: int,
    *,
    bias_E: Tensor | None = None,
    n_groups: int = 1,
    n_chosen_groups: int = 1,
    renormalise: bool = True,
    eps: float = 1e-20,
    scale: float = 1.0,
) -> Route:
    """Return a route that weights each expert by its own sigmoid.

    A bias that balances the loads of experts (Wang et al. 2024) is added when experts are chosen, but not to weights.

    Args:
        n_groups, n_chosen_groups: experts are chosen only from the best groups. Groups are ranked by their two best
            experts.
        eps: a number that is added to the sum of weights by which the weights are divided when they are renormalized.
    """

    sigmoid = steady(torch.sigmoid)

    def route(logits: Tensor) -> tuple[Tensor, Tensor]:
        scores = sigmoid(logits)
        ranks = scores if bias_E is None else scores + bias_E
        experts_TK = _close_groups(ranks, n_groups, n_chosen_groups, n_judged=2).topk(n_chosen).indices
        weights_TK = scores.gather(1, experts_TK)
        if renormalise:
            weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + eps)
        return weights_TK * scale, experts_TK

    return route


class Experts:
    """Runs each token through the experts that were chosen for it, and sums their outputs with its weights."""

    def __init__(self, experts: Sequence[Function], n_chosen: int) -> None:
        if not 1 <= n_chosen <= len(experts):
            raise FormatError(f"num_experts_per_tok is {n_chosen}, but there are {len(experts)} experts")
        self._experts, self._n_chosen = experts, n_chosen

    def run(self, x_TM: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> Tensor:
        """Return the sums (T, M) for tokens x (T, M); weights and indices of experts are (T, K)."""
        if x_TM.is_cuda and len(self._experts) <= experts_TK.numel() and len(x_TM) <= _FEW_TOKENS:
            return self._run_all(x_TM, weights_TK, experts_TK)
        # After sorting by expert, the (token, choice) pairs of each expert are contiguous.
        order = experts_TK.flatten().argsort(stable=True)
        counts = experts_TK.flatten().bincount(minlength=len(self._experts)).tolist()
        y_TM = torch.zeros_like(x_TM)
        for expert, pairs in zip(self._experts, torch.split(order, counts), strict=True):
            if len(pairs):
                tokens = pairs // self._n_chosen
                weights = weights_TK.flatten()[pairs].to(x_TM.dtype)
                y_TM.index_add_(0, tokens, expert(x_TM[tokens]) * weights[:, None])
        return y_TM

    def _run_all(self, x_TM: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> Tensor:
        """Compute the same as `run` with all experts on all tokens.

        The host reads nothing back from the device, so a CUDA graph can capture it.
        """
        weights_TE = (
            weights_TK.new_zeros(len(x_TM), len(self._experts)).scatter_(1, experts_TK, weights_TK).to(x_TM.dtype)
        )
        y_TM = torch.zeros_like(x_TM)
        for expert, weight_T in zip(self._experts, weights_TE.unbind(1), strict=True):
            # The output of an expert for a token that was not routed to it may be infinite, and 0 * infinity is not 0.
            y_TM += torch.where(weight_T[:, None] == 0, 0, expert(x_TM) * weight_T[:, None])
        return y_TM


class MixtureOfExperts:
    """Runs each token through the experts that `route` chooses for it, and sums their outputs with its weights.

    Args:
        router: (experts, M), in the dtype in which its product is computed.
        shared: an expert that every token passes through, with a weight of one.
        around: projections before and after the experts, if these work in a latent space; not for the shared one.
    """

    def __init__(
        self, router: Tensor, experts: Sequence[Function], n_chosen: int, route: Callable[[int], Route], *,
        shared: Function | None = None, around: tuple[Function, Function] | None = None,
    ) -> None:  # fmt: skip
        self._router = RowProduct(as_floats(router))
        self._experts = Experts(experts, n_chosen)
        self._route = route(n_chosen)
        self._shared, self._around = shared, around

    def __call__(self, x_TM: Tensor) -> Tensor:
        weights_TK, experts_TK = self._route(self._router(x_TM.to(self._router.weight_LN.dtype)).float())
        if self._around is None:
            y_TM = self._experts.run(x_TM, weights_TK, experts_TK)
        else:
            y_TM = self._around[1](self._experts.run(self._around[0](x_TM), weights_TK, experts_TK))
        return y_TM if self._shared is None else y_TM + self._shared(x_TM)


@dataclass(frozen=True)
class SharedExpert:
    """Computes mixture(x) + gate(x) * shared(x), where every token passes through the expert `shared`.

    Attributes:
        gate: a product that gives one number for each token, after a sigmoid.
    """

    mixture: MixtureOfExperts
    shared: GatedMLP
    gate: Linear

    def __call__(self, x_TM: Tensor) -> Tensor:
        return torch.addcmul(self.mixture(x_TM), self.gate(x_TM), self.shared(x_TM))


def check_groups(config: PreTrainedConfig, *, least: int, experts: str = "n_routed_experts") -> None:
    """Raise FormatError if these groups cannot be used. Each group is ranked by its `least` best experts.

    Args:
        experts: the config's name for the number of experts.
    """
    n_experts, n_groups, n_chosen_groups = getattr(config, experts), config.n_group, config.topk_group
    n_chosen, size = config.num_experts_per_tok, n_experts // n_groups
    if n_experts % n_groups or size < least or not 1 <= n_chosen <= n_chosen_groups * size <= n_experts:
        # These are the names in config.json, which may differ from those of the attributes.
        chosen, all_of_them, groups = (
            config.attribute_map.get(name, name) for name in ("num_experts_per_tok", experts, "n_group")
        )
        raise FormatError(
            f"{n_chosen} of {n_experts} experts in {n_groups} groups ({groups}) cannot be chosen from "
            f"{n_chosen_groups} of these (topk_group), each judged by its best {least}: "
            f"{chosen}={n_chosen}, {all_of_them}={n_experts}"
        )


def load_experts(
    checkpoint: Checkpoint, prefix: str, n_experts: int, n_model: int, n_inner: int, activation: str | None, *,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> list[GatedMLP]:  # fmt: skip
    """Load experts that are stored one by one, as in most checkpoints, or stacked in `gate_up_proj` and `down_proj`."""
    if f"{prefix}.gate_up_proj" not in checkpoint:
        return [
            GatedMLP.load(checkpoint, f"{prefix}.{i}", n_model, n_inner, activation, names=names)
            for i in range(n_experts)
        ]
    gate_up = checkpoint.take(f"{prefix}.gate_up_proj", n_experts, 2 * n_inner, n_model)
    down = checkpoint.take(f"{prefix}.down_proj", n_experts, n_model, n_inner)
    return [GatedMLP.of(*weights, activation) for weights in zip(gate_up, down, strict=True)]
