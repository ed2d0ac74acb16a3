"""Identifies the weights of a model by some of their numbers, because rows computed with other weights cannot be used.

The numbers are compared in the dtype in which the model computes, as they are read. So it does not matter from which
files they came, on which device they are, and how they are packed there.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hybridmem.models.weights.coded import CodedTensor
from hybridmem.models.weights.formats import wanted_format

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_N_PLACES, _N_ADJACENT = 16, 4
"""How many places of a tensor are sampled, and how many adjacent numbers at each.

They are few, since each is a page of a file.
"""

_GOLDEN = 0.6180339887498949
"""The multiples of this number, modulo 1, are spread evenly, and do not repeat with any power of two."""

_HEADS = re.compile(r"(.*\.)?(lm_head|embed_out)\.weight")
"""Heads are left out: no row depends on them, and a tied head may be missing or stored twice."""

_OPTIONS = re.compile(
    r".*(_eps|_epsilon|_multipliers?|_experts_per_tok(en)?|top_?k(_\w+)?|_softcapping|_act|activation(_function)?|"
    r"routed_scaling_factor)"
)
"""Options of a config that change rows, but change neither shapes nor the memory spec.

Other options are left out, because a new release of transformers may add options, or write them otherwise.
"""


@lru_cache(4096)
def _places(n: int) -> Tensor:
    """Return the indices of the elements that are compared in a tensor of `n` elements."""
    if n <= _N_PLACES * _N_ADJACENT:
        return torch.arange(n)
    starts = torch.arange(1, _N_PLACES + 1, dtype=torch.float64) * _GOLDEN % 1 * (n - _N_ADJACENT)
    return (starts.long()[:, None] + torch.arange(_N_ADJACENT)).view(-1)


def sample_of(tensor: Tensor, dtype: torch.dtype, factor: float | Tensor | None = None) -> bytes:
    """Return a digest of a tensor's shape and some of its numbers in `dtype`. It is empty for a tensor on "meta".

    Args:
        factor: what the tensor's numbers are multiplied by: one factor, or one for each row.
    """
    if tensor.is_meta:
        return b""
    at = _places(tensor.numel())
    if isinstance(tensor, CodedTensor):
        numbers, form = tensor.take_at(at), tensor.form.name
    else:
        numbers, form = torch.take(tensor.detach(), at.to(tensor.device)).cpu(), ""
    if factor is not None:
        factors = torch.as_tensor(factor, dtype=torch.float32).view(-1)
        numbers = numbers.float() * factors[at * len(factors) // max(1, tensor.numel())]
    if numbers.is_floating_point():
        numbers = numbers.to(dtype)
    return f"{tuple(tensor.shape)}{form}".encode() + numbers.view(torch.uint8).numpy().tobytes()


def signature_of(config: PreTrainedConfig, dtype: torch.dtype, samples: Mapping[str, bytes]) -> str | None:
    """Return `MemorySpec.weights` of a model: the dtype of its weights, a colon, and a digest.

    None: all samples are empty, as those of tensors without numbers are.

    Args:
        samples: name of a tensor -> the result of `sample_of` for it.
    """
    if not any(samples.values()):
        return None
    digest = hashlib.sha256(json.dumps(_options_of(config), sort_keys=True, default=str).encode())
    # Layers may share a tensor. Files may store it under the number of any of these layers.
    found = {(re.sub(r"\d+", "#", name), sample) for name, sample in samples.items() if not _HEADS.fullmatch(name)}
    for name, sample in sorted(found):
        digest.update(name.encode() + b"\0" + sample)
    format = str(dtype).removeprefix("torch.") if wanted_format() in ("auto", "dense", "plain") else wanted_format()
    return f"{format}:{digest.hexdigest()[:32]}"


def _options_of(config: PreTrainedConfig) -> dict[str, Any]:
    return {name: value for name, value in vars(config.get_text_config()).items() if _OPTIONS.fullmatch(name)}
