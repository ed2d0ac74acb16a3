"""A layer's weights as kernels take them."""

from __future__ import annotations

from torch import Tensor

from memory.kernels.signature import Kernels, Prepared


class Weights:
    """Tensors, prepared once for the kernels that they are asked for; None stays None."""

    def __init__(self, *tensors: Tensor | None) -> None:
        self._tensors = tensors
        self._kernels: Kernels | None = None
        self._prepared: list[Prepared] = []

    def prepared(self, kernels: Kernels) -> list[Prepared]:
        if self._kernels is not kernels:
            self._prepared = [None if tensor is None else kernels.prepare(tensor) for tensor in self._tensors]
            self._kernels = kernels
        return self._prepared
