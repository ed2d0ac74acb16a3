"""Puts pictures of MiniCPM-V 4.7 into prompts: a small copy of the whole and its slices, all on one canvas.

The canvas is a grid of positions. Its slices tile it, the small copy is stretched over it, and the tokens around them,
such as `<slice>`, stand at the corners of what they enclose. So these tokens are rows of the picture too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from hybridmem.memory import FormatError
from hybridmem.memory.blocks import Int64s
from hybridmem.memory.sequences import passages_in
from hybridmem.models.vision.pictures import Layout, Pictures
from hybridmem.models.vision.slices import SliceSight
from hybridmem.models.vision.token_ids import read_token_id

if TYPE_CHECKING:
    from transformers import MiniCPMV4_7Config

    from hybridmem.memory import Passage

_MARKS = "image_start_id", "image_end_id", "slice_start_id", "slice_end_id", "newline_id"
Part = tuple[int | None, Int64s]
"""A token of the vocabulary, or None for rows of the tower; and their positions (3, n)."""


class CanvasSight(SliceSight):
    """Says how many positions a picture takes: one more than the longer side of its canvas has cells.

    A line break right after a picture stands at the picture's first position, and takes none.
    """

    n_axes = 3

    def __init__(self, config: MiniCPMV4_7Config) -> None:
        super().__init__(config)
        self._begin, self._end, self._begin_slice, self._end_slice, self._newline = (
            read_token_id(config, name) for name in _MARKS
        )
        self._behind: dict[int, Passage] = {}

    def rows(self, inputs: Mapping[str, Any], rows: Tensor, embed: Callable[[Tensor], Tensor]) -> Tensor:
        parts = self._parts(inputs)
        n_rows = sum(positions.shape[1] for token, positions in parts if token is None)
        if n_rows != len(rows):
            raise FormatError(f"the tower made {len(rows)} rows of a picture that has places for {n_rows}")
        marks = embed(torch.tensor([token for token, _ in parts if token is not None], device=rows.device))
        woven, at, n_marks = list[Tensor](), 0, 0
        for token, positions in parts:
            n = positions.shape[1]
            woven.append(rows[at : at + n] if token is None else marks[n_marks : n_marks + 1])
            at, n_marks = (at + n, n_marks) if token is None else (at, n_marks + 1)
        return torch.cat(woven)

    def positions(self, inputs: Mapping[str, Any]) -> tuple[Int64s | None, int]:
        return np.concatenate([positions for _, positions in self._parts(inputs)], 1), max(self._canvas(inputs)) + 1

    def layout(self, inputs: Mapping[str, Any], n_rows: int) -> Layout:
        return [[0, n_rows]]

    def prepare(self, pictures: Pictures, passage: Passage) -> None:
        self._line_break(pictures, len(passage) - passage.back)

    def placed(
        self, pictures: Pictures, token_ids: Sequence[int], id_of: Callable[[str], int | None], n_before: int
    ) -> list[int]:
        placed, at = list[int](), 0
        for i, (start, end, n_positions) in enumerate(passages_in(token_ids), n_before):
            placed += token_ids[at:start]
            placed += self._number(i, id_of) if pictures.processor.use_image_id else []
            placed += token_ids[start:end]
            at = end
            while at < len(token_ids) and token_ids[at] == self._newline:
                placed.append(self._line_break(pictures, n_positions))
                at += 1
        return [*placed, *token_ids[at:]]

    def _line_break(self, pictures: Pictures, n_positions: int) -> int:
        """Return the id of a line break that stands `n_positions` before its own place, and takes none."""
        if n_positions not in self._behind:
            digest = hashlib.sha256(f"line break behind a canvas of {n_positions} positions".encode()).digest()
            row = pictures.embed(torch.tensor([self._newline], device=pictures.device))
            self._behind[n_positions] = pictures.soft_tokens.add(digest, row, np.full((3, 1), -n_positions), 0)
        return int(self._behind[n_positions].token_ids[0])

    def _canvas(self, inputs: Mapping[str, Any]) -> tuple[int, int]:
        whole, *slices = self._sizes(inputs)
        n_rows, n_columns = self._slices(inputs)
        if len(slices) != n_rows * n_columns:
            raise FormatError(f"the image processor made {len(slices)} slices of a picture of {n_rows} × {n_columns}")
        return (n_rows * slices[0][0], n_columns * slices[0][1]) if slices else whole

    def _parts(self, inputs: Mapping[str, Any]) -> list[Part]:
        """Return the tokens and rows that stand for a picture, with positions that count from its first one."""
        height, width = self._canvas(inputs)
        whole, *slices = self._sizes(inputs)
        _, n_columns = self._slices(inputs)
        parts: list[Part] = [
            (self._begin, np.array([[0], [-1], [-1]])),
            (None, _grid(_spread(height, whole[0]), _spread(width, whole[1]))),
            (self._end, np.array([[0], [height], [width]])),
        ]
        for i, (n_down, n_right) in enumerate(slices):
            down, right = i // n_columns * slices[0][0], i % n_columns * slices[0][1]
            if i and i % n_columns == 0:
                parts.append((self._newline, np.array([[0], [down - 1], [width]])))
            parts += [
                (self._begin_slice, np.array([[0], [down], [right]])),
                (None, _grid(np.arange(down, down + n_down), np.arange(right, right + n_right))),
                (self._end_slice, np.array([[0], [down + n_down - 1], [right + n_right - 1]])),
            ]
        return parts


def _spread(n_places: int, n: int) -> Int64s:
    """Return n places, as far apart as possible among n_places."""
    places: Int64s = torch.linspace(0, n_places - 1, n).round().long().numpy()
    return places


def _grid(down: Int64s, right: Int64s) -> Int64s:
    """Return positions (3, n) of the cells of a grid, row by row; its time is 0."""
    cells = np.stack(np.meshgrid(down, right, indexing="ij")).reshape(2, -1)
    return np.concatenate([np.zeros_like(cells[:1]), cells])
