"""Reads the tensors of a checkpoint in Hugging Face layout: a safetensors file, or shards with an index.

Files are memory-mapped.
"""

from __future__ import annotations

import json
import math
import re
import reprlib
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hybridmem.memory.errors import FormatError, HybridMemoryError
from hybridmem.models.weights.coded import CodedTensor, as_floats
from hybridmem.models.weights.dry import joined
from hybridmem.models.weights.formats import wanted_format
from hybridmem.models.weights.signature import sample_of
from hybridmem.models.weights.tied_weights import TiedWeights, equal_in

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_SHARD_NAME = re.compile(r"[\w.+ -]{1,200}\.safetensors")
"""Allowed names of shards: files in the folder of the index. Without this limit, an index could name any file."""

MOST_MAPPED_BYTES = 1 << 28
"""Bytes that are read before files are mapped anew: more than that of a checkpoint need not be in memory beside the
model."""

_MOST_COPIED_BYTES = 1 << 20
"""The largest tensor of a file that is copied when it is taken."""

CODE_DTYPES = frozenset({torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2})
"""Dtypes whose numbers mean nothing without a scale."""

_DTYPES = {
    "I64": torch.int64, "I32": torch.int32, "I8": torch.int8, "U8": torch.uint8, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
"""Dtypes that matter to a coding, under the names of safetensors."""


class UnsupportedModelError(HybridMemoryError, ValueError):
    """The architecture of a checkpoint, or one of its options, is not implemented by this library."""


def require(config: object, **wanted: object) -> None:
    """Raise UnsupportedModelError unless these options of a config have these values.

    It is for options whose other values existing implementations ignore, or treat in unknown ways.
    """
    for name, value in wanted.items():
        found = getattr(config, name)
        if (tuple(found) if isinstance(found, list) else found) != value:
            raise UnsupportedModelError(f"{name}={found!r}; {type(config).__name__} is implemented with {value!r} only")


def check_numbers(config: object, *names: str, above: float = -math.inf) -> None:
    """Raise UnsupportedModelError unless these options of a config are finite numbers greater than `above`."""
    for name in names:
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not above < value < math.inf:
            limit = "" if above == -math.inf else f" above {above}"
            raise UnsupportedModelError(
                f"{name}={value!r}; {type(config).__name__} is implemented with a number{limit}"
            )


class Coding(Protocol):
    """Says how a checkpoint stores quantized tensors: as parts, such as codes and scales, that make a dense tensor.

    Attributes:
        unused: the ends of the names of tensors that nothing needs, such as scales of activations.
    """

    unused: tuple[str, ...]

    def find_parts(self, names: Collection[str]) -> dict[str, dict[str, str]]:
        """Return, by the name of each dense tensor, its parts: kind of part -> name among `names`."""
        ...

    def join(self, name: str, parts: Mapping[str, Tensor]) -> Joined:
        """Return the tensor of these parts. Raises FormatError."""
        ...


class Joined(Protocol):
    """Holds a quantized tensor. If its parts are on "meta", so are the tensors that it returns."""

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the dense tensor. Raises FormatError."""
        ...

    def coded(self, dtype: torch.dtype) -> CodedTensor | None:
        """Return the tensor in its own bits, or None if no product reads them. Raises FormatError."""
        ...


class Checkpoint:
    """Holds the tensors of a checkpoint by name. Each tensor is read when it is taken. The others are never loaded.

    Args:
        folder: holds model.safetensors, or its shards and their index.
        dtype: the dtype to which floating-point tensors are cast.
        on_taken: called once for every tensor taken, for progress bars.
    Raises:
        FormatError: there are no weights, the index cannot be read, or a shard is missing or damaged.
    """

    def __init__(
        self, folder: Path, device: torch.device, dtype: torch.dtype, on_taken: Callable[[], None] = lambda: None
    ) -> None:
        self._start(folder, device, dtype)
        self.on_taken = on_taken
        self._read_bytes = 0
        self._files = {name: self._open(name) for name in self._file_names()}
        self._file_of = {tensor: name for name, file in self._files.items() for tensor in file.keys()}

    def _start(self, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
        """Set the attributes that checkpoints of all kinds have."""
        self.folder, self.device, self.dtype = folder, device, dtype
        self.on_taken = lambda: None
        self._taken: dict[str, bytes] = {}  # Maps the name of a taken tensor to a sample of its numbers.
        self._factors: dict[str, float | Tensor] = {}
        self._tied = TiedWeights()
        self._ignored: set[str] = set()
        self._coding: Coding | None = None
        # Maps a dense tensor to its parts, and each part to its file and its name there.
        self._parts: dict[str, dict[str, tuple[str, str]]] = {}

    def decode_with(self, coding: Coding) -> None:
        """From now on, replace tensors that are stored in parts by the dense tensors that `take` makes of the parts.

        Raises:
            FormatError: no tensor is stored in such parts.
        """
        found = coding.find_parts(self._file_of.keys())
        if not found:
            raise FormatError(
                f"{self.folder}/config.json has a quantization_config, but no tensor beside it is quantised so; "
                "if the weights are stored as they are, remove the quantization_config"
            )
        self._coding = coding
        self._parts = {
            name: {part: (self._file_of[stored], stored) for part, stored in parts.items()}
            for name, parts in found.items()
        }
        hidden = {stored for parts in found.values() for stored in parts.values()}
        plain = {
            name: file
            for name, file in self._file_of.items()
            if name not in hidden and not name.endswith(coding.unused)
        }
        self._file_of = plain | {name: next(iter(parts.values()))[0] for name, parts in self._parts.items()}

    def _file_names(self) -> list[str]:
        if (self.folder / SINGLE_FILE).exists():
            return [SINGLE_FILE]
        index = self.folder / INDEX_FILE
        if not index.exists():
            raise FormatError(
                f"{self.folder} has neither {SINGLE_FILE} nor {INDEX_FILE}; only safetensors checkpoints can be loaded"
            )
        try:
            names = set(json.loads(index.read_text())["weight_map"].values())
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise FormatError(f"{index} is no index of safetensors shards: {error}") from error
        if not names or not all(isinstance(name, str) and _SHARD_NAME.fullmatch(name) for name in names):
            raise FormatError(
                f"{index} is no index of safetensors shards: its weight_map holds {reprlib.repr(list(names))}, not "
                "names of files beside it"
            )
        return sorted(names)

    def _open(self, name: str) -> Any:
        path = self.folder / name
        if not path.is_file():
            raise FormatError(f"{path} is missing; the checkpoint is incomplete, download it again")
        try:
            return safe_open(path, framework="pt", device="cpu")
        except (SafetensorError, OSError) as error:
            raise FormatError(f"{path} is damaged: {error}; download it again") from error

    def __len__(self) -> int:
        return len(self._file_of)

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def take(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return the tensor `name`, of this `shape`, on the checkpoint's device, in `dtype` or the checkpoint's dtype.

        If `dtype` is None, a tensor that is stored in fewer bits may be a `CodedTensor`, which keeps these bits.

        Raises:
            FormatError: the tensor is missing or has another shape. The message names both shapes.
        """
        tensor = self.take_as_stored(name, *shape)
        if dtype is not None:
            tensor = as_floats(tensor)
        if name in self._factors and tensor.is_meta:
            tensor = torch.empty(tensor.shape, dtype=torch.float32, device=tensor.device)
        elif name in self._factors:
            factor = torch.as_tensor(self._factors[name], dtype=torch.float32)
            tensor = tensor.float() * factor.view(-1, *[1] * (tensor.dim() - 1))
        return tensor.to(self.device, dtype or self.dtype)

    def scale(self, name: str, factor: float | Tensor) -> None:
        """Make `take` multiply the tensor `name` by one factor, or by one factor per row. The tensor need not exist.

        Factors of one change nothing, so that a tensor in few bits keeps them.
        """
        if not bool((torch.as_tensor(factor) == 1).all()):
            self._factors[name] = factor

    def take_as_stored(self, name: str, *shape: int) -> Tensor:
        """Return a tensor as `take` does, but mapped from the file, in the file's dtype, on the CPU.

        Such a tensor takes memory only for those of its parts that are read.
        """
        stored = self._tied.stored_as.get(name, name)
        if stored not in self._file_of:
            close = [n for n in self._file_of if n.rsplit(".", 2)[-2:] == name.rsplit(".", 2)[-2:]][:3]
            raise FormatError(
                f"{self.folder} has no tensor {name!r} of shape {list(shape)}{f'; similar: {close}' if close else ''}"
            )
        tensor = self._read(stored)
        if tensor.shape != shape:
            raise FormatError(
                f"{stored} in {self.folder} has shape {list(tensor.shape)}, its config.json says {list(shape)}"
            )
        self._note_taken(name, tensor)
        return tensor

    def _note_taken(self, name: str, tensor: Tensor) -> None:
        if name not in self._taken:
            self._taken[name] = sample_of(tensor, self.dtype, self._factors.get(name))
            self.on_taken()

    @property
    def keeps_bits(self) -> bool:
        """True if tensors that are stored in few bits keep these bits when they are taken."""
        return self.device.type in ("cpu", "meta") and wanted_format() not in ("dense", "plain")

    @property
    def samples(self) -> Mapping[str, bytes]:
        """Return name -> sample of the numbers, for each tensor that was taken. `signature.signature_of` needs it."""
        return self._taken

    def _read(self, name: str) -> Tensor:
        """Map the tensor, or make it from its parts."""
        if self._coding is not None and name in self._parts:
            parts = {part: self._map(*stored) for part, stored in self._parts[name].items()}
            stored = self._coding.join(name, parts)
            coded = stored.coded(self.dtype) if self.keeps_bits else None
            return stored.dense(self.dtype) if coded is None else coded
        tensor = self._map(self._file_of[name], name)
        if tensor.dtype in CODE_DTYPES:
            raise FormatError(
                f"{name} in {self.folder} is stored as {str(tensor.dtype).removeprefix('torch.')} without a scale that "
                "its config.json explains; download the checkpoint again"
            )
        return tensor

    def _map(self, file: str, name: str) -> Tensor:
        """Map a tensor as it is stored.

        From time to time, files are mapped anew, so that pages that were read leave memory.

        Small tensors are copied, because the model keeps many of them, and each would keep all pages read of its file.
        """
        if self._read_bytes >= MOST_MAPPED_BYTES:
            self._files, self._read_bytes = {other: self._open(other) for other in self._files}, 0
        tensor: Tensor = self._files[file].get_tensor(name)
        self._read_bytes += tensor.nbytes
        return tensor if tensor.nbytes > _MOST_COPIED_BYTES else tensor.clone()

    def take_optional(self, condition: bool, name: str, *shape: int) -> Tensor | None:
        """Return the tensor as `take` does if the config says that it exists (`condition`), else None."""
        return self.take(name, *shape) if condition else None

    def name_of(self, *names: str) -> str:
        """Return the first of these names under which a tensor is stored, or the first name if none is stored."""
        return next((name for name in names if name in self), names[0])

    def take_joined(self, names: Sequence[str], *shape: int) -> Tensor:
        """Return several stored tensors as one, joined along the first dimension, as `take` does.

        They may be cut anywhere: published files cut by meaning, and transformers cuts into equal parts.

        Raises:
            FormatError: a tensor is missing, or the joined tensor has another shape.
        """
        if len(names) == 1 or any(name not in self for name in names):
            return self.take(names[0] if len(names) == 1 else next(n for n in names if n not in self), *shape)
        sizes = self._sizes_of(names, shape[0])
        return joined(*(self.take(name, size, *shape[1:]) for name, size in zip(names, sizes, strict=True)))

    def take_parts_as_stored(self, names: Sequence[str], *shape: int) -> list[Tensor]:
        """Return the parts of a tensor as `take_as_stored` does. They may be cut anywhere, as in `take_joined`."""
        if len(names) == 1:
            return [self.take_as_stored(names[0], *shape)]
        sizes = self._sizes_of(names, shape[0])
        return [self.take_as_stored(name, size, *shape[1:]) for name, size in zip(names, sizes, strict=True)]

    def _sizes_of(self, names: Sequence[str], n_rows: int) -> list[int]:
        """Return how many rows each part of a tensor has. Raises FormatError unless they have `n_rows` together."""
        sizes = [len(self._read(name)) for name in names]
        if sum(sizes) != n_rows:
            raise FormatError(
                f"{', '.join(names)} in {self.folder} have {sum(sizes)} rows, its config.json says {n_rows}"
            )
        return sizes

    def tie(self, source: str, *names: str, is_tied: bool = True, own: Collection[str] = ()) -> tuple[str, ...]:
        """Return, for each of `names`, the name under which to take it: `source` if both are the same tensor.

        A name that no file holds is taken from `source`. If no file holds `source`, it is taken from the first of
        `names` that is stored. Tensors that are stored and differ are used as they are, and `warn_of_surprises` names
        them.

        Args:
            is_tied: what the config says. If it is False, each name must be stored.
            own: those names that the config does not tie, although it ties the others.
        Raises:
            FormatError: a name that is not tied is not stored.
        Cost: stored tensors are read up to the first number that differs.
        """
        return self._tied.decide(self, source, names, is_tied, own)

    def tie_block(self, block: str, *sources: str, is_tied: bool) -> str:
        """Return the beginning of the names under which to take a block of a layer that other layers may use as well.

        It is the first of `sources` that is stored, unless `block` is stored and differs from it.

        Args:
            block, sources: the beginnings of the names of the block's tensors, for this layer and for all layers that
                share the block.
        """
        return self._tied.decide_block(self, self._file_of, block, sources, is_tied)

    def are_equal(self, name: str, other: str) -> bool:
        """Return whether two stored tensors hold the same numbers in the checkpoint's dtype."""
        if (name in self._parts) != (other in self._parts):
            return False  # One of the two was rounded when it was quantized.
        return equal_in(self.dtype, as_floats(self._read(name)), as_floats(self._read(other)))

    @property
    def differing(self) -> Mapping[str, str]:
        """Return name -> name of the tensor to which the config ties it, for pairs that are both stored and differ."""
        return self._tied.differing

    def warn_of_surprises(self) -> None:
        """Warn of tensors that differ although the config ties them, and of tensors that were not taken.

        In such cases the model may not be what its config says.
        """
        for name, source in self.differing.items():
            warnings.warn(
                f"{name} of {self.folder} differs from {source}, although its config says tie_word_embeddings=True; "
                f"{name} is used, as transformers does",
                stacklevel=3,
            )
        if left := self.leftovers():
            warnings.warn(f"{len(left)} tensors of {self.folder} are not used: {left[:5]}", stacklevel=3)

    def ignore(self, *names: str) -> None:
        """Name tensors that files may hold although the model computes them itself, so that no warning names them."""
        self._ignored.update(names)

    def names_below(self, prefixes: Iterable[str]) -> list[str]:
        """Return the names of stored tensors that begin with one of these. A dry run has none."""
        return sorted(name for name in self._file_of if name.startswith(tuple(prefixes)))

    def first_below(self, prefixes: Iterable[str]) -> str | None:
        """Return the first name of a stored tensor that begins with one of these, or None. A dry run asks its files."""
        return next(iter(self.names_below(prefixes)), None)

    def read_below(self, prefixes: Iterable[str]) -> dict[str, Tensor]:
        """Return stored tensors whose names begin with one of these; floats in the checkpoint's dtype.

        It is for a part that is not always loaded: none of them counts as taken.
        """
        found = {name: as_floats(self._read(name)) for name in self.names_below(prefixes)}
        return {name: x.to(self.dtype) if x.is_floating_point() else x for name, x in found.items()}

    def leftovers(self) -> list[str]:
        """Return the names of tensors that were neither taken nor ignored, and to which no others are tied."""
        return sorted(self._file_of.keys() - self._taken.keys() - self._tied.equal - self._ignored)


class UnreadCheckpoint(Checkpoint):
    """Reads names and shapes of a folder's checkpoint, and checks them, but reads no numbers: tensors take no memory.

    Attributes:
        stored: name -> (dtype as named by safetensors, shape) of every tensor in the files.
    """

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        super().__init__(folder, torch.device("meta"), dtype)
        slices = {name: self._files[file].get_slice(name) for name, file in self._file_of.items()}
        self.stored: dict[str, tuple[str, tuple[int, ...]]] = {
            n: (s.get_dtype(), tuple(s.get_shape())) for n, s in slices.items()
        }

    def are_equal(self, name: str, other: str) -> bool:
        """Compare the numbers, because which tensors a model holds depends on them."""
        read = Checkpoint(self.folder, torch.device("cpu"), self.dtype)
        if self._coding is not None:
            read.decode_with(self._coding)
        return read.are_equal(name, other)

    def _map(self, file: str, name: str) -> Tensor:
        if name.endswith("_shape"):  # The shape of a packed tensor is only in the numbers of this tensor.
            return super()._map(file, name)
        dtype, shape = self.stored[name]
        return torch.empty(shape, dtype=_DTYPES.get(dtype, self.dtype), device=self.device)

    def scale(self, name: str, factor: float | Tensor) -> None:
        """Do nothing, because there are no numbers to scale."""


class LoadedCheckpoint(Checkpoint):
    """Holds tensors that are already in memory. Tensors that are taken unchanged are shared.

    Args:
        tensors: the tensors, under the names that they would have in a file.
    """

    def __init__(self, name: str, tensors: dict[str, Tensor], device: torch.device, dtype: torch.dtype) -> None:
        self._start(Path(name), device, dtype)
        self._file_of = dict.fromkeys(tensors, name)
        self._tensors = tensors

    def _read(self, name: str) -> Tensor:
        return self._tensors[name]

    def leftovers(self) -> list[str]:
        """Return names as for files, where a tensor with several names occurs only once."""
        places = {self._tensors[name].data_ptr() for name in self._taken}
        return [name for name in super().leftovers() if self._tensors[name].data_ptr() not in places]


class SampledCheckpoint(LoadedCheckpoint):
    """Samples the numbers of tensors that are in memory, and returns tensors on "meta", which take no memory."""

    def __init__(self, name: str, tensors: dict[str, Tensor], dtype: torch.dtype) -> None:
        super().__init__(name, tensors, torch.device("meta"), dtype)

    def take(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty_like(self.take_as_stored(name, *shape), dtype=dtype or self.dtype)

    def take_as_stored(self, name: str, *shape: int) -> Tensor:
        return torch.empty_like(super().take_as_stored(name, *shape), device=self.device)
