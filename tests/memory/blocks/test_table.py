"""Block tables keep the ids of a sequence and of its checkpoints once, and never mix them up."""

from __future__ import annotations

import numpy as np
import pytest

from hybridmem.memory.blocks.arena import Arena
from hybridmem.memory.blocks.arrays import Int64s
from hybridmem.memory.blocks.pool import BlockPool
from hybridmem.memory.blocks.table import BlockTable


def make() -> tuple[BlockPool, BlockTable]:
    pool = BlockPool(Arena(1 << 20), "pages", 64, from_top=False, on_change=lambda start, n_bytes: None)
    return pool, BlockTable(pool, "pages", "first_page")


def share(table: BlockTable, *pairs: tuple[int, int]) -> None:
    table.share(np.array([source for source, _ in pairs]), np.array([target for _, target in pairs]))


@pytest.mark.parametrize("seed", range(8))
def test_any_history_agrees_with_lists(seed: int) -> None:
    """Six slots append, replace the last block, cut on both sides, and share."""
    rng = np.random.default_rng(seed)
    pool, table = make()
    plain: dict[int, list[int]] = {slot: [] for slot in range(6)}
    for _ in range(400):
        slot, n = int(rng.integers(6)), int(rng.integers(4))
        match int(rng.integers(7)):
            case 0 | 1:
                fresh = pool.allocate(n)
                table.append(slot, fresh)
                plain[slot] += fresh.tolist()
            case 2 if plain[slot]:  # A step replaces a page when it appends to one that others hold as well.
                fresh = pool.allocate(1 + n)
                table.replace(slot, len(plain[slot]) - 1, fresh)
                pool.release(np.array([plain[slot].pop()]))
                plain[slot] += fresh.tolist()
            case 3:
                kept = int(rng.integers(len(plain[slot]) + 1))
                table.truncate(slot, kept)
                del plain[slot][kept:]
            case 4 if plain[slot]:
                n = int(rng.integers(len(plain[slot]) + 1))
                pool.release(table.leave_behind(slot, n))
                del plain[slot][:n]
            case 5:
                order = rng.permutation(6)[:3].tolist()
                moves = [(int(rng.integers(6)), target) for target in order]
                before = {source: list(own) for source, own in plain.items()}
                share(table, *moves)
                plain |= {target: list(before[source]) for source, target in moves}
            case 6:
                table.release(slot)
                plain[slot] = []
        assert {slot: table[slot].tolist() for slot in plain} == plain
        assert table.counts(np.arange(6)).tolist() == [len(own) for own in plain.values()]
        table.check(range(6))
    for slot in plain:
        table.release(slot)
    pool.check([])
    assert pool.n_used == 0


def test_a_checkpoint_at_each_block_adds_no_table_of_its_own() -> None:
    pool, table = make()
    for slot in range(1, 1001):
        table.append(0, pool.allocate(4))
        share(table, (0, slot))
    assert table.book_bytes < 5 * table[0].nbytes
    ids: list[Int64s] = [table[slot] for slot in range(1, 1001)]
    assert all(np.array_equal(own, table[0][: len(own)]) for own in ids) and len(ids[-1]) == 4000


def test_a_slot_that_is_its_own_source_goes_on_in_place() -> None:
    pool, table = make()
    table.append(0, pool.allocate(3))
    before = table.book_bytes
    share(table, (0, 0), (0, 1))
    table.append(0, pool.allocate(1))
    assert table.book_bytes == before and len(table[1]) == 3
