"""Invariant 4 holds for every policy and storage, where bodies keep some rows, or rows in few bits.

A sequence that went further and returned must not see what came later: neither the tokens, nor what folded because of
them. `CONFORMANCE=kinds` runs every window with every cut and all distances.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from hybridmem.memory import HybridMemory, Sequence
from hybridmem.memory.eviction import Candidates, EvictionPolicy
from hybridmem.memory.quantization import Float8, Quantized, Storage
from hybridmem.memory.sequences.token_buffer import Checkpoint
from tests.extent import few_cases
from tests.subjects import IS_FULL, POLICIES, Subject, feed_together
from tests.toy import VOCAB, Toy

STORAGES: dict[str, Storage | None] = {
    "exact": None,
    **{f"{bits} bits of {group}": Quantized(bits, group=group) for bits in (8, 4, 2) for group in (4, 8)},
    "4 bits of 16": Quantized(4, group=16),
    **{f"float8 of {group}": Float8(group=group) for group in (4, 8)},
}
WINDOWS = (0, 1, 8, 32)
CUTS: tuple[tuple[int, ...], ...] = ((1,), (3, 1, 6), (17, 2))
"""The lengths of steps, over and over: before and after."""


@dataclass(frozen=True)
class LargestKeys(EvictionPolicy):
    """Is a policy as users write them. It says nothing of rollbacks."""

    def rank(self, rows: Candidates, scores: Tensor) -> Tensor:
        return rows.keys.float().amax(-1)


IS_WHOLE = IS_FULL or os.environ.get("CONFORMANCE") == "kinds"
N_BEFORE, N_DISTANCES = 50, 20 if IS_WHOLE else 5
KINDS = list(itertools.product((*POLICIES, "users"), STORAGES))
if not IS_WHOLE:  # Test each policy with every second storage, and each storage with every second policy.
    KINDS = [kind for i, kind in enumerate(KINDS) if (i // len(STORAGES) + i) % 2 == 0]
FORMS = list(itertools.product(WINDOWS, CUTS))
CASES = [
    (policy, storage, *form)
    for i, (policy, storage) in enumerate(KINDS)
    for form in (FORMS if IS_WHOLE else [FORMS[i % len(FORMS)]])
]


def cut(tokens: list[int], sizes: tuple[int, ...]) -> list[list[int]]:
    steps, lengths = list[list[int]](), itertools.cycle(sizes)
    while tokens:
        n = next(lengths)
        steps.append(tokens[:n])
        tokens = tokens[n:]
    return steps


def text(n_tokens: int, seed: int) -> list[int]:
    return torch.randint(0, VOCAB, (n_tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


WAYS = ("rollback", "decode", "fork", "accept", "checkpoint")


def go_and_return(toy: Toy, memory: HybridMemory, sequences: list[Sequence]) -> list[Sequence]:
    """Let each sequence go further, and return it, or a fork of it, as it was.

    The n-th sequence takes the n-th of many ways.
    """
    window, found = memory.rollback_window, list[Sequence]()
    lengths, further = [sequence.length for sequence in sequences], dict[Sequence, list[list[int]]]()
    marks, ways = dict[Sequence, Checkpoint](), way_of(len(sequences), window)
    for i, (sequence, way) in enumerate(zip(sequences, ways, strict=True)):
        n_further = 1 + i * 7 % window if window else 0
        if way == "checkpoint":  # The sequence goes far beyond the window.
            marks[sequence] = memory.checkpoint(sequence)
            further[sequence] = cut(text(40, i), (11, 1))
        elif way == "accept":  # The tokens are drafts, of which the first is kept.
            with memory.step({sequence: [1, *text(n_further, i)[:15]]}) as step:
                toy(step)
                step.accept({sequence: 1})
            lengths[i] += 1
        else:
            further[sequence] = cut(text(n_further, i), (1,) if way == "decode" else (n_further,))
    feed_together(toy, memory, further)
    for sequence, way, length in zip(sequences, ways, lengths, strict=True):
        # At the furthest position, a fork that was swapped out and in takes the place of the sequence.
        if way == "fork":
            sequence = memory.fork(sequence)
            memory.swap_out(sequence)
            memory.swap_in(sequence)
        memory.rollback(sequence, to=marks.get(sequence, length))
        found.append(sequence)
    return found


def way_of(n_sequences: int, window: int) -> list[str]:
    return [WAYS[i % len(WAYS)] if window else "checkpoint" for i in range(n_sequences)]


@few_cases
@pytest.mark.parametrize(
    ("policy", "storage", "window", "sizes"), CASES, ids=lambda x: str(x) if isinstance(x, tuple) else None
)
def test_what_a_sequence_returned_from_is_not_seen(
    policy: str, storage: str, window: int, sizes: tuple[int, ...]
) -> None:
    """Sequences of many lengths went further and came back, beside as many that did not.

    Both give equal bits.
    """
    toy = Toy(recurrent=False)
    chosen = POLICIES.get(policy) or LargestKeys(9, every=4)
    subject = Subject(policy, "keep", toy, True, chosen, STORAGES[storage])
    memory = subject.memory(window, "64MiB", page_tokens=4)
    root = memory.open()
    feed_together(toy, memory, {root: cut(text(N_BEFORE, 0), sizes)})
    sequences = [memory.fork(root) for _ in range(N_DISTANCES)]
    feed_together(toy, memory, {sequence: cut(text(i, i), sizes) for i, sequence in enumerate(sequences)})
    twins = [memory.fork(sequence) for sequence in sequences]
    returned = go_and_return(toy, memory, sequences)
    accepted = [back.tokens[twin.length :].tolist() for back, twin in zip(returned, twins, strict=True)]
    feed_together(toy, memory, {twin: [tokens] for twin, tokens in zip(twins, accepted, strict=True) if tokens})
    # Go on until no row that was evicted lately is left.
    after = 2 * [cut(text(window + 4, 50 + i), sizes) for i in range(N_DISTANCES)]
    found = feed_together(toy, memory, dict(zip(returned + twins, after, strict=True)))
    assert float(found[twins[0]].std()) > 1
    for back, twin, tokens in zip(returned, twins, accepted, strict=True):
        assert back.tokens.tolist() == twin.tokens.tolist()
        # Accepted tokens were a part of a chunk here, and are decoded there. So they are the same to rounding.
        subject.assert_same(found[back], found[twin], bits=not tokens)
