"""Runs attention modules of transformers as a whole on a memory, where their interface to the cache is too narrow.

Some attention layers choose the rows that they read by an index, convolve their keys and values, or add a bias that
each query computes. Their modules ask the cache for keys of all tokens, which only the memory has. So a function here
does what the module's `forward` does, with the module's projections and norms, and leaves the rest to the memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridmem.memory import ChosenRows, Step
from hybridmem.memory.recurrences import GatedPool
from hybridmem.models.hf.latent import absorb, without_neighbours
from hybridmem.models.hf.mixers import Mix, Module, weights_of
from hybridmem.models.layers.attention import Rotary, turn
from hybridmem.models.layers.distance_bias import DistanceBias, LogScale, Scale, unscaled
from hybridmem.models.layers.indexer import CHOSEN
from hybridmem.models.layers.ngrams import LOCAL, LastTokens, NgramHashes, conv_with_gaps
from hybridmem.models.layers.residual_conv import DynamicConv, ResidualConv
from hybridmem.models.layers.span_indexer import SPAN, MeanSpans
from hybridmem.models.weights.checkpoint import UnsupportedModelError

Angles = tuple[Tensor, Tensor]
"""Cosines and sines of each token's positions as transformers has them, (N, R) each: both halves are the same."""

_CONV_NAMES = {2: "attention_output", 3: "feed_forward"}
"""Maps the number of a layer's convolution to its name in the memory. The first two are those of keys and values."""


def memory_layer(config: Any, layer: int) -> int:
    """Return the layer of the memory's spec that corresponds to layer `layer` of transformers' cache.

    They differ where layers run several times: transformers adds the layers of later passes at the end, while the
    memory has all layers as they run.
    """
    if not hasattr(config, "loop_num_passes"):
        return layer
    end, n_layers = int(config.loop_layer_index_end), len(config.layer_types)
    if layer < end:
        return layer
    if layer >= n_layers:
        return layer - n_layers + end
    return layer + (int(config.loop_num_passes) - 1) * (end - int(config.loop_layer_index_start))


# The function below is for Inkling.


def inkling_attention(module: Module, config: Any) -> Mix:
    """Return the mix of attention with convolved keys and values, and a bias by distance that each query computes."""
    n_heads, dtype = module.num_heads, module.q_proj.weight.dtype
    taps = [_taps_of(conv, dtype) for conv in (module.k_sconv, module.v_sconv)]
    conv = ResidualConv(module.layer_idx, "keys_values", torch.cat(taps, 1))
    bias = _bias_of(module.rel_logits_proj)
    scale: Scale = unscaled
    if not module.is_sliding and config.log_scaling_n_floor is not None:
        scale = LogScale(config.log_scaling_n_floor, config.log_scaling_alpha)

    def mix(x_TM: Tensor, step: Step) -> Tensor:
        k, v = conv(torch.cat([module.k_proj(x_TM), module.v_proj(x_TM)], -1), step).chunk(2, -1)
        q_THD, k_TGD, v_TGD = (y.reshape(len(y), -1, module.head_dim) for y in (module.q_proj(x_TM), k, v))
        q_THD, k_TGD = scale(module.q_norm(q_THD), step), module.k_norm(k_TGD)
        bias_THL = scale(bias(module.r_proj(x_TM).view(len(x_TM), n_heads, -1)), step)
        y_THD = step.attend(module.layer_idx, q_THD, k_TGD, v_TGD, scale=module.scaling, bias=bias_THL)
        out_TM: Tensor = module.o_proj(y_THD.flatten(1))
        return out_TM

    return mix


def inkling_conv(module: Module, _: Any) -> Mix:
    """Return the mix of a convolution of the outputs of attention, or of experts."""
    return ResidualConv(module.layer_idx, _CONV_NAMES[module.conv_idx], _taps_of(module))


def inkling2_conv(module: Module, config: Any) -> Mix:
    """Return the mix of a scaled convolution like `inkling_conv`'s, in a layer that may run several times."""
    scale = (module.conv_kernel_size + 1) ** -0.5
    conv = ResidualConv(module.layer_idx, _CONV_NAMES[module.conv_idx], _taps_of(module), scale)

    def mix(x_TM: Tensor, step: Step, *, cache_offset: int = 0) -> Tensor:
        return conv.at(memory_layer(config, module.layer_idx + cache_offset))(x_TM, step)

    return mix


def inkling2_attention(module: Module, config: Any) -> Mix:
    """Return the mix of attention in which each query also computes a sink, and tokens may compute their taps."""
    if not hasattr(module.q_proj, "linear"):
        raise UnsupportedModelError("Inkling 2 is attached as transformers 5.24 computes it; install at least 5.24")
    n_heads, n_kv, like = module.num_heads, module.num_key_value_heads, module.q_proj.linear.weight
    convs = [weights_of(side.sconv) for side in (module.k_proj, module.v_proj)]
    is_dynamic, n_taps = hasattr(convs[0], "static_weight"), convs[0].conv_kernel_size
    conv: ResidualConv | DynamicConv
    if is_dynamic:
        taps_WE = torch.cat([each.static_weight.detach() for each in convs], 1).to(like.dtype)
        conv = DynamicConv(module.layer_idx, "keys_values", taps_WE, 2 * n_kv, (2 * n_taps + 1) ** -0.5)
    else:
        taps_WE = torch.cat([_taps_of(each, like.dtype) for each in convs], 1)
        conv = ResidualConv(module.layer_idx, "keys_values", taps_WE, (n_taps + 1) ** -0.5)
    relative = module.relative_position_bias
    bias, sinks = _bias_of(relative), torch.zeros(n_heads, device=like.device)

    def mix(
        q_TM: Tensor,
        step: Step,
        *,
        key_hidden_states: Tensor | None = None,
        value_hidden_states: Tensor | None = None,
        cache_offset: int = 0,
    ) -> Tensor:
        layer = memory_layer(config, module.layer_idx + cache_offset)
        k_TM, v_TM = (q_TM if x is None else x for x in (key_hidden_states, value_hidden_states))
        kv, own = torch.cat([module.k_proj.linear(k_TM), module.v_proj.linear(v_TM)], -1), conv.at(layer)
        if isinstance(own, DynamicConv):
            taps = [each.weight_proj(x) for each, x in zip(convs, (k_TM, v_TM), strict=True)]
            kv = own(kv, torch.cat(taps, -1).view(len(kv), 2 * n_kv, -1), step)
        else:
            kv = own(kv, step)
        k_TGD, v_TGD = kv.view(len(kv), 2, n_kv, -1).unbind(1)
        k_TGD, v_TGD = module.k_proj.norm(k_TGD), module.v_proj.norm(v_TGD)
        q_THD = module.q_proj.norm(module.q_proj.linear(q_TM).view(len(q_TM), n_heads, -1), step.positions)
        bias_THL = bias(relative.norm(relative.linear(q_TM).view(len(q_TM), n_heads, -1), step.positions))
        # A sink of s takes the weight that a sink of 0 takes if all other scores are less by s.
        bias_THL = bias_THL - module.sink_proj(q_TM).float()[..., None]
        y_THD = step.attend(layer, q_THD, k_TGD, v_TGD, scale=module.scaling, sinks=sinks, bias=bias_THL)
        out_TM: Tensor = module.o_proj(y_THD.flatten(1), q_TM)
        return out_TM

    return mix


def _taps_of(conv: Module, dtype: torch.dtype | None = None) -> Tensor:
    """Return (W, E) taps, in the dtype of the rows that they convolve."""
    weight: Tensor = weights_of(weights_of(conv).conv1d).weight.detach()
    return weight[:, 0].T.contiguous().to(weight.dtype if dtype is None else dtype)


def _bias_of(module: Module) -> DistanceBias:
    """Return the bias of a module whose `proj` holds profiles of the nearest distances."""
    return DistanceBias.of(weights_of(module).proj.detach())


# The function below is for latent attention to rows that an index chooses.


def indexed_latent_attention(module: Module, config: Any) -> Mix:
    """Return the mix of latent attention to the rows that an index chooses, in this layer or in one before."""
    n_heads, index = module.num_heads, getattr(module, "indexer", None)
    n_plain, n_latent, n_rotary = module.qk_nope_head_dim, module.kv_lora_rank, module.qk_rope_head_dim
    weights_of(module.kv_b_proj)
    has_pools = hasattr(config, "index_kpool")  # Such an index rotates neither queries nor keys.
    choose = None if index is None else _pool_indexer(index) if has_pools else _row_indexer(index)

    def mix(x_TM: Tensor, step: Step, *, position_embeddings: Angles | None = None) -> Tensor:
        angles = None if position_embeddings is None or has_pools else _halves(position_embeddings)
        compressed = module.q_a_layernorm(module.q_a_proj(x_TM))
        q_THD = module.q_b_proj(compressed).view(len(x_TM), n_heads, -1)
        plain_THN, rotary_THR = q_THD.split_with_sizes([n_plain, n_rotary], -1)
        latents, rotary_TR = module.kv_a_proj_with_mqa(x_TM).split_with_sizes([n_latent, n_rotary], -1)
        rotated = torch.cat([rotary_THR, rotary_TR[:, None]], 1)
        if angles is not None:
            rotated = turn(without_neighbours(rotated), *angles)
        if choose is not None:
            step.notes[CHOSEN] = choose(x_TM, compressed, angles, step)
        rows_T1D = torch.cat([module.kv_a_layernorm(latents)[:, None], rotated[:, n_heads:]], -1)

        def attend(q_THD: Tensor, k_T1D: Tensor) -> Tensor:
            return step.attend(module.layer_idx, q_THD, k_T1D, scale=module.scaling, chosen=step.notes[CHOSEN])

        y_THV = absorb(module, (plain_THN, rotated[:, :n_heads]), rows_T1D, attend)
        out_TM: Tensor = module.o_proj(y_THV.flatten(1))
        return out_TM

    return mix


def _row_indexer(index: Module) -> Any:
    """Return a function that chooses rows by an index whose keys are rotated in pairs of neighbours, or of halves."""
    n_heads, n_rotary = index.n_heads, index.qk_rope_head_dim
    in_neighbours = any(base.__name__ in _INDEX_IN_NEIGHBOURS for base in type(index).__mro__)

    def choose(x_TM: Tensor, compressed: Tensor, angles: Angles, step: Step) -> ChosenRows:
        q_THD = index.wq_b(compressed).view(len(x_TM), n_heads, -1)
        both = torch.cat([q_THD, index.k_norm(index.wk(x_TM))[:, None]], 1)
        if in_neighbours:
            both = torch.cat([without_neighbours(both[..., :n_rotary]), both[..., n_rotary:]], -1)
        both = turn(both, *angles)
        return step.choose(index.layer_idx, both[:, :n_heads], both[:, n_heads:], _head_weights(index, x_TM))

    return choose


def _pool_indexer(index: Module) -> Any:
    """Return a function that chooses spans by an index. Its keys are gated averages of tokens' keys, not rotated."""
    recurrence, gate = GatedPool(index.index_kpool_compress_ape.detach().float()), index.index_kpool_compress_gate

    def choose(x_TM: Tensor, compressed: Tensor, _: Angles | None, step: Step) -> ChosenRows:
        q_THD, k_TD = index.wq_b(compressed).view(len(x_TM), index.n_heads, -1), index.k_norm(index.wk(x_TM))
        if index.index_kpool > 1:
            rows = torch.cat([k_TD, F.linear(x_TM, gate)], -1)
            k_TD = step.recur(index.layer_idx, rows, recurrence, name=SPAN)
        return step.choose(index.layer_idx, q_THD, k_TD[:, None], _head_weights(index, x_TM))

    return choose


def _head_weights(index: Module, x_TM: Tensor) -> Tensor:
    """Return the weights of an index's heads, (N, H) float32."""
    product = index.weights_proj
    weights_TH: Tensor = product(x_TM.to(product.weight.dtype)).float() * index.n_heads**-0.5
    return weights_TH


_INDEX_IN_NEIGHBOURS = ("GlmMoeDsaIndexer",)
"""Classes of indexes that rotate pairs of neighbours."""


# The function below is for Qwen4-Exp.


def qwen4_exp_attention(module: Module, config: Any) -> Mix:
    """Return the mix of attention with a gate, to spans that an index chooses by the means of their keys."""
    index, size, like = module.indexer, module.head_dim, module.o_proj.weight.detach()
    n_rotated = 2 * len(Rotary(config, size, like.device, is_partial=True).rotation.frequencies)
    spans = MeanSpans.of(
        module.layer_idx, index.k_layernorm, index.compress_ratio, index.index_head_dim, n_rotated, like
    )

    def mix(x_TM: Tensor, step: Step, *, position_embeddings: Angles) -> Tensor:
        angles = _halves(position_embeddings)
        heads = index.index_qk_proj(x_TM).view(len(x_TM), -1, index.index_head_dim)
        queries = index.q_layernorm(heads[:, : index.index_n_heads])
        chosen = spans.choose(queries, heads[:, -1], angles, step)
        q_THD, gate_THD = module.q_proj(x_TM).view(len(x_TM), -1, 2 * size).chunk(2, -1)
        k_TGD, v_TGD = (product(x_TM).view(len(x_TM), -1, size) for product in (module.k_proj, module.v_proj))
        q_THD, k_TGD = turn(module.q_norm(q_THD), *angles), turn(module.k_norm(k_TGD), *angles)
        y_THD = step.attend(module.layer_idx, q_THD, k_TGD, v_TGD, scale=module.scaling, chosen=chosen)
        out_TM: Tensor = module.o_proj((y_THD * gate_THD.sigmoid()).flatten(1))
        return out_TM

    return mix


def qwen4_exp_ngrams(module: Module, _: Any) -> Mix:
    """Return the mix of features of n-grams. The memory knows the tokens; so their ids are not read from the call."""
    embedding, n_streams = module.ple_embedding, module.hc_count
    parts = embedding.layer_multipliers, embedding.ngram_heads_vocab_sizes, embedding.ngram_heads_offsets
    hashes = NgramHashes(embedding.eos_token_id, *(part.detach() for part in parts))
    like = module.key_proj.weight
    last = LastTokens(module.layer_idx, hashes.n_before, like.dtype, like.device)
    conv = conv_with_gaps(weights_of(module.conv1d).weight.detach()[:, 0], embedding.ngram_size)

    def mix(x_TE: Tensor, step: Step) -> Tensor:
        rows_TN = hashes(step.token_ids, last(step))
        features = embedding.ngram_embedding(rows_TN.to(embedding.ngram_embedding.weight.device)).flatten(1)
        features = features.to(x_TE.device)
        agreement = module.norm_key(module.key_proj(features)) * module.norm_query(x_TE)
        gate_TS1 = agreement.view(len(x_TE), n_streams, -1).sum(-1, keepdim=True) * module.hidden_size**-0.5
        gate_TS1 = torch.sigmoid(gate_TS1.abs().clamp_min(1e-6).sqrt() * gate_TS1.sign())
        y_TE: Tensor = (gate_TS1 * module.value_proj(features)[:, None]).flatten(1)
        return y_TE + step.recur(module.layer_idx, module.norm_conv(y_TE), conv, name=LOCAL)

    return mix


def _halves(angles: Angles) -> Angles:
    """Return cosines and sines as `turn` takes them, (N, 1, R / 2) each."""
    cos, sin = (each[:, None, : each.shape[-1] // 2] for each in angles)
    return cos, sin


ATTENTIONS: dict[str, Callable[[Module, Any], Mix]] = {
    "DeepseekV32Attention": indexed_latent_attention,
    "Glm5NextTextAttention": indexed_latent_attention,
    "GlmMoeDsaAttention": indexed_latent_attention,
    "Inkling2FullAttention": inkling2_attention,
    "Inkling2LoopFullAttention": inkling2_attention,
    "Inkling2LoopShortConvolution": inkling2_conv,
    "Inkling2LoopSlidingAttention": inkling2_attention,
    "Inkling2ShortConvolution": inkling2_conv,
    "Inkling2SlidingAttention": inkling2_attention,
    "InklingAttention": inkling_attention,
    "InklingShortConvolution": inkling_conv,
    "Qwen4ExpTextAttention": qwen4_exp_attention,
    "Qwen4ExpTextPLELayer": qwen4_exp_ngrams,
}
"""Maps the class name of a module to the function that makes its mix, of the module and the model's config."""
