"""Implements MiniMax (MiniMax 2025, "MiniMax-01"): lightning attention, some layers of softmax attention, experts.

Unlike in other families, the residual is the normed input: h = norm(x), x = a h + b mixer(h), with factors a and b for
each kind of layer. The experts follow in the same form.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hybridmem.memory import AttentionSpec, Step
from hybridmem.memory.recurrences import LinearAttention, linear_attention_spec
from hybridmem.memory.specs import LayerSpec
from hybridmem.models.layers.attention import Attention, Rotary, head_dim_of, load_projections
from hybridmem.models.layers.decoder import Decoder, Function, Mixer
from hybridmem.models.layers.experts import MixtureOfExperts, load_experts, softmax_then_choose
from hybridmem.models.layers.linear import Linear
from hybridmem.models.layers.norms import RMSNorm
from hybridmem.models.layers.vocabulary import Vocabulary
from hybridmem.models.loading.architectures import register
from hybridmem.models.weights.checkpoint import Checkpoint, UnsupportedModelError, check_numbers

if TYPE_CHECKING:
    from transformers import MiniMaxConfig

_LIGHTNING_NORM_EPS = 1e-6
"""Epsilon of the norm after lightning attention, whatever the config's."""
_MOST_OFF = 0.02
"""Largest share by which a stored decay may differ from the computed one: files hold it in 16 bits."""


@register("MiniMaxForCausalLM")
class MiniMax(Decoder):
    """Implements MiniMax: each layer is lightning attention or softmax attention, and then a mixture of experts."""

    def __init__(self, config: MiniMaxConfig, checkpoint: Checkpoint) -> None:
        n_model = config.hidden_size
        kinds = {"linear_attention": "linear_attn", "full_attention": "full_attn", "mlp": "mlp"}
        factors = {kind: (f"{name}_alpha_factor", f"{name}_beta_factor") for kind, name in kinds.items()}
        check_numbers(config, *(name for pair in factors.values() for name in pair))
        vocabulary = Vocabulary.load(checkpoint, config, "model.embed_tokens.weight")
        rotary = Rotary(config, head_dim_of(config), checkpoint.device)

        def part(kind: str, norm: str, function: Mixer | Function) -> _Part:
            alpha, beta = (float(getattr(config, name)) for name in factors[kind])
            return _Part(
                RMSNorm(checkpoint.take(f"{norm}.weight", n_model), config.rms_norm_eps), function, alpha, beta
            )

        layers = []
        for i in range(config.num_hidden_layers):
            prefix, kind = f"model.layers.{i}", config.layer_types[i]
            mixer = _load_mixer(config, checkpoint, prefix, i, rotary)
            experts = _load_mixture(config, checkpoint, f"{prefix}.block_sparse_moe")
            layers.append(
                _Layer(
                    mixer.specs,
                    part(kind, f"{prefix}.input_layernorm", mixer),
                    part("mlp", f"{prefix}.post_attention_layernorm", experts),
                )
            )
        norm = RMSNorm(checkpoint.take("model.norm.weight", n_model), config.rms_norm_eps)
        super().__init__(config, checkpoint, vocabulary, layers, norm)


@dataclass(frozen=True)
class _Part:
    """Computes alpha h + beta function(h) with h = norm(x)."""

    norm: RMSNorm
    function: Mixer | Function
    alpha: float
    beta: float

    def __call__(self, x_TM: Tensor, *arguments: Step) -> Tensor:
        h_TM = self.norm(x_TM)
        return h_TM * self.alpha + self.function(h_TM, *arguments) * self.beta


@dataclass(frozen=True)
class _Layer:
    specs: tuple[LayerSpec, ...]
    mixer: _Part
    feed_forward: _Part

    def __call__(self, x_TM: Tensor, step: Step) -> Tensor:
        return self.feed_forward(self.mixer(x_TM, step))


def _load_mixer(config: MiniMaxConfig, checkpoint: Checkpoint, prefix: str, i: int, rotary: Rotary) -> Mixer:
    kind, head_dim = config.layer_types[i], head_dim_of(config)
    if kind == "linear_attention":
        return LightningAttention(config, checkpoint, f"{prefix}.self_attn", i)
    if kind != "full_attention":
        raise UnsupportedModelError(f"layer_types[{i}]={kind!r}; implemented are linear_attention and full_attention")
    window = None if config.sliding_window is None else int(config.sliding_window)
    spec = AttentionSpec(config.num_attention_heads, config.num_key_value_heads, head_dim, window=window)
    qkv, out = load_projections(checkpoint, f"{prefix}.self_attn", config.hidden_size, spec)
    return Attention(i, spec, qkv, out, rotary=rotary)


def _load_mixture(config: MiniMaxConfig, checkpoint: Checkpoint, prefix: str) -> MixtureOfExperts:
    n_experts, n_model = config.num_local_experts, config.hidden_size
    experts = load_experts(
        checkpoint, f"{prefix}.experts", n_experts, n_model, config.intermediate_size, config.hidden_act,
        names=("w1", "w3", "w2"),
    )  # fmt: skip
    # The router is float32 whatever the model's dtype, because scores decide which experts run, and close scores are
    # common.
    router = checkpoint.take(f"{prefix}.gate.weight", n_experts, n_model, dtype=torch.float32)
    route = partial(softmax_then_choose, renormalise=True)
    return MixtureOfExperts(router, experts, config.num_experts_per_tok, route)


class LightningAttention:
    """Computes W_out(norm(y) * sigmoid(W_gate x)), with y the linear attention of act(W x) with a decay for each head.

    MiniMax 2025, section 2.2.
    """

    def __init__(self, config: MiniMaxConfig, checkpoint: Checkpoint, prefix: str, layer: int) -> None:
        n_model, n_heads, head_dim = config.hidden_size, config.num_attention_heads, head_dim_of(config)
        n_inner, take = n_heads * head_dim, checkpoint.take
        self._rows = Linear(take(f"{prefix}.qkv_proj.weight", 3 * n_inner, n_model), activation=config.hidden_act)
        self._gate = Linear(take(f"{prefix}.output_gate.weight", n_inner, n_model), activation="sigmoid")
        self._norm = RMSNorm(take(f"{prefix}.norm.weight", n_inner), _LIGHTNING_NORM_EPS)
        self._out = Linear(take(f"{prefix}.out_proj.weight", n_model, n_inner))
        rates_H = decay_rates(n_heads, layer, config.num_hidden_layers)
        _check_stored_rates(checkpoint, prefix, rates_H)
        self._recurrence = LinearAttention(-rates_H.to(checkpoint.device), head_dim)
        self._layer, self._n_heads = layer, n_heads
        self.specs = (linear_attention_spec(n_heads, head_dim, head_dim),)

    def __call__(self, x_TM: Tensor, step: Step) -> Tensor:
        rows = self._rows(x_TM)
        y_THV = step.recur(self._layer, rows.view(len(rows), self._n_heads, -1), self._recurrence)
        return self._out(self._norm(y_THV.flatten(1)) * self._gate(x_TM))


def decay_rates(n_heads: int, layer: int, n_layers: int) -> Tensor:
    """Return each head's decay rate, by which the logarithm of the state falls with each token: (H,) float32.

    Rates fall from head to head like the slopes of ALiBi, and from layer to layer.
    """
    heads = torch.arange(1, n_heads + 1, dtype=torch.float32)
    return (1 / 2 ** (8 / n_heads)) ** heads * (1 - layer / (n_layers - 1 + 1e-5) + 1e-5)


def _check_stored_rates(checkpoint: Checkpoint, prefix: str, rates_H: Tensor) -> None:
    """Raise UnsupportedModelError if the checkpoint holds rates that differ from the computed ones."""
    checkpoint.ignore(*(f"{prefix}.{name}_decay" for name in ("query", "key", "diagonal")))
    name = f"{prefix}.slope_rate"
    if name not in checkpoint:
        return
    stored = checkpoint.take(name, len(rates_H), 1, 1, dtype=torch.float32)
    if not stored.is_meta and bool(((stored.cpu().flatten() - rates_H).abs() > _MOST_OFF * rates_H.abs()).any()):
        raise UnsupportedModelError(
            f"{name} of {checkpoint.folder} is {stored.flatten().tolist()}; implemented are the decays that "
            f"num_attention_heads and num_hidden_layers give, {rates_H.tolist()}"
        )
