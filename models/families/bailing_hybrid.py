"""Implements Ling 3 (Ling Team 2026): delta attention with a decay per key channel, gated latent attention, experts.

It is Kimi Linear with positions, a gate for each head of attention, and decays that may have a lower bound.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hybridmem.memory.kernels import steady
from hybridmem.models.families.kimi_linear import (
    KimiDeltaMixer,
    KimiLinear,
    check_heads,
    load_feed_forward,
    read_delta_shape,
    repeat_rates,
)
from hybridmem.models.layers.decoder import Function, Mixer
from hybridmem.models.layers.latent_attention import load_latent_attention, load_latent_rotary
from hybridmem.models.layers.linear import Linear
from hybridmem.models.loading.architectures import register
from hybridmem.models.weights.checkpoint import Checkpoint, check_numbers


@register("BailingHybridForCausalLM")
class BailingHybrid(KimiLinear):
    """Implements Ling 3. Its layers for multi-token prediction are not loaded."""

    embedding = "model.word_embeddings.weight"

    def _delta_mixer(self, config: Any, checkpoint: Checkpoint, prefix: str, i: int) -> Mixer:
        shape, n_model, prefix = read_delta_shape(config), config.hidden_size, f"{prefix}.attention"
        product = Linear(checkpoint.take(f"{prefix}.f_proj.weight", shape.n_keys, n_model))
        rates = repeat_rates(checkpoint.take(f"{prefix}.A_log", shape.n_heads, dtype=torch.float32), shape)
        bias = checkpoint.take(f"{prefix}.dt_bias", shape.n_keys, dtype=torch.float32)
        gate = Linear(checkpoint.take(f"{prefix}.g_proj.weight", shape.n_keys, n_model), activation="sigmoid")
        decay: Function = product
        decays: tuple[Tensor, Tensor] | None = bias, rates
        if config.kda_safe_gate:
            check_numbers(config, "kda_lower_bound")
            decay, decays = bounded_decay(product, bias, rates, config.kda_lower_bound), None
        return KimiDeltaMixer(config, checkpoint, prefix, i, shape, decay, gate, decays, out="dense")

    def _attention(self, config: Any, checkpoint: Checkpoint, prefix: str, i: int) -> Mixer:
        check_heads(config)
        return load_latent_attention(
            config, checkpoint, f"{prefix}.attention", i, load_latent_rotary(config, checkpoint),
            is_interleaved=True, out="dense", has_gate=True,
        )  # fmt: skip

    def _feed_forward(self, config: Any, checkpoint: Checkpoint, prefix: str, kind: str) -> Function:
        mlp, names = f"{prefix}.mlp", ("gate_proj", "up_proj", "down_proj")
        return load_feed_forward(config, checkpoint, kind, mlp, mlp, bias="expert_bias", names=names)


def bounded_decay(product: Function, bias_A: Tensor, rate_A: Tensor, least: float) -> Function:
    """Return a function that computes logarithms of decays, from `least` to 0, in the dtype of the layer's input."""

    sigmoid = steady(torch.sigmoid)

    def log_decay(x_TM: Tensor) -> Tensor:
        return (least * sigmoid((product(x_TM).float() + bias_A) * -rate_A)).to(x_TM.dtype)

    return log_decay
