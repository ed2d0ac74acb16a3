"""Implements Granite 4 (IBM 2025): each layer is attention or Mamba-2, then a shared MLP together with experts.

Every part is scaled by a multiplier of the config, and rotary positions are optional.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridmem.models.families.bamba import load_mixer
from hybridmem.models.layers.attention import Rotary, head_dim_of
from hybridmem.models.layers.decoder import Block, Decoder, Function
from hybridmem.models.layers.experts import MixtureOfExperts, choose_then_softmax
from hybridmem.models.layers.mlp import GatedMLP
from hybridmem.models.layers.norms import RMSNorm
from hybridmem.models.layers.vocabulary import Vocabulary
from hybridmem.models.loading.architectures import register
from hybridmem.models.weights.checkpoint import Checkpoint, UnsupportedModelError, check_numbers

if TYPE_CHECKING:
    from transformers import GraniteMoeHybridConfig


@register("GraniteMoeHybridForCausalLM")
class GraniteMoeHybrid(Decoder):
    """Implements Granite 4: each layer is a mixer and a feed-forward part, and both outputs are scaled."""

    def __init__(self, config: GraniteMoeHybridConfig, checkpoint: Checkpoint) -> None:
        # For models without positions, Granite 4.0-H's own configs say "nope" and transformers says None.
        if config.position_embedding_type not in (None, "nope", "rope"):
            raise UnsupportedModelError(
                f"position_embedding_type={config.position_embedding_type!r}; implemented are None, 'nope' and 'rope'"
            )
        check_numbers(config, "embedding_multiplier", "residual_multiplier")
        check_numbers(config, "attention_multiplier", "logits_scaling", above=0)
        n_model = config.hidden_size
        vocabulary = Vocabulary.load(
            checkpoint,
            config,
            "model.embed_tokens.weight",
            embedding_scale=config.embedding_multiplier,
            logits_scale=1.0 / config.logits_scaling,
        )
        rotary = (
            Rotary(config, head_dim_of(config), checkpoint.device) if config.position_embedding_type == "rope" else None
        )

        def norm(name: str) -> RMSNorm:
            return RMSNorm(checkpoint.take(f"model.{name}.weight", n_model), config.rms_norm_eps)

        layers = [
            Block(
                (
                    norm(f"layers.{i}.input_layernorm"),
                    load_mixer(config, checkpoint, i, rotary, config.attention_multiplier),
                ),
                (norm(f"layers.{i}.post_attention_layernorm"), _feed_forward(config, checkpoint, f"model.layers.{i}")),
                scale=config.residual_multiplier,
            )
            for i in range(config.num_hidden_layers)
        ]
        super().__init__(config, checkpoint, vocabulary, layers, norm("norm"))


def _feed_forward(config: GraniteMoeHybridConfig, checkpoint: Checkpoint, prefix: str) -> Function:
    n_model, n_inner, n_experts = config.hidden_size, config.shared_intermediate_size, config.num_local_experts
    take, activation = checkpoint.take, config.hidden_act
    shared = GatedMLP.of(
        take(f"{prefix}.shared_mlp.input_linear.weight", 2 * n_inner, n_model),
        take(f"{prefix}.shared_mlp.output_linear.weight", n_model, n_inner),
        activation,
    )
    if n_experts < 1:
        return shared
    prefix, n_inner = f"{prefix}.block_sparse_moe", config.intermediate_size
    gate_up = take(f"{prefix}.input_linear.weight", n_experts, 2 * n_inner, n_model)
    down = take(f"{prefix}.output_linear.weight", n_experts, n_model, n_inner)
    experts = [GatedMLP.of(*weights, activation) for weights in zip(gate_up, down, strict=True)]
    router = take(f"{prefix}.router.layer.weight", n_experts, n_model)
    return MixtureOfExperts(router, experts, config.num_experts_per_tok, choose_then_softmax, shared=shared)
