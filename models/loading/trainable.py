"""Makes models whose weights are computed from the parameters of a torch module, so that gradients reach these.

A model here holds weights in other forms than files do: queries, keys and values in one matrix, decays instead of their
logarithms. It is made anew for each step of an optimizer, by operations that torch differentiates. So the parameters
are those of the files, and torch's optimizers, and adapters that compute a weight from others, work as they are.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Never

import torch
from torch import Tensor, nn

from hybridmem.memory.blocks import read_count, refuse_arguments
from hybridmem.memory.errors import SpecError
from hybridmem.memory.kernels import precision_for
from hybridmem.models.loading.architectures import ARCHITECTURES, LanguageModel
from hybridmem.models.loading.conversion import Conversion
from hybridmem.models.loading.folders import unsupported
from hybridmem.models.loading.load import build, check_source, open_model
from hybridmem.models.weights.checkpoint import SINGLE_FILE, LoadedCheckpoint, UnsupportedModelError
from hybridmem.models.weights.formats import plain_weights

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class Trainable(nn.Module):
    """Holds the weights of a model as parameters, under their names in files: `Trainable.load` and `Trainable.of`.

    `trainable.model()` makes a model whose weights are computed from the parameters as they are now. Give it to a
    `memory.training.Tape`, and make another after each step of an optimizer.
    """

    def __init__(self, config: PreTrainedConfig, architecture: str, weights: nn.Module) -> None:
        super().__init__()
        if architecture not in ARCHITECTURES:
            raise unsupported(architecture)
        self.config, self.architecture, self.weights = config, architecture, weights
        self._conversion: Conversion | None = None

    @classmethod
    def load(
        cls, path_or_hub_id: str | Path, *, device: str | torch.device = "cpu", dtype: str | torch.dtype = "float32",
        **unknown: Never,
    ) -> Trainable:  # fmt: skip
        """Read weights from a folder, a GGUF file or the hub, as `load_model` does. Quantised ones become floats.

        Args:
            dtype: as for `load_model`; or "float64", in which training is slow, and shows what rounding does.
        """
        if unknown:
            refuse_arguments("Trainable.load", (), unknown)
        is_double = dtype in ("float64", torch.float64)
        opened = open_model(path_or_hub_id, device=device, dtype="float32" if is_double else dtype)
        if is_double:
            opened = replace(opened, dtype=torch.float64)  # `open_model` refuses it, because memories do.
        tensors = {name: x.to(opened.device) for name, x in opened.checkpoint().read_below([""]).items()}
        return cls(opened.config, opened.config.architectures[0], _Tree(tensors))

    @classmethod
    def of(cls, hf_model: nn.Module) -> Trainable:
        """Take the parameters of a loaded model of transformers, which stay its own. PEFT's adapters are followed.

        Raises:
            UnsupportedModelError: the architecture is not implemented, or an adapter changes more than weights.
        """
        base = _base_of(hf_model)
        names = [found.__name__ for found in type(base).__mro__]
        architecture = next((name for name in names if name in ARCHITECTURES), None)
        if architecture is None:
            if not isinstance(base, nn.Module):
                raise UnsupportedModelError(
                    f"Trainable.of() takes a loaded model of transformers, and got {type(base).__name__}; "
                    "Trainable.load() reads a folder, a GGUF file, a hub id or 'embedded'"
                )
            raise unsupported(names[0])
        check_source(base)
        return cls(base.config, architecture, hf_model)

    def model(self) -> LanguageModel:
        """Make the model of the parameters as they are now. Gradients of its weights go on to the parameters."""
        with torch.enable_grad(), plain_weights():
            tensors = self._tensors()
            floats = [tensor for tensor in tensors.values() if tensor.is_floating_point()]
        with torch.enable_grad(), plain_weights(), precision_for(floats[0].dtype):
            checkpoint = LoadedCheckpoint(self.architecture, tensors, floats[0].device, floats[0].dtype)
            return build(ARCHITECTURES[self.architecture], self.config, checkpoint)

    def save(self, folder: str | Path) -> None:
        """Write weights and config, with adapters merged into the weights, so that `load_model(folder)` reads them."""
        from safetensors.torch import save_file

        with torch.no_grad():
            tensors = self._tensors()
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        distinct = {tensor.data_ptr(): name for name, tensor in reversed(tensors.items())}
        save_file({name: tensors[name].contiguous() for name in distinct.values()}, path / SINGLE_FILE)
        (path / "config.json").write_text(
            json.dumps(self.config.to_dict() | {"architectures": [self.architecture]}, indent=2, default=str) + "\n"
        )

    def _tensors(self) -> dict[str, Tensor]:
        """Return all tensors under their names in files."""
        weights = _base_of(self.weights)
        tensors = effective_tensors(weights)
        if isinstance(weights, _Tree):
            return tensors
        if self._conversion is None:
            self._conversion = Conversion(weights, tensors)
        return self._conversion(tensors)


class _Tree(nn.Module):
    """Holds tensors as parameters of nested modules, so that they have their own dotted names."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            *parents, last = name.split(".")
            module: nn.Module = self
            for parent in parents:
                if parent not in module._modules:
                    module.add_module(parent, nn.Module())
                module = module.get_submodule(parent)
            if tensor.is_floating_point():
                module.register_parameter(last, nn.Parameter(tensor))
            else:
                module.register_buffer(last, tensor)


def _base_of(module: nn.Module) -> Any:
    """Return the model inside of a model of PEFT, or the module itself."""
    get_base: Any = getattr(module, "get_base_model", None)
    return module if get_base is None else get_base()


def effective_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a module by name, as its forward would use them: after adapters and parametrizations.

    Raises:
        UnsupportedModelError: an adapter of PEFT does more than add to a weight.
    """
    found, inside = dict[str, Tensor](), tuple[str, ...]()
    for prefix, part in module.named_modules():
        if inside and prefix.startswith(inside):
            continue
        if hasattr(part, "base_layer"):
            found[f"{prefix}.weight"] = _adapted(prefix, part)
            if getattr(part.base_layer, "bias", None) is not None:
                found[f"{prefix}.bias"] = part.base_layer.bias
            inside = (*inside, f"{prefix}.")
            continue
        parametrized = getattr(part, "parametrizations", {})
        if parametrized:
            inside = (*inside, f"{prefix}.parametrizations" if prefix else "parametrizations")
        own = {*part._parameters, *(part._buffers.keys() - part._non_persistent_buffers_set), *parametrized}
        for name in sorted(own):
            if (tensor := getattr(part, name)) is not None:
                found[f"{prefix}.{name}" if prefix else name] = tensor
    return found


def _adapted(name: str, layer: Any) -> Tensor:
    """Return the weight of a layer of PEFT, with what its active adapters add."""
    weight: Tensor = layer.base_layer.weight
    if layer.merged or layer.disable_adapters:
        return weight
    for adapter in layer.active_adapters:
        if getattr(layer, "use_dora", {}).get(adapter, False) or not hasattr(layer, "lora_A"):
            raise UnsupportedModelError(f"{name} has an adapter that is no plain LoRA; use LoRA without DoRA")
        if adapter in layer.lora_A:
            weight = weight + layer.get_delta_weight(adapter).to(weight.dtype)
    return weight


class LowRank(nn.Module):
    """Adds a product of two thin matrices to a weight: W + scale B A (Hu et al. 2021, "LoRA").

    Attributes:
        down, up: A, (rank, n_in), and B, (n_out, rank), which is zero at first.
    """

    def __init__(self, weight: Tensor, rank: int, scale: float, generator: torch.Generator | None) -> None:
        super().__init__()
        n_out, n_in = weight.shape
        down = torch.empty(rank, n_in).uniform_(-1, 1, generator=generator) * n_in**-0.5
        self.down, self.up = nn.Parameter(down.to(weight)), nn.Parameter(weight.new_zeros(n_out, rank))
        self._scale = scale

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self._scale * (self.up @ self.down)


def add_lora(
    trainable: nn.Module, names: str | Iterable[str], *, rank: int = 8, alpha: float = 16.0,
    generator: torch.Generator | None = None,
) -> list[nn.Parameter]:  # fmt: skip
    """Freeze a module's parameters, and add to matrices, at first zero, products of two thin ones. Return these.

    Args:
        names: ends of the names of the matrices, such as "in_proj.weight"; or one end.
        rank, alpha: the width of the thin matrices; their product is multiplied by alpha / rank.
        generator: draws the first numbers.
    Raises:
        SpecError: an end fits no matrix, or `rank` is less than 1.
    """
    read_count("rank", rank, 1, "column")
    names = (names,) if isinstance(names, str) else names
    found = dict(trainable.named_parameters())
    for parameter in found.values():
        parameter.requires_grad_(False)
    added = list[nn.Parameter]()
    for end in names:
        fitting = [name for name, p in found.items() if name.endswith(end) and p.dim() == 2]
        if not fitting:
            raise SpecError(f"no matrix's name ends with {end!r}; there are such as {list(found)[:5]}")
        for name in fitting:
            owner, _, last = name.rpartition(".")
            low_rank = LowRank(found[name], rank, alpha / rank, generator)
            nn.utils.parametrize.register_parametrization(trainable.get_submodule(owner), last, low_rank)
            added += [low_rank.down, low_rank.up]
    return added
