"""Reads metadata that several architectures have in common, as fields of transformers' configs."""

from __future__ import annotations

import math
from typing import Any

from hybridmem.memory.errors import FormatError
from hybridmem.models.loading.gguf.file import GgufFile
from hybridmem.models.weights.checkpoint import UnsupportedModelError

Fields = dict[str, Any]


def common_fields(file: GgufFile) -> Fields:
    embedding = "token_embd.weight"
    if embedding not in file:
        raise FormatError(f"{file.path} has no tensor {embedding}; it holds no whole language model")
    ids = {
        f"{name}_token_id": file.value(f"tokenizer.ggml.{key}_token_id", is_needed=False)
        for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }
    return {
        "vocab_size": file.shape(embedding)[0],
        "hidden_size": file.own("embedding_length"),
        "num_hidden_layers": count_layers(file),
        "tie_word_embeddings": "output.weight" not in file,
        "dtype": dtype_of(file),
        **ids,
    }


def count_layers(file: GgufFile) -> int:
    """Return the number of layers, leaving out those that only draft tokens (multi-token prediction).

    Raises FormatError if there are more layers than tensors: each layer has at least one, and callers visit all layers.
    """
    n_layers = int(file.own("block_count") - file.own("nextn_predict_layers", 0))
    if n_layers > len(file):
        raise FormatError(f"{file.path} claims {n_layers:,} layers and holds {len(file):,} tensors; get the file again")
    return n_layers


def dtype_of(file: GgufFile) -> str:
    """Return the dtype of most numbers. Numbers in fewer bits count as bfloat16.

    Numbers are counted, not tensors, because most of Mamba-2's tensors with two axes are small, and F32 in every file.
    """
    if file.is_quantised():
        return "bfloat16"
    n_numbers = dict.fromkeys(("F32", "F16", "BF16"), 0)
    for name in file:
        n_numbers[file.stored_dtype(name)] += math.prod(file.shape(name))
    return {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}[max(n_numbers, key=lambda kind: n_numbers[kind])]


def attention_fields(file: GgufFile) -> Fields:
    """Return the fields of attention, for the layers that have it."""
    n_heads, n_kv_heads = largest(file.own("attention.head_count")), file.own("attention.head_count_kv", 0)
    return {"num_attention_heads": n_heads, "num_key_value_heads": largest(n_kv_heads) or n_heads}


def largest(value: Any) -> int:
    return int(max(value)) if isinstance(value, list) else int(value)


def attention_layers(file: GgufFile) -> list[int]:
    """Return the layers with attention: those that have key heads."""
    counts = file.own("attention.head_count_kv")
    n_layers = count_layers(file)
    return [i for i, n in enumerate(counts if isinstance(counts, list) else [counts] * n_layers) if n > 0]


def head_dim_of(file: GgufFile) -> int:
    n_heads = largest(file.own("attention.head_count"))
    return int(file.own("attention.key_length", file.own("embedding_length") // n_heads))


def rope_fields(file: GgufFile, *, head_dim: int | None = None) -> Fields:
    """Return the parameters of the rotary embedding, which llama.cpp stores in several ways.

    Args:
        head_dim: how many elements of a head may be rotated. The default is all.
    """
    theta = float(file.own("rope.freq_base", 10000.0))
    kind = file.own("rope.scaling.type", "none")
    head_dim = head_dim or head_dim_of(file)
    share = file.own("rope.dimension_count", head_dim) / head_dim
    found: Fields = {"rope_theta": theta, "rope_type": "default"}
    if share != 1.0:
        found["partial_rotary_factor"] = share
    if "rope_freqs.weight" in file:
        found |= _llama3(file, theta, head_dim)
    elif kind == "linear":
        found |= {"rope_type": "linear", "factor": float(file.own("rope.scaling.factor"))}
    elif kind == "yarn":
        found |= {
            "rope_type": "yarn", "factor": float(file.own("rope.scaling.factor")),
            "original_max_position_embeddings": int(file.own("rope.scaling.original_context_length")),
        }  # fmt: skip
        for name, key in (("beta_fast", "beta_fast"), ("beta_slow", "beta_slow"), ("attention_factor", "attn_factor")):
            if (value := file.own(f"rope.scaling.yarn_{key}", is_needed=False)) is not None:
                found[name] = float(value)
    elif kind != "none":
        raise UnsupportedModelError(
            f"{file.path} scales rotary embeddings by {kind!r}; read are linear, yarn and llama3"
        )
    return {"rope_parameters": found, "max_position_embeddings": int(file.own("context_length"))}


def _llama3(file: GgufFile, theta: float, head_dim: int) -> Fields:
    """Return Llama 3's rotary parameters, computed from the factors, because the file holds only these.

    Models of this family differ in the largest factor and in the length of their first training.
    """
    import torch

    stored = file.read("rope_freqs.weight", torch.float32).float().flatten()
    factor, low, high = float(stored.max()), 1.0, 4.0
    wavelengths = 2 * math.pi * theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    for n_original in (1 << i for i in range(4, 20)):
        smooth = ((n_original / wavelengths - low) / (high - low)).clamp(0, 1)
        if stored.shape == smooth.shape and torch.allclose(1 / ((1 - smooth) / factor + smooth), stored, rtol=1e-3):
            return {
                "rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high,
                "original_max_position_embeddings": n_original,
            }  # fmt: skip
    raise UnsupportedModelError(
        f"rope_freqs.weight in {file.path} holds factors that are not Llama 3's; give the checkpoint in safetensors"
    )


def has_part(file: GgufFile, part: str) -> bool:
    """True if any layer has a tensor with this part's name."""
    return any(name.startswith("blk.") and name.endswith(f".{part}") for name in file)


def refuse_experts(file: GgufFile) -> None:
    if file.own("expert_count", 0) > 0:
        raise UnsupportedModelError(f"{file.path} is a {file.architecture} with experts, which is not implemented")


def rms_eps(file: GgufFile) -> float:
    """Return the epsilon of RMS norms. Nemotron-H's files store it under the name of other norms."""
    key = "attention.layer_norm_rms_epsilon"
    if file.own(key, is_needed=False) is None and file.own("attention.layer_norm_epsilon", is_needed=False) is not None:
        key = "attention.layer_norm_epsilon"
    return float(file.own(key))


def period_of(file: GgufFile, layers: list[int], what: str) -> tuple[int, int]:
    """Return period and offset of these layers, as in Jamba's config."""
    n_layers = count_layers(file)
    if not layers:
        return n_layers + 1, n_layers
    period = layers[1] - layers[0] if len(layers) > 1 else n_layers
    if layers != list(range(layers[0], n_layers, period)) or layers[0] >= period:
        raise UnsupportedModelError(f"{file.path} has {what} in layers {layers}, which have no period")
    return period, layers[0]


def ssd_fields(file: GgufFile) -> Fields:
    """Return the fields of Mamba-2 layers, under the names in configs of hybrids."""
    n_inner, n_heads = file.own("ssm.inner_size"), file.own("ssm.time_step_rank")
    return {
        "mamba_n_heads": n_heads, "mamba_d_head": n_inner // n_heads, "mamba_n_groups": file.own("ssm.group_count"),
        "mamba_d_state": file.own("ssm.state_size"), "mamba_d_conv": file.own("ssm.conv_kernel"),
        "mamba_conv_bias": has_part(file, "ssm_conv1d.bias"), "mamba_proj_bias": has_part(file, "ssm_in.bias"),
    }  # fmt: skip
