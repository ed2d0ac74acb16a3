"""The bytes of a budget on a device, which pools address and kernels read and write."""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from memory.blocks import staging as uploads
from memory.blocks.arena import Arena
from memory.blocks.arrays import Int64s
from memory.blocks.layout import BlockLayout, Field
from memory.blocks.pool import BlockPool, _runs
from memory.blocks.staging import Placed
from memory.errors import BUDGET_UNIT, SpecError

_mappings: weakref.WeakValueDictionary[int, mmap.mmap] = weakref.WeakValueDictionary()
"""Address -> what `reserve` has mapped there, as long as a tensor of it lives."""


def reserve(n_bytes: int, device: torch.device) -> Tensor:
    """(n_bytes,) uint8, of any content. On the CPU, bytes that are never touched take no memory.

    Linux is asked for large pages: what a step touches first then costs one page fault in 2 MiB instead of one in 4
    KiB.
    """
    if n_bytes and device.type == "cpu" and hasattr(mmap, "MADV_HUGEPAGE"):
        pages = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        pages.madvise(mmap.MADV_HUGEPAGE)
        mapped = torch.frombuffer(pages, dtype=torch.uint8)
        _mappings[mapped.data_ptr()] = pages
        return mapped
    return torch.empty(n_bytes, dtype=torch.uint8, device=device)


class Store:
    """An arena with its bytes: one tensor on the device, none at all on "meta".

    Args:
        reserve: (bytes, device) -> that tensor, uint8; what the device has unless given.
        unit: of the arena.
        poison: fill every block with NaN when it is handed out and when it is freed, so that reading memory nobody
            wrote shows at once. For tests: it costs a write of every block.
    """

    def __init__(
        self,
        capacity_bytes: int,
        device: torch.device,
        *,
        poison: bool,
        reserve: Callable[[int, torch.device], Tensor] = reserve,
        unit: str = BUDGET_UNIT,
    ) -> None:
        self.arena = Arena(capacity_bytes, unit)
        self.device = device
        self.stages = uploads.Stages(device)
        self.is_dry = device.type == "meta"
        self._poison = poison and not self.is_dry
        try:
            with torch.inference_mode(False):  # or the bytes could be written inside of inference mode only
                self._bytes = reserve(
                    0 if self.is_dry else self.arena.capacity_bytes, torch.device("cpu") if self.is_dry else device
                )
        except (RuntimeError, AssertionError, OSError) as error:
            raise SpecError(
                f"{device} cannot hold a budget of {capacity_bytes:,} {unit}; choose a smaller one"
            ) from error
        if self._poison:
            self._bytes.fill_(0xFF)

    def give_back(self) -> None:
        """Nobody uses the bytes any more: they go now, whatever still refers to them, such as the frames of a
        traceback.
        """
        if self.device.type == "cuda":
            self._bytes.untyped_storage().resize_(0)
        elif (pages := _mappings.get(self._bytes.data_ptr())) is not None:
            pages.madvise(mmap.MADV_DONTNEED)

    def flat(self, field: Field) -> Tensor:
        """All bytes as a flat tensor of the field's dtype, from the field's place in a block at address 0 on.

        In it, element i of that field in the block at address a is element a // itemsize + i.
        """
        return self._bytes.view(field.dtype)[field.offset_bytes // field.dtype.itemsize :]

    def make_pool(self, name: str, layout: BlockLayout, *, from_top: bool) -> BlockPool:
        return BlockPool(self.arena, name, layout.block_bytes, from_top=from_top, on_change=self._poison_block)

    def upload(self, array: Int64s, *, room: bool = False) -> Tensor:
        """A plan's array where the kernels want it: `memory.blocks.staging`."""
        return uploads.upload(array, self.device, room=room)

    def place(self, array: Int64s) -> Placed:
        """Upload an array that kernels read on the host or on the device, each as it needs."""
        return uploads.place(array, self.device)

    def copy(self, source: int, target: int, n_bytes: int) -> None:
        """Copy one block's bytes onto another's."""
        if not self.is_dry:
            self._bytes[target : target + n_bytes] = self._bytes[source : source + n_bytes]

    def read(self, addresses: Int64s, block_bytes: int) -> Tensor:
        """Copies of blocks, (n, block_bytes) uint8 on the host; in a dry run on "meta"."""
        if self.is_dry:
            return torch.empty(len(addresses), block_bytes, dtype=torch.uint8, device="meta")
        blocks = torch.empty(len(addresses), block_bytes, dtype=torch.uint8)
        for first, end, (address,) in _runs(block_bytes, addresses):
            blocks[first:end].view(-1).copy_(self._bytes[address : address + (end - first) * block_bytes])
        return blocks

    def write(self, addresses: Int64s, blocks: Tensor) -> None:
        """Put what `read` returned into other blocks."""
        if not self.is_dry:
            n_bytes = blocks.shape[1]
            for first, end, (address,) in _runs(n_bytes, addresses):
                self._bytes[address : address + (end - first) * n_bytes] = blocks[first:end].view(-1)

    def fetch(self, source: Store, addresses: Int64s, targets: Int64s, block_bytes: int) -> None:
        """Copy blocks of another store into own ones (n,). The host waits unless both are of one CUDA device."""
        if not self.is_dry:
            for first, end, (address, target) in _runs(block_bytes, addresses, targets):
                n_bytes = (end - first) * block_bytes
                self._bytes[target : target + n_bytes].copy_(source._bytes[address : address + n_bytes])

    def _poison_block(self, address: int, n_bytes: int) -> None:
        """All bits set is NaN in every floating-point dtype."""
        if self._poison:
            self._bytes[address : address + n_bytes].fill_(0xFF)
