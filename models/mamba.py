"""Mamba (Gu & Dao 2023): a stack of Mamba-1 mixers, no attention."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import MambaConfig

from memory import MemorySpec, Step
from models.checkpoint import Checkpoint
from models.layers import MambaMixer, MambaShape, RMSNorm, Vocabulary
from models.loading import register


@register("MambaForCausalLM")
class Mamba:
    """`logits = model(step)`: (n_requests, vocab) or (n_tokens, vocab) float, in the caller's order."""

    def __init__(self, config: MambaConfig, checkpoint: Checkpoint) -> None:
        shape = MambaShape(
            n_model=config.hidden_size, n_channels=config.intermediate_size, d_state=config.state_size, d_conv=config.conv_kernel,
            dt_rank=int(config.time_step_rank), has_conv_bias=config.use_conv_bias, has_proj_bias=config.use_bias,
            activation=config.hidden_act,
        )  # fmt: skip
        n_layers, n_model, eps = config.num_hidden_layers, config.hidden_size, config.layer_norm_epsilon
        self.config = config
        head = None if config.tie_word_embeddings else "lm_head.weight"
        self._vocabulary = Vocabulary(checkpoint, "backbone.embeddings.weight", config.vocab_size, n_model, head)
        self._mixers = [MambaMixer(checkpoint, f"backbone.layers.{i}.mixer", i, shape) for i in range(n_layers)]
        self._norms = [RMSNorm(checkpoint.take(f"backbone.layers.{i}.norm.weight", n_model), eps) for i in range(n_layers)]
        self._norm = RMSNorm(checkpoint.take("backbone.norm_f.weight", n_model), eps)
        # The residual stream is kept in float32 even where the weights are not.
        self._residual_dtype = torch.float32 if config.residual_in_fp32 else checkpoint.dtype
        self.memory_spec = MemorySpec(
            layers=((shape.spec,),) * n_layers,
            vocab_size=config.vocab_size, dtype=checkpoint.dtype, device=checkpoint.device, model=f"Mamba {checkpoint.folder.name}",
        )  # fmt: skip

    @torch.no_grad()
    def __call__(self, step: Step) -> Tensor:
        step.check_model(self.memory_spec)
        dtype = self.memory_spec.dtype
        x_TM = self._vocabulary.embed(step.token_ids).to(self._residual_dtype)
        for norm, mixer in zip(self._norms, self._mixers, strict=True):
            x_TM = x_TM + mixer(norm(x_TM.to(dtype)), step)
        return self._vocabulary.logits(self._norm(step.select(x_TM).to(dtype)))
