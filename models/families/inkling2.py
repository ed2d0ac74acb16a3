"""Implements Inkling 2 (Thinking Machines 2026): like Inkling, but parts of a layer also read earlier blocks of layers.

The input of each part is a mixture of what each block of layers has left of the same token. In layers that attend to
all tokens, keys and values have mixtures of their own, and each token computes the taps of their convolutions. Each
query computes a sink of its own as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridmem.memory import Step
from hybridmem.memory.kernels import steady
from hybridmem.memory.specs import LayerSpec
from hybridmem.models.families.inkling import attention_spec_of, head_sizes
from hybridmem.models.layers.block_attention import BlockAttention, MessageGate
from hybridmem.models.layers.decoder import Decoder, Function, Layer
from hybridmem.models.layers.distance_bias import DistanceBias, LogScale, unscaled
from hybridmem.models.layers.experts import MixtureOfExperts, sigmoid_then_choose
from hybridmem.models.layers.linear import Linear
from hybridmem.models.layers.mlp import CappedMLP
from hybridmem.models.layers.norms import RMSNorm
from hybridmem.models.layers.residual_conv import DynamicConv, ResidualConv, check_taps
from hybridmem.models.layers.vocabulary import Vocabulary
from hybridmem.models.loading.architectures import register
from hybridmem.models.weights.checkpoint import Checkpoint, check_numbers, require

if TYPE_CHECKING:
    from transformers import Inkling2TextConfig

ROOT = "model.llm"
PREVIOUS = "rows of the pass before"
"""Key in a step's notes of what layers have left that ran before and run again, (T, B, M)."""


@register("Inkling2ForCausalLM")
class Inkling2(Decoder):
    """Implements Inkling 2's language model: each layer is attention, over all tokens or a window, and experts."""

    def __init__(self, config: Inkling2TextConfig, checkpoint: Checkpoint) -> None:
        require(config, scoring_func="sigmoid")
        names = "mlp_gate_softcap", "mlp_up_softcap", "final_logit_softcapping", "unpadded_vocab_size"
        check_numbers(config, *names, "n_layers_per_attn_res_block", "log_scaling_n_floor", above=0)
        n_model, eps = config.hidden_size, config.rms_norm_eps

        def norm(name: str) -> RMSNorm:
            return RMSNorm(checkpoint.take(f"{ROOT}.{name}.weight", n_model), eps)

        vocabulary = Vocabulary(
            checkpoint, config, f"{ROOT}.embed.weight", f"{ROOT}.unembed.weight", embedding_norm=norm("embed_norm"),
            logits_cap=config.final_logit_softcapping, n_tokens=config.unpadded_vocab_size,
        )  # fmt: skip
        layers = self.in_order([load_layer(config, checkpoint, i) for i in range(config.num_hidden_layers)])
        last, last_norm = BlockAttention.load(checkpoint, f"{ROOT}.attn_res.output_query", n_model), norm("norm")
        super().__init__(config, checkpoint, vocabulary, layers, lambda x_TBM: last_norm(last(x_TBM)[:, 0]))

    def in_order(self, layers: Sequence[BlockLayer]) -> Sequence[Layer]:
        """Return the layers in the order in which they run."""
        return layers


@dataclass(frozen=True)
class Messages:
    """Adds, to the inputs of a layer's parts, mixtures of the rows that earlier layers have left.

    Attributes:
        queries: mix earlier rows for queries, for keys, for values and for experts.
        gates: one for each of these four mixtures.
    """

    queries: BlockAttention
    gates: Sequence[MessageGate]


@dataclass(frozen=True)
class BlockLayer:
    """Adds the outputs of attention and experts to the last row of each token, (T, B, M).

    Attributes:
        attention_input: mixes the rows for queries, keys and values, or for all of them; None in the first layer.
        norms: of the inputs of queries, keys and values.
        begins_block: whether attention's output begins a new row.
        messages: None where no layer has run before.
    """

    attention_input: BlockAttention | None
    norms: tuple[Function, Function, Function]
    attention: SinkingAttention
    attention_conv: ResidualConv
    experts_input: BlockAttention
    experts_norm: Function
    experts: Function
    experts_conv: ResidualConv
    begins_block: bool
    messages: Messages | None = None

    @property
    def specs(self) -> tuple[LayerSpec, ...]:
        return (*self.attention.specs, self.attention_conv.spec, self.experts_conv.spec)

    def at(self, layer: int, messages: Messages | None) -> BlockLayer:
        """Return the same layer with a memory of its own."""
        return replace(
            self, attention=self.attention.at(layer), attention_conv=self.attention_conv.at(layer),
            experts_conv=self.experts_conv.at(layer), messages=messages,
        )  # fmt: skip

    def __call__(self, x_TBM: Tensor, step: Step) -> Tensor:
        x_TBM = x_TBM if x_TBM.dim() == 3 else x_TBM[:, None]
        said = None if self.messages is None else self.messages.queries(step.notes[PREVIOUS])
        mixed = x_TBM if self.attention_input is None else self.attention_input(x_TBM)
        mixed = mixed if mixed.shape[1] == 3 else mixed[:, -1:].expand(-1, 3, -1)
        q_TM, k_TM, v_TM = (norm(self._with_message(i, mixed[:, i], said)) for i, norm in enumerate(self.norms))
        y_TM = self.attention_conv(self.attention(q_TM, k_TM, v_TM, step), step)
        rows = (x_TBM, y_TM) if self.begins_block else (x_TBM[:, :-1], x_TBM[:, -1] + y_TM)
        x_TBM = torch.cat([rows[0], rows[1][:, None]], 1)
        mixed_TM = self._with_message(3, self.experts_input(x_TBM)[:, 0], said)
        y_TM = self.experts_conv(self.experts(self.experts_norm(mixed_TM)), step)
        return torch.cat([x_TBM[:, :-1], (x_TBM[:, -1] + y_TM)[:, None]], 1)

    def _with_message(self, i: int, x_TM: Tensor, said_T4M: Tensor | None) -> Tensor:
        return x_TM if self.messages is None or said_T4M is None else self.messages.gates[i](x_TM, said_T4M[:, i])


class SinkingAttention:
    """Computes attention with a bias, a sink and a gate that each query computes, and with keys that have a limit."""

    def __init__(self, config: Inkling2TextConfig, checkpoint: Checkpoint, layer: int) -> None:
        prefix, n_model, n_taps = f"{ROOT}.layers.{layer}.attn", config.hidden_size, config.conv_kernel_size
        check_taps(n_taps)
        spec, n_distances = attention_spec_of(config, layer)
        n_q, n_kv, _, n_weights = head_sizes(spec, config.d_rel)
        self._layer, self._spec, self._eps = layer, spec, config.rms_norm_eps
        is_full = spec.window is None

        def linear(names: dict[str, int]) -> Linear:
            return Linear(*(checkpoint.take(f"{prefix}.{name}", size, n_model) for name, size in names.items()))

        self._query_sizes = {
            "wq_du.weight": n_q, "wr_du.weight": n_weights, "attn_sink_proj.weight": spec.n_query_heads,
            "gate_attn.weight": n_q,
        }  # fmt: skip
        self._query = linear(self._query_sizes)
        dynamic = {x: {f"{x}_sconv.weight_proj": spec.n_kv_heads * n_taps} if is_full else {} for x in "kv"}
        self._key, self._value = (linear({f"w{x}_dv.weight": n_kv, **dynamic[x]}) for x in "kv")
        self._key_sizes = [n_kv, spec.n_kv_heads * n_taps if is_full else 0]
        self._out = Linear.load(checkpoint, f"{prefix}.wo_ud", n_model, n_q)
        self._conv: ResidualConv | DynamicConv
        if is_full:
            taps = torch.cat([checkpoint.take(f"{prefix}.{x}_sconv.static_w", n_taps, n_kv) for x in "kv"], 1)
            self._conv = DynamicConv(layer, "keys_values", taps, 2 * spec.n_kv_heads, (2 * n_taps + 1) ** -0.5)
        else:
            rows = {f"{prefix}.{x}_sconv": n_kv for x in "kv"}
            self._conv = ResidualConv.load(checkpoint, rows, layer, "keys_values", n_taps, (n_taps + 1) ** -0.5)
        self._q_scale, self._r_scale = (
            checkpoint.take(f"{prefix}.{x}_l2_clip.scale", spec.n_query_heads, size)
            for x, size in (("q", spec.head_dim), ("rel", config.d_rel))
        )
        self._most, self._most_weights = config.qk_l2_clip_threshold, config.rel_l2_clip_threshold
        self._bias = DistanceBias.load(checkpoint, f"{prefix}.rel_logits_proj.proj", config.d_rel, n_distances)
        self._scale = LogScale(config.log_scaling_n_floor, config.log_scaling_alpha) if is_full else unscaled
        self._sinks, self._sigmoid = torch.zeros(spec.n_query_heads, device=checkpoint.device), steady(torch.sigmoid)
        self.specs: tuple[LayerSpec, ...] = (spec, self._conv.spec)

    def at(self, layer: int) -> SinkingAttention:
        """Return the same attention with a memory in another layer."""
        other = object.__new__(SinkingAttention)
        vars(other).update(vars(self), _layer=layer, _conv=self._conv.at(layer))
        return other

    def __call__(self, q_TM: Tensor, k_TM: Tensor, v_TM: Tensor, step: Step) -> Tensor:
        spec = self._spec
        q, weights, sinks_TH, gate = self._query(q_TM).split_with_sizes([*self._query_sizes.values()], -1)
        (k, k_taps), (v, v_taps) = (
            product(x).split_with_sizes(self._key_sizes, -1) for product, x in ((self._key, k_TM), (self._value, v_TM))
        )
        kv = torch.cat([k, v], -1)
        if isinstance(self._conv, DynamicConv):
            kv = self._conv(kv, torch.cat([k_taps, v_taps], -1).view(len(kv), 2 * spec.n_kv_heads, -1), step)
        else:
            kv = self._conv(kv, step)
        k_TGD, v_TGD = kv.view(len(kv), 2, spec.n_kv_heads, -1).unbind(1)
        v_TGD = F.rms_norm(v_TGD, v_TGD.shape[-1:], eps=self._eps)
        q_THD = _clip(q.reshape(len(q), spec.n_query_heads, -1) * self._q_scale, self._most)
        weights_THR = _clip(weights.reshape(len(q), spec.n_query_heads, -1) * self._r_scale, self._most_weights)
        bias_THL = self._bias(self._scale(weights_THR, step))
        # A sink of s takes the weight that a sink of 0 takes if all other scores are less by s.
        bias_THL = bias_THL - sinks_TH.float()[..., None]
        y_THD = step.attend(
            self._layer, self._scale(q_THD, step), _clip(k_TGD, self._most), v_TGD, sinks=self._sinks, bias=bias_THL
        )
        return self._out(y_THD.flatten(1) * self._sigmoid(gate))


def _clip(x_THD: Tensor, most: float) -> Tensor:
    """Return heads, of which those longer than `most` are scaled to that length."""
    length: Tensor = torch.linalg.vector_norm(x_THD.float(), dim=-1, keepdim=True)
    return x_THD * (most / (length + 1e-6)).clamp(max=1.0).to(x_THD.dtype)


def load_layer(config: Inkling2TextConfig, checkpoint: Checkpoint, i: int) -> BlockLayer:
    """Load a layer, in the form for the first time that it runs."""
    prefix, n_model, n_taps = f"{ROOT}.layers.{i}", config.hidden_size, config.conv_kernel_size

    def norm(name: str) -> RMSNorm:
        return RMSNorm(checkpoint.take(f"{prefix}.{name}.weight", n_model), config.rms_norm_eps)

    def conv(name: str, spec_name: str) -> ResidualConv:
        return ResidualConv.load(
            checkpoint, {f"{prefix}.{name}": n_model}, i, spec_name, n_taps, (n_taps + 1) ** -0.5
        )  # fmt: skip

    attention = SinkingAttention(config, checkpoint, i)
    if config.layer_types[i] == "hybrid":
        n_queries, norms = 3, (norm("q_input_norm"), norm("k_input_norm"), norm("v_input_norm"))
    else:
        n_queries, norms = 1, (norm("attn_norm"),) * 3
    queries = f"{ROOT}.attn_res.attn_queries.{i - 1}"
    return BlockLayer(
        BlockAttention.load(checkpoint, queries, n_model, n_queries) if i else None, norms, attention,
        conv("attn_sconv", "attention_output"),
        BlockAttention.load(checkpoint, f"{ROOT}.attn_res.mlp_queries.{i}", n_model), norm("mlp_norm"),
        _load_experts(config, checkpoint, f"{prefix}.mlp"), conv("mlp_sconv", "feed_forward"),
        begins_block=i % config.n_layers_per_attn_res_block == 0,
    )  # fmt: skip


def _load_experts(config: Inkling2TextConfig, checkpoint: Checkpoint, prefix: str) -> MixtureOfExperts:
    n_model, n_inner, n_experts = config.hidden_size, config.moe_intermediate_size, config.n_routed_experts
    caps = config.mlp_gate_softcap, config.mlp_up_softcap
    # In the first of these, rows of the gate and of what it multiplies alternate.
    gate_up = checkpoint.take(f"{prefix}.experts.w13_weight", n_experts, 2 * n_inner, n_model)
    down = checkpoint.take(f"{prefix}.experts.w2_weight", n_experts, n_model, n_inner)
    experts = [
        CappedMLP(Linear(rows[0::2]), Linear(rows[1::2]), Linear(own), caps)
        for rows, own in zip(gate_up, down, strict=True)
    ]
    router = checkpoint.take(f"{prefix}.gate.weight", n_experts, n_model, dtype=torch.float32)
    bias = checkpoint.take(f"{prefix}.gate.bias", n_experts, dtype=torch.float32)
    route = partial(sigmoid_then_choose, bias_E=bias, scale=config.route_scale)
    return MixtureOfExperts(router, experts, config.num_experts_per_tok, route)
