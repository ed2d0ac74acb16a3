"""Implements Qwen4-Exp (Qwen Team 2026): delta mixers, attention to chosen spans of rows, and experts.

Several residual streams run beside each other, and some layers add features of the last tokens to them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridmem.models.families.qwen3_next import load_gated_attention, load_mixture
from hybridmem.models.layers.attention import Rotary, head_dim_of
from hybridmem.models.layers.decoder import Decoder, Mixer
from hybridmem.models.layers.delta_mixer import DeltaInputs, DeltaMixer, delta_shape_of
from hybridmem.models.layers.hyper_connection import GatedStreams, StreamBlock
from hybridmem.models.layers.ngrams import NgramEmbedding
from hybridmem.models.layers.span_indexer import IndexedAttention, MeanIndexer
from hybridmem.models.layers.vocabulary import Vocabulary
from hybridmem.models.loading.architectures import register
from hybridmem.models.vision.grid import GridSight
from hybridmem.models.vision.pictures import pictures_below, text_config_of
from hybridmem.models.weights.checkpoint import Checkpoint, UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, Qwen4ExpTextConfig

_SECTIONS = [11, 11, 10]
"""The shares of time, height and width of the rotary embedding, where the config does not say."""


@register("Qwen4ExpForCausalLM")
@register("Qwen4ExpForConditionalGeneration")
class Qwen4Exp(Decoder):
    """Implements Qwen4-Exp. If the checkpoint has a vision tower, the tower is loaded at the first picture."""

    def __init__(self, config: PreTrainedConfig, checkpoint: Checkpoint) -> None:
        text = text_config_of(config)
        text.rope_parameters = {"mrope_section": _SECTIONS, **text.rope_parameters}
        root = "model.language_model"
        root = root if f"{root}.embed_tokens.weight" in checkpoint else "model"
        vocabulary = Vocabulary.load(checkpoint, text, f"{root}.embed_tokens.weight")
        rotary = Rotary(text, head_dim_of(text), checkpoint.device, is_partial=True)

        def streams(name: str, *, adds: bool = True) -> GatedStreams:
            return GatedStreams.load(
                checkpoint, f"{root}.{name}", text.hc_count, text.hidden_size, text.hc_lowrank, text.rms_norm_eps,
                adds=adds,
            )  # fmt: skip

        layers = []
        for i in range(text.num_hidden_layers):
            name = f"layers.{i}"
            ngrams = None
            if i + 1 in text.ple_layer_ids:
                number = text.ple_layer_ids.index(i + 1)
                ngrams = NgramEmbedding(text, checkpoint, f"{root}.{name}.ple", i, number)
            mixer = self._mixer(text, checkpoint, f"{root}.{name}", i, rotary)
            mixture = load_mixture(text, checkpoint, f"{root}.{name}.mlp", renormalise=text.norm_topk_prob)
            layers.append(
                StreamBlock(
                    ngrams,
                    (streams(f"{name}.attn_hyper_connection"), mixer),
                    (streams(f"{name}.mlp_hyper_connection"), mixture),
                    n_copies=1 if i else text.hc_count,
                )
            )
        last = streams("hyper_connection_mixer", adds=False)
        super().__init__(text, checkpoint, vocabulary, layers, last, residual_dtype=checkpoint.dtype)
        if hasattr(config, "vision_config"):
            self.see(pictures_below(GridSight(config), config, checkpoint))

    def _mixer(self, config: Qwen4ExpTextConfig, checkpoint: Checkpoint, prefix: str, i: int, rotary: Rotary) -> Mixer:
        kind = config.layer_types[i]
        if kind == "indexed_attention":
            prefix = f"{prefix}.self_attn"
            indexer = MeanIndexer(config, checkpoint, f"{prefix}.indexer", i, rotary)
            return IndexedAttention.of(load_gated_attention(config, checkpoint, prefix, i, rotary), indexer)
        if kind != "linear_attention":
            raise UnsupportedModelError(
                f"layer_types[{i}]={kind!r}; implemented are linear_attention and indexed_attention"
            )
        shape, prefix = delta_shape_of(config), f"{prefix}.linear_attn"
        return DeltaMixer(
            checkpoint, prefix, i, shape, DeltaInputs.take(checkpoint, prefix, config.hidden_size, shape),
            norm_eps=config.rms_norm_eps, activation=config.hidden_act,
            gate_activation=config.output_gate_type or config.hidden_act,
        )  # fmt: skip
