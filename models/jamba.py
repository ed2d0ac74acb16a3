"""Jamba (Lieber et al. 2024): Mamba layers, attention every `attn_layer_period`-th, experts every `expert_layer_period`-th."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import JambaConfig

from memory import AttentionSpec, MemorySpec, Step
from models.checkpoint import Checkpoint
from models.layers import Attention, GatedMLP, MambaMixer, MambaShape, MixtureOfExperts, RMSNorm, Vocabulary
from models.loading import register


@register("JambaForCausalLM")
class Jamba:
    """`logits = model(step)`: (n_requests, vocab) or (n_tokens, vocab) float, in the caller's order."""

    def __init__(self, config: JambaConfig, checkpoint: Checkpoint) -> None:
        self.config = config
        head = None if config.tie_word_embeddings else "lm_head.weight"
        self._vocabulary = Vocabulary(checkpoint, "model.embed_tokens.weight", config.vocab_size, config.hidden_size, head)
        self._layers = [_Layer(config, checkpoint, i) for i in range(config.num_hidden_layers)]
        self._norm = RMSNorm(checkpoint.take("model.final_layernorm.weight", config.hidden_size), config.rms_norm_eps)
        self.memory_spec = MemorySpec(
            layers=tuple((layer.spec,) for layer in self._layers),
            vocab_size=config.vocab_size, dtype=checkpoint.dtype, device=checkpoint.device, model=f"Jamba {checkpoint.folder.name}",
        )  # fmt: skip

    @torch.no_grad()
    def __call__(self, step: Step) -> Tensor:
        step.check_model(self.memory_spec)
        x_TM = self._vocabulary.embed(step.token_ids)
        for layer in self._layers:
            x_TM = layer(x_TM, step)
        return self._vocabulary.logits(self._norm(step.select(x_TM)))


class _Layer:
    def __init__(self, config: JambaConfig, checkpoint: Checkpoint, i: int) -> None:
        prefix, n_model = f"model.layers.{i}", config.hidden_size
        self._mixer: Attention | MambaMixer
        self.spec = _attention_spec(config) if config.layers_block_type[i] == "attention" else _mamba_shape(config).spec
        if isinstance(self.spec, AttentionSpec):
            self._mixer = Attention(checkpoint, f"{prefix}.self_attn", i, n_model, self.spec)
        else:
            self._mixer = MambaMixer(checkpoint, f"{prefix}.mamba", i, _mamba_shape(config))
        self._feed_forward = _feed_forward(config, checkpoint, f"{prefix}.feed_forward", config.layers_num_experts[i])
        self._input_norm = RMSNorm(checkpoint.take(f"{prefix}.input_layernorm.weight", n_model), config.rms_norm_eps)
        self._feed_forward_norm = RMSNorm(checkpoint.take(f"{prefix}.pre_ff_layernorm.weight", n_model), config.rms_norm_eps)

    def __call__(self, x_TM: Tensor, step: Step) -> Tensor:
        x_TM = x_TM + self._mixer(self._input_norm(x_TM), step)
        return x_TM + self._feed_forward(self._feed_forward_norm(x_TM))


def _attention_spec(config: JambaConfig) -> AttentionSpec:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return AttentionSpec(config.num_attention_heads, config.num_key_value_heads, head_dim)


def _mamba_shape(config: JambaConfig) -> MambaShape:
    return MambaShape(
        n_model=config.hidden_size, n_channels=config.mamba_expand * config.hidden_size, d_state=config.mamba_d_state,
        d_conv=config.mamba_d_conv, dt_rank=int(config.mamba_dt_rank), has_conv_bias=config.mamba_conv_bias,
        has_proj_bias=config.mamba_proj_bias, norm_eps=config.rms_norm_eps, activation=config.hidden_act,
    )  # fmt: skip


def _feed_forward(config: JambaConfig, checkpoint: Checkpoint, prefix: str, n_experts: int) -> GatedMLP | MixtureOfExperts:
    def make_expert(name: str) -> GatedMLP:
        return GatedMLP(checkpoint, name, config.hidden_size, config.intermediate_size, config.hidden_act)

    if n_experts == 1:
        return make_expert(prefix)
    router = checkpoint.take(f"{prefix}.router.weight", n_experts, config.hidden_size)
    experts = [make_expert(f"{prefix}.experts.{i}") for i in range(n_experts)]
    return MixtureOfExperts(router, experts, config.num_experts_per_tok)
