"""Implements the language models of Gemma 2 and 3 (Gemma Team 2024, 2025).

Some layers attend to a window and some to all tokens. Each part of a layer has a norm before and a norm after it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch

from hybridmem.memory import AttentionSpec
from hybridmem.models.families.llama import window_of
from hybridmem.models.layers.attention import Attention, Rotary, load_projections
from hybridmem.models.layers.decoder import Block, Decoder, Normed, in_turn
from hybridmem.models.layers.mlp import GatedMLP
from hybridmem.models.layers.norms import RMSNorm, load_offset_norm
from hybridmem.models.layers.vocabulary import Vocabulary
from hybridmem.models.loading.architectures import register
from hybridmem.models.weights.checkpoint import Checkpoint, UnsupportedModelError, check_numbers

if TYPE_CHECKING:
    from transformers import Gemma2Config, Gemma3TextConfig, PreTrainedConfig


class _Gemma(Decoder, ABC):
    """Implements what Gemma 2 and 3 have in common. Subclasses choose rotary embeddings, caps and norms."""

    def __init__(self, config: PreTrainedConfig, checkpoint: Checkpoint) -> None:
        if config.use_bidirectional_attention:
            raise UnsupportedModelError(
                "use_bidirectional_attention=True; a memory of the past cannot serve tokens that see the future"
            )
        check_numbers(config, "query_pre_attn_scalar", above=0)
        if config.final_logit_softcapping is not None:
            check_numbers(config, "final_logit_softcapping", above=0)
        n_model = config.hidden_size
        vocabulary = Vocabulary.load(
            checkpoint,
            config,
            "model.embed_tokens.weight",
            # The scale is rounded to the weights' dtype, as it was in training.
            embedding_scale=float(torch.tensor(n_model**0.5, dtype=checkpoint.dtype)),
            logits_cap=config.final_logit_softcapping,
        )

        def norm(name: str) -> RMSNorm:
            return load_offset_norm(checkpoint, f"model.{name}", n_model, config.rms_norm_eps)

        rotaries = self._rotaries(config, checkpoint.device)
        layers = []
        for i in range(config.num_hidden_layers):
            prefix = f"layers.{i}"
            attention = self._attention(config, checkpoint, i, rotaries[config.layer_types[i]])
            mlp = GatedMLP.load(
                checkpoint, f"model.{prefix}.mlp", n_model, config.intermediate_size, config.hidden_activation
            )
            layers.append(
                Block(
                    (norm(f"{prefix}.input_layernorm"), Normed(attention, norm(f"{prefix}.post_attention_layernorm"))),
                    (
                        norm(f"{prefix}.pre_feedforward_layernorm"),
                        in_turn(mlp, norm(f"{prefix}.post_feedforward_layernorm")),
                    ),
                )
            )
        super().__init__(config, checkpoint, vocabulary, layers, norm("norm"))

    @abstractmethod
    def _rotaries(self, config: PreTrainedConfig, device: torch.device) -> dict[str, Rotary]:
        """Return the rotary embedding of each type of layer."""

    def _attention(self, config: PreTrainedConfig, checkpoint: Checkpoint, i: int, rotary: Rotary) -> Attention:
        spec = AttentionSpec(
            config.num_attention_heads, config.num_key_value_heads, config.head_dim, window=window_of(config, i)
        )
        bias, prefix = config.attention_bias, f"model.layers.{i}.self_attn"
        projections = load_projections(checkpoint, prefix, config.hidden_size, spec, has_bias=bias, has_out_bias=bias)
        return Attention(
            i,
            spec,
            *projections,
            rotary=rotary,
            scale=config.query_pre_attn_scalar**-0.5,
            softcap=self._softcap(config),
            norms=self._head_norms(config, checkpoint, prefix),
        )

    def _softcap(self, config: PreTrainedConfig) -> float | None:
        """Return the cap of attention scores, or None for no cap."""
        return None

    def _head_norms(
        self, config: PreTrainedConfig, checkpoint: Checkpoint, prefix: str
    ) -> tuple[RMSNorm, RMSNorm] | None:
        return None


@register("Gemma2ForCausalLM")
class Gemma2(_Gemma):
    """Implements Gemma 2, which caps attention scores."""

    def _rotaries(self, config: Gemma2Config, device: torch.device) -> dict[str, Rotary]:
        return dict.fromkeys(config.layer_types, Rotary(config, config.head_dim, device))

    def _softcap(self, config: Gemma2Config) -> float | None:
        if config.attn_logit_softcapping is None:
            return None
        check_numbers(config, "attn_logit_softcapping", above=0)
        return float(config.attn_logit_softcapping)


@register("Gemma3ForCausalLM")
class Gemma3(_Gemma):
    """Implements Gemma 3, which normalizes queries and keys and has a rotary embedding for each type of layer.

    Configs may have `attn_logit_softcapping`. Like transformers, this class ignores it and does not cap scores.
    """

    def _rotaries(self, config: Gemma3TextConfig, device: torch.device) -> dict[str, Rotary]:
        return {kind: Rotary(config, config.head_dim, device, layer_type=kind) for kind in set(config.layer_types)}

    def _head_norms(self, config: Gemma3TextConfig, checkpoint: Checkpoint, prefix: str) -> tuple[RMSNorm, RMSNorm]:
        q, k = (load_offset_norm(checkpoint, f"{prefix}.{x}_norm", config.head_dim, config.rms_norm_eps) for x in "qk")
        return q, k
