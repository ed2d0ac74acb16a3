"""Holds a layer's weights in the form that kernels take."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hybridmem.memory.kernels.signature import Kernels, Prepared


class Weights:
    """Holds tensors that are prepared once for the kernels that use them. A tensor of None stays None."""

    def __init__(self, *tensors: Tensor | None) -> None:
        self._tensors = tensors
        self._prepared: tuple[Kernels | None, list[Prepared]] = None, []

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what was prepared, because it refers to kernels, which are modules and cannot be copied."""
        return {**vars(self), "_prepared": (None, [])}

    @property
    def requires_grad(self) -> bool:
        """True if gradients of one of the tensors are wanted."""
        return any(tensor is not None and tensor.requires_grad for tensor in self._tensors)

    def prepared(self, kernels: Kernels) -> list[Prepared]:
        """Return the tensors in the form that these kernels take."""
        # Both are read at once, because another thread may prepare the tensors for other kernels meanwhile.
        found_for, prepared = self._prepared
        if found_for is not kernels:
            prepared = [None if tensor is None else kernels.prepare(tensor) for tensor in self._tensors]
            self._prepared = kernels, prepared
        return prepared
