"""Decides where rows and states of chunks are kept until backward: on the device, in host memory, or in files.

Of what the budgets allow, the cheapest is done. Staying on the device costs nothing. Rows and states in host memory or
in files are copied block by block as they are read. States may also be left out, because forward can compute them again
from older ones, which costs a second forward of these chunks. Rows of attention may not: every later chunk reads them.
"""

from __future__ import annotations

import tempfile
import weakref
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor

from hybridmem.memory.blocks.arena import read_budget
from hybridmem.memory.errors import CapacityError

Where = Literal["device", "host", "files"]


class HasStates(Protocol):
    """Declares what `Boundaries` reads and calls of a piece whose states may be left out."""

    @property
    def state_bytes(self) -> int: ...
    def drop_states(self) -> None: ...


class Held:
    """Counts the bytes that one piece holds in each place. The bytes are no longer counted once the piece is gone."""

    def __init__(self, boundaries: Boundaries, piece: object) -> None:
        self._counts: dict[Where, int] = {}
        self.release = weakref.finalize(piece, boundaries.subtract, self._counts)
        self.release.atexit = False

    def add(self, where: Where, n_bytes: int) -> None:
        self._counts[where] = self._counts.get(where, 0) + n_bytes


class Boundaries:
    """Places tensors, and counts their bytes.

    Args:
        budget: bytes on the device; None for no limit.
        host_budget: bytes of host memory, if the device is not the host itself; None for none.
        folder: where files are made, whose names disappear at once; None for no files.

    Attributes:
        used: the bytes of each place.
        n_computed_again: how many chunks have been computed again because their states were left out.
    """

    def __init__(
        self, device: torch.device, budget: float | str | None, host_budget: float | str | None, folder: Path | None
    ) -> None:
        self._device, self._folder = device, folder
        limit = None if budget is None else read_budget(budget)
        host = 0 if host_budget is None or device.type == "cpu" else read_budget(host_budget, "host_budget")
        self._limits: dict[Where, int | None] = {"device": limit, "host": host, "files": None if folder else 0}
        self.used: dict[str, int] = {"device": 0, "host": 0, "files": 0}
        self.n_computed_again = 0
        self._pieces: list[weakref.ref[HasStates]] = []

    def subtract(self, counts: dict[Where, int]) -> None:
        for where, n_bytes in counts.items():
            self.used[where] -= n_bytes
        counts.clear()

    def keep(self, tensor: Tensor, held: Held) -> Tensor:
        """Return a copy of a tensor, which nothing else shares, where there is room for it.

        Raises:
            CapacityError: there is no room anywhere.
        """
        return self._placed(tensor, held, self._find(tensor.nbytes))

    def zeros_like(self, tensor: Tensor, dtype: torch.dtype, held: Held) -> Tensor:
        """Return zeros for the gradients of a tensor, where there is room for them. Raises CapacityError."""
        where = self._find(tensor.numel() * dtype.itemsize)
        if where == "device":
            held.add(where, tensor.numel() * dtype.itemsize)
            self.used[where] += tensor.numel() * dtype.itemsize
            return torch.zeros_like(tensor, dtype=dtype, device=self._device)
        return self._placed(torch.zeros(1, dtype=dtype).expand(tensor.shape), held, where)

    def keep_states(self, piece: HasStates, states: list[Tensor], held: Held) -> list[Tensor]:
        """Return copies of all states of a piece. If there is no room, states of older pieces are left out."""
        n_bytes = sum(tensor.nbytes for tensor in states)
        while self._find_or_none(n_bytes) is None and self._thin_out():
            pass
        self._pieces.append(weakref.ref(piece))
        return [self.keep(tensor, held) for tensor in states]

    def _thin_out(self) -> bool:
        """Leave out the states of every second piece that still has states, so that the rest is evenly spaced."""
        alive = [(ref, piece) for ref in self._pieces if (piece := ref()) is not None and piece.state_bytes]
        # The newest states are those that the next chunk begins with.
        for _, piece in alive[1:-1:2]:
            piece.drop_states()
        self._pieces = [ref for ref, piece in alive if piece.state_bytes]
        return len(self._pieces) < len(alive)

    def _find(self, n_bytes: int) -> Where:
        if (where := self._find_or_none(n_bytes)) is None:
            limit = self._limits["device"] or 0
            raise CapacityError(
                f"rows and states of texts need {n_bytes:,} bytes more, and {limit - self.used['device']:,} of "
                f"budget={limit:,} are free; give the tape a larger budget, a host_budget, or a folder for files",
                needed=n_bytes, free=limit - self.used["device"], capacity=limit,
            )  # fmt: skip
        return where

    def _find_or_none(self, n_bytes: int) -> Where | None:
        """Return the cheapest place that has room."""
        for where, limit in self._limits.items():
            if limit is None or self.used[where] + n_bytes <= limit:
                return where
        return None

    def _placed(self, tensor: Tensor, held: Held, where: Where) -> Tensor:
        held.add(where, n_bytes := tensor.numel() * tensor.dtype.itemsize)
        self.used[where] += n_bytes
        if where == "files":
            return _mapped(tensor, self._folder)
        if where == "device":
            return tensor.clone(memory_format=torch.contiguous_format)
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)


def _mapped(tensor: Tensor, folder: Path | None) -> Tensor:
    """Return a copy that lies in a file. The system writes its pages out, and reads them back, as it needs memory."""
    with tempfile.NamedTemporaryFile(dir=folder, suffix=".rows") as file:
        copy = torch.from_file(file.name, shared=True, size=max(1, tensor.numel()), dtype=tensor.dtype)
    return copy[: tensor.numel()].view(tensor.shape).copy_(tensor)
