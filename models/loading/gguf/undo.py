"""Undoes the changes that llama.cpp's converter made to a tensor, given its name in a Hugging Face checkpoint."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hybridmem.models.weights.coded import CodedTensor, as_floats
from hybridmem.models.weights.dry import joined
from hybridmem.models.weights.layouts import BLOCK

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_PERMUTED = ("llama", "granitehybrid", "nemotron_h", "nemotron_h_moe")
"""Architectures whose queries and keys were reordered, so that the two elements of a rotary pair are neighbours."""

_OFFSET_NORMS = ("gemma2", "gemma3", "qwen3next", "qwen35", "qwen35moe")
"""Architectures whose norms multiply by 1 + weight. The file holds the sum."""

_TILED_HEADS = ("qwen35", "qwen35moe")
"""Architectures whose value heads are ordered by number: first the first value head of every key head, and so on."""

_QUERY_OR_KEY = re.compile(r"\.([qk])_proj\.(weight|bias)$")

_CONV_OF_ONE = re.compile(r"\.[qkv]_conv1d\.weight$")
"""Convolutions of queries, of keys or of values alone."""


def undo(architecture: str, config: PreTrainedConfig, name: str, tensor: Tensor) -> Tensor:
    """Return the tensor as a Hugging Face checkpoint has it."""
    if _CONV_OF_ONE.search(name):
        return tensor.reshape(-1, 1, tensor.shape[-1])  # Files have up to two more axes of one element.
    if architecture == "rwkv7" and name.endswith(".r_k"):
        return tensor.reshape(config.num_heads, -1)
    if tensor.is_meta and not isinstance(tensor, CodedTensor):
        return tensor  # A tensor on "meta" has no numbers, and its shape stays.
    if name.endswith(".A_log"):
        tensor = (tensor.float() if architecture == "bailingmoe3" else -tensor.float()).log()
    if architecture in _PERMUTED and (match := _QUERY_OR_KEY.search(name)):
        n_heads = config.num_attention_heads if match[1] == "q" else config.num_key_value_heads
        return _unpaired(tensor, n_heads)
    if architecture in _OFFSET_NORMS and name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        return tensor.float() - 1
    if architecture in _TILED_HEADS and ".linear_attn." in name:
        return _untiled(config, name.split(".linear_attn.")[1], tensor)
    return tensor


def _unpaired(tensor: Tensor, n_heads: int) -> Tensor:
    """Move the first elements of all rotary pairs of a head to the first half of the head."""
    if len(tensor) % (2 * n_heads):
        return tensor  # Its shape will be refused later.
    return tensor.reshape(n_heads, -1, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def _untiled(config: PreTrainedConfig, part: str, tensor: Tensor) -> Tensor:
    """Bring the value heads of one key head together, in the axis in which this part of the layer has heads."""
    n_keys, width = config.linear_num_key_heads, config.linear_value_head_dim
    n_qk = 2 * n_keys * config.linear_key_head_dim
    if part in ("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias"):
        return _grouped(tensor, n_keys, 1)
    if part == "in_proj_z.weight":
        return _grouped(tensor, n_keys, width)
    if part in ("in_proj_qkv.weight", "conv1d.weight"):
        return torch.cat((tensor[:n_qk], _grouped(tensor[n_qk:], n_keys, width)))
    if part == "out_proj.weight" and isinstance(tensor, CodedTensor):
        n_heads = tensor.shape[1] // width
        moved = tensor.with_inputs(_grouped(torch.arange(n_heads), n_keys, 1).tolist(), width)
        return _untiled(config, part, tensor.dense()) if moved is None else moved
    if part == "out_proj.weight":
        return _grouped(tensor.T, n_keys, width).T
    return tensor


def _grouped(tensor: Tensor, n_keys: int, width: int) -> Tensor:
    """Reorder rows from (value heads of a key head, key heads, width) to (key heads, value heads, width)."""
    if len(tensor) % (n_keys * width):
        return tensor  # Its shape will be refused later.
    if isinstance(tensor, CodedTensor) and width % BLOCK == 0:  # Products lay out such rows where they are.
        heads = torch.arange(len(tensor) // width).view(-1, n_keys).T.flatten().tolist()
        return torch.cat([tensor[width * head : width * (head + 1)] for head in heads])
    return tensor.reshape(-1, n_keys, width, *tensor.shape[1:]).transpose(0, 1).reshape(tensor.shape)


def interleave_by_key_head(config: PreTrainedConfig, qkv: Tensor, z: Tensor) -> Tensor:
    """Return Qwen3-Next's in_proj_qkvz, which has the rows of q, k, v and z of each key head.

    The file has qkv and z apart.
    """
    n_keys = config.linear_num_key_heads
    n_q, n_v = n_keys * config.linear_key_head_dim, config.linear_num_value_heads * config.linear_value_head_dim
    if len(qkv) != 2 * n_q + n_v or len(z) != n_v or (qkv.is_meta and not isinstance(qkv, CodedTensor)):
        return joined(qkv, z)  # The shape will be refused later, or there is nothing to interleave.
    parts = (*torch.split(qkv, [n_q, n_q, n_v]), z)
    return torch.cat([part.reshape(n_keys, -1, part.shape[-1]) for part in parts], 1).flatten(0, 1)


def keys_and_values(keys_HLN: Tensor, values_HVL: Tensor) -> Tensor:
    """Return DeepSeek's kv_b_proj (heads x (N + V), L). The file has its keys apart and transposed."""
    keys, values = as_floats(keys_HLN).transpose(1, 2), as_floats(values_HVL)
    return joined(keys, values, dim=1).flatten(0, 1)
