"""Implements xLSTM (Beck et al. 2024, 2025): layers with a matrix state and exponential gates, and no attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridmem.memory import Step
from hybridmem.memory.recurrences import MLSTM, mlstm_spec
from hybridmem.models.layers.decoder import Block, Decoder, Function
from hybridmem.models.layers.linear import Linear
from hybridmem.models.layers.mlp import GatedMLP
from hybridmem.models.layers.norms import RMSNorm
from hybridmem.models.layers.vocabulary import HEAD, Vocabulary
from hybridmem.models.loading.architectures import register
from hybridmem.models.weights.checkpoint import Checkpoint, UnsupportedModelError, check_numbers, require

if TYPE_CHECKING:
    from transformers import xLSTMConfig


@register("xLSTMForCausalLM")
class XLSTM(Decoder):
    """Implements xLSTM: each layer is an mLSTM mixer and a gated MLP.

    The config's fields for transformers' kernels and chunk sizes have no effect on results, so they are ignored.
    """

    def __init__(self, config: xLSTMConfig, checkpoint: Checkpoint) -> None:
        n_model = config.hidden_size
        # Transformers would round states to bfloat16 between single tokens, but not between the chunks of a prompt.
        # Then outputs would depend on how a text is split into steps.
        require(config, embedding_dim=n_model, inference_state_dtype="float32")
        check_numbers(config, "gate_soft_cap", "output_logit_soft_cap", above=0)
        check_numbers(config, "eps", "norm_eps")
        # The class has a separate output head, whatever `tie_word_embeddings` says.
        vocabulary = Vocabulary(
            checkpoint, config, "backbone.embeddings.weight", HEAD, logits_cap=config.output_logit_soft_cap
        )

        def norm(name: str) -> Function:
            rms = RMSNorm(checkpoint.take(f"backbone.{name}.weight", n_model), config.norm_eps)
            if not config.use_bias or name == "out_norm":
                return rms
            return _BiasedNorm(rms, checkpoint.take(f"backbone.{name}.bias", n_model))

        layers = [
            Block(
                (norm(f"blocks.{i}.norm_mlstm"), Mixer(config, checkpoint, f"backbone.blocks.{i}.mlstm_layer", i)),
                (norm(f"blocks.{i}.norm_ffn"), _load_mlp(config, checkpoint, f"backbone.blocks.{i}.ffn")),
            )
            for i in range(config.num_blocks)
        ]
        super().__init__(config, checkpoint, vocabulary, layers, norm("out_norm"))


@dataclass(frozen=True)
class _BiasedNorm:
    norm: RMSNorm
    bias_M: Tensor

    def __call__(self, x_TM: Tensor) -> Tensor:
        return self.norm(x_TM) + self.bias_M


def _take_products(
    config: xLSTMConfig, checkpoint: Checkpoint, prefix: str, parts: dict[str, int], fused: str, *, has_bias: bool
) -> list[tuple[Tensor, Tensor | None]]:
    """Return weights and biases of products of the layer's input. Files hold them one by one, or joined into one.

    Args:
        parts: the name of each product, and its number of outputs.
        fused: the name of the joined product, which has all outputs.
    """
    sizes, n_model = list(parts.values()), config.hidden_size
    if config.weight_mode == "single":
        return [
            (
                checkpoint.take(f"{prefix}.{name}.weight", size, n_model),
                checkpoint.take_optional(has_bias, f"{prefix}.{name}.bias", size),
            )
            for name, size in parts.items()
        ]
    weights = checkpoint.take(f"{prefix}.{fused}.weight", sum(sizes), n_model).split_with_sizes(sizes)
    bias = checkpoint.take_optional(has_bias, f"{prefix}.{fused}.bias", sum(sizes))
    biases = [None] * len(sizes) if bias is None else bias.split_with_sizes(sizes)
    return list(zip(weights, biases, strict=True))


def _joined(*products: tuple[Tensor, Tensor | None], activation: str | None = None) -> Linear:
    biases = [bias for _, bias in products if bias is not None]
    return Linear(
        *(weight for weight, _ in products), bias=torch.cat(biases) if biases else None, activation=activation
    )


def _load_mlp(config: xLSTMConfig, checkpoint: Checkpoint, prefix: str) -> GatedMLP:
    n_model, multiple = config.hidden_size, config.ffn_round_up_to_multiple_of
    check_numbers(config, "ffn_round_up_to_multiple_of", above=0)
    n_inner = int((n_model * config.ffn_proj_factor + multiple - 1) // multiple * multiple)
    parts = {"proj_up_gate": n_inner, "proj_up": n_inner}
    gate, up = _take_products(config, checkpoint, prefix, parts, "proj_up_gate_z", has_bias=config.use_bias)
    down = Linear.load(checkpoint, f"{prefix}.proj_down", n_model, n_inner, has_bias=config.use_bias)
    return GatedMLP(_joined(gate, activation="silu"), _joined(up), down)


class Mixer:
    """Computes W_out(sigmoid(o) norm(y)), with y the mLSTM of q, k, v and gates (Beck et al. 2024, eq. 19 to 27).

    The norm is a layer norm of each head.
    """

    def __init__(self, config: xLSTMConfig, checkpoint: Checkpoint, prefix: str, layer: int) -> None:
        n_model, n_heads, has_bias = config.hidden_size, config.num_heads, config.use_bias
        check_numbers(config, "num_heads", above=0)
        n_keys, n_values = (int(n_model * factor) for factor in (config.qk_dim_factor, config.v_dim_factor))
        if n_keys % n_heads or n_values % n_heads or min(n_keys, n_values) < 1:
            raise UnsupportedModelError(
                f"num_heads={n_heads} heads cannot share {n_keys} channels of keys and {n_values} of values, which are "
                f"hidden_size={n_model} times qk_dim_factor={config.qk_dim_factor} and "
                f"v_dim_factor={config.v_dim_factor}"
            )
        parts = {"q": n_keys, "k": n_keys, "v": n_values, "ogate_preact": n_values}
        *qkv, gate = _take_products(config, checkpoint, prefix, parts, "qkv_opreact", has_bias=has_bias)
        parts = {"igate_preact": n_heads, "fgate_preact": n_heads}
        self._gates = _joined(*_take_products(config, checkpoint, prefix, parts, "ifgate_preact", has_bias=True))
        self._qkv, self._out_gate = _joined(*qkv), _joined(gate, activation="sigmoid")
        self._out = Linear.load(checkpoint, f"{prefix}.out_proj", n_model, n_values, has_bias=has_bias)
        self._norm_V = checkpoint.take(f"{prefix}.multihead_norm.weight", n_values)
        self._norm_bias_V = checkpoint.take_optional(has_bias, f"{prefix}.multihead_norm.bias", n_values)
        self._cap, self._norm_eps, self._n_heads, self._layer = config.gate_soft_cap, config.norm_eps, n_heads, layer
        sizes = n_values // n_heads, n_keys // n_heads
        self._recurrence = MLSTM(*sizes, config.eps, torch.zeros(n_heads, device=checkpoint.device))
        self.specs = (mlstm_spec(n_heads, *sizes),)

    def __call__(self, x_TM: Tensor, step: Step) -> Tensor:
        gates_T2H = torch.tanh(self._gates(x_TM) / self._cap) * self._cap
        y_TV = step.recur(self._layer, torch.cat([self._qkv(x_TM), gates_T2H], -1), self._recurrence)
        y_THV = y_TV.view(len(x_TM), self._n_heads, -1).float()
        normed_TV = F.layer_norm(y_THV, y_THV.shape[2:], eps=self._norm_eps).flatten(1).to(x_TM.dtype) * self._norm_V
        if self._norm_bias_V is not None:
            normed_TV = normed_TV + self._norm_bias_V
        return self._out(self._out_gate(x_TM) * normed_TV)
