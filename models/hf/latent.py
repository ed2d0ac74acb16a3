"""Lets latent attention of transformers attend to the rows of a memory, of which each is a latent and a rotary key.

transformers gives the cache these rows, and then makes keys and values of single heads of what the cache returns. The
memory keeps the rows alone. So queries are multiplied by the part of `kv_b_proj` that makes keys, and what they find by
the part that makes values, as in `models.layers.latent_attention`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from hybridmem.memory import AttentionSpec, MemorySpec
from hybridmem.models.hf.mixers import Module, weights_of
from hybridmem.models.hf.passes import Pass
from hybridmem.models.weights.checkpoint import UnsupportedModelError

_IN_NEIGHBOURS = ("DeepseekV2Attention",)
"""Classes that rotate pairs of neighbours, where the memory's rows have the first elements of all pairs first."""


def check_latent(hf_model: PreTrainedModel, spec: MemorySpec) -> None:
    """Raise UnsupportedModelError if latent attention does not give rows to its cache, or has an adapter around them.

    Versions of transformers before 5.24 may give keys and values of single heads instead.
    """
    if not any(isinstance(one, AttentionSpec) and one.value_dim is not None for own in spec.layers for one in own):
        return
    modules = [module for module in hf_model.modules() if hasattr(module, "kv_b_proj")]
    if not modules or not all(hasattr(module, "expand_kv") for module in modules):
        raise UnsupportedModelError(
            f"{type(hf_model).__name__} of transformers {transformers.__version__} gives its cache keys and values of "
            "single heads, where the memory keeps one row for all; install transformers 5.24"
        )
    for module in modules:
        weights_of(module.kv_b_proj)


def attend_latent(module: Module, spec: AttentionSpec, current: Pass, query: Tensor, scale: float | None) -> Tensor:
    """Return each head's attention, (N, H, V), for the packed tokens of a pass.

    Args:
        query: (B, H, T, D) queries of single heads, of which the last elements are rotated.
    """
    assert current.given is not None
    latents, rotary = (current.pack(part.transpose(1, 2)) for part in current.given)
    q_THD = current.pack(query.transpose(1, 2))
    n_rotary = rotary.shape[-1]
    plain_THN, rotated_THR = q_THD.split_with_sizes([q_THD.shape[-1] - n_rotary, n_rotary], -1)
    if any(base.__name__ in _IN_NEIGHBOURS for base in type(module).__mro__):
        rotated_THR, rotary = without_neighbours(rotated_THR), without_neighbours(rotary)

    def attend(q_THD: Tensor, k_T1D: Tensor) -> Tensor:
        return current.step.attend(current.attending, q_THD, k_T1D, scale=scale)

    return absorb(module, (plain_THN, rotated_THR), torch.cat([latents, rotary], -1), attend)


def without_neighbours(x: Tensor) -> Tensor:
    """Return x with the first elements of all pairs before the second ones, instead of neighbours in pairs."""
    return torch.cat([x[..., 0::2], x[..., 1::2]], -1)


def absorb(
    module: Module, q: tuple[Tensor, Tensor], rows_T1D: Tensor, attend: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Attend to latents: multiply queries by the matrix that makes keys, and the results by the one that makes values.

    Args:
        q: the plain and the rotated part of each head's queries, (T, H, N) and (T, H, R).
        rows_T1D: each token's latent and its rotary key.
        attend: maps queries of the size of rows, and the rows, to what each head finds, (T, H, L).
    Returns (T, H, V).
    """
    plain_THN, rotated_THR = q
    n_latent = rows_T1D.shape[-1] - rotated_THR.shape[-1]
    weight = weights_of(module.kv_b_proj).weight.view(plain_THN.shape[1], -1, n_latent)
    keys_HNL, values_HVL = weight.split_with_sizes([plain_THN.shape[-1], weight.shape[1] - plain_THN.shape[-1]], 1)
    absorbed_THL = (plain_THN.transpose(0, 1) @ keys_HNL).transpose(0, 1)
    mixed_THL = attend(torch.cat([absorbed_THL, rotated_THR], -1), rows_T1D)
    found_THV: Tensor = (mixed_THL.transpose(0, 1) @ values_HVL.mT).transpose(0, 1)
    return found_THV
