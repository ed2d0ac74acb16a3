"""Implements RecurrentGemma (Botev et al. 2024): Griffin's gated linear recurrences, and local attention in between."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridmem.memory import AttentionSpec, FormatError, Step
from hybridmem.memory.recurrences import RGLRU, rg_lru_spec
from hybridmem.models.layers.attention import Attention, Rotary, load_projections
from hybridmem.models.layers.decoder import Block, Decoder, Mixer
from hybridmem.models.layers.linear import Linear
from hybridmem.models.layers.mamba_mixers import load_conv
from hybridmem.models.layers.mlp import GatedMLP
from hybridmem.models.layers.norms import RMSNorm, load_offset_norm
from hybridmem.models.layers.vocabulary import Vocabulary
from hybridmem.models.loading.architectures import register
from hybridmem.models.weights.checkpoint import Checkpoint, check_numbers
from hybridmem.models.weights.dry import joined

if TYPE_CHECKING:
    from transformers import RecurrentGemmaConfig


@register("RecurrentGemmaForCausalLM")
class RecurrentGemma(Decoder):
    """Implements RecurrentGemma: each layer is a recurrent mixer or attention over a window, and then a gated MLP."""

    def __init__(self, config: RecurrentGemmaConfig, checkpoint: Checkpoint) -> None:
        check_numbers(config, "logits_soft_cap", above=0)
        if config.lru_width % config.num_attention_heads:
            raise FormatError(
                f"lru_width={config.lru_width} is no multiple of num_attention_heads={config.num_attention_heads}"
            )
        n_model = config.hidden_size
        vocabulary = Vocabulary.load(
            checkpoint, config, "model.embed_tokens.weight",
            # The checkpoints were trained with a scale rounded like this.
            embedding_scale=float(torch.tensor(n_model**0.5, dtype=torch.bfloat16)), logits_cap=config.logits_soft_cap,
        )  # fmt: skip
        rotary = Rotary(config, config.head_dim, checkpoint.device, is_partial=True)

        def norm(name: str) -> RMSNorm:
            return load_offset_norm(checkpoint, f"model.{name}", n_model, config.rms_norm_eps)

        layers = []
        for i in range(config.num_hidden_layers):
            mlp = GatedMLP.load(
                checkpoint,
                f"model.layers.{i}.mlp_block",
                n_model,
                config.intermediate_size // 2,
                config.hidden_activation,
                has_bias=True,
            )
            mixer = norm(f"layers.{i}.temporal_pre_norm"), _mixer(config, checkpoint, i, rotary)
            layers.append(Block(mixer, (norm(f"layers.{i}.channel_pre_norm"), mlp)))
        super().__init__(config, checkpoint, vocabulary, layers, norm("final_norm"))


def _mixer(config: RecurrentGemmaConfig, checkpoint: Checkpoint, i: int, rotary: Rotary) -> Mixer:
    prefix = f"model.layers.{i}.temporal_block"
    if config.layers_block_type[i] == "linear_attention":
        return RecurrentMixer(config, checkpoint, prefix, i)
    n_heads, n_kv_heads = config.num_attention_heads, config.num_key_value_heads
    spec = AttentionSpec(n_heads, n_kv_heads, config.head_dim, window=config.attention_window_size)
    has_bias = config.attention_bias
    projections = load_projections(checkpoint, prefix, config.hidden_size, spec, has_bias=has_bias, has_out_bias=True)
    return Attention(i, spec, *projections, rotary=rotary)


class RecurrentMixer:
    """Computes Griffin's recurrent block: y = W_out(rg_lru(conv(W_x x)) * act(W_y x)) (De et al. 2024, section 2.3)."""

    def __init__(self, config: RecurrentGemmaConfig, checkpoint: Checkpoint, prefix: str, layer: int) -> None:
        n_model = config.hidden_size
        n_channels = config.lru_width
        n_blocks = config.num_attention_heads
        take = checkpoint.take

        def linear(name: str, n_out: int, n_in: int, activation: str | None = None) -> Linear:
            return Linear(
                take(f"{prefix}.{name}.weight", n_out, n_in),
                bias=take(f"{prefix}.{name}.bias", n_out),
                activation=activation,
            )

        def gates(name: str, *shape: int) -> Tensor:
            both = (take(f"{prefix}.rg_lru.{gate}_gate_{name}", n_blocks, *shape) for gate in ("input", "recurrent"))
            return joined(*both, dim=-1)

        self._rows = linear("linear_x", n_channels, n_model)
        self._gate = linear("linear_y", n_channels, n_model, config.hidden_activation)
        self._out = linear("linear_out", n_model, n_channels)
        n_block = n_channels // n_blocks
        self._recurrence = RGLRU(
            conv=load_conv(
                checkpoint, f"{prefix}.conv_1d", n_channels, config.conv1d_width, has_bias=True, activation=None
            ),
            gate_weight_BIO=gates("weight", n_block, n_block),
            gate_bias_BO=gates("bias", n_block),
            decay_E=F.softplus(take(f"{prefix}.rg_lru.recurrent_param", n_channels, dtype=torch.float32)),
        )
        self._layer = layer
        self.specs = (rg_lru_spec(n_channels, config.conv1d_width),)

    def __call__(self, x_TM: Tensor, step: Step) -> Tensor:
        return self._out(step.recur(self._layer, self._rows(x_TM), self._recurrence) * self._gate(x_TM))
