"""The tests compare routing with its definition, token by token."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from hybridmem.models.layers.experts import MixtureOfExperts, sigmoid_then_choose, softmax_then_choose
from hybridmem.models.weights.checkpoint import Checkpoint
from tests.models.checkpoints import CONFIGS, write_checkpoint
from tests.tolerances import assert_kernel_close


@pytest.mark.parametrize("n_groups, n_chosen_groups", [(1, 1), (4, 2), (2, 2)])
@pytest.mark.parametrize("renormalise", [True, False])
def test_sigmoids_choose_among_the_best_groups(n_groups: int, n_chosen_groups: int, renormalise: bool) -> None:
    logits, bias = torch.randn(20, 8), torch.randn(8)
    route = sigmoid_then_choose(
        3, bias_E=bias, n_groups=n_groups, n_chosen_groups=n_chosen_groups, renormalise=renormalise, scale=2.5
    )
    weights, experts = route(logits)
    for token, (chosen, weight) in enumerate(zip(experts.tolist(), weights, strict=True)):
        ranks = logits[token].sigmoid() + bias
        groups = torch.arange(8).view(n_groups, -1)
        best = sorted(groups, key=lambda g: -float(ranks[g].topk(2).values.sum()))[:n_chosen_groups]
        assert chosen == sorted(torch.cat(best).tolist(), key=lambda e: -float(ranks[e]))[:3]
        scores = logits[token].sigmoid()[chosen]
        torch.testing.assert_close(weight, 2.5 * (scores / scores.sum() if renormalise else scores))


@pytest.mark.parametrize("n_groups, n_chosen_groups", [(1, 1), (4, 2), (2, 2), (8, 3)])
@pytest.mark.parametrize("renormalise", [True, False])
def test_a_softmax_chooses_among_the_groups_of_the_best_experts(
    n_groups: int, n_chosen_groups: int, renormalise: bool
) -> None:
    logits = torch.randn(20, 8)
    route = softmax_then_choose(
        3, n_groups=n_groups, n_chosen_groups=n_chosen_groups, renormalise=renormalise, scale=2.5
    )
    for token, (weight, chosen) in enumerate(zip(*route(logits), strict=True)):
        scores = logits[token].softmax(-1)
        groups = torch.arange(8).view(n_groups, -1)
        best = sorted(groups, key=lambda g: -float(scores[g].max()))[:n_chosen_groups]
        assert chosen.tolist() == sorted(torch.cat(best).tolist(), key=lambda e: -float(scores[e]))[:3]
        expected = scores[chosen] / scores[chosen].sum() if renormalise else scores[chosen]
        torch.testing.assert_close(weight, 2.5 * expected)


def test_a_shared_expert_sees_the_input_and_the_others_a_space_of_their_own() -> None:
    into, back, x = torch.randn(4, 2), torch.randn(2, 4), torch.randn(7, 4)
    experts = [lambda x: x, lambda x: 3 * x]
    route = partial(sigmoid_then_choose, bias_E=torch.zeros(2))
    mixture = MixtureOfExperts(
        torch.zeros(2, 4), experts, 2, route, shared=lambda x: 10 * x, around=(lambda x: x @ into, lambda x: x @ back)
    )
    torch.testing.assert_close(mixture(x), 2 * x @ into @ back + 10 * x)


def test_a_scaled_tensor_is_taken_times_its_factors(tmp_path) -> None:
    folder = write_checkpoint(tmp_path, CONFIGS["mamba"]())
    name, factors = "backbone.layers.0.mixer.out_proj.weight", torch.rand(24)
    checkpoint = Checkpoint(folder, torch.device("cpu"), torch.float32)
    plain = checkpoint.take(name, 24, 48)
    checkpoint.scale(name, factors)
    assert torch.equal(checkpoint.take(name, 24, 48), plain * factors[:, None])
    checkpoint.scale(name, 0.5)
    assert torch.equal(checkpoint.take(name, 24, 48), plain * 0.5)


class AsOnGpu(torch.Tensor):
    """A tensor on the CPU that claims to be on a GPU."""

    is_cuda = True


def test_all_experts_at_once_are_the_chosen_ones() -> None:
    """A GPU runs all experts at once if most are chosen. An expert that overflows for tokens of others does no harm."""
    generator = torch.Generator().manual_seed(5)
    weights, n_rows = torch.randn(4, 6, 6, generator=generator), list[int]()

    def expert(i: int, x: torch.Tensor) -> torch.Tensor:
        n_rows.append(len(x))
        return torch.where((i > 1) & (x[:, :1] > 8), torch.inf, x @ weights[i])

    x = torch.randn(9, 6, generator=generator)
    x[3, 0] = 9.0
    chosen = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in x])
    chosen[3], shares = torch.tensor([0, 1]), torch.rand(9, 2, generator=generator)
    experts = [partial(expert, i) for i in range(4)]
    mixture = MixtureOfExperts(torch.zeros(4, 6), experts, 2, lambda n_chosen: lambda logits: (shares, chosen))
    expected = mixture(x)
    assert sum(n_rows) == chosen.numel()
    n_rows.clear()
    found = mixture(x.as_subclass(AsOnGpu)).as_subclass(torch.Tensor)
    assert n_rows == [len(x)] * 4
    assert_kernel_close(found, expected)
