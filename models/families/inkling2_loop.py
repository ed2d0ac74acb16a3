"""Implements Inkling 2 with a loop (Thinking Machines 2026): layers in the middle run several times.

Each time they begin from the same rows, with a memory of their own, and read messages from their previous pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hybridmem.memory import Step
from hybridmem.memory.kernels import RowProduct
from hybridmem.memory.specs import LayerSpec
from hybridmem.models.families.inkling2 import PREVIOUS, ROOT, BlockLayer, Inkling2, Messages
from hybridmem.models.layers.block_attention import BlockAttention, MessageGate
from hybridmem.models.layers.decoder import Layer
from hybridmem.models.loading.architectures import register
from hybridmem.models.weights.checkpoint import Checkpoint, UnsupportedModelError

if TYPE_CHECKING:
    from transformers import Inkling2LoopTextConfig

_BEGINNING = "rows before the loop"
"""Key in a step's notes of the rows from which each pass begins, (T, B, M)."""


@register("Inkling2LoopForCausalLM")
class Inkling2Loop(Inkling2):
    """Implements the language model of Inkling 2 with a loop."""

    def __init__(self, config: Inkling2LoopTextConfig, checkpoint: Checkpoint) -> None:
        if not config.loop_layer_index_start <= config.loop_layer_index_end <= config.num_hidden_layers:
            raise UnsupportedModelError(
                f"loop_layer_index_start={config.loop_layer_index_start} and "
                f"loop_layer_index_end={config.loop_layer_index_end} are not layers in order of the "
                f"{config.num_hidden_layers} (num_hidden_layers)"
            )
        self._loop = range(config.loop_layer_index_start, config.loop_layer_index_end)
        self._n_passes = config.loop_num_passes
        self._messages = _load_messages(config, checkpoint, self._loop)
        super().__init__(config, checkpoint)

    def in_order(self, layers: Sequence[BlockLayer]) -> Sequence[Layer]:
        loop, found = self._loop, list[Layer](layers[: self._loop.start])
        for turn in range(self._n_passes):
            for layer, messages in zip(layers[loop.start : loop.stop], self._messages, strict=True):
                own = layer.at(len(found), messages if turn else None)
                is_first = layer is layers[loop.start]
                found.append(_Beginning(own, begins_loop=turn == 0) if is_first else own)
        return [*found, *(layer.at(len(found) + i, None) for i, layer in enumerate(layers[loop.stop :]))]


@dataclass(frozen=True)
class _Beginning:
    """Runs the first layer of a pass, which begins from the rows before the loop."""

    layer: BlockLayer
    begins_loop: bool

    @property
    def specs(self) -> tuple[LayerSpec, ...]:
        return self.layer.specs

    def __call__(self, x_TBM: Tensor, step: Step) -> Tensor:
        if self.begins_loop:
            step.notes[_BEGINNING] = x_TBM
        else:
            # This pass begins again from the rows before the loop. Rows of earlier passes reach it as messages.
            beginning_TBM = step.notes[_BEGINNING]
            step.notes[PREVIOUS] = x_TBM[:, beginning_TBM.shape[1] :]
            x_TBM = beginning_TBM
        return self.layer(x_TBM, step)


def _load_messages(config: Inkling2LoopTextConfig, checkpoint: Checkpoint, loop: range) -> list[Messages]:
    n_model, size = config.hidden_size, (2 * len(loop), config.hidden_size)
    of_inputs, of_rows = (
        checkpoint.take(f"{ROOT}.middle_cycle_cross_pass_{name}", *size, dtype=torch.float32).view(-1, 2, n_model)
        for name in ("queries", "kv_queries")
    )
    found = []
    for i, inputs, rows in zip(loop, of_inputs, of_rows, strict=True):
        gates = [
            MessageGate.load(
                checkpoint, f"{ROOT}.layers.{i}.controllers.{name}", n_model, config.loop_gate_rank,
                config.rms_norm_eps,
            )
            for name in ("attn", "k", "v", "mlp")
        ]  # fmt: skip
        queries = RowProduct(torch.stack([inputs[0], rows[0], rows[1], inputs[1]]))
        found.append(Messages(BlockAttention(queries), gates))
    return found
