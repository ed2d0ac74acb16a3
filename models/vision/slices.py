"""Puts pictures of MiniCPM-V into prompts: a small copy of the whole, then the slices of a large picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hybridmem.memory import FormatError
from hybridmem.memory.sequences import is_soft
from hybridmem.models.vision.pictures import Layout, Pictures, Sight
from hybridmem.models.vision.reading import PictureError
from hybridmem.models.vision.token_ids import read_token_id

if TYPE_CHECKING:
    from transformers import MiniCPMV4_6Config, MiniCPMV4_7Config

_LINE_BREAK = "\u010a"
"""The name of the token of a line break in the vocabulary of Qwen's tokenizers."""


class SliceSight(Sight):
    """Says how MiniCPM-V 4.6 does it: each row is a token's place, and line breaks stand between rows of slices.

    The pictures of a prompt are numbered.
    """

    prefixes = ("model.vision_tower.", "model.merger.")

    def __init__(self, config: MiniCPMV4_6Config | MiniCPMV4_7Config) -> None:
        self.placeholder_id = read_token_id(config, "image_token_id")
        self._merge = 2 if config.downsample_mode == "4x" else 4

    def layout(self, inputs: Mapping[str, Any], n_rows: int) -> Layout:
        whole, *slices = (height * width for height, width in self._sizes(inputs))
        n_down, n_right = self._slices(inputs)
        if len(slices) != n_down * n_right or whole + sum(slices) != n_rows:
            raise FormatError(
                f"the image processor made {len(slices)} slices of a picture of {n_down} × {n_right}, and the tower "
                f"{n_rows} rows of it where there are places for {whole + sum(slices)}"
            )
        layout: Layout = ["<image>", [0, whole], "</image>"]
        at = whole
        for i, n in enumerate(slices):
            layout += [_LINE_BREAK] if i and i % n_right == 0 else []
            layout += ["<slice>", [at, at + n], "</slice>"]
            at += n
        return layout

    def placed(
        self, pictures: Pictures, token_ids: Sequence[int], id_of: Callable[[str], int | None], n_before: int
    ) -> list[int]:
        if not pictures.processor.use_image_id:
            return [*token_ids]
        placed, begin = list[int](), id_of("<image>")
        for token, following in zip(token_ids, [*token_ids[1:], 0], strict=True):
            if token == begin and is_soft(following):
                placed += self._number(n_before, id_of)
                n_before += 1
            placed.append(token)
        return placed

    def _number(self, number: int, id_of: Callable[[str], int | None]) -> list[int]:
        """Return the tokens that say which picture of the prompt this one is."""
        names = ["<image_id>", *str(number), "</image_id>"]
        ids = [id_of(name) for name in names]
        if not all(isinstance(id, int) for id in ids):
            absent = names[next(i for i, id in enumerate(ids) if not isinstance(id, int))]
            raise PictureError(f"a picture needs the token {absent!r}, and the tokenizer was not given or has none")
        return ids  # type: ignore[return-value]

    def _sizes(self, inputs: Mapping[str, Any]) -> list[tuple[int, int]]:
        """Return the rows and columns of the small copy and of each slice."""
        return [(int(height) // self._merge, int(width) // self._merge) for height, width in inputs["target_sizes"]]

    def _slices(self, inputs: Mapping[str, Any]) -> tuple[int, int]:
        """Return in how many rows and columns the picture is sliced; 0, 0 if it is not."""
        n_rows, n_columns = (int(n) for n in inputs["grids"][0])
        return n_rows, n_columns
