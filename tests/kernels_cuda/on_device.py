"""Offers the CUDA kernels to tests whose tensors are on the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hybridmem.memory.kernels import cuda


class OnDevice:
    """Is `memory.kernels.cuda` on `device`: each call copies its tensors there, and copies back what was written.

    Tensors that share a storage still do so there. On the CPU, where the interpreter runs, nothing moves.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(cuda, name)
        return function if self._device.type == "cpu" else lambda *args, **options: self._call(function, args, options)

    def _call(self, function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        moved: dict[int, tuple[Tensor, Tensor]] = {}
        result = function(
            *(self._move(x, moved) for x in args), **{name: self._move(x, moved) for name, x in options.items()}
        )
        for host, on_device in moved.values():
            host.copy_(on_device)
        return result.cpu() if isinstance(result, Tensor) else result

    def _move(self, x: Any, moved: dict[int, tuple[Tensor, Tensor]]) -> Any:
        if isinstance(x, Tensor):
            storage = x.untyped_storage()
            if storage.data_ptr() not in moved:
                host = torch.empty(0, dtype=torch.uint8).set_(storage)
                moved[storage.data_ptr()] = host, host.to(self._device)
            on_device = moved[storage.data_ptr()][1].untyped_storage()
            return torch.empty(0, dtype=x.dtype, device=self._device).set_(
                on_device, x.storage_offset(), x.size(), x.stride()
            )
        if (
            is_dataclass(x)
            and not isinstance(x, type)
            and any(isinstance(getattr(x, f.name), Tensor | tuple) for f in fields(x))
        ):
            return replace(x, **{f.name: self._move(getattr(x, f.name), moved) for f in fields(x) if f.init})
        if isinstance(x, tuple):
            parts = [self._move(y, moved) for y in x]
            return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)
        return x


class MadeOn(TorchFunctionMode):
    """Makes tensors on this device, whatever device is asked for. So benchmarks of a GPU run elsewhere."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self.n_bytes = 0
        """Of what was made, parts of it in other dtypes included."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(
            *args, **{name: self._device if name == "device" else value for name, value in (kwargs or {}).items()}
        )
        self.n_bytes += out.nbytes if isinstance(out, Tensor) and not out._is_view() else 0
        return out
