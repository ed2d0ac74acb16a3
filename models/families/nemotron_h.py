"""Implements Nemotron-H (NVIDIA 2025): each layer is Mamba-2, attention without positions, an MLP, or experts."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

import torch

from hybridmem.memory import AttentionSpec
from hybridmem.memory.recurrences import SSDShape
from hybridmem.models.draft_heads import NextTokenHead
from hybridmem.models.layers.attention import Attention, load_projections
from hybridmem.models.layers.decoder import Block, Decoder, Function
from hybridmem.models.layers.experts import MixtureOfExperts, check_groups, sigmoid_then_choose
from hybridmem.models.layers.linear import Linear
from hybridmem.models.layers.mamba_mixers import Mamba2Mixer, Mamba2Options
from hybridmem.models.layers.mlp import MLP
from hybridmem.models.layers.norms import RMSNorm
from hybridmem.models.layers.vocabulary import HEAD, Vocabulary
from hybridmem.models.loading.architectures import register
from hybridmem.models.vision.grid import ShuffledGridSight
from hybridmem.models.vision.pictures import pictures_below
from hybridmem.models.weights.checkpoint import Checkpoint, UnsupportedModelError, require

if TYPE_CHECKING:
    from transformers import NemotronH_Omni_Reasoning_V3_Config, NemotronHConfig


@register("NemotronHForCausalLM")
class NemotronH(Decoder):
    """Implements Nemotron-H. The config's pattern of layers says what each layer is."""

    def __init__(self, config: NemotronHConfig, checkpoint: Checkpoint, root: str = "") -> None:
        # The config has these options, but implementations ignore them or interpret them differently.
        require(config, tie_word_embeddings=False, attention_bias=False, sliding_window=None)
        if config.mamba_proj_bias != config.use_bias:
            raise UnsupportedModelError(
                f"mamba_proj_bias={config.mamba_proj_bias}, use_bias={config.use_bias}; implemented are equal ones"
            )
        require(config, time_step_limit=(0.0, math.inf))
        backbone = f"{root}backbone"
        vocabulary = Vocabulary.load(checkpoint, config, f"{backbone}.embeddings.weight", head=root + HEAD)
        layers = [
            _load_block(config, checkpoint, f"{backbone}.layers.{i}", i, kind)
            for i, kind in enumerate(config.layers_block_type)
        ]
        norm = RMSNorm(checkpoint.take(f"{backbone}.norm_f.weight", config.hidden_size), config.layer_norm_epsilon)
        residual_dtype = torch.float32 if config.residual_in_fp32 else checkpoint.dtype
        super().__init__(config, checkpoint, vocabulary, layers, norm, residual_dtype=residual_dtype)
        self._draft_root = f"{root}mtp.layers"
        self.draft_prefixes = (f"{root}mtp.",)

    def load_draft_head(self, checkpoint: Checkpoint) -> NextTokenHead | None:
        """Return the module of multi-token prediction, whose layers `mtp_layers_block_type` names.

        The first layer's tensors are beside those that join embedding and hidden state, the last one's beside the norm.
        """
        config, n_model, root = self.config, self.config.hidden_size, self._draft_root
        if f"{root}.0.eh_proj.weight" not in checkpoint:
            super().load_draft_head(checkpoint)
            return None
        kinds = config.mtp_layers_block_type

        def norm(name: str) -> RMSNorm:
            return RMSNorm(checkpoint.take(f"{root}.{name}.weight", n_model), config.layer_norm_epsilon)

        layers = [_load_block(config, checkpoint, f"{root}.{i}", i, kind) for i, kind in enumerate(kinds)]
        joined = Linear.load(checkpoint, f"{root}.0.eh_proj", n_model, 2 * n_model)
        norms = norm("0.enorm"), norm("0.hnorm")
        return NextTokenHead(self, norms, joined, layers, norm(f"{len(kinds) - 1}.final_layernorm"))


@register("NemotronH_Omni_Reasoning_V3")
class NemotronHOmni(NemotronH):
    """Implements Nemotron 3 Omni: Nemotron-H with a tower, which is loaded at the first picture.

    The parts for sound are not read. The outer config says nothing about the language model.
    """

    def __init__(self, config: NemotronH_Omni_Reasoning_V3_Config, checkpoint: Checkpoint) -> None:
        super().__init__(config.get_text_config(), checkpoint, "language_model.")
        checkpoint.ignore(*checkpoint.names_below(_HEARS))
        self.see(pictures_below(ShuffledGridSight(config), config, checkpoint))


_HEARS = "sound_encoder.", "sound_projection.", "audio_tower.", "embed_audio."


def _load_block(config: NemotronHConfig, checkpoint: Checkpoint, prefix: str, i: int, kind: str) -> Block:
    norm = RMSNorm(checkpoint.take(f"{prefix}.norm.weight", config.hidden_size), config.layer_norm_epsilon)
    prefix = f"{prefix}.mixer"
    if kind == "linear_attention":
        return Block((norm, Mamba2Mixer(checkpoint, prefix, i, _mamba2_options(config))))
    if kind == "full_attention":
        spec = AttentionSpec(config.num_attention_heads, config.num_key_value_heads, config.head_dim)
        return Block((norm, Attention(i, spec, *load_projections(checkpoint, prefix, config.hidden_size, spec))))
    if kind == "moe":
        return Block(None, (norm, _load_experts(config, checkpoint, prefix)))
    return Block(None, (norm, _load_mlp(config, checkpoint, prefix, config.intermediate_size)))


def _mamba2_options(config: NemotronHConfig) -> Mamba2Options:
    shape = SSDShape(
        config.mamba_num_heads, config.mamba_head_dim, config.n_groups, config.ssm_state_size, config.conv_kernel
    )
    return Mamba2Options(
        n_model=config.hidden_size, shape=shape, has_conv_bias=config.use_conv_bias, has_in_bias=config.use_bias,
        has_out_bias=config.use_bias, norm_eps=config.layer_norm_epsilon, n_norm_groups=config.n_groups,
        dt_limits=(config.time_step_min, math.inf), activation=config.mamba_hidden_act,
    )  # fmt: skip


def _load_mlp(config: NemotronHConfig, checkpoint: Checkpoint, prefix: str, n_inner: int) -> MLP:
    return MLP.load(checkpoint, prefix, config.hidden_size, n_inner, config.mlp_hidden_act, has_bias=config.mlp_bias)


def _load_experts(config: NemotronHConfig, checkpoint: Checkpoint, prefix: str) -> MixtureOfExperts:
    n_model = config.hidden_size
    n_experts = config.n_routed_experts
    n_inner = config.moe_intermediate_size
    n_latent = config.moe_latent_size
    check_groups(config, least=2)
    # The router is float32 whatever the model's dtype, because scores decide which experts run, and close scores are
    # common.
    router = checkpoint.take(f"{prefix}.gate.weight", n_experts, n_model, dtype=torch.float32)
    bias = checkpoint.take(f"{prefix}.gate.e_score_correction_bias", n_experts, dtype=torch.float32)
    activation = config.mlp_hidden_act
    experts = [
        MLP.load(checkpoint, f"{prefix}.experts.{e}", n_latent or n_model, n_inner, activation)
        for e in range(n_experts)
    ]

    def latent(name: str, n_out: int, n_in: int) -> Linear:
        return Linear.load(checkpoint, f"{prefix}.{name}", n_out, n_in, has_bias=config.mlp_bias)

    around: tuple[Function, Function] | None = None
    if n_latent is not None:
        around = latent("fc1_latent_proj", n_latent, n_model), latent("fc2_latent_proj", n_model, n_latent)
    route = partial(
        sigmoid_then_choose,
        bias_E=bias,
        n_groups=config.n_group,
        n_chosen_groups=config.topk_group,
        renormalise=config.norm_topk_prob,
        scale=config.routed_scaling_factor,
    )
    n_shared = config.moe_shared_expert_intermediate_size or config.intermediate_size
    shared = _load_mlp(config, checkpoint, f"{prefix}.shared_experts", n_shared)
    return MixtureOfExperts(router, experts, config.num_experts_per_tok, route, shared=shared, around=around)
