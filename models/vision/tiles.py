"""Puts pictures of LFM2-VL into prompts: small ones whole, large ones as tiles and a small copy of the whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hybridmem.memory import FormatError
from hybridmem.models.vision.grid import FlatGridSight
from hybridmem.models.vision.pictures import Layout, Sight
from hybridmem.models.vision.token_ids import read_token_id

if TYPE_CHECKING:
    from transformers import Lfm2VlConfig


class TileSight(Sight):
    """Says that each tile of a picture has a token before it that names its row and its column."""

    prefixes = FlatGridSight.prefixes

    def __init__(self, config: Lfm2VlConfig) -> None:
        self.placeholder_id = read_token_id(config, "image_token_id")
        self._factor = int(config.downsample_factor)

    def layout(self, inputs: Mapping[str, Any], n_rows: int) -> Layout:
        counts = (inputs["spatial_shapes"] // self._factor).prod(-1).tolist()
        rows, columns = (int(inputs[name][0]) if name in inputs else 1 for name in ("image_rows", "image_cols"))
        if len(counts) not in (1, rows * columns, rows * columns + 1) or sum(counts) != n_rows:
            raise FormatError(f"the image processor made {len(counts)} parts of a picture of {rows} × {columns} tiles")
        names = [f"<|img_row_{row + 1}_col_{column + 1}|>" for row in range(rows) for column in range(columns)]
        names += ["<|img_thumbnail|>"] * (len(counts) - len(names))
        layout: Layout = ["<|image_start|>"]
        at = 0
        for name, count in zip(names, counts, strict=True):
            layout += [name] if len(counts) > 1 else []
            layout.append([at, at + count])
            at += count
        return [*layout, "<|image_end|>"]
