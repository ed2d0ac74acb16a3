"""Implements the heads of DFlash (Chen et al. 2026, "DFlash"): layers that draft several tokens at once.

One matrix fuses the model's residual streams after several layers into c, which is normed. Keys and values of earlier
tokens are made of c, in each layer of the head. The layers then compute the newest token and blanks after it, which
are mask tokens: `x = x + attention(norm(x))`, then `x + mlp(norm(x))`. These tokens see all c, and each other. From
norm(x) of a blank, the model's output matrix makes the logits of the token that belongs there. So a draft of many
tokens takes one run of the head.

Below, the newest token counts as one of the B blanks. Attention of a memory is causal. So blanks are fed twice: first
their keys and values, and then their queries, which have no keys of their own and see all blanks before them.

    a request of a step    c i ... c n-1 | K n ... K n+B-1 | Q n ... Q n+B-1
    is rotated by            i ...   n-1 |   n ...   n+B-1 |   n ...   n+B-1
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hybridmem.memory import AttentionSpec, MemorySpec, Step, StepError
from hybridmem.memory.blocks import without_gradients
from hybridmem.models.layers.attention import Rotary, head_dim_of, turn
from hybridmem.models.layers.decoder import Decoder, Function
from hybridmem.models.layers.linear import Linear
from hybridmem.models.layers.mlp import GatedMLP
from hybridmem.models.layers.norms import RMSNorm
from hybridmem.models.weights.checkpoint import Checkpoint, UnsupportedModelError
from hybridmem.models.weights.dry import joined

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Angles = tuple[Tensor, Tensor]
_OF_AUTHORS = "DFlashDraftModel"
"""The architecture in configs of the authors. Transformers' own is `MuseGlimmerAssistantModel`."""
_NEUTRAL = {"output_multiplier": 1.0, "final_logit_softcapping": None, "fc_layernorm": False, "selector_rank": None}
"""Options of such heads that are not implemented, with the values at which they do nothing."""

_MOST_PLACES, _MOST_KEPT_TOKENS = 256, 256
"""The places of so many kinds of steps are remembered, if they have at most so many tokens."""


@dataclass(frozen=True)
class BlankPlaces:
    """Says which tokens of a step are what, by their indices in the step's own order.

    Attributes:
        rows_X: (P + R,) the P tokens of pairs, and then the R blanks that give keys and values.
        queries_R: (R,) the blanks that query.
        unseen: is a layer causal -> (T, L) float32: a bias by distance, -inf for rows that a query does not see.
    """

    rows_X: Tensor
    queries_R: Tensor
    unseen: dict[bool, Tensor]

    @property
    def keys_R(self) -> Tensor:
        return self.rows_X[len(self.rows_X) - len(self.queries_R) :]


@dataclass(frozen=True)
class BlankLayer:
    """Computes a layer for blanks, and stores keys and values of fused streams and of blanks.

    Attributes:
        norms: norm what attention and the MLP read.
        q, kv: the products for queries, and for keys and values.
        head_norms: norm each head's query and key.
        is_causal: whether a blank sees only the blanks of its request before it, and itself.
    """

    index: int
    spec: AttentionSpec
    norms: tuple[Function, Function]
    q: Linear
    kv: Linear
    out: Linear
    head_norms: tuple[Function, Function]
    mlp: Function
    is_causal: bool

    def __call__(self, x_RM: Tensor, fused_PM: Tensor, step: Step, places: BlankPlaces, angles: Angles) -> Tensor:
        """Return the rows of blanks after this layer, (R, M). `angles` are those of `places.rows_X`."""
        spec, n_tokens, n_queries = self.spec, len(step.token_ids), len(x_RM)
        normed_RM = self.norms[0](x_RM) if n_queries else x_RM
        kv = self.kv(torch.cat([fused_PM, normed_RM])).view(-1, 2 * spec.n_kv_heads, spec.head_dim)
        k_XGD, v_XGD = torch.split(kv, spec.n_kv_heads, 1)
        k_XGD = turn(self.head_norms[1](k_XGD), *angles)
        k_TGD, v_TGD = (_spread(x_XGD, places.rows_X, n_tokens) for x_XGD in (k_XGD, v_XGD))
        q_THD = k_TGD.new_zeros(n_tokens, spec.n_query_heads, spec.head_dim)
        if n_queries:
            q_RHD = self.head_norms[0](self.q(normed_RM).view(-1, spec.n_query_heads, spec.head_dim))
            q_THD.index_copy_(0, places.queries_R, turn(q_RHD, *(angle[-n_queries:] for angle in angles)))
        bias_THL = None  # Without queries, what is seen does not matter.
        if n_queries:
            bias_THL = places.unseen[self.is_causal][:, None].expand(-1, spec.n_query_heads, -1)
        y_THD = step.attend(self.index, q_THD, k_TGD, v_TGD, bias=bias_THL)
        if not n_queries:
            return x_RM
        x_RM = x_RM + self.out(y_THD[places.queries_R].flatten(1))
        return x_RM + self.mlp(self.norms[1](x_RM))


class DFlashHead:
    """Drafts several tokens at once: see `BlankHead`.

    Args:
        model: the model that it was trained for.
        reads: the layers after which it reads, ascending. After the last one, it reads the normed states.
        fused: the product of the streams, (M, len(reads) M), and the norm after it.
        n_blanks: how many blanks a request has, the newest token of the text included.
        mask_id: the token that stands for those that are drafted.
        embed: looks up the embeddings of tokens.
        norm: norms what the last layer returns.
    """

    def __init__(
        self, model: Decoder, reads: tuple[int, ...], fused: tuple[Linear, Function], n_blanks: int, mask_id: int,
        embed: Function, rotary: Rotary, layers: Sequence[BlankLayer], norm: Function,
    ) -> None:  # fmt: skip
        spec, last = model.memory_spec, len(model.memory_spec.layers) - 1
        self.after = tuple(i for i in reads if i != last)
        self.n_drafted = n_blanks - 1
        self.is_recordable = model.is_recordable
        self._reads_last = last in reads
        self._fused, self._mask_id, self._embed, self._rotary = fused, mask_id, embed, rotary
        self._layers, self._norm, self._vocabulary = layers, norm, model.vocabulary
        self._places = dict[tuple[int, ...], BlankPlaces]()
        self.memory_spec = MemorySpec(
            layers=tuple((layer.spec,) for layer in layers), vocab_size=spec.vocab_size, dtype=spec.dtype,
            device=spec.device, model=f"the draft head of {spec.model}",
        )  # fmt: skip

    @staticmethod
    def load(config: PreTrainedConfig, checkpoint: Checkpoint, model: Decoder) -> DFlashHead:
        """Load a head as its authors publish it (`DFlashDraftModel`), or transformers (`MuseGlimmerAssistantModel`).

        Raises:
            UnsupportedModelError: it was made for another model, or has options that are not implemented.
            FormatError: a tensor is missing or has another shape.
        """
        n_model, options = config.hidden_size, _Options(config)
        options.check(model)
        rotary = Rotary(config, head_dim_of(config), checkpoint.device)
        fuse, fused_norm = (
            checkpoint.name_of(f"{one}.weight", f"encoder.{other}.weight").removesuffix(".weight")
            for one, other in (("fc", "fc"), ("hidden_norm", "output_norm_enc"))
        )
        embed = replace(model.vocabulary.embed, norm=None)
        if options.is_of_authors:  # They look rows up without the model's own scale.
            embed = replace(embed, scale=float(options.of("input_embedding_scale", 1.0)))
        reads = tuple(options.of("target_layer_ids"))
        return DFlashHead(
            model, reads,
            (Linear.load(checkpoint, fuse, n_model, len(reads) * n_model), _load_norm(config, checkpoint, fused_norm)),
            options.block_size, options.of("mask_token_id"), embed, rotary,
            [_load_layer(config, options, checkpoint, i, rotary) for i in range(config.num_hidden_layers)],
            _load_norm(config, checkpoint, "norm"),
        )  # fmt: skip

    @property
    def n_fed(self) -> int:
        """See `BlankHead`."""
        return 2 * (self.n_drafted + 1)

    def blanks_after(self, token_id: int) -> list[int]:
        """See `BlankHead`."""
        return [token_id, *[self._mask_id] * self.n_drafted] * 2

    def read(self, rows_TR: Tensor) -> Tensor:
        """Return the fused streams, normed."""
        n_model = rows_TR.shape[-1] // (len(self.after) + 1)
        product, norm = self._fused
        with without_gradients():
            read_TN = rows_TR if self._reads_last else rows_TR[:, :-n_model]
            fused_TM: Tensor = norm(product(read_TN))
        return fused_TM

    def __call__(self, step: Step, rows_PM: Tensor, n_pairs: Sequence[int]) -> Tensor:
        """See `BlankHead`."""
        return self.at(step, rows_PM, self.places(step, n_pairs))

    def places(self, step: Step, n_pairs: Sequence[int]) -> BlankPlaces:
        """Return which tokens of a step are what. Raises StepError if requests are no pairs with or without blanks."""
        counts, size = step.tokens.counts.tolist(), self.n_drafted + 1
        if len(n_pairs) != len(counts) or any(n - m not in (0, 2 * size) for n, m in zip(counts, n_pairs, strict=True)):
            raise StepError(
                f"{list(n_pairs)} pairs in requests of {counts} tokens; a request is pairs alone, or pairs and then "
                f"the {2 * size} tokens of `blanks_after`"
            )
        firsts = _firsts_of(step, counts)
        key = (*firsts, *counts, *n_pairs)
        if (known := self._places.get(key)) is not None:
            return known
        pairs, keys, queries = list[int](), list[int](), list[int]()
        for first, n, m in zip(firsts, counts, n_pairs, strict=True):
            pairs += range(first, first + m)
            if n > m:
                keys += range(first + m, first + m + size)
                queries += range(first + m + size, first + n)
        device = step.token_ids.device
        queries_R = torch.tensor(queries, dtype=torch.int64, device=device)
        unseen = {
            is_causal: _unseen(size, queries_R, sum(counts), is_causal=is_causal)
            for is_causal in {layer.is_causal for layer in self._layers}
        }
        places = BlankPlaces(torch.tensor(pairs + keys, device=device), queries_R, unseen)
        if sum(counts) <= _MOST_KEPT_TOKENS:
            if len(self._places) >= _MOST_PLACES:
                self._places.clear()
            self._places[key] = places
        return places

    def at(self, step: Step, rows_PM: Tensor, places: BlankPlaces) -> Tensor:
        """Do what `__call__` does, for tokens whose places are known already."""
        step.check_model(self.memory_spec)
        with without_gradients():
            angles = self._rotary.angles_at(step.positions[places.rows_X], rows_PM.dtype)
            x_RM = self._embed(step.token_ids[places.keys_R])
            for layer in self._layers:
                x_RM = layer(x_RM, rows_PM, step, places, angles)
            x_SNM = x_RM.view(-1, self.n_drafted + 1, x_RM.shape[1])[:, 1:]
            if not len(x_SNM):
                return x_RM.new_empty(0, self.n_drafted, self.memory_spec.vocab_size)
            logits = self._vocabulary.logits(self._norm(x_SNM.flatten(0, 1)))
            return logits.view(len(x_SNM), self.n_drafted, -1)


class _Options:
    """Reads the options of a head from its config, or from `dflash_config` in it."""

    def __init__(self, config: PreTrainedConfig) -> None:
        self._config, self._own = config, getattr(config, "dflash_config", None) or {}
        self.is_of_authors = _OF_AUTHORS in (config.architectures or ())

    def of(self, name: str, default: Any = None) -> Any:
        return self._own.get(name, getattr(self._config, name, default))

    @property
    def block_size(self) -> int:
        return int(self.of("block_size", 16))

    def layer_kind(self, i: int) -> tuple[int | None, bool]:
        """Return the window of layer i's attention, and whether it is causal.

        The window is counted as a spec does, where blanks are fed twice.
        """
        kinds = getattr(self._config, "layer_types", None)
        kind = kinds[i] if kinds else "full_attention"
        if kind not in ("full_attention", "sliding_attention"):
            raise UnsupportedModelError(
                f"layer_types[{i}]={kind!r}; implemented are full_attention and sliding_attention"
            )
        is_sliding, is_causal = kind == "sliding_attention", False
        if self.is_of_authors:
            given = getattr(self._config, "is_causal", None)
            is_causal = is_sliding if given is None else bool(given)
        if not is_sliding:
            return None, is_causal
        # To transformers, a distance of the window is seen. To the authors, only smaller ones are.
        window = (self._config.sliding_window or 0) + (not self.is_of_authors)
        if window < self.block_size:
            raise UnsupportedModelError(
                f"sliding_window={self._config.sliding_window} and block_size={self.block_size}; implemented are "
                "windows in which all tokens of a block see each other"
            )
        return window + self.block_size, is_causal

    def check(self, model: Decoder) -> None:
        """Raise UnsupportedModelError unless the head is for a model like this one."""
        n_model, n_layers, n_tokens = (
            model.config.hidden_size, len(model.memory_spec.layers), model.memory_spec.vocab_size,
        )  # fmt: skip
        if self._config.hidden_size != n_model:
            raise UnsupportedModelError(
                f"the head's hidden_size={self._config.hidden_size}; implemented is the model's, {n_model}"
            )
        if (n_target := self.of("num_target_layers", n_layers)) != n_layers:
            raise UnsupportedModelError(f"the head is for a model of {n_target} layers; this one has {n_layers}")
        reads = self.of("target_layer_ids")
        if not reads or list(reads) != sorted(set(reads)) or not 0 <= reads[0] <= reads[-1] < n_layers:
            raise UnsupportedModelError(
                f"target_layer_ids={reads} for a model of {n_layers} layers; implemented are ascending numbers from 0 "
                f"to {n_layers - 1}"
            )
        mask_id = self.of("mask_token_id")
        if mask_id is None or not 0 <= mask_id < n_tokens:
            raise UnsupportedModelError(f"mask_token_id={mask_id}; implemented is one of the model's {n_tokens} tokens")
        if self.block_size < 2:
            raise UnsupportedModelError(f"block_size={self.block_size}; implemented are 2 tokens or more")
        for name, neutral in _NEUTRAL.items():
            if (value := self.of(name, neutral)) != neutral:
                raise UnsupportedModelError(f"{name}={value!r}; implemented is {neutral!r}")


def _load_layer(
    config: PreTrainedConfig, options: _Options, checkpoint: Checkpoint, i: int, rotary: Rotary
) -> BlankLayer:
    n_model, head_dim, prefix = config.hidden_size, head_dim_of(config), f"layers.{i}"
    window, is_causal = options.layer_kind(i)
    spec = AttentionSpec(
        config.num_attention_heads, config.num_key_value_heads, head_dim, window=window, rotation=rotary.rotation,
        has_bias=True,
    )  # fmt: skip
    has_bias = options.is_of_authors and config.attention_bias
    n_q, n_kv = spec.n_query_heads * head_dim, spec.n_kv_heads * head_dim

    def take(name: str, size: int) -> tuple[Tensor, Tensor | None]:
        name = f"{prefix}.self_attn.{name}_proj"
        bias = checkpoint.take_optional(has_bias, f"{name}.bias", size)
        return checkpoint.take(f"{name}.weight", size, n_model), bias

    (q, q_bias), (k, k_bias), (v, v_bias) = take("q", n_q), take("k", n_kv), take("v", n_kv)
    kv_bias = None if k_bias is None or v_bias is None else joined(k_bias, v_bias)
    norms = [_load_norm(config, checkpoint, f"{prefix}.{x}_layernorm") for x in ("input", "post_attention")]
    heads = [_load_norm(config, checkpoint, f"{prefix}.self_attn.{x}_norm", head_dim) for x in "qk"]
    return BlankLayer(
        i, spec, (norms[0], norms[1]), Linear(q, bias=q_bias), Linear(k, v, bias=kv_bias),
        Linear.load(checkpoint, f"{prefix}.self_attn.o_proj", n_model, n_q, has_bias=has_bias), (heads[0], heads[1]),
        GatedMLP.load(checkpoint, f"{prefix}.mlp", n_model, config.intermediate_size, config.hidden_act), is_causal,
    )  # fmt: skip


def _load_norm(config: PreTrainedConfig, checkpoint: Checkpoint, name: str, size: int | None = None) -> RMSNorm:
    return RMSNorm(checkpoint.take(f"{name}.weight", size or config.hidden_size), config.rms_norm_eps)


def _spread(x_XGD: Tensor, rows_X: Tensor, n_tokens: int) -> Tensor:
    """Return (T, G, D) with these rows at these places, and zeros elsewhere."""
    return x_XGD.new_zeros(n_tokens, *x_XGD.shape[1:]).index_copy_(0, rows_X, x_XGD)


def _firsts_of(step: Step, counts: list[int]) -> list[int]:
    """Return the index of each request's first token in the step's own order."""
    if len(counts) == 1:
        return [0]
    own_T = step.select(torch.arange(sum(counts), device=step.token_ids.device), "all")
    return [int(own_T[end - n]) for n, end in zip(counts, accumulate(counts), strict=True)]


def _unseen(size: int, queries_R: Tensor, n_tokens: int, *, is_causal: bool) -> Tensor:
    """Return (T, size + 1) biases by distance: -inf for rows of queries, and for later keys if a layer is causal.

    Query j has rows of j + 1 queries at the distances 0 ... j, its own among them. Before them is the last key of its
    request's blanks: key i is at the distance size + j - i.
    """
    bias_TL = torch.zeros(n_tokens, size + 1, device=queries_R.device)
    if n_requests := len(queries_R) // size:
        nearest = torch.full((size,), size) if is_causal else torch.arange(1, size + 1)
        unseen_BL = torch.where(torch.arange(size + 1) < nearest[:, None], -torch.inf, 0.0)
        bias_TL[queries_R] = unseen_BL.repeat(n_requests, 1).to(bias_TL.device)
    return bias_TL
