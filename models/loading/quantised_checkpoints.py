"""Reads weights of checkpoints that store them quantized: compressed-tensors, GPTQ, AWQ and FP8.

Every format consists of codes, a grid of scales, and perhaps a grid of zero points (`stored_codes`). Which tensors are
quantized is decided by what is stored, so lists of modules to leave out are not needed. Activations are not quantized,
whatever the config says of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hybridmem.memory.blocks import ceil_div, is_integer
from hybridmem.memory.errors import FormatError
from hybridmem.models.loading.stored_codes import StoredCodes
from hybridmem.models.weights.checkpoint import CODE_DTYPES, Coding, UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_REMEDY = "give a checkpoint quantised with compressed-tensors, gptq, awq or fp8, or one in 16 or 32 bits"
_UNUSED: tuple[str, ...] = (
    ".input_scale", ".input_zero_point", ".input_global_scale", ".output_scale", ".output_zero_point",
    ".activation_scale",
)  # fmt: skip
"""The ends of the names of tensors about activations."""


def find_coding(config: PreTrainedConfig) -> Coding | None:
    """Return the coding of a checkpoint's quantized tensors, or None if its config names none.

    Raises:
        UnsupportedModelError: the format, or an option of it, is not implemented. The message names it.
        FormatError: the config contradicts itself.
    """
    for part in (config, config.get_text_config()):
        for name in ("quantization_config", "compression_config"):  # Older files use the second name.
            if not (stored := getattr(part, name, None)):
                continue
            try:
                return _read_coding(stored if isinstance(stored, dict) else stored.to_dict())
            except (AttributeError, LookupError, TypeError, re.error) as error:
                raise FormatError(f"{name}={stored!r} contradicts itself: {error}") from error
    return None


def _read_coding(stored: dict[str, Any]) -> Coding:
    method = stored.get("quant_method") or ("compressed-tensors" if "config_groups" in stored else None)
    if stored.get("kv_cache_scheme") or stored.get("kv_cache_quant_algo"):
        raise _refusal(stored, "kv_cache_scheme", "kv_cache_quant_algo")
    readers: dict[object, Callable[[dict[str, Any]], Coding]] = {
        "compressed-tensors": CompressedTensors.read, "gptq": Gptq.read, "awq": Awq.read, "fp8": Float8.read,
        "modelopt": Float8.read_modelopt,
    }  # fmt: skip
    if method not in readers:
        raise UnsupportedModelError(f"quantization_config has quant_method={method!r}, which is not read; {_REMEDY}")
    return readers[method](stored)


def _refusal(stored: Mapping[str, Any], *names: str) -> UnsupportedModelError:
    said = ", ".join(f"{name}={stored[name]!r}" for name in ("quant_method", *names) if stored.get(name) is not None)
    return UnsupportedModelError(f"quantization_config has {said}, which is not read; {_REMEDY}")


def _check(stored: Mapping[str, Any], name: str, *wanted: object) -> Any:
    """Return an option of a config. Raise UnsupportedModelError unless it is one of the `wanted`."""
    if not any(stored.get(name) == value and type(stored.get(name)) is type(value) for value in wanted):
        raise UnsupportedModelError(
            f"quantization_config has quant_method={stored.get('quant_method')!r}, {name}={stored.get(name)!r}, "
            f"but {name} is read as {', '.join(map(repr, wanted))} only; {_REMEDY}"
        )
    return stored.get(name)


def _read_size(stored: Mapping[str, Any], name: str) -> int | None:
    """Return the number of columns of a group, or None for all columns, which files write as -1."""
    size = stored.get(name)
    if not is_integer(size) or (size < 1 and size != -1):
        raise _refusal({**stored, name: repr(size)}, name)
    return None if size == -1 else int(size)


# The functions below compute weights from codes, scales and zero points.


def _unpack(words: Tensor, bits: int) -> Tensor:
    """Return the unsigned codes of 4 or 8 bits in int32 words (..., n), lowest bits first: (..., n * 32 / bits)."""
    n_codes = 32 // bits
    codes = torch.empty(*words.shape, n_codes, dtype=torch.uint8, device=words.device)
    for i in range(n_codes):
        codes[..., i] = words >> bits * i & (1 << bits) - 1
    return codes.flatten(-2)


def _gather(names: Collection[str], key: str, dense: str, ends: Iterable[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield, for each name that ends in `key`, the name of its dense tensor, and the names of its parts that exist."""
    for name in names:
        if name.endswith(key):
            root = name.removesuffix(key)
            yield root + dense, {end.strip("._"): root + end for end in ends if root + end in names}


def _need(name: str, parts: Mapping[str, Tensor], *wanted: str) -> None:
    for part in wanted:
        if part not in parts:
            raise FormatError(f"{name} is quantised, but has no {part or 'codes'}; download the checkpoint again")


def _part(name: str, parts: Mapping[str, Tensor], part: str, *dtypes: torch.dtype, n_dims: int | None = None) -> Tensor:
    """Return a part of a tensor, of one of these dtypes. If no dtypes are given, any floating-point dtype will do."""
    _need(name, parts, part)
    found = parts[part]
    if (found.dtype not in dtypes) if dtypes else not found.is_floating_point():
        wanted = ", ".join(map(str, dtypes)) or "a floating-point dtype"
        raise FormatError(f"{name} has its {part or 'codes'} in {found.dtype}; they are read in {wanted}")
    if n_dims is not None and found.dim() != n_dims:
        raise FormatError(f"{name} has its {part or 'codes'} of shape {list(found.shape)}, not of {n_dims} axes")
    return found


# The class below reads checkpoints of compressed-tensors.


@dataclass(frozen=True)
class _Scheme:
    """Says how a group of modules is stored.

    Attributes:
        bits: how many bits a packed code has.
        block: how many rows and columns share a scale.
        needed: the names of parts without which scales and codes would give wrong numbers.
    """

    targets: tuple[str, ...]
    bits: int
    block: tuple[int | None, int | None]
    needed: tuple[str, ...]

    @staticmethod
    def read(stored: Mapping[str, Any], format: object) -> _Scheme | None:
        weights = stored.get("weights")
        if weights is None:
            return None
        named = {"quant_method": "compressed-tensors", "format": stored.get("format") or format, **weights}
        _check(named, "format", *CompressedTensors.FORMATS)
        _check(named, "type", *(("int",) if named["format"] == "pack-quantized" else ("int", "float")))
        _check(named, "num_bits", *((8,) if weights.get("type") == "float" else (4, 8)))
        strategy = _check(named, "strategy", "tensor", "channel", "group", "block")
        block: tuple[int | None, int | None] = (None if strategy == "tensor" else 1, None)
        if strategy == "group":
            block = (1, _read_size(named, "group_size"))
        if strategy == "block":
            block = _read_block(named, "block_structure")
        targets = stored.get("targets") or ()
        for target in targets:
            re.compile(target.removeprefix("re:"))
        needs = {"zero_point": weights.get("symmetric") is False}
        needs["g_idx"] = weights.get("actorder") in (True, "group", "dynamic")
        return _Scheme(
            tuple(targets), weights["num_bits"], block, tuple(part for part, is_so in needs.items() if is_so)
        )

    def rank(self, module: str) -> int:
        """Return how well the targets fit a module. The scheme with the highest number stores the module.

        3: a target is the module's name, or a pattern of it. 2: a target is the class that the name suggests. 1: a
        target is another class. 0: no target fits.
        """
        for target in self.targets:
            pattern = target.removeprefix("re:")
            if target == module or (pattern != target and re.match(pattern, module)):
                return 3
        likely = "Embedding" if "embed" in module.rsplit(".", 1)[-1] else "Linear"
        return 2 if likely in self.targets else int(any(not target.startswith("re:") for target in self.targets))


def _read_block(stored: Mapping[str, Any], name: str) -> tuple[int, int]:
    size = stored.get(name)
    if isinstance(size, str):  # Older files say "128x128".
        size = [int(part) if part.isdigit() else part for part in size.split("x")]
    if not (isinstance(size, list | tuple) and len(size) == 2 and all(is_integer(n) and n > 0 for n in size)):
        raise _refusal({**stored, name: repr(size)}, name)
    return size[0], size[1]


class CompressedTensors:
    """Reads the files of the compressed-tensors library (llm-compressor): packed or plain integers, and FP8."""

    FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
    unused = _UNUSED

    def __init__(self, schemes: list[_Scheme]) -> None:
        self._schemes = schemes

    @staticmethod
    def read(stored: dict[str, Any]) -> CompressedTensors:
        stored = {"quant_method": "compressed-tensors", **stored}
        if (stored.get("sparsity_config") or {}).get("format", "dense") != "dense":
            raise _refusal(stored, "sparsity_config")
        if (stored.get("transform_config") or {}).get("config_groups"):
            raise _refusal(stored, "transform_config")
        format = _check(stored, "format", *CompressedTensors.FORMATS, "mixed-precision")
        schemes = [_Scheme.read(group, format) for group in stored["config_groups"].values()]
        return CompressedTensors([scheme for scheme in schemes if scheme is not None])

    def find_parts(self, names: Collection[str]) -> dict[str, dict[str, str]]:
        ends = ("_packed", "_scale", "_zero_point", "_shape", "_g_idx")
        packed = dict(_gather(names, "_packed", "", ends))
        plain = _gather(names, "_scale", "", ("", *ends[1:]))
        return packed | {
            name: parts for name, parts in plain if name not in packed and (name in names or name.endswith(".weight"))
        }

    def join(self, name: str, parts: Mapping[str, Tensor]) -> StoredCodes:
        scheme = max(self._schemes, key=lambda scheme: scheme.rank(name.removesuffix(".weight")))
        _need(name, parts, *scheme.needed)
        scale, zero = _part(name, parts, "scale"), parts.get("zero_point")
        if "packed" not in parts:
            codes = _part(name, parts, "", *CODE_DTYPES)
        else:
            bits = scheme.bits
            shape = [int(n) for n in _part(name, parts, "shape", torch.int32, torch.int64).flatten()]
            words = _part(name, parts, "packed", torch.int32)
            if len(shape) < 2 or list(words.shape) != [*shape[:-1], ceil_div(shape[-1] * bits, 32)]:
                raise FormatError(f"{name} of shape {shape} cannot be {list(words.shape)} words of {32 // bits} codes")
            codes = _unpack(words, bits)[..., : shape[-1]]
            # Packed codes and zero points have an offset that makes them unsigned. Without zero points, the offset is
            # the zero point.
            offset = 1 << bits - 1
            if zero is None:
                return StoredCodes(name, codes, scale, offset, scheme.block, parts.get("g_idx"), bits)
            if zero.dtype is torch.int32:
                zero = _unpack(zero.transpose(-1, -2), bits)[..., : shape[-2]].transpose(-1, -2)
            else:
                zero = zero.to(torch.int16) + offset
            return StoredCodes(name, codes, scale, zero, scheme.block, parts.get("g_idx"), bits)
        return StoredCodes(name, codes, scale, zero, scheme.block, parts.get("g_idx"))


# The classes below read the other formats. GPTQ and AWQ store weights with axes (columns, rows), because their products
# are x W.


@dataclass(frozen=True)
class Gptq:
    """Reads GPTQ checkpoints: codes are packed along the columns, zero points along the rows.

    Attributes:
        one: the number that was subtracted from zero points before they were packed.
        is_ordered: True if columns were quantized in the order of their activations' sizes. Then g_idx has the group of
            each column.
    """

    bits: int
    size: int | None
    one: int
    is_ordered: bool
    unused = _UNUSED

    @staticmethod
    def read(stored: dict[str, Any]) -> Gptq:
        stored = {"checkpoint_format": "gptq"} | {name: v for name, v in stored.items() if v is not None}
        bits = _check(stored, "bits", 4, 8)
        version = _check(stored, "checkpoint_format", "gptq", "gptq_v2")
        if stored.get("is_marlin_format"):
            raise _refusal(stored, "is_marlin_format")
        if any(not str(rule).startswith("-:") for rule in stored.get("dynamic", {})):
            raise _refusal(stored, "dynamic")
        return Gptq(bits, _read_size(stored, "group_size"), int(version == "gptq"), bool(stored.get("desc_act")))

    def find_parts(self, names: Collection[str]) -> dict[str, dict[str, str]]:
        return dict(_gather(names, ".qweight", ".weight", (".qweight", ".qzeros", ".scales", ".g_idx")))

    def join(self, name: str, parts: Mapping[str, Tensor]) -> StoredCodes:
        codes = _unpack(_part(name, parts, "qweight", torch.int32, n_dims=2).t(), self.bits)
        zero = _unpack(_part(name, parts, "qzeros", torch.int32, n_dims=2), self.bits)
        # The subtraction was modulo 2^bits: a zero point of 0 is stored as the largest code.
        zero = (zero + self.one) & (1 << self.bits) - 1
        scale = _part(name, parts, "scales", n_dims=2)
        _need(name, parts, *["g_idx"] * self.is_ordered)
        return StoredCodes(name, codes, scale.t(), zero.t(), (1, self.size), parts.get("g_idx"), self.bits)


@dataclass(frozen=True)
class Awq:
    """Reads AWQ checkpoints of version "gemm": codes of 4 bits and zero points are packed along the rows."""

    size: int | None
    unused = _UNUSED
    _NIBBLE_OF = (0, 4, 1, 5, 2, 6, 3, 7)
    """The place of each of eight rows in a word: from the lowest bits on, a word holds rows 0, 2, 4, 6, 1, 3, 5, 7."""

    @staticmethod
    def read(stored: dict[str, Any]) -> Awq:
        version = str(stored.get("version") or stored.get("format") or "gemm").lower()
        named = {"bits": stored.get("w_bit"), "group_size": stored.get("q_group_size"), **stored, "version": version}
        _check(named, "version", "gemm")
        _check(named, "bits", 4)
        return Awq(_read_size(named, "group_size"))

    def find_parts(self, names: Collection[str]) -> dict[str, dict[str, str]]:
        return dict(_gather(names, ".qweight", ".weight", (".qweight", ".qzeros", ".scales")))

    def join(self, name: str, parts: Mapping[str, Tensor]) -> StoredCodes:
        codes = self._unpack(_part(name, parts, "qweight", torch.int32, n_dims=2))
        zero = self._unpack(_part(name, parts, "qzeros", torch.int32, n_dims=2))
        scale = _part(name, parts, "scales", n_dims=2)
        return StoredCodes(name, codes.t(), scale.t(), zero.t(), (1, self.size), None, 4)

    def _unpack(self, words: Tensor) -> Tensor:
        return _unpack(words, 4).view(*words.shape, 8)[..., list(self._NIBBLE_OF)].flatten(-2)


@dataclass(frozen=True)
class Float8:
    """Reads FP8 checkpoints with a scale for each block of rows and columns, or one for each tensor."""

    block: tuple[int | None, int | None]
    unused = _UNUSED

    @staticmethod
    def read(stored: dict[str, Any]) -> Float8:
        has_blocks = stored.get("weight_block_size") is not None
        return Float8(_read_block(stored, "weight_block_size") if has_blocks else (None, None))

    @staticmethod
    def read_modelopt(stored: dict[str, Any]) -> Float8:
        _check(stored, "quant_algo", "FP8")
        return Float8((None, None))

    def find_parts(self, names: Collection[str]) -> dict[str, dict[str, str]]:
        inverse = dict(_gather(names, "_scale_inv", "", ("", "_scale_inv")))
        others = _gather(names, "_scale", "", ("", "_scale"))
        return inverse | {name: parts for name, parts in others if name in names or name.endswith(".weight")}

    def join(self, name: str, parts: Mapping[str, Tensor]) -> StoredCodes:
        codes = _part(name, parts, "", torch.float8_e4m3fn, torch.float8_e5m2)
        scale = _part(name, parts, "scale_inv" if "scale_inv" in parts else "scale")
        return StoredCodes(name, codes, scale, None, self.block)
