"""Gives tensors of a model of transformers the names and shapes that they have in files, so that gradients pass.

transformers' own conversion computes no gradients. It only moves numbers, so it is run once on the numbers' places;
from then on, every tensor in files is known as places of tensors of the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hybridmem.models.loading.load import names_in_files
from hybridmem.models.weights.checkpoint import UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class _Moved:
    """Says where the numbers of a tensor come from.

    Attributes:
        sources: names of the model's tensors, whose numbers are taken one tensor after the other.
        places: of its numbers among those; None if they are consecutive from `first` on.
        is_padded: True if a zero comes after all of them, at which `places` may point.
    """

    sources: tuple[str, ...]
    shape: torch.Size
    first: int
    places: Tensor | None
    is_padded: bool

    def of(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the tensor, differentiably."""
        found = [tensors[name] for name in self.sources]
        if len(found) == 1 and self.places is None and found[0].shape == self.shape:
            return found[0]
        flat = found[0].flatten() if len(found) == 1 else torch.cat([tensor.flatten() for tensor in found])
        if self.is_padded:
            flat = torch.cat([flat, flat.new_zeros(1)])
        if self.places is None:
            return flat[self.first : self.first + self.shape.numel()].view(self.shape)
        return flat[self.places].view(self.shape)


class Conversion:
    """Knows how a model's tensors become those of files, from one run of transformers' conversion.

    Raises:
        UnsupportedModelError: the conversion computes with the numbers.
    """

    def __init__(self, hf_model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> None:
        # Place 0 is that of the zeros with which the conversion fills up rows.
        first, firsts, places = 1, dict[str, int](), dict[str, Tensor]()
        owners = dict[int, str]()
        for name, tensor in tensors.items():
            # For the conversion, too, a tensor with several names is a single tensor.
            owner = owners.setdefault(id(tensor), name)
            if owner == name:
                firsts[name], first = first, first + tensor.numel()
                places[name] = torch.arange(firsts[name], first).view(tensor.shape)
            else:
                places[name] = places[owner]
        starts = torch.tensor([*firsts.values()])
        self._moved = {}
        with torch.no_grad():
            for name, found in names_in_files(hf_model, places).items():
                flat = found.flatten()
                owned = torch.unique(torch.searchsorted(starts, flat[flat > 0], right=True)) - 1
                names = [*firsts]
                sources = tuple(names[i] for i in owned.tolist())
                self._moved[name] = _moved(flat, found.shape, sources, firsts, tensors)
            given = names_in_files(hf_model, dict(tensors))
            for name, moved in self._moved.items():
                if not torch.equal(moved.of(tensors), given[name]):
                    raise UnsupportedModelError(
                        f"transformers computes {name} from other numbers when it writes files, through which no "
                        "gradients pass; write the model with save_pretrained(folder), and take Trainable.load(folder)"
                    )

    def __call__(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors under their names in files."""
        return {name: moved.of(tensors) for name, moved in self._moved.items()}


def _moved(
    flat: Tensor, shape: torch.Size, sources: tuple[str, ...], firsts: Mapping[str, int], tensors: Mapping[str, Tensor]
) -> _Moved:
    """Return the sources of the numbers at these places, which count through all tensors."""
    own = torch.empty_like(flat)
    begin = 0
    for name in sources:
        is_own = (flat >= firsts[name]) & (flat < firsts[name] + tensors[name].numel())
        own[is_own] = flat[is_own] - firsts[name] + begin
        begin += tensors[name].numel()
    is_padded = bool((flat == 0).any())
    own[flat == 0] = begin
    first = int(own[0])
    is_consecutive = torch.equal(own, torch.arange(first, first + len(own)))
    return _Moved(sources, shape, first, None if is_consecutive else own, is_padded)
