"""Makes soft tokens of pictures, for a model that sees. The tower runs once for each picture, whoever sends it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor

from hybridmem.memory import Passage, SoftTokens
from hybridmem.memory.blocks import Int64s
from hybridmem.models.vision.reading import Limits, PictureError, digest_of, file_of, open_picture
from hybridmem.models.vision.tower import Tower
from hybridmem.models.weights.checkpoint import Checkpoint, UnsupportedModelError

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import PreTrainedConfig

Layout: TypeAlias = list[str | int | list[int]]
"""What stands for a picture in a prompt: names of special tokens, ids of tokens, and ranges [start, end) of rows."""


class Sight:
    """Says how a family puts pictures into its prompts. As it is: each row takes one position, as a token does.

    Attributes:
        prefixes: what the names of the tensors of tower and projector begin with.
        n_axes: how many rotary positions a row has.
        placeholder_id: the token that stands for a row in transformers' `input_ids`.
    """

    prefixes: tuple[str, ...] = ()
    n_axes = 1
    placeholder_id: int

    def rows(self, inputs: Mapping[str, Any], rows: Tensor, embed: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the rows (N, M) that stand for a picture, given those of the tower and the lookup of tokens."""
        return rows

    def positions(self, inputs: Mapping[str, Any]) -> tuple[Int64s | None, int]:
        """Return the positions of the rows (axes, N), from the first on, and how many positions the picture takes.

        None, 0: each row takes one, as a token does.
        """
        return None, 0

    def layout(self, inputs: Mapping[str, Any], n_rows: int) -> Layout:
        """Return the tokens that stand for a picture in a prompt."""
        raise NotImplementedError

    def prepare(self, pictures: Pictures, passage: Passage) -> None:
        """Make what else a prompt with this picture may need."""

    def placed(
        self, pictures: Pictures, token_ids: Sequence[int], id_of: Callable[[str], int | None], n_before: int
    ) -> list[int]:
        """Return a prompt as the family wants it: see `Pictures.placed`."""
        return [*token_ids]


@dataclass(frozen=True)
class Picture:
    """Holds a picture that was read. Keep it until its tokens are fed: its rows stay that long.

    Attributes:
        passage: its rows of embeddings.
        layout: what stands for it in a prompt.
        file: a file with the picture, as it was given or as PNG.
    """

    passage: Passage
    layout: Layout
    file: bytes = field(repr=False)

    @property
    def digest(self) -> bytes:
        """Return 32 bytes that tell its content from any other's."""
        return self.passage.digest

    def token_ids(self, id_of: Callable[[str], int | None] = lambda name: None) -> list[int]:
        """Return the token ids that stand for it: put them where the picture belongs, `[*before, *ids, *behind]`.

        Args:
            id_of: name of a special token -> its id, such as `tokenizer.convert_tokens_to_ids`, for families whose
                layout has names.
        Raises:
            PictureError: a name has no id.
        """
        ids = list[int]()
        for part in self.layout:
            if isinstance(part, list):
                ids += self.passage.token_ids[slice(*part)].tolist()
            elif isinstance(part, int):
                ids.append(part)
            elif isinstance(id := id_of(part), int):
                ids.append(id)
            else:
                raise PictureError(f"a picture needs the token {part!r}, and the tokenizer was not given or has none")
        return ids

    def __len__(self) -> int:
        """Return the number of its rows."""
        return len(self.passage)


class Pictures:
    """Reads pictures for one model.

    The tower is loaded at the first picture, so users who send no pictures pay nothing for it.

    Attributes:
        soft_tokens: finds the rows of pictures for memories of this model.
        limits: what a picture may cost.
        n_computed: how often the tower has run.
        embed: looks up the embeddings of tokens of the vocabulary.
        device: where rows are.
    """

    def __init__(self, sight: Sight, config: PreTrainedConfig, checkpoint: Checkpoint) -> None:
        self.soft_tokens = SoftTokens(sight.placeholder_id, n_axes=sight.n_axes)
        self.limits = Limits()
        self.n_computed = 0
        self._sight, self._config, self._checkpoint = sight, config, checkpoint
        self._tower: Tower | None = None
        self._processor: Any = None
        self._lock = threading.Lock()
        self.device = checkpoint.device
        self.embed: Callable[[Tensor], Tensor] = _embed_nothing
        checkpoint.ignore(*checkpoint.names_below(sight.prefixes))

    @property
    def processor(self) -> Any:
        """Return transformers' image processor: the one of the checkpoint's folder, unless another one was set.

        Raises PictureError if there is none.
        """
        if self._processor is None:
            from transformers import AutoImageProcessor

            places = (self._checkpoint.folder, getattr(self._config, "_name_or_path", ""))
            place = next((str(place) for place in places if place and Path(place).is_dir()), None)
            if place is None:
                raise PictureError("this model came without an image processor; set model.pictures.processor to one")
            try:
                self._processor = AutoImageProcessor.from_pretrained(place, local_files_only=True)
            except (ImportError, OSError, ValueError) as error:
                raise PictureError(f"{place} has no image processor that can be used: {error}") from error
        return self._processor

    @processor.setter
    def processor(self, processor: Any) -> None:
        self._processor = processor

    def load(self) -> None:
        """Load the tower and the image processor now, so that no picture waits for them. Raises as `read`."""
        with self._lock:
            self._load()

    def tensors(self) -> list[Tensor]:
        """Return the weights of the tower; none before it is loaded."""
        return [] if self._tower is None else self._tower.tensors()

    def read(self, source: bytes | str | Path | Image) -> Picture:
        """Read a picture: the bytes or the path of a file, or an image of Pillow.

        Raises:
            PictureError: it cannot be read, is beyond the limits, or there is no image processor. FormatError: the
                tower's tensors are missing.
        Cost: one pass of the tower, unless the picture is known: its rows are held by somebody, or were used lately.
        """
        image = open_picture(source, self.limits)
        digest = digest_of(image)
        passage = self.soft_tokens.find(digest)
        if passage is None:
            with self._lock:  # A thread with the same picture waits here, and then finds its rows.
                passage = self.soft_tokens.find(digest) or self._compute(digest, image)
        self._sight.prepare(self, passage)
        return Picture(passage, passage.about, file_of(source, image))

    def placed(
        self, token_ids: Sequence[int], id_of: Callable[[str], int | None] = lambda name: None, n_before: int = 0
    ) -> list[int]:
        """Return the token ids of a prompt as the family wants them, given those in which pictures just stand.

        Most families want no more than that. MiniCPM-V numbers the pictures, and moves line breaks after them.

        Args:
            id_of: as in `Picture.token_ids`.
            n_before: how many pictures stand before these tokens.
        """
        return self._sight.placed(self, token_ids, id_of, n_before)

    def _compute(self, digest: bytes, image: Image) -> Passage:
        tower = self._load()
        try:
            inputs = self.processor(images=[image], return_tensors="pt", **self._options())
        except (TypeError, ValueError) as error:
            raise PictureError(f"the model cannot take a picture of {image.width} × {image.height}: {error}") from error
        rows = self._sight.rows(inputs, tower(inputs), self.embed)
        self.n_computed += 1
        positions, n_positions = self._sight.positions(inputs)
        layout = self._sight.layout(inputs, len(rows))
        return self.soft_tokens.add(digest, rows, positions, n_positions, about=layout)

    def _options(self) -> dict[str, Any]:
        return {"return_row_col_info": True} if hasattr(self.processor, "return_row_col_info") else {}

    def _load(self) -> Tower:
        if self._tower is None:
            checkpoint = self._checkpoint
            tensors = checkpoint.read_below(self._sight.prefixes)
            self._tower = Tower(self._config, tensors, checkpoint.dtype, checkpoint.device)
        return self._tower


def _embed_nothing(token_ids_T: Tensor) -> Tensor:
    raise RuntimeError("these pictures belong to no model yet")


def pictures_of(model: object) -> Pictures:
    """Return the `Pictures` of a model. Raises UnsupportedModelError, which names the model, if it sees none."""
    found = getattr(model, "pictures", None)
    if not isinstance(found, Pictures):
        name = getattr(getattr(model, "memory_spec", None), "model", type(model).__name__)
        raise UnsupportedModelError(
            f"{name} reads text alone: no picture can be in its prompts. Models that see are in "
            "docs/results/architectures.md; of files for llama.cpp only the language model is read"
        )
    return found


def text_config_of(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the config of the language model of a model that sees.

    The outer config says which class it is and whether weights are tied.
    """
    text = copy(config.get_text_config())
    text.architectures = config.architectures
    text.tie_word_embeddings = config.tie_word_embeddings
    return text


def pictures_below(sight: Sight, config: PreTrainedConfig, checkpoint: Checkpoint) -> Pictures | None:
    """Return the pictures of a model whose checkpoint has a tower; None if it has none, as in a file for text alone."""
    return Pictures(sight, config, checkpoint) if checkpoint.names_below(sight.prefixes) else None
