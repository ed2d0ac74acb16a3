"""Runs recurrent modules of transformers on a memory: the modules' projections and norms with one of our recurrences.

Large matrices stay in the modules and are read there at each call. Small tensors of the recurrence (taps, decays,
biases) are copied once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridmem.memory import Step
from hybridmem.memory.recurrences import (
    MLSTM,
    RGLRU,
    RWKV4,
    SSD,
    CausalConv,
    DeltaRule,
    DeltaRuleShape,
    LinearAttention,
    Mamba1,
    ShortConv,
    SSDShape,
)
from hybridmem.models.layers.delta_mixer import NAME
from hybridmem.models.layers.mamba_mixers import head_spec, split_conv
from hybridmem.models.layers.norms import SplitNorm
from hybridmem.models.layers.query_key_conv import QueryKeyConv, around
from hybridmem.models.layers.rwkv import TokenMix
from hybridmem.models.weights.checkpoint import UnsupportedModelError

Module = Any
"""A module of transformers. Its attributes have no static types."""

Mix = Callable[..., Tensor]
"""A function that maps packed inputs of a mixer (N, M) and the step to the mixer's outputs (N, M).

If it has parameters by keyword alone, it is given the arguments of these names of the module's call, packed as well.
"""

MixMany = Callable[..., tuple[Tensor, ...]]
"""The same, with several outputs (N, ...)."""


def weights_of(module: Module) -> Module:
    """Return a module whose tensors are read instead of calling it.

    Raises UnsupportedModelError if an adapter is around the module.
    """
    if hasattr(module, "base_layer"):
        raise UnsupportedModelError(
            f"an adapter around a {type(module.base_layer).__name__} whose weights a layer reads; merge it "
            "into the weights, peft_model.merge_and_unload(), and attach what that returns"
        )
    return module


def _conv_of(conv: Module, *, activation: bool = True) -> CausalConv:
    conv = weights_of(conv)
    bias = None if conv.bias is None else conv.bias.detach()
    return CausalConv(conv.weight.detach()[:, 0].T.contiguous(), bias, activation)


def _decay_of(module: Module) -> Tensor:
    """Return -exp(A_log), float32."""
    a_log: Tensor = module.A_log.detach().float()
    return -a_log.exp()


def mamba(module: Module, *, norms: SplitNorm | None = None) -> Mix:
    """Return the mix of a Mamba-1 mixer."""
    dt_proj = weights_of(module.dt_proj)
    recurrence = Mamba1(
        conv=_conv_of(module.conv1d),
        x_proj=module.x_proj,
        dt_proj=lambda dt_TR: F.linear(dt_TR, dt_proj.weight),  # The bias of this product belongs to the recurrence.
        dt_bias_E=dt_proj.bias.detach(),
        a_NE=_decay_of(module).T.contiguous(),
        d_E=module.D.detach().float(),
        norms=norms,
    )

    def mix(x_TM: Tensor, step: Step) -> Tensor:
        rows_TE, gate_TE = module.in_proj(x_TM).chunk(2, -1)
        y_TE = step.recur(module.layer_idx, rows_TE.contiguous(), recurrence)
        out_TM: Tensor = module.out_proj(y_TE * module.act(gate_TE))
        return out_TM

    return mix


def jamba_mamba(module: Module) -> Mix:
    """Return the mix of a Mamba-1 mixer with norms of dt, B and C."""
    norms = module.dt_layernorm, module.b_layernorm, module.c_layernorm
    return mamba(module, norms=SplitNorm(norms[0].variance_epsilon, *(norm.weight.detach() for norm in norms)))


def falcon_mamba(module: Module) -> Mix:
    """Return the mix of a Mamba-1 mixer with norms of dt, B and C that have no weights."""
    sizes = module.time_step_rank, module.ssm_state_size, module.ssm_state_size
    ones = [torch.ones(size, dtype=module.x_proj.weight.dtype, device=module.x_proj.weight.device) for size in sizes]
    return mamba(module, norms=SplitNorm(module.rms_eps, *ones))


def _ssd_of(module: Module) -> SSD:
    shape = SSDShape(module.num_heads, module.head_dim, module.n_groups, module.ssm_state_size, module.conv_kernel_size)
    return SSD(
        shape=shape, conv=_conv_of(module.conv1d), dt_bias_H=module.dt_bias.detach().float(), a_H=_decay_of(module),
        d_H=module.D.detach().float(), dt_limits=tuple(module.time_step_limit),
    )  # fmt: skip


def mamba2(module: Module) -> Mix:
    """Return the mix of a Mamba-2 mixer."""
    recurrence = _ssd_of(module)
    shape = recurrence.shape

    def mix(x_TM: Tensor, step: Step) -> Tensor:
        gate_TI, rows_TR = module.in_proj(x_TM).split([shape.n_inner, shape.n_channels + shape.n_heads], -1)
        y_TI = step.recur(module.layer_idx, rows_TR.contiguous(), recurrence)
        out_TM: Tensor = module.out_proj(module.norm(y_TI, gate_TI))
        return out_TM

    return mix


def falcon_h1_mamba(module: Module) -> Mix:
    """Return the mix of a Mamba-2 mixer whose input and projections are scaled, and which may have no norm."""
    recurrence = _ssd_of(module)
    shape = recurrence.shape

    def mix(x_TM: Tensor, step: Step) -> Tensor:
        projected = module.in_proj(x_TM * module.ssm_in_multiplier) * module.mup_vector.flatten()
        gate_TI, rows_TR = projected.split([shape.n_inner, shape.n_channels + shape.n_heads], -1)
        y_TI = step.recur(module.layer_idx, rows_TR.contiguous(), recurrence)
        y_TI = module.norm(y_TI, gate_TI) if module.mamba_rms_norm else y_TI * F.silu(gate_TI)
        out_TM: Tensor = module.out_proj(y_TI)
        return out_TM

    return mix


def zamba_mamba(module: Module) -> Mix:
    """Return the mix of a Mamba-1 mixer with heads, whose rows of x and of the gate alternate."""
    heads, weights, n_each = module.n_mamba_heads, weights_of(module), module.mamba_head_dim
    x_proj, dt_proj = weights.x_proj_weight.detach(), weights.dt_proj_weight.detach()
    rates, direct, dt_bias = _decay_of(module), module.D.detach().float(), module.dt_proj_bias.detach()
    recurrences = [
        Mamba1(conv, partial(F.linear, weight=x_proj[i]), partial(F.linear, weight=dt_proj[i]), dt_bias[i],
               rates[i].T.contiguous(), direct[i])
        for i, conv in enumerate(split_conv(_conv_of(module.conv1d), heads))
    ]  # fmt: skip
    names = [head_spec(i, n_each, module.ssm_state_size, module.conv_kernel_size).name for i in range(heads)]

    def mix(x_TM: Tensor, step: Step) -> Tensor:
        rows_TE, gate_TE = module.in_proj(x_TM).view(len(x_TM), -1, 2).unbind(-1)
        parts = zip(rows_TE.chunk(heads, -1), recurrences, names, strict=True)
        y = [step.recur(module.layer_idx, rows.contiguous(), one, name=name) for rows, one, name in parts]
        out_TM: Tensor = module.out_proj(torch.cat(y, -1) * module.act(gate_TE))
        return out_TM

    return mix


def lightning_attention(module: Module) -> Mix:
    """Return the mix of linear attention with a decay for each head."""
    n_heads, recurrence = (
        module.num_attention_heads,
        LinearAttention(-module.slope_rate.float().flatten(), module.head_dim),
    )

    def mix(x_TM: Tensor, step: Step) -> Tensor:
        rows = module.act_fn(module.qkv_proj(x_TM)).view(len(x_TM), n_heads, -1)
        y_TI = module.norm(step.recur(module.layer_idx, rows, recurrence).flatten(1))
        out_TM: Tensor = module.out_proj(module.output_gate(x_TM).sigmoid() * y_TI)
        return out_TM

    return mix


def _delta(
    module: Module,
    project: Callable[[Tensor], tuple[Tensor, Tensor, Tensor, Tensor]],
    *,
    most_beta: float = 1.0,
    norm: str = "norm",
    out: str = "out_proj",
) -> Mix:
    """Return the mix of a gated delta rule's mixer.

    Args:
        project: a function that returns queries, keys and values in one tensor, the gate, b and a, (N, ...) each.
        most_beta: the number below which beta stays.
        norm, out: the names of the norm and of the last product.
    """
    shape = DeltaRuleShape(
        module.num_v_heads, module.num_k_heads, module.head_v_dim, module.head_k_dim, module.conv_kernel_size
    )
    recurrence = DeltaRule(
        shape=shape, conv=_conv_of(module.conv1d), a_bias_A=module.dt_bias.detach().float(), rate_A=_decay_of(module)
    )

    def mix(x_TM: Tensor, step: Step) -> Tensor:
        qkv, gate, b, a = project(x_TM)
        y_TI = step.recur(module.layer_idx, torch.cat([qkv, b.sigmoid() * most_beta, a], -1), recurrence, name=NAME)
        heads = (-1, shape.value_dim)
        normed: Tensor = getattr(module, norm)(y_TI.reshape(heads), gate.reshape(heads))
        out_TM: Tensor = getattr(module, out)(normed.view(len(x_TM), -1))
        return out_TM

    return mix


def olmo_hybrid_delta(module: Module) -> Mix:
    """Return the mix of a gated delta rule in which a token may flip the sign of what the state holds along its key."""

    def project(x_TM: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        qkv = torch.cat([module.q_proj(x_TM), module.k_proj(x_TM), module.v_proj(x_TM)], -1)
        return qkv, module.g_proj(x_TM), module.b_proj(x_TM), module.a_proj(x_TM)

    return _delta(module, project, most_beta=2.0 if module.allow_neg_eigval else 1.0, norm="o_norm", out="o_proj")


def qwen3_5_delta(module: Module) -> Mix:
    """Return the mix of a gated delta rule with a separate product for each input."""
    return _delta(
        module, lambda x: (module.in_proj_qkv(x), module.in_proj_z(x), module.in_proj_b(x), module.in_proj_a(x))
    )


def qwen3_next_delta(module: Module) -> Mix:
    """Return the mix of a gated delta rule whose two input products are grouped by key head.

    The module's own function splits their outputs.
    """

    def project(x_TM: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        q, k, v, gate, b, a = module.fix_query_key_value_ordering(
            module.in_proj_qkvz(x_TM)[None], module.in_proj_ba(x_TM)[None]
        )
        return torch.cat([t[0].flatten(1) for t in (q, k, v)], -1), gate[0].flatten(1), b[0], a[0]

    return _delta(module, project)


def kimi_delta(module: Module) -> Mix:
    """Return the mix of delta attention with a decay for each key channel, which may be bounded from below."""
    n_heads, size, forget = module.num_heads, module.head_dim, module.forget_gate
    shape = DeltaRuleShape(n_heads, n_heads, size, size, module.conv_kernel_size, decays_keys=True)
    conv = _conv_of(module.conv1d)
    conv = replace(conv, weight_WE=conv.weight_WE.to(module.q_proj.weight.dtype))
    rates = _decay_of(forget).view(-1, 1).expand(n_heads, size).reshape(-1)
    # The second name is GLM-5.3's, which has a bound wherever it has a number.
    is_bounded = getattr(forget, "safe_gate", False) or getattr(forget, "safe_gate_lower_bound", None) is not None
    decays = (None, None) if is_bounded else (forget.dt_bias.detach().float(), rates)
    recurrence = DeltaRule(shape, conv, *decays)

    def decay(x_TM: Tensor) -> Tensor:
        if is_bounded:
            return forget(x_TM[None])[0].flatten(1)  # type: ignore[no-any-return]  # logarithms of decays
        in_one_step = hasattr(forget, "f_proj")
        return forget.f_proj(x_TM) if in_one_step else forget.f_b_proj(forget.f_a_proj(x_TM))  # type: ignore[no-any-return]

    def mix(x_TM: Tensor, step: Step) -> Tensor:
        qkv = [module.q_proj(x_TM), module.k_proj(x_TM), module.v_proj(x_TM)]
        rows = torch.cat([*qkv, module.b_proj(x_TM).sigmoid(), decay(x_TM)], -1)
        y_TI = step.recur(module.layer_idx, rows, recurrence)
        in_one_step = hasattr(module, "g_proj")
        gate_TI = module.g_proj(x_TM) if in_one_step else module.g_b_proj(module.g_a_proj(x_TM))
        normed = module.o_norm(y_TI.view(-1, n_heads, size), gate_TI.view(-1, n_heads, size))
        out_TM: Tensor = module.o_proj(normed.flatten(1))
        return out_TM

    return mix


def lfm2_conv(module: Module) -> Mix:
    """Return the mix of a short convolution with a gate before and after it."""
    recurrence = ShortConv(_conv_of(module.conv, activation=False))

    def mix(x_TM: Tensor, step: Step) -> Tensor:
        before, behind, rows_TM = module.in_proj(x_TM).chunk(3, -1)
        out_TM: Tensor = module.out_proj(behind * step.recur(module.layer_idx, before * rows_TM, recurrence))
        return out_TM

    return mix


def xlstm_layer(module: Module) -> Mix:
    """Return the mix of an mLSTM layer, whose products are modules of their own, or joined."""
    config, is_joined = module.config, module.config.weight_mode == "fused"
    n_heads, n_keys, n_values = config.num_heads, module.qk_dim, module.v_dim
    device = module.out_proj.weight.device
    recurrence = MLSTM(n_values // n_heads, n_keys // n_heads, config.eps, torch.zeros(n_heads, device=device))

    def mix(x_TM: Tensor, step: Step) -> Tensor:
        if is_joined:
            qkv, out_gate = module.qkv_opreact(x_TM).split_with_sizes([2 * n_keys + n_values, n_values], -1)
            gates = module.ifgate_preact(x_TM)
        else:
            qkv, out_gate = torch.cat([module.q(x_TM), module.k(x_TM), module.v(x_TM)], -1), module.ogate_preact(x_TM)
            gates = torch.cat([module.igate_preact(x_TM), module.fgate_preact(x_TM)], -1)
        rows = torch.cat([qkv, torch.tanh(gates / config.gate_soft_cap) * config.gate_soft_cap], -1)
        y_TV = step.recur(module.layer_idx, rows, recurrence)
        normed = module.multihead_norm(y_TV.view(1, len(x_TM), n_heads, -1))[0]
        out_TM: Tensor = module.out_proj(module.ogate_act_fn(out_gate) * normed)
        return out_TM

    return mix


def recurrent_gemma_block(module: Module) -> Mix:
    """Return the mix of Griffin's recurrent block."""
    gates = weights_of(module.rg_lru)

    def both(name: str) -> Tensor:
        return torch.cat([getattr(gates, f"{gate}_gate_{name}").detach() for gate in ("input", "recurrent")], -1)

    decay = F.softplus(gates.recurrent_param.detach().float())
    recurrence = RGLRU(_conv_of(module.conv_1d, activation=False), both("weight"), both("bias"), decay)

    def mix(x_TM: Tensor, step: Step) -> Tensor:
        y_TE = step.recur(module.layer_idx, module.linear_x(x_TM), recurrence)
        out_TM: Tensor = module.linear_out(y_TE * module.act_fn(module.linear_y(x_TM)))
        return out_TM

    return mix


def zaya_projection(module: Module) -> MixMany:
    """Return a function that computes queries, keys and values of convolved attention, before their norms."""
    convs = weights_of(module.conv_qk_depthwise), weights_of(module.conv_qk_grouped)
    taps = [(conv.weight.detach(), conv.bias.detach()) for conv in convs]
    delayed = weights_of(module.v_proj_delayed)
    conv = QueryKeyConv(taps[0], taps[1], len(delayed.weight))
    heads = module.num_attention_heads, module.num_key_value_heads

    def mix(x_TM: Tensor, step: Step) -> tuple[Tensor, ...]:
        q, k = module.q_proj(x_TM), module.k_proj(x_TM)
        qk_THD, before = conv(module.layer_idx, torch.cat([q, k], -1), F.linear(x_TM, delayed.weight), step)
        if delayed.bias is not None:
            before = before + delayed.bias
        q_THD, k_TGD = (x.view(len(x_TM), n, -1) for x, n in zip((q, k), heads, strict=True))
        v_TGD = torch.cat([module.v_proj_current(x_TM), before], -1).view_as(k_TGD)
        return *(a + b for a, b in zip(qk_THD.split_with_sizes(heads, 1), around(q_THD, k_TGD), strict=True)), v_TGD

    return mix


def rwkv_time_mix(module: Module) -> Mix:
    """Return the mix of averages of values that decay with age (RWKV-4)."""
    token_mix = _token_mix(module, "attention_shift", "key", "value", "receptance")
    rates_E, first_E = (getattr(module, f"time_{name}").detach().float() for name in ("decay", "first"))
    recurrence = RWKV4(-rates_E.exp(), first_E)

    def mix(x_TM: Tensor, step: Step) -> Tensor:
        key_TM, value_TM, receptance_TM = token_mix(x_TM, step)
        rows_T2E = torch.stack([module.key(key_TM), module.value(value_TM)], 1)
        y_TE = step.recur(module.layer_idx, rows_T2E, recurrence, name="wkv")
        out_TM: Tensor = module.output(module.receptance(receptance_TM).sigmoid() * y_TE)
        return out_TM

    return mix


def rwkv_channel_mix(module: Module) -> Mix:
    """Return the mix of RWKV-4's feed-forward layer, which also reads the previous token."""
    token_mix = _token_mix(module, "feed_forward_shift", "key", "receptance")

    def mix(x_TM: Tensor, step: Step) -> Tensor:
        key_TM, receptance_TM = token_mix(x_TM, step)
        out_TM: Tensor = module.receptance(receptance_TM).sigmoid() * module.value(module.key(key_TM).relu().square())
        return out_TM

    return mix


def _token_mix(module: Module, name: str, *parts: str) -> TokenMix:
    weights = (getattr(module, f"time_mix_{part}").detach() for part in parts)
    return TokenMix(module.layer_idx, name, *((1 - w.float()).flatten().to(w.dtype) for w in weights))


MIXERS: dict[str, Callable[[Module], Mix | MixMany]] = {
    "BailingHybridDeltaAttention": kimi_delta,
    "BambaMixer": mamba2,
    "FalconH1Mixer": falcon_h1_mamba,
    "FalconMambaMixer": falcon_mamba,
    "Glm5NextTextLinearAttention": kimi_delta,
    "GraniteMoeHybridMambaLayer": mamba2,
    "JambaMambaMixer": jamba_mamba,
    "KimiLinearDeltaAttention": kimi_delta,
    "LaraMiniGatedDeltaNet": qwen3_5_delta,
    "Lfm2MoeShortConv": lfm2_conv,
    "Lfm2ShortConv": lfm2_conv,
    "Lfm3ShortConv": lfm2_conv,
    "Mamba2Mixer": mamba2,
    "MambaMixer": mamba,
    "MiniMaxLightningAttention": lightning_attention,
    "NemotronHMamba2Mixer": mamba2,
    "OlmoHybridGatedDeltaNet": olmo_hybrid_delta,
    "Qwen3NextGatedDeltaNet": qwen3_next_delta,
    "Qwen3_5GatedDeltaNet": qwen3_5_delta,
    "Qwen3_5MoeGatedDeltaNet": qwen3_5_delta,
    "Qwen4ExpTextGatedDeltaNet": qwen3_5_delta,
    "RecurrentGemmaRecurrentBlock": recurrent_gemma_block,
    "RwkvFeedForward": rwkv_channel_mix,
    "RwkvSelfAttention": rwkv_time_mix,
    "Zamba2MambaMixer": mamba2,
    "ZambaMambaMixer": zamba_mamba,
    "ZayaCCAProjection": zaya_projection,
    "xLSTMLayer": xlstm_layer,
}
"""Maps the class name of a recurrent module of transformers to the function that makes its mix."""
