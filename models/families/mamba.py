"""Implements Mamba (Gu & Dao 2023) and Mamba-2 (Dao & Gu 2024): a stack of mixers, without attention."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch

from hybridmem.memory.recurrences import SSDShape
from hybridmem.models.layers.decoder import Block, Decoder, Mixer
from hybridmem.models.layers.mamba_mixers import Mamba2Mixer, Mamba2Options, MambaMixer, MambaShape, read_dt_limits
from hybridmem.models.layers.norms import RMSNorm
from hybridmem.models.layers.vocabulary import Vocabulary
from hybridmem.models.loading.architectures import register
from hybridmem.models.weights.checkpoint import Checkpoint, check_numbers

if TYPE_CHECKING:
    from transformers import FalconMambaConfig, Mamba2Config, MambaConfig


class _MixerStack(Decoder, ABC):
    """Implements what both generations have in common. Subclasses load the mixers."""

    def __init__(self, config: MambaConfig | Mamba2Config, checkpoint: Checkpoint) -> None:
        n_model = config.hidden_size
        vocabulary = Vocabulary.load(checkpoint, config, "backbone.embeddings.weight")

        def norm(name: str) -> RMSNorm:
            return RMSNorm(checkpoint.take(f"backbone.{name}.weight", n_model), config.layer_norm_epsilon)

        layers = [
            Block((norm(f"layers.{i}.norm"), self._mixer(config, checkpoint, f"backbone.layers.{i}.mixer", i)))
            for i in range(config.num_hidden_layers)
        ]
        # The residual stream may be kept in float32 even if the weights are not.
        residual_dtype = torch.float32 if config.residual_in_fp32 else checkpoint.dtype
        super().__init__(config, checkpoint, vocabulary, layers, norm("norm_f"), residual_dtype=residual_dtype)

    @abstractmethod
    def _mixer(self, config: MambaConfig | Mamba2Config, checkpoint: Checkpoint, prefix: str, i: int) -> Mixer:
        """Load the mixer of layer i from the tensors below `prefix`."""


@register("MambaForCausalLM")
class Mamba(_MixerStack):
    """Implements Mamba, of the first generation."""

    def _mixer(self, config: MambaConfig, checkpoint: Checkpoint, prefix: str, i: int) -> Mixer:
        shape = MambaShape(
            n_model=config.hidden_size,
            n_channels=config.intermediate_size,
            d_state=config.state_size,
            d_conv=config.conv_kernel,
            dt_rank=int(config.time_step_rank),
            has_conv_bias=config.use_conv_bias,
            has_proj_bias=config.use_bias,
            activation=config.hidden_act,
            **self._norms(config),
        )
        return MambaMixer(checkpoint, prefix, i, shape)

    def _norms(self, config: MambaConfig) -> dict[str, Any]:
        """Return the fields of `MambaShape` for norms of dt, B and C, which this generation does not have."""
        return {}


@register("FalconMambaForCausalLM")
class FalconMamba(Mamba):
    """Implements FalconMamba (Zuo et al. 2024): Mamba with norms of dt, B and C, which have no weights."""

    def _norms(self, config: FalconMambaConfig) -> dict[str, Any]:
        check_numbers(config, "mixer_rms_eps")
        return {"norm_eps": config.mixer_rms_eps, "has_norm_weights": False}


@register("Mamba2ForCausalLM")
class Mamba2(_MixerStack):
    """Implements Mamba-2."""

    def _mixer(self, config: Mamba2Config, checkpoint: Checkpoint, prefix: str, i: int) -> Mixer:
        shape = SSDShape(config.num_heads, config.head_dim, config.n_groups, config.state_size, config.conv_kernel)
        options = Mamba2Options(
            n_model=config.hidden_size, shape=shape, has_conv_bias=config.use_conv_bias, has_in_bias=config.use_bias,
            has_out_bias=config.use_bias, norm_eps=config.layer_norm_epsilon, n_norm_groups=config.n_groups,
            dt_limits=read_dt_limits(config), activation=config.hidden_act,
        )  # fmt: skip
        return Mamba2Mixer(checkpoint, prefix, i, options)
