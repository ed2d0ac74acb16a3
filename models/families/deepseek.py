"""Implements DeepSeek-V2 and V3 (DeepSeek-AI 2024): latent attention, then a gated MLP or a mixture of experts.

In addition to the experts that are chosen for a token, each mixture has shared experts, which every token passes
through.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch

from hybridmem.models.draft_heads import NextTokenHead
from hybridmem.models.layers.attention import Rotary
from hybridmem.models.layers.decoder import Block, Decoder, Function, Mixer
from hybridmem.models.layers.experts import (
    MixtureOfExperts,
    Route,
    check_groups,
    load_experts,
    sigmoid_then_choose,
    softmax_then_choose,
)
from hybridmem.models.layers.latent_attention import load_latent_attention, load_latent_rotary
from hybridmem.models.layers.linear import Linear
from hybridmem.models.layers.mlp import GatedMLP
from hybridmem.models.layers.norms import RMSNorm
from hybridmem.models.layers.vocabulary import Vocabulary
from hybridmem.models.loading.architectures import register
from hybridmem.models.weights.checkpoint import Checkpoint, UnsupportedModelError, require

if TYPE_CHECKING:
    from transformers import DeepseekV2Config, DeepseekV3Config, PreTrainedConfig


class _DeepSeek(Decoder, ABC):
    """Implements what V2 and V3 have in common. Subclasses choose the experts."""

    has_mlp_bias = False
    is_interleaved = True

    def __init__(self, config: PreTrainedConfig, checkpoint: Checkpoint) -> None:
        if config.num_key_value_heads != config.num_attention_heads:
            raise UnsupportedModelError(
                f"num_key_value_heads={config.num_key_value_heads}, num_attention_heads={config.num_attention_heads}; "
                "latent attention is implemented with as many of both"
            )
        if getattr(config, "head_dim", config.qk_rope_head_dim) != config.qk_rope_head_dim:
            raise UnsupportedModelError(
                f"head_dim={config.head_dim}, qk_rope_head_dim={config.qk_rope_head_dim}; transformers computes "
                "angles for the first and rotates the second, so they must be equal here"
            )
        n_model = config.hidden_size
        vocabulary = Vocabulary.load(checkpoint, config, "model.embed_tokens.weight")
        rotary = load_latent_rotary(config, checkpoint)

        def norm(name: str) -> RMSNorm:
            return RMSNorm(checkpoint.take(f"model.{name}.weight", n_model), config.rms_norm_eps)

        layers = []
        for i in range(config.num_hidden_layers):
            prefix = f"model.layers.{i}"
            mixer = self._mixer(config, checkpoint, f"{prefix}.self_attn", i, rotary)
            is_dense = self._is_dense(config, i)
            feed_forward = (self._mlp if is_dense else self._mixture)(config, checkpoint, f"{prefix}.mlp")
            layers.append(
                Block(
                    (norm(f"layers.{i}.input_layernorm"), mixer),
                    (norm(f"layers.{i}.post_attention_layernorm"), feed_forward),
                )
            )
        super().__init__(config, checkpoint, vocabulary, layers, norm("norm"))
        self._rotary = rotary
        self.draft_prefixes = draft_layers(config)

    def load_draft_head(self, checkpoint: Checkpoint) -> NextTokenHead | None:
        """Return the first module of multi-token prediction, which is stored as a layer after the last one.

        Its embedding and output matrix are the model's, of which files may hold copies.
        """
        config, n_model = self.config, self.config.hidden_size
        prefix = f"model.layers.{config.num_hidden_layers}"
        if f"{prefix}.eh_proj.weight" not in checkpoint:
            super().load_draft_head(checkpoint)
            return None

        def norm(name: str) -> RMSNorm:
            return RMSNorm(checkpoint.take(f"{prefix}.{name}.weight", n_model), config.rms_norm_eps)

        mixer = self._mixer(config, checkpoint, f"{prefix}.self_attn", 0, self._rotary)
        has_experts = f"{prefix}.mlp.gate.weight" in checkpoint
        feed_forward = (self._mixture if has_experts else self._mlp)(config, checkpoint, f"{prefix}.mlp")
        layer = Block((norm("input_layernorm"), mixer), (norm("post_attention_layernorm"), feed_forward))
        joined = Linear.load(checkpoint, f"{prefix}.eh_proj", n_model, 2 * n_model)
        return NextTokenHead(self, (norm("enorm"), norm("hnorm")), joined, [layer], norm("shared_head.norm"))

    def _mixer(self, config: PreTrainedConfig, checkpoint: Checkpoint, prefix: str, i: int, rotary: Rotary) -> Mixer:
        return load_latent_attention(config, checkpoint, prefix, i, rotary, is_interleaved=self.is_interleaved)

    def _is_dense(self, config: PreTrainedConfig, i: int) -> bool:
        """True if layer i has one MLP instead of experts."""
        return bool(i < config.first_k_dense_replace)

    def _mlp(
        self, config: PreTrainedConfig, checkpoint: Checkpoint, prefix: str, n_inner: int | None = None
    ) -> Function:
        return GatedMLP.load(
            checkpoint,
            prefix,
            config.hidden_size,
            n_inner or config.intermediate_size,
            config.hidden_act,
            has_bias=self.has_mlp_bias,
        )

    def _mixture(self, config: PreTrainedConfig, checkpoint: Checkpoint, prefix: str) -> Function:
        n_model, n_experts, n_inner = config.hidden_size, config.n_routed_experts, config.moe_intermediate_size
        if config.n_shared_experts < 1:
            raise UnsupportedModelError(f"n_shared_experts={config.n_shared_experts}; implemented is at least one")
        # The router is float32 whatever the model's dtype, because scores decide which experts run, and close scores
        # are common.
        router = checkpoint.take(f"{prefix}.gate.weight", n_experts, n_model, dtype=torch.float32)
        experts = load_experts(checkpoint, f"{prefix}.experts", n_experts, n_model, n_inner, config.hidden_act)
        shared = self._mlp(config, checkpoint, f"{prefix}.shared_experts", n_inner * config.n_shared_experts)
        return MixtureOfExperts(
            router, experts, config.num_experts_per_tok, self._route(config, checkpoint, prefix), shared=shared
        )

    @abstractmethod
    def _route(self, config: PreTrainedConfig, checkpoint: Checkpoint, prefix: str) -> Callable[[int], Route]:
        """Return the rule by which the mixture below `prefix` chooses experts."""


@register("DeepseekV2ForCausalLM")
class DeepseekV2(_DeepSeek):
    """Implements DeepSeek-V2, which chooses experts by a softmax over all of them."""

    def __init__(self, config: DeepseekV2Config, checkpoint: Checkpoint) -> None:
        self.has_mlp_bias = config.mlp_bias
        _require_if_named(config, norm_topk_prob=False, scoring_func="softmax", moe_layer_freq=1)
        super().__init__(config, checkpoint)

    def _route(self, config: PreTrainedConfig, checkpoint: Checkpoint, prefix: str) -> Callable[[int], Route]:
        scale = config.routed_scaling_factor
        if config.topk_method == "greedy":
            return partial(softmax_then_choose, scale=scale)
        if config.topk_method != "group_limited_greedy":
            raise UnsupportedModelError(
                f"topk_method={config.topk_method!r}; implemented are greedy and group_limited_greedy"
            )
        check_groups(config, least=1)
        return partial(softmax_then_choose, n_groups=config.n_group, n_chosen_groups=config.topk_group, scale=scale)


@register("DeepseekV3ForCausalLM")
class DeepseekV3(_DeepSeek):
    """Implements DeepSeek-V3, which chooses experts by their sigmoids plus biases that balance the experts' loads.

    Of its modules for multi-token prediction, the first is loaded as a draft head if it is wanted.
    """

    def __init__(self, config: DeepseekV3Config, checkpoint: Checkpoint) -> None:
        self.is_interleaved = bool(getattr(config, "rope_interleave", True))
        _require_if_named(config, scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1)
        super().__init__(config, checkpoint)

    def _route(self, config: PreTrainedConfig, checkpoint: Checkpoint, prefix: str) -> Callable[[int], Route]:
        check_groups(config, least=2)
        bias = checkpoint.take(f"{prefix}.gate.e_score_correction_bias", config.n_routed_experts, dtype=torch.float32)
        return partial(
            sigmoid_then_choose, bias_E=bias, n_groups=config.n_group, n_chosen_groups=config.topk_group,
            renormalise=config.norm_topk_prob, scale=config.routed_scaling_factor,
        )  # fmt: skip


def draft_layers(config: PreTrainedConfig) -> tuple[str, ...]:
    """Return what the names of the modules of multi-token prediction begin with: of the layers after the last one."""
    numbers = (getattr(config, name, None) for name in ("num_mtp_layers", "num_nextn_predict_layers"))
    n_layers, n_heads = config.num_hidden_layers, next((int(n) for n in numbers if n), 0)
    return tuple(f"model.layers.{i}." for i in range(n_layers, n_layers + n_heads))


def _require_if_named(config: PreTrainedConfig, **wanted: object) -> None:
    """Call `require` for those of these options that the config has.

    DeepSeek's own configs have all of them, but transformers' configs need not have them.
    """
    require(config, **{name: value for name, value in wanted.items() if hasattr(config, name)})
