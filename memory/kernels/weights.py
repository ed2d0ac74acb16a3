"""A layer's weights as kernels take them."""

from __future__ import annotations

from torch import Tensor

from memory.kernels.signature import Kernels, Prepared


class Weights:
    """Tensors, prepared once for the kernels that they are asked for; None stays None."""

    def __init__(self, *tensors: Tensor | None) -> None:
        self._tensors = tensors
        self._prepared: tuple[Kernels | None, list[Prepared]] = None, []

    def prepared(self, kernels: Kernels) -> list[Prepared]:
        found_for, prepared = self._prepared  # one attribute, so that no other thread's kernels come in between
        if found_for is not kernels:
            prepared = [None if tensor is None else kernels.prepare(tensor) for tensor in self._tensors]
            self._prepared = kernels, prepared
        return prepared
