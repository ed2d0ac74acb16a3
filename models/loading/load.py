"""Loads models that run on a memory, from a folder, a hub id, or a loaded transformers model.

transformers, the hub's library and progress bars are imported when they are needed, so that importing this is fast.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Never

import torch
from torch import Tensor

from hybridmem.memory import MemorySpec, SpecError
from hybridmem.memory.blocks import check_usable, read_device, read_dtype, refuse_arguments
from hybridmem.memory.errors import FormatError, HybridMemoryError
from hybridmem.models.layers.decoder import Decoder
from hybridmem.models.loading.architectures import ARCHITECTURES, LanguageModel, ModelClass
from hybridmem.models.loading.dry import DryCheckpoint
from hybridmem.models.loading.folders import find_folder, read_config, unsupported
from hybridmem.models.loading.freed_memory import give_back_freed_memory
from hybridmem.models.loading.gguf import GgufCheckpoint, GgufFile, is_gguf, read_gguf_config
from hybridmem.models.loading.quantised_checkpoints import find_coding
from hybridmem.models.loading.reproducible import check_reproducible, reproducible_rows
from hybridmem.models.products.choice import Kind, compile_ahead, noting_kinds
from hybridmem.models.products.huge_pages import taken_ahead
from hybridmem.models.vision.pictures import Pictures
from hybridmem.models.weights.checkpoint import (
    Checkpoint,
    LoadedCheckpoint,
    SampledCheckpoint,
    UnreadCheckpoint,
    UnsupportedModelError,
)
from hybridmem.models.weights.coded import CodedTensor
from hybridmem.models.weights.formats import WeightFormat, weights_in
from hybridmem.models.weights.signature import signature_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_PROGRESS_FROM_TENSORS = 200
"""The fewest tensors for which a progress bar is shown. With fewer, it would disappear at once."""

_MOST_PARTS, _PARTS_OF_A_LAYER = 1 << 17, 16
"""The most experts of all layers, and how many experts the other parts of a layer count as.

No model has nearly so many.
"""


def load_model(
    path_or_hub_id: str | Path,
    *,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype = "auto",
    weights: WeightFormat = "auto",
    progress: bool | None = None,
    reproducible: bool = False,
    draft_head: bool = False,
    **unknown: Never,
) -> LanguageModel:
    """Load a model for inference.

    Args:
        path_or_hub_id: a folder with config.json and safetensors; a GGUF file, or a folder with one; "embedded" for the
            model that ships with the library; or a model id on the Hugging Face hub, downloaded once.
        dtype: "float32", "bfloat16", "float16" or a torch.dtype; "auto" takes the checkpoint's own. Logits are float32
            in all of them.
        weights: how products hold weights. "auto" keeps the bits of the files on the CPU, also for quantized weights.
            "dense" makes all weights floats in `dtype`. "int8" or "int4" rounds weights that have more bits to integers
            while they are read, on the CPU. With "int4", heads and embeddings still have 8 bits.
        reproducible: whether a row's logits have the same bits in any step, as a reproducible `HybridMemory` needs. On
            the CPU only.
        draft_head: whether to load the draft head that the checkpoint holds, such as the layers for multi-token
            prediction (`mtp.*`), or the one in the folder `draft_head` beside its files, as `model.draft_head`. It is
            None if there is none. Without this, the head stays in the files.
        progress: whether to show a bar on stderr. The default is to show it on a terminal, for larger checkpoints.
    Raises:
        FormatError: files are missing, damaged, or do not fit the config. The message names the tensor.
        UnsupportedModelError: the architecture, an option of it, or the format of quantized weights is not implemented.
        SpecError: the device, dtype or format does not exist, or the format is not for this device.
    Warns of tensors that nothing uses, and of heads and embeddings that differ although the config ties them. The
    tensors in the files are then used as they are.
    Cost: every tensor is read once. On the CPU, matrices are laid out for their kernels one by one, so memory holds the
    model and a few hundred MiB of the files. An embedding in the files' own dtype stays mapped.
    """
    if unknown:
        refuse_arguments("load_model", (), unknown)
    return open_model(path_or_hub_id, device=device, dtype=dtype).load(
        weights=weights, progress=progress, reproducible=reproducible, draft_head=draft_head
    )


def open_model(
    path_or_hub_id: str | Path, *, device: str | torch.device = "cpu", dtype: str | torch.dtype = "auto"
) -> OpenedModel:
    """Open a model's files, and read their headers and the config. Arguments and errors are those of `load_model`."""
    found, place = _read_device(device), find_folder(path_or_hub_id)
    if is_gguf(place):
        file = GgufFile(place)
        config = read_gguf_config(file)
        model_class = ARCHITECTURES[config.architectures[0]]
        return OpenedModel(place, config, model_class, found, _read_dtype(dtype, config), file)
    config, model_class = read_config(place)
    return OpenedModel(place, config, model_class, found, _read_dtype(dtype, config))


@dataclass(frozen=True)
class OpenedModel:
    """Holds a model whose headers and config were read, and whose weights were not.

    Attributes:
        place: the checkpoint's folder, or its GGUF file.
        file: the open GGUF file; None for a folder.
    """

    place: Path
    config: PreTrainedConfig
    model_class: ModelClass
    device: torch.device
    dtype: torch.dtype
    file: GgufFile | None = None

    def dry_spec(self, weights: WeightFormat = "auto", *, reproducible: bool = False) -> MemorySpec:
        """Return the memory spec, without the signature of the weights, and read no weights.

        Raises FormatError and UnsupportedModelError as `load` does, for everything that headers and config tell.
        """
        with weights_in(weights, self.device), reproducible_rows(reproducible, self.device):
            dry = build(self.model_class, self.config, self.checkpoint(is_read=False))
        return replace(dry.memory_spec, device=self.device, weights=None)

    def load(
        self, *, weights: WeightFormat = "auto", progress: bool | None = None, reproducible: bool = False,
        draft_head: bool = False,
    ) -> LanguageModel:  # fmt: skip
        """Read the weights. Arguments, errors and warnings are those of `load_model`."""
        checkpoint, kinds = self.checkpoint(), Counter[Kind]()
        with (
            _shown(checkpoint, self.place.name, progress),
            weights_in(weights, self.device),
            reproducible_rows(reproducible, self.device),
            noting_kinds(kinds),
            taken_ahead(),
        ):
            model = build(self.model_class, self.config, checkpoint)
            if draft_head and isinstance(model, Decoder):
                model.draft_head = model.load_draft_head(checkpoint)
                if model.draft_head is not None:
                    from hybridmem.models.loading.draft_heads import sign

                    sign(model.draft_head, model, checkpoint)
        if isinstance(model, Decoder):
            checkpoint.ignore(*checkpoint.names_below(model.draft_prefixes))
        checkpoint.warn_of_surprises()
        if self.file is not None:
            self.file.release()
        give_back_freed_memory()
        if draft_head and isinstance(model, Decoder) and model.draft_head is None:
            from hybridmem.models.loading.draft_heads import folder_beside, load_draft_head

            beside = folder_beside(self.place)
            model.draft_head = None if beside is None else load_draft_head(beside, model, weights=weights)
        if self.device.type == "cpu":
            compile_ahead(kinds)  # Compile kernels now, so that no step waits for it.
        return model

    def checkpoint(self, *, is_read: bool = True) -> Checkpoint:
        """Return the checkpoint. If it is not read, its tensors have shapes and no numbers."""
        device = self.device if is_read else torch.device("meta")
        if self.file is not None:
            return GgufCheckpoint(self.file, self.config, device, self.dtype)
        checkpoint = Checkpoint(self.place, device, self.dtype) if is_read else UnreadCheckpoint(self.place, self.dtype)
        if (coding := find_coding(self.config)) is not None:
            checkpoint.decode_with(coding)
        return checkpoint


@contextmanager
def _shown(checkpoint: Checkpoint, name: str, progress: bool | None) -> Iterator[None]:
    """Show a bar on stderr while a checkpoint's tensors are taken, if `load_model` would."""
    is_terminal = sys.stderr is not None and sys.stderr.isatty()
    if not (is_terminal and len(checkpoint) >= _PROGRESS_FROM_TENSORS if progress is None else progress):
        yield
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task(f"loading {name}", total=len(checkpoint))
        checkpoint.on_taken = lambda: bar.advance(task)
        yield


def from_transformers(
    hf_model: PreTrainedModel, *, dtype: str | torch.dtype = "auto", weights: WeightFormat = "auto",
    reproducible: bool = False,
) -> LanguageModel:  # fmt: skip
    """Make this library's model from a loaded transformers model, on the model's device. No file is written.

    Tensors that are used unchanged stay shared with `hf_model`: embeddings, norms and, on devices other than the CPU,
    most matrices. Tensors that our layers need in another form are copied: queries, keys and values in one matrix, taps
    and decays of recurrences and, on the CPU, every matrix of a product, which is laid out for its kernel. So do not
    change `hf_model`'s weights afterwards.

    Args:
        dtype: as for `load_model`. "auto" takes the model's own dtype. With another dtype, everything is copied.
        weights, reproducible: as for `load_model`.
    Raises:
        UnsupportedModelError: the architecture, or an option of it, is not implemented; weights are quantized or on
            several devices; or adapters (PEFT) are not merged.
    """
    check_is_of_transformers(hf_model)
    names = [base.__name__ for base in type(hf_model).__mro__]
    if adapted := find_adapter(hf_model):
        raise UnsupportedModelError(
            f"{names[0]} with an adapter, at {adapted}; merge it into the weights, "
            "peft_model.merge_and_unload(), and give what that returns"
        )
    model_class = next((ARCHITECTURES[name] for name in names if name in ARCHITECTURES), None)
    if model_class is None:
        raise unsupported(names[0])
    check_usable("device", device := check_source(hf_model))
    read_as = _read_dtype(hf_model.dtype if dtype == "auto" else dtype, hf_model.config)
    checkpoint = LoadedCheckpoint(names[0], names_in_files(hf_model, hf_model.state_dict()), device, read_as)
    _undo_rescaling(checkpoint, hf_model)
    kinds = Counter[Kind]()
    with weights_in(weights, device), reproducible_rows(reproducible, device), noting_kinds(kinds):
        model = build(model_class, hf_model.config, checkpoint)
    checkpoint.warn_of_surprises()
    if device.type == "cpu":
        compile_ahead(kinds)  # Compile kernels now, so that no step waits for it.
    return model


def names_in_files(hf_model: PreTrainedModel, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of a model of transformers, by their names there, under the names that they have in files."""
    try:
        # No public function of transformers converts names without writing files.
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError as error:
        import transformers

        raise UnsupportedModelError(
            f"transformers {transformers.__version__} has no public way to the names of this "
            "model's tensors in files; write them with model.save_pretrained(folder), and load_model(folder)"
        ) from error
    try:
        converted: dict[str, Tensor] = revert_weight_conversion(hf_model, tensors)
    except torch.OutOfMemoryError:
        raise
    except (LookupError, RuntimeError, ValueError) as error:
        raise FormatError(
            f"transformers cannot write this {type(hf_model).__name__} as a checkpoint: {error}"
        ) from error
    return converted


def _undo_rescaling(checkpoint: Checkpoint, hf_model: PreTrainedModel) -> None:
    """Undo transformers' rescaling of RWKV-4's weights, whose first forward halves them in place every few layers."""
    for prefix, module in hf_model.named_modules():
        every = hf_model.config.rescale_every if getattr(module, "layers_are_rescaled", False) else 0
        for i in range(hf_model.config.num_hidden_layers if every > 0 else 0):
            for name in ("attention.output", "feed_forward.value"):
                checkpoint.scale(f"{prefix}.blocks.{i}.{name}.weight", 2.0 ** (i // every))


def find_adapter(hf_model: torch.nn.Module) -> str | None:
    """Return the first place with a PEFT adapter around a module, or around the whole model, or None if there is none.

    Adapters are recognized by their attributes, because PEFT need not be installed, and because what it stores on a
    model stays there after a merge.
    """
    from transformers import PreTrainedModel

    if not isinstance(hf_model, PreTrainedModel) and hasattr(hf_model, "peft_config"):
        return "the whole model"
    for name, module in hf_model.named_modules():
        if hasattr(module, "base_layer") or hasattr(module, "lora_A"):
            return str(name)
    return None


def check_is_of_transformers(hf_model: object) -> None:
    """Raise UnsupportedModelError if an object is no torch module."""
    if not isinstance(hf_model, torch.nn.Module):
        raise UnsupportedModelError(
            f"{hf_model!r} is no model of transformers; give AutoModelForCausalLM.from_pretrained(...), "
            "or a path to load_model"
        )


def check_source(hf_model: PreTrainedModel) -> torch.device:
    """Return the device of a transformers model.

    Raises UnsupportedModelError if its weights are quantised, on "meta", or on several devices.
    """
    _check_unquantised(hf_model.config)
    devices = sorted({str(parameter.device) for parameter in hf_model.parameters()})
    if len(devices) != 1 or devices == ["meta"]:
        raise UnsupportedModelError(
            f"weights on {', '.join(devices)}; load the model onto one device, with its weights"
        )
    return torch.device(devices[0])


def _check_unquantised(config: PreTrainedConfig) -> None:
    if stored := getattr(config, "quantization_config", None):
        raise UnsupportedModelError(
            f"quantization_config={stored!r}: this model's weights are quantised already; load_model(folder) reads "
            "the formats of docs/how-to/cpu.md, or give a model whose weights are in 16 or 32 bits"
        )


def plan_memory(config: PreTrainedConfig, architecture: str, *, dtype: str | torch.dtype = "auto") -> MemorySpec:
    """Return the memory spec of a model of this config, without reading its weights.

    A dry run needs it: `HybridMemory(..., device="meta")`.

    Args:
        architecture: the class that `config.json` names, such as "BambaForCausalLM".
    Raises:
        UnsupportedModelError: the architecture, or an option of it, is not implemented.
        FormatError: the config contradicts itself.
    """
    return dry_model(config, architecture, dtype=dtype).memory_spec


def spec_of_loaded(hf_model: PreTrainedModel, architecture: str) -> MemorySpec:
    """Return the memory spec that `from_transformers` would give the model, without copying the model's weights.

    If transformers cannot name the model's tensors, the spec has no signature of weights. Raises what `plan_memory`
    raises.
    """
    spec = plan_memory(hf_model.config, architecture, dtype=hf_model.dtype)
    try:
        checkpoint = SampledCheckpoint(architecture, names_in_files(hf_model, hf_model.state_dict()), spec.dtype)
        _undo_rescaling(checkpoint, hf_model)
        return build(ARCHITECTURES[architecture], hf_model.config, checkpoint).memory_spec
    except (FormatError, UnsupportedModelError):
        return spec


def dry_model(
    config: PreTrainedConfig, architecture: str, *, dtype: str | torch.dtype = "auto", weights: WeightFormat = "auto",
    files: Checkpoint | None = None,
) -> LanguageModel:  # fmt: skip
    """Make a model whose weights are on "meta": they have shapes but no numbers, so it cannot run.

    Arguments and errors are those of `plan_memory`; `weights` is as for `load_model`. `files` is the model's own
    checkpoint, if there is one: it says whether the model has a separate head (`Checkpoint.tie`).
    """
    from transformers import PreTrainedConfig

    if not isinstance(config, PreTrainedConfig):
        raise SpecError(f"config={config!r} is no config of transformers; give AutoConfig.from_pretrained(folder)")
    if architecture not in ARCHITECTURES:
        raise unsupported(architecture)
    checkpoint = DryCheckpoint(architecture, _read_dtype(dtype, config), files)
    with weights_in(weights, checkpoint.device):
        return build(ARCHITECTURES[architecture], config, checkpoint)


def weight_bytes(model: LanguageModel) -> int:
    """Return the bytes of all tensors that a model holds.

    Each tensor counts once, and packed ones with their packed size.

    On the CPU, a tensor whose dtype is the file's own is mapped, not copied. It counts here, but takes memory only for
    the parts that are read. So a tied embedding costs little in addition to the head that is packed from it, because a
    lookup reads single rows. Linux may count up to 2 MiB of the file around each row as memory of the process. It takes
    these pages back when memory is short.
    """
    found: dict[int, Tensor] = {}
    seen: set[int] = set()
    todo: list[object] = [model]
    while todo:
        thing = todo.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, CodedTensor):
            todo += thing.chunks
        elif isinstance(thing, Tensor):
            found[id(thing)] = thing
        elif isinstance(thing, list | tuple):
            todo += thing
        elif isinstance(thing, partial):
            todo += (thing.func, thing.args, *thing.keywords.values())
        elif isinstance(thing, Pictures):
            todo += thing.tensors()
        elif isinstance(thing, FunctionType):
            todo += [cell.cell_contents for cell in thing.__closure__ or ()]
        elif type(thing).__module__.startswith(("hybridmem.models.", "hybridmem.memory.")):
            todo += vars(thing).values() if hasattr(thing, "__dict__") else ()
    return sum(int(tensor.nbytes) for tensor in found.values())


def build(model_class: ModelClass, config: PreTrainedConfig, checkpoint: Checkpoint) -> LanguageModel:
    """Make the model, with the signature of its weights in its memory spec.

    If a config with impossible values causes an error on the way, the error becomes a FormatError.
    """
    _check_parts(config)
    try:
        model = model_class(config, checkpoint)
        weights = signature_of(config, checkpoint.dtype, checkpoint.samples)
        model.memory_spec = replace(model.memory_spec, weights=weights, reproducible=check_reproducible(model))
        return model
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, HybridMemoryError) and not isinstance(error, SpecError):
            raise
        odd = _odd_sizes(config)
        if isinstance(error, torch.OutOfMemoryError) or (isinstance(error, RuntimeError) and not odd):
            raise  # The error is a fault of the device or of torch, not of the config.
        place, said = checkpoint.folder / "config.json", f"; it says {odd}" if odd else ""
        raise FormatError(f"{place} contradicts itself: {type(error).__name__}: {error}{said}") from error


def _check_parts(config: PreTrainedConfig) -> None:
    """Raise FormatError if a config has more layers and experts than any model: a dry run makes all of them."""
    said = config.get_text_config()
    names = ("num_hidden_layers", "num_experts", "num_local_experts", "n_routed_experts")
    n_layers, *experts = (n if type(n := getattr(said, name, 0)) is int else 0 for name in names)
    if n_layers * (_PARTS_OF_A_LAYER + max(experts)) > _MOST_PARTS:
        raise FormatError(f"{n_layers:,} layers of {max(experts):,} experts are more than any model has")


def _odd_sizes(config: PreTrainedConfig) -> str:
    """Return, as text, those integers in the config that are below one and not defaults of its class."""
    chosen = config.get_text_config().to_diff_dict().items()
    odd = {name: value for name, value in chosen if type(value) is int and value < 1 and not name.endswith("_token_id")}
    return ", ".join(f"{name}={value}" for name, value in odd.items())


def _read_device(device: str | torch.device) -> torch.device:
    found = read_device("device", device)
    check_usable("device", found)
    return found


def _read_dtype(dtype: str | torch.dtype, config: PreTrainedConfig) -> torch.dtype:
    if isinstance(dtype, str) and dtype == "auto":
        # The config of a model with several parts may name a dtype only in its text part.
        dtype = config.dtype or config.get_text_config().dtype or torch.float32
    return read_dtype("dtype", dtype, "'auto', ")
