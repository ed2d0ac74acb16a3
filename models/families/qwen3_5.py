"""Implements the language model of Qwen3.5 (Qwen Team 2026), dense or with experts in each layer.

Its layers are those of Qwen3-Next with other input matrices. Its rotary embedding has three kinds of positions, time,
height and width, each for a share of the frequencies. For text the three are equal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from hybridmem.memory.recurrences import DeltaRuleShape
from hybridmem.models.families.qwen3_next import Qwen3Next, load_mixture
from hybridmem.models.layers.delta_mixer import DeltaInputs
from hybridmem.models.layers.mlp import GatedMLP
from hybridmem.models.loading.architectures import register
from hybridmem.models.vision.canvas import CanvasSight
from hybridmem.models.vision.grid import GridSight
from hybridmem.models.vision.pictures import Sight, pictures_below, text_config_of
from hybridmem.models.vision.slices import SliceSight
from hybridmem.models.weights.checkpoint import Checkpoint

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


_SECTIONS = [11, 11, 10]
"""The shares of time, height and width, where the config does not say."""


@register("Qwen3_5ForCausalLM")
@register("Qwen3_5ForConditionalGeneration")
class Qwen35(Qwen3Next):
    """Implements Qwen3.5. If the checkpoint has a vision tower, the tower is loaded at the first picture."""

    def __init__(self, config: PreTrainedConfig, checkpoint: Checkpoint) -> None:
        text = text_config_of(config)
        text.rope_parameters = {"mrope_section": _SECTIONS, **text.rope_parameters}
        root = "model.language_model"
        # A checkpoint that ties embedding and head may hold only the head.
        super().__init__(text, checkpoint, root if f"{root}.norm.weight" in checkpoint else "model")
        if text is not config and hasattr(config, "vision_config"):
            self.see(pictures_below(self._sight(config), config, checkpoint))

    def _sight(self, config: PreTrainedConfig) -> Sight:
        return GridSight(config)

    def _delta_inputs(self, checkpoint: Checkpoint, prefix: str, n_model: int, shape: DeltaRuleShape) -> DeltaInputs:
        return DeltaInputs.take(checkpoint, prefix, n_model, shape)

    def _feed_forward(
        self, config: PreTrainedConfig, checkpoint: Checkpoint, prefix: str, i: int
    ) -> Callable[[Tensor], Tensor]:
        return GatedMLP.load(checkpoint, prefix, config.hidden_size, config.intermediate_size, config.hidden_act)


@register("Qwen3_5MoeForCausalLM")
@register("Qwen3_5MoeForConditionalGeneration")
class Qwen35Moe(Qwen35):
    """Implements Qwen3.5 with experts in each layer."""

    def _feed_forward(
        self, config: PreTrainedConfig, checkpoint: Checkpoint, prefix: str, i: int
    ) -> Callable[[Tensor], Tensor]:
        return load_mixture(config, checkpoint, prefix, renormalise=True)

    def _draft_feed_forward(
        self, config: PreTrainedConfig, checkpoint: Checkpoint, prefix: str
    ) -> Callable[[Tensor], Tensor]:
        return load_mixture(config, checkpoint, prefix, renormalise=True)


@register("MiniCPMV4_6ForConditionalGeneration")
class MiniCPMV46(Qwen35):
    """Implements MiniCPM-V 4.6 (OpenBMB 2026): Qwen3.5 with a tower whose rows stand in the places of tokens."""

    def _sight(self, config: PreTrainedConfig) -> Sight:
        return SliceSight(config)


@register("MiniCPMV4_7ForConditionalGeneration")
class MiniCPMV47(Qwen35):
    """Implements MiniCPM-V 4.7 (OpenBMB 2026): Qwen3.5 with a tower and positions of its own for pictures."""

    def _sight(self, config: PreTrainedConfig) -> Sight:
        return CanvasSight(config)
