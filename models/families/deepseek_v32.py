"""Implements DeepSeek-V3.2 and GLM-5: latent attention to the rows that an index chooses, and experts.

DeepSeek-AI 2025, "DeepSeek-V3.2"; in GLM-5, layers without an index read the rows that the last index has chosen.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hybridmem.models.draft_heads import NextTokenHead
from hybridmem.models.families.deepseek import DeepseekV3
from hybridmem.models.layers.attention import Rotary
from hybridmem.models.layers.decoder import Mixer
from hybridmem.models.layers.indexer import IndexedLatentAttention, load_indexer
from hybridmem.models.layers.latent_attention import load_latent_attention
from hybridmem.models.loading.architectures import register
from hybridmem.models.weights.checkpoint import Checkpoint, UnsupportedModelError

if TYPE_CHECKING:
    from transformers import DeepseekV32Config, GlmMoeDsaConfig


@register("DeepseekV32ForCausalLM")
class DeepseekV32(DeepseekV3):
    """Implements DeepSeek-V3.2, where each layer has an index, that of its draft head as well."""

    has_interleaved_index = False

    def __init__(self, config: DeepseekV32Config, checkpoint: Checkpoint) -> None:
        if config.q_lora_rank is None:
            raise UnsupportedModelError("q_lora_rank=None; the index reads compressed queries, so give their size")
        super().__init__(config, checkpoint)

    def load_draft_head(self, checkpoint: Checkpoint) -> NextTokenHead | None:
        """Return the first module of multi-token prediction, or None without one.

        Raises UnsupportedModelError if it has no index of its own. It would read the rows that a layer of the model has
        chosen, which its own memory does not hold. Transformers refuses such files as well.
        """
        prefix = f"model.layers.{self.config.num_hidden_layers}"
        has_index = f"{prefix}.self_attn.indexer.wk.weight" in checkpoint
        if f"{prefix}.eh_proj.weight" in checkpoint and not has_index:
            raise UnsupportedModelError(
                f"the draft head in {checkpoint.folder} has no index of its own ({prefix}.self_attn.indexer.wk.weight "
                "is missing), and the rows that the model's index chooses are not in its memory; load the model "
                "without the head"
            )
        return super().load_draft_head(checkpoint)

    def _is_dense(self, config: Any, i: int) -> bool:
        kind = config.mlp_layer_types[i]
        if kind not in ("dense", "sparse"):
            raise UnsupportedModelError(f"mlp_layer_types[{i}]={kind!r}; implemented are dense and sparse")
        return bool(kind == "dense")

    def _has_index(self, config: Any, i: int) -> bool:
        return True

    def _mixer(self, config: Any, checkpoint: Checkpoint, prefix: str, i: int, rotary: Rotary) -> Mixer:
        attention = load_latent_attention(config, checkpoint, prefix, i, rotary, is_interleaved=True)
        attention = replace(attention, spec=replace(attention.spec, n_chosen=config.index_topk))
        if not self._has_index(config, i):
            return IndexedLatentAttention(attention, None)
        indexer = load_indexer(
            config, checkpoint, f"{prefix}.indexer", i, rotary, is_interleaved=self.has_interleaved_index
        )
        return IndexedLatentAttention(attention, indexer)


@register("GlmMoeDsaForCausalLM")
class GlmMoeDsa(DeepseekV32):
    """Implements GLM-5, where some layers share the index of a layer before."""

    has_interleaved_index = True

    def __init__(self, config: GlmMoeDsaConfig, checkpoint: Checkpoint) -> None:
        if config.num_hidden_layers and config.indexer_types[0] != "full":
            raise UnsupportedModelError(
                f"indexer_types[0]={config.indexer_types[0]!r}; the first layer has no index before it, so it is 'full'"
            )
        super().__init__(config, checkpoint)

    def _has_index(self, config: Any, i: int) -> bool:
        if (kind := config.indexer_types[i]) not in ("full", "shared"):
            raise UnsupportedModelError(f"indexer_types[{i}]={kind!r}; implemented are full and shared")
        return bool(kind == "full")
