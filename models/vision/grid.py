"""Puts pictures of Qwen's families into prompts: a grid of rows, with a time, a height and a width each (M-RoPE)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from hybridmem.memory.blocks import Int64s
from hybridmem.models.vision.pictures import Layout, Sight
from hybridmem.models.vision.token_ids import read_token_id

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class GridSight(Sight):
    """Says that a picture is a grid, whose positions take as many places as its longer side (Wang et al. 2024)."""

    prefixes: tuple[str, ...] = ("model.visual.", "visual.")
    n_axes = 3
    kind = "vision"
    """What the config calls the tokens around pictures by."""

    def __init__(self, config: PreTrainedConfig) -> None:
        self.placeholder_id = read_token_id(config, "image_token_id")
        self._around = tuple(read_token_id(config, f"{self.kind}_{end}_token_id") for end in ("start", "end"))
        self._merge = int(config.vision_config.spatial_merge_size)

    def positions(self, inputs: Mapping[str, Any]) -> tuple[Int64s | None, int]:
        time, height, width = (int(n) for n in inputs["image_grid_thw"][0])
        sides = time, height // self._merge, width // self._merge
        return np.indices(sides).reshape(3, -1).astype(np.int64), max(sides)

    def layout(self, inputs: Mapping[str, Any], n_rows: int) -> Layout:
        start, end = self._around
        return [start, [0, n_rows], end]


class FlatGridSight(GridSight):
    """Says that a picture is such a grid in the tower alone: for the language model each row is a token's place."""

    prefixes: tuple[str, ...] = (
        "model.vision_tower.", "model.multi_modal_projector.", "vision_tower.", "multi_modal_projector.",
    )  # fmt: skip
    n_axes = 1

    def positions(self, inputs: Mapping[str, Any]) -> tuple[Int64s | None, int]:
        return None, 0


class PlainGridSight(FlatGridSight):
    """Says the same of GLM-5.3, whose config and files have other names."""

    prefixes = GridSight.prefixes
    kind = "image"


class ShuffledGridSight(Sight):
    """Says how Nemotron 3 Omni does it: rows in the places of tokens, between two tokens that have names."""

    prefixes = "vision_model.", "mlp1.", "vision_projector.", "multi_modal_projector.", "vision_final_layernorm."

    def __init__(self, config: PreTrainedConfig) -> None:
        self.placeholder_id = read_token_id(config, "image_token_id")

    def layout(self, inputs: Mapping[str, Any], n_rows: int) -> Layout:
        return ["<img>", [0, n_rows], "</img>"]
