"""Implements Llama (Touvron et al. 2023), Mistral (Jiang et al. 2023), Qwen2 and Qwen3 (Qwen Team 2024, 2025).

Each layer is rotary attention and a gated MLP.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridmem.memory import AttentionSpec
from hybridmem.models.layers.attention import Attention, Rotary, head_dim_of, load_projections
from hybridmem.models.layers.decoder import Block, Decoder
from hybridmem.models.layers.mlp import GatedMLP
from hybridmem.models.layers.norms import RMSNorm
from hybridmem.models.layers.vocabulary import Vocabulary
from hybridmem.models.loading.architectures import register
from hybridmem.models.weights.checkpoint import Checkpoint, UnsupportedModelError

if TYPE_CHECKING:
    from transformers import LlamaConfig, MistralConfig, PreTrainedConfig, Qwen2Config, Qwen3Config


class _Transformer(Decoder):
    """Implements what the families have in common. Subclasses set biases, norms and windows."""

    has_mlp_bias = False
    has_attention_bias = False
    has_out_bias: bool | None = None
    """Whether the projection of attention's outputs has a bias; None if it has one where the other three have it."""
    has_head_norms = False

    def __init__(self, config: PreTrainedConfig, checkpoint: Checkpoint) -> None:
        n_model = config.hidden_size
        vocabulary = Vocabulary.load(checkpoint, config, "model.embed_tokens.weight")
        rotary = Rotary(config, head_dim_of(config), checkpoint.device)

        def norm(name: str) -> RMSNorm:
            return RMSNorm(checkpoint.take(f"model.{name}.weight", n_model), config.rms_norm_eps)

        layers = []
        for i in range(config.num_hidden_layers):
            mlp = GatedMLP.load(
                checkpoint,
                f"model.layers.{i}.mlp",
                n_model,
                config.intermediate_size,
                config.hidden_act,
                has_bias=self.has_mlp_bias,
            )
            mixer = self._attention(config, checkpoint, i, rotary)
            layers.append(
                Block((norm(f"layers.{i}.input_layernorm"), mixer), (norm(f"layers.{i}.post_attention_layernorm"), mlp))
            )
        super().__init__(config, checkpoint, vocabulary, layers, norm("norm"))

    def _attention(self, config: PreTrainedConfig, checkpoint: Checkpoint, i: int, rotary: Rotary) -> Attention:
        prefix, has_bias = f"model.layers.{i}.self_attn", self.has_attention_bias
        has_out_bias = has_bias if self.has_out_bias is None else self.has_out_bias
        spec = AttentionSpec(
            config.num_attention_heads, config.num_key_value_heads, head_dim_of(config), window=self._window(config, i)
        )
        projections = load_projections(
            checkpoint, prefix, config.hidden_size, spec, has_bias=has_bias, has_out_bias=has_out_bias
        )
        norms = None
        if self.has_head_norms:
            q, k = (
                RMSNorm(checkpoint.take(f"{prefix}.{x}_norm.weight", spec.head_dim), config.rms_norm_eps) for x in "qk"
            )
            norms = q, k
        return Attention(i, spec, *projections, rotary=rotary, norms=norms)

    def _window(self, config: PreTrainedConfig, i: int) -> int | None:
        """Return how many tokens layer i attends to, or None for all tokens."""
        return None


@register("LlamaForCausalLM")
class Llama(_Transformer):
    """Implements Llama, whose projections may have biases."""

    def __init__(self, config: LlamaConfig, checkpoint: Checkpoint) -> None:
        self.has_mlp_bias, self.has_attention_bias = config.mlp_bias, config.attention_bias
        super().__init__(config, checkpoint)


@register("MistralForCausalLM")
class Mistral(_Transformer):
    """Implements Mistral, whose layers attend to `sliding_window` tokens, or to all."""

    def _window(self, config: MistralConfig, i: int) -> int | None:
        return int(config.sliding_window) if config.sliding_window is not None else None


@register("Qwen2ForCausalLM")
class Qwen2(_Transformer):
    """Implements Qwen2 and Qwen2.5: queries, keys and values have biases. Some layers may attend to a window only."""

    has_attention_bias = True
    has_out_bias = False

    def _window(self, config: Qwen2Config, i: int) -> int | None:
        return window_of(config, i)


@register("Qwen3ForCausalLM")
class Qwen3(_Transformer):
    """Implements Qwen3, which normalizes queries and keys. Some layers may attend to a window only."""

    has_head_norms = True

    def __init__(self, config: Qwen3Config, checkpoint: Checkpoint) -> None:
        self.has_attention_bias = config.attention_bias
        super().__init__(config, checkpoint)

    def _window(self, config: Qwen3Config, i: int) -> int | None:
        return window_of(config, i)


def window_of(config: PreTrainedConfig, i: int) -> int | None:
    """Return the window of layer i, from `layer_types` and `sliding_window`; None for all tokens."""
    kind = config.layer_types[i]
    if kind not in ("full_attention", "sliding_attention"):
        raise UnsupportedModelError(f"layer_types[{i}]={kind!r}; implemented are full_attention and sliding_attention")
    return int(config.sliding_window) if kind == "sliding_attention" else None
