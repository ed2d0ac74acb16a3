"""The checkpoint that gives way is the one that a search through all of them would choose."""

from __future__ import annotations

import random

import numpy as np
import pytest

from hybridmem.memory import HybridMemory, Sequence
from hybridmem.memory.prefix.cache import PrefixCache
from hybridmem.memory.prefix.eviction_rank import Ranking
from tests.toy import VOCAB, Toy


@pytest.mark.parametrize("seed", range(3))
def test_the_order_is_that_of_all_values(seed: int) -> None:
    """Checkpoints come, go, are used, and save other numbers of tokens meanwhile.

    Of equal ones, the older gives way first.
    """
    generator, memory = random.Random(seed), HybridMemory(Toy().memory_spec, "1MiB", device="meta")
    # The four numbers are `saved`, `held`, `used_at` and `private`.
    ranking, known = Ranking(), dict[Sequence, list[int]]()
    for clock in range(400):
        held = generator.randint(1, 4)
        mark = memory.open()
        known[mark] = [generator.randint(1, 5), held, clock, generator.randint(0, held)]
        ranking.add(mark, known[mark][0], held)
        ranking.use(mark, clock)
        for other in generator.sample(list(known), min(len(known), 2)):
            known[other][2] = clock
            ranking.use(other, clock)
            known[other][0] = generator.randint(1, 5)
            ranking.saves(other, known[other][0])
        if clock % 7 < 2 or generator.random() < 0.5:
            gone = generator.choice(list(known))
            del known[gone]
            ranking.remove(gone)
        expected = sorted(known, key=lambda m: known[m][0] / max(known[m][3], 1) / (1 + clock - known[m][2]))
        assert [
            m for m, _ in ranking.ascending(clock, lambda marks: np.array([known[m][3] for m in marks]))
        ] == expected


@pytest.mark.parametrize("attention", [True, False])
def test_a_cache_evicts_what_is_worth_least(attention: bool) -> None:
    """Conversations share beginnings.

    The expected order is computed only from tokens and the memory's own account of bytes.
    """
    generator, memory = (
        random.Random(1),
        HybridMemory(Toy(attention=attention).memory_spec, "16MiB", device="meta", page_tokens=4),
    )
    cache = PrefixCache(memory, grid_tokens=0)
    # Maps the id of a checkpoint to its tokens, and to when it was used.
    marks: dict[int, tuple[tuple[int, ...], int]] = {}
    clock = n_evicted = 0

    def checkpoints() -> set[int]:
        return {id for id, usage in memory.usage().by_sequence.items() if usage.is_checkpoint}

    def worth(id: int, private_bytes: int) -> float:
        tokens, used_at = marks[id]
        above = max((len(t) for t, _ in marks.values() if len(t) < len(tokens) and tokens[: len(t)] == t), default=0)
        return (len(tokens) - above) / max(private_bytes, 1) / (1 + clock - used_at)

    live: list[Sequence] = []
    for _ in range(250):
        if live and generator.random() < 0.7:
            sequence = generator.choice(live)
            sequence = memory.fork(sequence) if generator.random() < 0.4 else sequence
        else:
            sequence = memory.open()
        if sequence not in live:
            live.append(sequence)
        memory.run(None, {sequence: [generator.randrange(3) % VOCAB for _ in range(generator.randint(1, 9))]})
        cache.insert(sequence)
        clock += 1
        tokens = tuple(sequence.tokens.tolist())
        found = next((id for id, (t, _) in marks.items() if t == tokens), None) or max(checkpoints())
        marks[found] = tokens, clock
        if len(live) > 6:
            memory.close(live.pop(generator.randrange(len(live))))
        if generator.random() < 0.4:
            held = memory.usage().by_sequence
            expected = min(marks, key=lambda id: worth(id, held[id].private_bytes))
            assert cache.reclaim(1)
            gone = marks.keys() - checkpoints()
            assert expected in gone
            n_evicted += len(gone)
            for id in gone:
                del marks[id]
    assert n_evicted > 50 and cache.stats().n_evicted == n_evicted
