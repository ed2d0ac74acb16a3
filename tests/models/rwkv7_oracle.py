"""RWKV-7 as Peng et al. 2025, "RWKV-7 Goose", section 4 and appendix, write it: token by token, in plain torch.

It uses nothing of this library but the config. Its parameters have the names and shapes of flash-linear-attention's
checkpoints, so it saves such checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import ModelOutput

from hybridmem.models.families.rwkv7 import RWKV7Config


class Lora(nn.Module):
    def __init__(self, n_model: int, rank: int, inner: nn.Module, *, bias: bool = True) -> None:
        super().__init__()
        self.lora = nn.Sequential(nn.Linear(n_model, rank, bias=False), inner, nn.Linear(rank, n_model, bias=bias))

    def forward(self, x: Tensor) -> Tensor:
        return self.lora(x)


class TimeMixing(nn.Module):
    """Computes time mixing of one token, from x (M,), the x of the token before (M,), and the state (H, V, N)."""

    def __init__(self, config: RWKV7Config, layer: int) -> None:
        super().__init__()
        n_model = config.hidden_size
        self.n_heads, self.layer, self.fuse_norm = config.num_heads, layer, config.fuse_norm
        for name in "rwkvag":
            self.register_parameter(f"x_{name}", nn.Parameter(torch.zeros(1, 1, n_model)))
        self.k_k, self.k_a = nn.Parameter(torch.zeros(n_model)), nn.Parameter(torch.zeros(n_model))
        self.r_k = nn.Parameter(torch.zeros(config.num_heads, config.head_dim))
        self.r_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(n_model, n_model, bias=False) for _ in range(4))
        self.w_lora = Lora(n_model, config.decay_low_rank_dim, nn.Tanh())
        self.a_lora = Lora(n_model, config.a_low_rank_dim, nn.Identity())
        self.g_lora = Lora(n_model, config.gate_low_rank_dim, nn.Sigmoid(), bias=False)
        if layer:
            self.v_lora = Lora(n_model, config.v_low_rank_dim, nn.Identity())
        self.g_norm = nn.GroupNorm(config.num_heads, n_model, eps=config.norm_eps * config.head_dim)

    def forward(
        self, x: Tensor, before: Tensor, state: Tensor, v_first: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        mixed = {name: (x + (before - x) * getattr(self, f"x_{name}").flatten()) for name in "rwkvag"}
        r, k, v = self.r_proj(mixed["r"]), self.k_proj(mixed["k"]), self.v_proj(mixed["v"])
        w = -F.softplus(-self.w_lora(mixed["w"])) - 0.5
        decay = torch.exp(-torch.exp(w))
        if v_first is None:
            v_first = v
        else:
            v = v + (v_first - v) * torch.sigmoid(self.v_lora(mixed["v"]))
        a = torch.sigmoid(self.a_lora(mixed["a"]))
        g = self.g_lora(mixed["g"])
        heads = (self.n_heads, -1)
        kk = (k * self.k_k).view(heads)
        kappa = kk / torch.sqrt(kk.square().sum(-1, keepdim=True) + 1e-6) if self.fuse_norm else F.normalize(kk, dim=-1)
        k = k * (1 + (a - 1) * self.k_a)
        r, decay, k, v_heads, a = (t.view(heads) for t in (r, decay, k, v, a))
        state = torch.stack(
            [
                s @ torch.diag(decay[h]) - torch.outer(s @ kappa[h], a[h] * kappa[h]) + torch.outer(v_heads[h], k[h])
                for h, s in enumerate(state)
            ]
        )
        y = self.g_norm(torch.einsum("hvn,hn->hv", state, r).reshape(1, -1))[0]
        y = y + ((r * k * self.r_k).sum(-1, keepdim=True) * v_heads).flatten()
        return self.o_proj(y * g), state, v_first


class ChannelMixing(nn.Module):
    def __init__(self, config: RWKV7Config) -> None:
        super().__init__()
        self.x_k = nn.Parameter(torch.zeros(config.hidden_size))
        self.key = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.value = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, before: Tensor) -> Tensor:
        return self.value(torch.relu(self.key(x + (before - x) * self.x_k)) ** 2)


class Layer(nn.Module):
    def __init__(self, config: RWKV7Config, layer: int) -> None:
        super().__init__()

        def norm() -> nn.LayerNorm:
            return nn.LayerNorm(config.hidden_size, eps=config.norm_eps, bias=config.norm_bias)

        if layer == 0 and config.norm_first:
            self.pre_norm = norm()
        self.attn_norm, self.ffn_norm = norm(), norm()
        self.attn, self.ffn = TimeMixing(config, layer), ChannelMixing(config)

    def forward(self, x: Tensor, state: list[Tensor], v_first: Tensor | None) -> tuple[Tensor, list[Tensor], Tensor]:
        x = self.pre_norm(x) if hasattr(self, "pre_norm") else x
        attended, carried = self.attn_norm(x), state[1]
        y, carried, v_first = self.attn(attended, state[0], carried, v_first)
        x = x + y
        fed = self.ffn_norm(x)
        return x + self.ffn(fed, state[2]), [attended, carried, fed], v_first


class Stack(nn.Module):
    def __init__(self, config: RWKV7Config) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([Layer(config, i) for i in range(config.num_hidden_layers)])
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.norm_eps, bias=config.norm_bias)


@dataclass
class Output(ModelOutput):
    logits: Tensor | None = None
    state: list[Tensor] | None = None


class RWKV7ForCausalLM(PreTrainedModel):
    """Takes and returns its state as a list: for each layer the last inputs of both halves, and the matrices."""

    config_class = RWKV7Config
    _tied_weights_keys = {"lm_head.weight": "model.embeddings.weight"}  # noqa: RUF012

    def __init__(self, config: RWKV7Config) -> None:
        super().__init__(config)
        self.model = Stack(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embeddings

    def forward(self, input_ids: Tensor, state: list[Tensor] | None = None, use_cache: bool = False) -> Output:
        (tokens,) = input_ids
        state, logits = self.nothing() if state is None else list(state), []
        for token in tokens:
            x, v_first = self.model.embeddings(token), None
            for i, layer in enumerate(self.model.layers):
                x, state[3 * i : 3 * i + 3], v_first = layer(x, state[3 * i : 3 * i + 3], v_first)
            logits.append(self.lm_head(self.model.norm(x)))
        return Output(logits=torch.stack(logits)[None], state=state if use_cache else None)

    def nothing(self) -> list[Tensor]:
        """Return the state before the first token."""
        n_model, n_heads = self.config.hidden_size, self.config.num_heads
        shapes = (n_model,), (n_heads, n_model // n_heads, n_model // n_heads), (n_model,)
        return [torch.zeros(shape, dtype=self.dtype) for _ in self.model.layers for shape in shapes]


AutoModelForCausalLM.register(RWKV7Config, RWKV7ForCausalLM, exist_ok=True)
