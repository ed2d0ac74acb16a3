"""Implements the heads of EAGLE-3 (Li et al. 2025, "EAGLE-3"): a layer that reads the model's states at three depths.

One matrix fuses the residual streams after three layers into g. Attention reads [norm(e); norm(g)], where e is the
embedding of the next token: `x = g + attention([norm(e); norm(g)])`, then `x + mlp(norm(x))`. The next draft continues
from this sum, in place of g. The output matrix may be of fewer tokens than the model's: those that are drafted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hybridmem.memory import AttentionSpec, MemorySpec, Step
from hybridmem.memory.blocks import without_gradients
from hybridmem.memory.errors import FormatError
from hybridmem.models.draft_heads.next_token import in_order_of
from hybridmem.models.layers.attention import Attention, Rotary, head_dim_of, load_projections
from hybridmem.models.layers.decoder import Decoder, Function
from hybridmem.models.layers.linear import Linear
from hybridmem.models.layers.mlp import GatedMLP
from hybridmem.models.layers.norms import RMSNorm
from hybridmem.models.weights.checkpoint import Checkpoint, UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_LAYERS = "midlayer", "layers.0"
"""Names of the layer in files of the authors, and in others."""


@dataclass(frozen=True)
class Eagle3Layer:
    """Computes the layer from embeddings and fused states.

    Attributes:
        norms: norm the embedding, the fused state, and what the MLP reads.
        norms_residual: whether attention is added to norm(g) instead of g.
    """

    norms: tuple[Function, Function, Function]
    attention: Attention
    mlp: Function
    norms_residual: bool = False

    @staticmethod
    def load(config: PreTrainedConfig, checkpoint: Checkpoint, prefix: str) -> Eagle3Layer:
        n_model, has_bias = config.hidden_size, config.attention_bias
        spec = AttentionSpec(config.num_attention_heads, config.num_key_value_heads, head_dim_of(config))
        projections = load_projections(
            checkpoint, f"{prefix}.self_attn", n_model, spec, has_bias=has_bias, has_out_bias=has_bias, n_in=2 * n_model
        )
        embed_norm, hidden_norm, mlp_norm = (
            _load_norm(config, checkpoint, f"{prefix}.{name}")
            for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        )
        return Eagle3Layer(
            (embed_norm, hidden_norm, mlp_norm),
            Attention(0, spec, *projections, rotary=Rotary(config, head_dim_of(config), checkpoint.device)),
            GatedMLP.load(checkpoint, f"{prefix}.mlp", n_model, config.intermediate_size, config.hidden_act),
            bool(getattr(config, "norm_before_residual", False)),
        )

    def __call__(self, embedded_TM: Tensor, fused_TM: Tensor, step: Step) -> Tensor:
        embed_norm, hidden_norm, mlp_norm = self.norms
        normed_TM = hidden_norm(fused_TM)
        read_TN = torch.cat([embed_norm(embedded_TM), normed_TM], -1)
        x_TM = (normed_TM if self.norms_residual else fused_TM) + self.attention(read_TN, step)
        return x_TM + self.mlp(mlp_norm(x_TM))


class Eagle3Head:
    """Drafts with one layer on the model's residual streams at three depths.

    Args:
        model: the model that it was trained for.
        after: see `DraftHead`.
        fused: the product of the streams, (M, 3 M).
        embed: looks up the embeddings of tokens: the model's, or the head's own.
        norm, output: norm what the layer returns, and compute logits of the tokens that are drafted.
        tokens_D: the ids of these tokens, (D,) int64; None if they are all.
    """

    def __init__(
        self, model: Decoder, after: tuple[int, ...], fused: Linear, embed: Callable[[Tensor], Tensor],
        layer: Eagle3Layer, norm: Function, output: Linear, tokens_D: Tensor | None,
    ) -> None:  # fmt: skip
        self.after, self._fused, self._embed, self._layer = after, fused, embed, layer
        self._norm, self._output, self._tokens_D = norm, output, tokens_D
        spec = model.memory_spec
        self._n_tokens, self._n_read = spec.vocab_size, len(after)
        self.memory_spec = MemorySpec(
            layers=(layer.attention.specs,), vocab_size=spec.vocab_size, dtype=spec.dtype, device=spec.device,
            model=f"the draft head of {spec.model}",
        )  # fmt: skip

    @staticmethod
    def load(config: PreTrainedConfig, checkpoint: Checkpoint, model: Decoder) -> Eagle3Head:
        """Load a head as its authors publish it, with `config` of the architecture LlamaForCausalLMEagle3.

        Raises:
            UnsupportedModelError: it was made for a model of another size, or has options that are not implemented.
            FormatError: a tensor is missing or has another shape, or tokens are drafted that the model does not have.
        """
        n_model, vocabulary = config.hidden_size, model.vocabulary
        if n_model != model.config.hidden_size:
            raise UnsupportedModelError(
                f"the head's hidden_size={n_model}; implemented is the model's, {model.config.hidden_size}"
            )
        layer = checkpoint.name_of(*(f"{name}.hidden_norm.weight" for name in _LAYERS)).removesuffix(
            ".hidden_norm.weight"
        )
        after, n_tokens, name = _layers_read(config, model), model.memory_spec.vocab_size, "embed_tokens.weight"
        n_drafted = int(getattr(config, "draft_vocab_size", None) or n_tokens)
        return Eagle3Head(
            model, after, Linear.load(checkpoint, "fc", n_model, len(after) * n_model),
            vocabulary.embedding_of(checkpoint, name) if name in checkpoint else vocabulary.embed,
            Eagle3Layer.load(config, checkpoint, layer), _load_norm(config, checkpoint, "norm"),
            Linear.load(checkpoint, "lm_head", n_drafted, n_model, keeps_sums=True),
            _drafted_tokens(checkpoint, n_drafted, n_tokens),
        )  # fmt: skip

    def read(self, rows_TR: Tensor) -> Tensor:
        """Return the fused streams. The last columns are the model's hidden states, which the head does not read."""
        n_columns = rows_TR.shape[-1] // (self._n_read + 1) * self._n_read
        with without_gradients():
            fused_TM: Tensor = self._fused(rows_TR[:, :n_columns])
        return fused_TM

    def __call__(self, step: Step, rows_TM: Tensor) -> tuple[Tensor, Tensor]:
        """See `DraftHead`. Logits of tokens that the head does not draft are -inf."""
        step.check_model(self.memory_spec)
        with without_gradients():
            x_TM = self._layer(step.embed(self._embed), in_order_of(step, rows_TM), step)
            rows_SM = step.select(x_TM)
            logits_SD = self._output(self._norm(rows_SM))
            if self._tokens_D is None:
                return logits_SD, rows_SM
            logits_SV = logits_SD.new_full((len(logits_SD), self._n_tokens), -torch.inf)
            return logits_SV.index_copy_(1, self._tokens_D, logits_SD), rows_SM


def _load_norm(config: PreTrainedConfig, checkpoint: Checkpoint, name: str) -> RMSNorm:
    return RMSNorm(checkpoint.take(f"{name}.weight", config.hidden_size), config.rms_norm_eps)


def _layers_read(config: PreTrainedConfig, model: Decoder) -> tuple[int, ...]:
    """Return the layers after which the head reads. Configs number the layers before which it does."""
    n_layers = len(model.memory_spec.layers)
    named = (getattr(config, "eagle_config", None) or {}).get("eagle_aux_hidden_state_layer_ids")
    before = tuple(named or (2, n_layers // 2, n_layers - 3))
    if before != tuple(sorted(set(before))) or not all(1 <= i <= n_layers for i in before):
        raise UnsupportedModelError(
            f"eagle_aux_hidden_state_layer_ids={list(before)} for a model of {n_layers} layers; implemented are "
            f"ascending numbers from 1 to {n_layers}"
        )
    return tuple(i - 1 for i in before)


def _drafted_tokens(checkpoint: Checkpoint, n_drafted: int, n_tokens: int) -> Tensor | None:
    """Return the ids of the tokens that are drafted. Files hold how far each is behind its number (`d2t`)."""
    if "d2t" not in checkpoint:
        if n_drafted != n_tokens:
            raise FormatError(
                f"{checkpoint.folder} drafts {n_drafted} of {n_tokens} tokens and has no d2t to say which"
            )
        return None
    offsets_D = checkpoint.take_as_stored("d2t", n_drafted).to(checkpoint.device, torch.int64)
    tokens_D = torch.arange(n_drafted, device=checkpoint.device) + offsets_D
    if checkpoint.device.type != "meta" and not 0 <= int(tokens_D.min()) <= int(tokens_D.max()) < n_tokens:
        raise FormatError(f"d2t in {checkpoint.folder} names tokens outside of the model's {n_tokens}")
    return tokens_D
