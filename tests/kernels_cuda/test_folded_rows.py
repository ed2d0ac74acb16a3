"""Attention reads rows that a storage keeps, and after them rows in pages."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hybridmem.memory.kernels import Scoring, reference
from hybridmem.memory.kernels.cuda import tiles
from hybridmem.memory.quantization import Float8, Quantized, Storage
from tests.kernels_cuda.on_device import OnDevice
from tests.memory.kernels.test_kernels import Pages
from tests.memory.test_quantization import folded_rows
from tests.tolerances import assert_kernel_close

STORAGES = (Quantized(8, group=8), Quantized(4, group=8), Quantized(2, group=8), Float8(group=8))


@pytest.mark.parametrize("by_channel", [True, False])
@pytest.mark.parametrize("storage", STORAGES, ids=str)
def test_folded_rows_are_the_reference_s(
    device: torch.device, storage: Storage, by_channel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cases have few queries and many, and requests without folded rows.

    Others have blocks that are not full, a split inside of the folded rows, or a wide head.
    """
    monkeypatch.setattr(tiles, "SPLIT_ROWS", 32)
    monkeypatch.setattr(tiles, "WHOLE_TILES", 32)
    lengths, block_rows = ([80, 0, 8, 16], 8) if by_channel else ([75, 0, 1, 13], 80)
    pages = Pages(6, 2, 24, 4, lengths=(1, 2, 1, 20), histories=(0, 40, 3, 0))
    folded = folded_rows(storage, lengths, block_rows, 2, 24, by_channel=by_channel)
    scoring = Scoring(0.3, None, 2.0, torch.randn(6), torch.randn(6, 30)) if by_channel else Scoring(0.3)
    arguments = (pages.q, pages.arena, pages.arena[pages.values_at :], pages.batch, 2, scoring, folded)
    assert_kernel_close(OnDevice(device).paged_attention(*arguments), reference.paged_attention(*arguments))


@pytest.mark.parametrize("storage", STORAGES[1:], ids=str)
def test_folded_rows_beside_bfloat16(device: torch.device, storage: Storage) -> None:
    pages = Pages(3, 1, 16, 4, lengths=(1, 20), histories=(9, 0), dtype=torch.bfloat16)
    folded = folded_rows(storage, [24, 16], 8, 1, 16, by_channel=True)
    nothing = replace(folded, lengths=folded.lengths * 0)
    for rows in (folded, nothing):
        arguments = (pages.q, pages.arena, pages.arena[pages.values_at :], pages.batch, 1, Scoring(0.3), rows)
        expected = reference.paged_attention(*arguments)
        assert_kernel_close(OnDevice(device).paged_attention(*arguments), expected, torch.bfloat16)
