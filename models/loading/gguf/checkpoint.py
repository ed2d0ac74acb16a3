"""Finds the tensors of a Hugging Face checkpoint in a GGUF file, and undoes the changes of llama.cpp's converter."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hybridmem.memory.errors import FormatError
from hybridmem.models.loading.gguf.file import GgufFile, import_gguf
from hybridmem.models.loading.gguf.names import (
    expert_of,
    in_layer_behind,
    known_name,
    layer_of,
    name_in_no_table,
    nextn_of,
    table_of,
)
from hybridmem.models.loading.gguf.undo import interleave_by_key_head, keys_and_values, undo
from hybridmem.models.weights.checkpoint import MOST_MAPPED_BYTES, Checkpoint
from hybridmem.models.weights.dry import joined

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_QKVZ = ".linear_attn.in_proj_qkvz.weight"
_KEYS_AND_VALUES = ".kv_b_proj.weight"
_GATE_OF_HEADS = ".attention.g_proj.weight"
_HALVES = {"shared_mlp.input_linear": "shared_mlp", "block_sparse_moe.input_linear": "experts"}


class GgufCheckpoint(Checkpoint):
    """Reads tensors of a GGUF file by the names that they have in checkpoints of Hugging Face.

    Floats of 16 or 32 bits are read as they are. Numbers in fewer bits become floats in the checkpoint's dtype, one
    tensor at a time. (Sources of names and changes: the `gguf` package's tables, and llama.cpp's `conversion` folder.)

    On "meta" nothing is read, and tensors take no memory.

    Args:
        config: what `read_gguf_config` returns for the file.
    """

    def __init__(self, file: GgufFile, config: PreTrainedConfig, device: torch.device, dtype: torch.dtype) -> None:
        gguf = import_gguf(file.path)
        self._start(file.path, device, dtype)
        self._file, self._config = file, config
        kind = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}[table_of(file.architecture)]
        self._names = gguf.get_tensor_name_map(kind, int(file.own("block_count")))
        self._used: set[str] = set()
        self._read_bytes = 0

    def __len__(self) -> int:
        return len(self._file)

    def __contains__(self, name: str) -> bool:
        return all(stored in self._file for stored in self._sources(name)) and bool(self._sources(name))

    def take_as_stored(self, name: str, *shape: int) -> Tensor:
        """Return a tensor as `Checkpoint.take_as_stored` does. Axes of one element and groups of a norm may differ."""
        sources = self._sources(name)
        missing = [stored for stored in sources if stored not in self._file]
        if missing or not sources:
            wanted = f" (as {', '.join(missing)})" if missing else ""
            raise FormatError(f"{self.folder} has no tensor {name!r}{wanted} of shape {list(shape)}")
        tensor = self._read(name)
        loose = _without_ones(tensor.shape) == _without_ones(shape) or name.endswith("norm.weight")
        if not loose or tensor.numel() != torch.Size(shape).numel():
            raise FormatError(
                f"{', '.join(sources)} in {self.folder} has shape {list(tensor.shape)}, its metadata says {list(shape)}"
            )
        tensor = tensor.reshape(shape)
        self._used.update(sources)
        self._note_taken(name, tensor)
        return tensor

    def are_equal(self, name: str, other: str) -> bool:
        """Return whether two tensors are stored as the same bytes.

        To compare others, they would have to become floats.
        """
        (one,), (another,) = self._sources(name), self._sources(other)
        return self._file.holds_equal(one, another)

    def names_below(self, prefixes: Iterable[str]) -> list[str]:
        """Return no names: `leftovers` leaves out the layers of heads that draft."""
        return []

    def leftovers(self) -> list[str]:
        """Return the names in the file of tensors that were not taken, leaving out layers that only draft tokens."""
        n_layers = self._config.get_text_config().num_hidden_layers
        equal = {stored for name in self._tied.equal for stored in self._sources(name)}
        left = set(self._file) - self._used - equal - {"rope_freqs.weight"}
        # Files have tensors for mixing values in RWKV-7's first layer too, but nothing reads them.
        if self._file.architecture == "rwkv7":
            left -= {f"blk.0.time_mix_v{i}.weight" for i in range(3)}
        return sorted(name for name in left if not (name.startswith("blk.") and int(layer_of(name)) >= n_layers))

    def _sources(self, name: str) -> list[str]:
        """Return the names of the tensors in the file from which a tensor is made, or none if there can be none."""
        name = in_layer_behind(name, self._config.num_hidden_layers)
        if (nextn := nextn_of(name)) is not None:
            return [nextn]
        if expert := expert_of(name):
            found = self._mapped(expert[0])
            return [self._fused(name)] if found and found[0] not in self._file and self._fused(name) else found
        for part in _HALVES:
            if name.endswith(f".{part}.weight"):
                layer = f"blk.{layer_of(name)}.ffn"
                if _HALVES[part] == "experts" and (fused := self._fused(name)):
                    return [fused]
                suffix = "_exps" if _HALVES[part] == "experts" else self._shared_suffix(name)
                return [f"{layer}_gate{suffix}.weight", f"{layer}_up{suffix}.weight"]
        if name.endswith(".shared_mlp.output_linear.weight"):
            return [f"blk.{layer_of(name)}.ffn_down{self._shared_suffix(name)}.weight"]
        if name.endswith(_QKVZ):
            return [f"blk.{layer_of(name)}.{part}.weight" for part in ("attn_qkv", "attn_gate")]
        if name.endswith(_KEYS_AND_VALUES) and f"blk.{layer_of(name)}.attn_k_b.weight" in self._file:
            return [f"blk.{layer_of(name)}.{part}.weight" for part in ("attn_k_b", "attn_v_b")]
        if name.endswith(_GATE_OF_HEADS) and (gate := f"blk.{layer_of(name)}.attn_gate.weight") in self._file:
            return [gate]
        if self._file.architecture == "rwkv7" and name.endswith(".x_x"):
            return [f"blk.{layer_of(name)}.time_mix_lerp_fused.weight"]
        known = known_name(self._file.architecture, name)
        own = name_in_no_table(self._file.architecture, known)
        return self._mapped(known) if own is None else [own]

    def _shared_suffix(self, name: str) -> str:
        """Return the suffix that the file gives to the name of a shared expert, if there are other experts."""
        return "_shexp" if f"blk.{layer_of(name)}.ffn_down_exps.weight" in self._file else ""

    def _fused(self, name: str) -> str:
        """Return the tensor with the gates and, after them, the first products of all experts, if the file has it."""
        fused = f"blk.{layer_of(name)}.ffn_gate_up_exps.weight"
        return fused if fused in self._file and not name.endswith(("down_proj.weight", "w2.weight")) else ""

    def _mapped(self, name: str) -> list[str]:
        for prefix in ("model.", "backbone."):
            known = re.sub(r"^(model|backbone)\.", prefix, name)
            if (found := self._names.get_name(known, try_suffixes=(".weight", ".bias"))) is not None:
                return [found]
        return []

    def _read(self, name: str) -> Tensor:
        name = in_layer_behind(name, self._config.num_hidden_layers)
        sources = self._sources(name)
        if expert := expert_of(name):
            tensor = self._read_stored(sources[0], expert[1])
            if sources == [self._fused(name)]:
                n = len(tensor) // 2
                return tensor[n:] if name.endswith(("up_proj.weight", "w3.weight")) else tensor[:n]
            return tensor
        parts = [self._read_stored(source) for source in sources]
        if name.endswith(_QKVZ):
            return interleave_by_key_head(self._config, *parts)
        if name.endswith(_KEYS_AND_VALUES) and len(parts) == 2:
            return keys_and_values(*parts)
        tensor = joined(*parts, dim=-2)
        return undo(self._file.architecture, self._config, name, tensor)

    def _read_stored(self, source: str, index: int | None = None) -> Tensor:
        """Return a tensor of the file, or one entry of its first axis. It stays in its own bits if these are kept."""
        self._read_bytes += self._file.n_bytes(source) if self.device.type != "meta" else 0
        if self._read_bytes > MOST_MAPPED_BYTES:
            self._file.release()
            self._read_bytes = 0
        coded = self._file.read_coded(source, self.dtype, index) if self.keeps_bits else None
        if self.device.type == "meta":
            shape = self._file.shape(source)[0 if index is None else 1 :]
            whole = torch.empty(shape, dtype=self.dtype, device="meta")
            return whole if coded is None else coded.to("meta")
        return self._file.read(source, self.dtype, index) if coded is None else coded


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(n for n in shape if n != 1)
