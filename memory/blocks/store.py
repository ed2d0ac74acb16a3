"""Defines the store, which holds the bytes of a budget on a device. Pools address them, kernels read and write them."""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from hybridmem.memory.blocks import staging as uploads
from hybridmem.memory.blocks.arena import Arena
from hybridmem.memory.blocks.arrays import Int64s
from hybridmem.memory.blocks.journal import Journal
from hybridmem.memory.blocks.layout import BlockLayout, Field
from hybridmem.memory.blocks.pool import BlockPool, _runs
from hybridmem.memory.blocks.staging import Placed
from hybridmem.memory.errors import BUDGET_UNIT, SpecError

_mappings: weakref.WeakValueDictionary[int, mmap.mmap] = weakref.WeakValueDictionary()
"""Maps an address to the memory that `reserve` has mapped there, as long as a tensor of this memory exists."""


def reserve(n_bytes: int, device: torch.device) -> Tensor:
    """Allocate (n_bytes,) uint8 without initializing them. On the CPU, bytes that are never touched take no RAM.

    On Linux it requests huge pages: the first use of memory then costs one page fault for 2 MiB instead of 4 KiB.
    """
    if n_bytes and device.type == "cpu" and hasattr(mmap, "MADV_HUGEPAGE"):
        pages = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        pages.madvise(mmap.MADV_HUGEPAGE)
        mapped = torch.frombuffer(pages, dtype=torch.uint8)
        _mappings[mapped.data_ptr()] = pages
        return mapped
    return torch.empty(n_bytes, dtype=torch.uint8, device=device)


class Store:
    """Holds an arena and its bytes, which are one tensor on the device. On "meta" there are no bytes.

    Args:
        reserve: a function (bytes, device) -> uint8 tensor that allocates the bytes. The default allocates device
            memory.
        unit: the `CapacityError.unit` of the arena's errors.
        is_reproducible: True if what is computed from these bytes must not depend on how tokens are split into steps.
        journal: the memory's journal. By default the store makes its own.
        poison: fills every block with NaN when it is allocated and when it is freed. So a read of bytes that were never
            written shows at once. It is for tests, because it costs an additional write of each block.
    """

    def __init__(
        self,
        capacity_bytes: int,
        device: torch.device,
        *,
        poison: bool,
        reserve: Callable[[int, torch.device], Tensor] = reserve,
        unit: str = BUDGET_UNIT,
        journal: Journal | None = None,
        is_reproducible: bool = False,
    ) -> None:
        self.arena = Arena(capacity_bytes, unit)
        self.journal = Journal() if journal is None else journal
        # The references are weak, because each pool refers to the store.
        self._pools: weakref.WeakSet[BlockPool] = weakref.WeakSet()
        self.device, self.is_reproducible = device, is_reproducible
        self.stages = uploads.Stages(device)
        self.is_dry = device.type == "meta"
        self._poison = poison and not self.is_dry
        try:
            # Outside of this mode, the bytes could only be written in inference mode.
            with torch.inference_mode(False):
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
        """Free the bytes now, even if something still refers to them, such as the frames of a traceback."""
        if self.device.type == "cuda":
            self._bytes.untyped_storage().resize_(0)
        elif (pages := _mappings.get(self._bytes.data_ptr())) is not None:
            pages.madvise(mmap.MADV_DONTNEED)

    def flat(self, field: Field) -> Tensor:
        """Return all bytes as a flat tensor of the field's dtype.

        The flat tensor begins at the field's place in a block at address 0. So element i of the field, in the block at
        address a, is element a // itemsize + i of the flat tensor.
        """
        return self._bytes.view(field.dtype)[field.offset_bytes // field.dtype.itemsize :]

    def make_pool(self, name: str, layout: BlockLayout, *, from_top: bool) -> BlockPool:
        pool = BlockPool(
            self.arena, name, layout.block_bytes, from_top=from_top, on_change=self.spoil, journal=self.journal
        )
        self._pools.add(pool)
        return pool

    def rebuild(self, references: Mapping[BlockPool, list[Int64s]]) -> None:
        """Compute anew which blocks and bytes are free, from arrays of all referenced ids of each pool."""
        for pool in self._pools:
            pool.recount(references.get(pool, []))
        self.arena.rebuild([used for pool in self._pools for used in pool.used_ranges()])
        for start, end in zip(*self.arena.free_ranges(), strict=True) if self._poison else ():
            self.spoil(int(start), int(end - start))

    def upload(self, array: Int64s, *, room: bool = False) -> Tensor:
        """Upload an array of a plan for the kernels, as `memory.blocks.staging.upload` does."""
        return uploads.upload(array, self.device, room=room)

    def place(self, array: Int64s) -> Placed:
        """Upload an array that some kernels read on the host and others on the device."""
        return uploads.place(array, self.device)

    def on_host(self, array: Int64s) -> Int64s:
        """Return an array of a plan that only the host reads, as `memory.blocks.staging.on_host` does."""
        return uploads.on_host(array, self.device)

    def copy(self, source: int, target: int, n_bytes: int) -> None:
        """Copy the bytes of one block to another."""
        if not self.is_dry:
            self._bytes[target : target + n_bytes] = self._bytes[source : source + n_bytes]

    def saved(self, address: int, n_bytes: int) -> Tensor:
        """Return a copy of a byte range, on the device. In a dry run it has no bytes."""
        return self._bytes[address : address + n_bytes].clone()

    def put(self, address: int, saved: Tensor) -> None:
        """Write the bytes that `saved` returned to another byte range."""
        if not self.is_dry:
            self._bytes[address : address + len(saved)] = saved

    def read(self, addresses: Int64s, block_bytes: int) -> Tensor:
        """Copy blocks to the host, (n, block_bytes) uint8. In a dry run they are copied to "meta"."""
        if self.is_dry:
            return torch.empty(len(addresses), block_bytes, dtype=torch.uint8, device="meta")
        # Numpy asks for huge pages, and torch does not. So the first use of many bytes costs few page faults.
        blocks = torch.from_numpy(np.empty((len(addresses), block_bytes), np.uint8))
        for first, end, (address,) in _runs(block_bytes, addresses):
            blocks[first:end].view(-1).copy_(self._bytes[address : address + (end - first) * block_bytes])
        return blocks

    def write(self, addresses: Int64s, blocks: Tensor) -> None:
        """Write the blocks that `read` returned to other addresses."""
        if not self.is_dry:
            n_bytes = blocks.shape[1]
            for first, end, (address,) in _runs(n_bytes, addresses):
                self._bytes[address : address + (end - first) * n_bytes] = blocks[first:end].view(-1)

    def fetch(self, source: Store, addresses: Int64s, targets: Int64s, block_bytes: int) -> None:
        """Copy blocks (n,) of another store into blocks of this one.

        The host waits unless both are on one CUDA device.
        """
        if not self.is_dry:
            for first, end, (address, target) in _runs(block_bytes, addresses, targets):
                n_bytes = (end - first) * block_bytes
                self._bytes[target : target + n_bytes].copy_(source._bytes[address : address + n_bytes])

    def spoil(self, address: int, n_bytes: int) -> None:
        """Fill a range with NaN if the store has `poison`.

        A number with all bits set is NaN in every floating-point dtype.
        """
        if self._poison:
            self._bytes[address : address + n_bytes].fill_(0xFF)
