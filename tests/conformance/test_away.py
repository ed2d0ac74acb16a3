"""What leaves the arena comes back bit for bit.

It is swapped to host memory or to a file, or saved by one memory and loaded by another.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hybridmem.memory import HybridMemory, Sequence, SpecError
from hybridmem.memory.specs import AttentionSpec
from tests.inside import arena_bytes
from tests.subjects import Subject
from tests.tolerances import assert_split_close

WINDOW, PROMPT = 8, 37
NEXT = ([3, 1, 4], [1], [9, 2, 6, 5, 3, 5, 8])


def grown(subject: Subject, memory: HybridMemory) -> Sequence:
    """Return a sequence that was fed, rolled back and fed again.

    It holds something else than a prompt alone would leave.
    """
    sequence = memory.open()
    subject.feed(memory, sequence, [subject.tokens(PROMPT), *([t] for t in subject.tokens(3, seed=1))])
    memory.rollback(sequence, to=PROMPT + 2)
    subject.feed(memory, sequence, [subject.tokens(2, seed=2)])
    return sequence


def go_on(subject: Subject, memory: HybridMemory, sequence: Sequence) -> torch.Tensor:
    """Return outputs after a rollback into the tail that came back, and of the next tokens."""
    memory.rollback(sequence, to=sequence.length - 3)
    return subject.feed(memory, sequence, NEXT)


@pytest.mark.parametrize("tier", ["host", "file"])
def test_a_swapped_sequence_goes_on_as_if_it_had_stayed(subject: Subject, tmp_path: Path, tier: str) -> None:
    memory = HybridMemory(
        subject.spec, "8MiB", rollback_window=WINDOW, page_tokens=4, fold=subject.fold, poison=True,
        host_budget=None if tier == "host" else 1, swap_dir=tmp_path,
    )  # fmt: skip
    stays, leaves = (grown(subject, memory) for _ in range(2))
    fork = memory.fork(leaves)
    tokens, horizon, before = leaves.tokens.tolist(), leaves.horizon, memory.usage()
    memory.swap_out(leaves)
    memory.check()
    away = memory.usage()
    assert leaves.is_swapped and (leaves.tokens.tolist(), leaves.horizon) == (tokens, horizon)
    assert (away.host_bytes, away.disk_bytes)[tier == "file"] == sum(before.by_sequence[leaves.id].by_kind.values())
    assert bool(list(tmp_path.iterdir())) == (tier == "file")
    memory.close(fork)
    assert memory.usage().used_bytes < before.used_bytes
    other = memory.open()
    # The other sequence takes the blocks that were freed.
    subject.feed(memory, other, [subject.tokens(PROMPT, seed=9)])
    memory.swap_in(leaves)
    memory.check()
    assert not leaves.is_swapped and not list(tmp_path.iterdir())
    found, expected = go_on(subject, memory, leaves), go_on(subject, memory, stays)
    assert torch.equal(found, expected)
    for sequence in (stays, leaves, other):
        memory.close(sequence)
    assert memory.usage().used_bytes == memory.usage().host_bytes == 0


def test_a_sequence_whose_pages_are_in_host_memory_goes_on_as_others_do(subject: Subject) -> None:
    if not any(isinstance(memory, AttentionSpec) for layer in subject.spec.layers for memory in layer):
        with pytest.raises(SpecError, match="no attention"):
            HybridMemory(subject.spec, "8MiB", host_pages="8MiB")
        return
    device, dtype = subject.spec.device, subject.spec.dtype
    for attention in ("stream", "compute") if device.type == "cuda" and not subject.is_lossy else ("stream",):
        memory = HybridMemory(
            subject.spec, "8MiB", rollback_window=WINDOW, page_tokens=4, fold=subject.fold, poison=True,
            host_pages="8MiB",
            host_attention=attention,  # type: ignore[arg-type]
        )  # fmt: skip
        stays, leaves = (grown(subject, memory) for _ in range(2))
        memory.to_host(leaves)
        memory.check()
        other = memory.open()
        # The other sequence takes the blocks that were freed.
        subject.feed(memory, other, [subject.tokens(PROMPT, seed=9)])
        found, expected = go_on(subject, memory, leaves), go_on(subject, memory, stays)
        assert (
            torch.equal(found, expected)
            if attention == "stream"
            else assert_split_close(found, expected, dtype) is None
        )
        memory.to_device(memory.fork(leaves))
        both = {stays: [7] * 5, leaves: [7] * 5, other: [1]}
        with memory.step(both, outputs="all") as step:
            found, expected, _ = step.split(subject.model(step))
        assert_split_close(found, expected, dtype)
        assert leaves.is_on_host
        memory.check()


def test_a_saved_sequence_goes_on_in_another_memory(subject: Subject, tmp_path: Path) -> None:
    memory, other = subject.memory(WINDOW), subject.memory(WINDOW, budget="7MiB")
    sequence = grown(subject, memory)
    memory.save(sequence, tmp_path / "saved")
    used_bytes = memory.usage().used_bytes
    expected = go_on(subject, memory, sequence)
    other.open()
    twins = [other.load(tmp_path / "saved") for _ in range(2)]
    other.check()
    assert other.usage().used_bytes == 2 * used_bytes
    for twin in twins:
        assert torch.equal(go_on(subject, other, twin), expected)
    assert [p.name for p in tmp_path.iterdir()] == ["saved"]


def left_by_others(subject: Subject, memory: HybridMemory, seed: int) -> Sequence:
    """Return a sequence that has taken tokens back, in blocks that others have left.

    Its own tokens are the same for every `seed`, and all else differs.
    """
    arena_bytes(memory).fill_(seed)
    for stranger, n_tokens in [(memory.open(), n) for n in (PROMPT, 9)]:
        subject.feed(memory, stranger, [subject.tokens(n_tokens, seed=seed), [1]])
        memory.close(stranger)
    sequence = memory.open()
    subject.feed(memory, sequence, [subject.tokens(PROMPT), subject.tokens(5, seed=seed)])
    memory.rollback(sequence, to=PROMPT)
    with memory.step({sequence: subject.tokens(2, seed=1) + subject.tokens(4, seed=seed)}) as step:
        subject.model(step)
        step.accept({sequence: 2})
    fork = memory.fork(sequence)
    subject.feed(memory, sequence, [subject.tokens(3, seed=seed)])
    memory.rollback(fork, to=PROMPT + 1)
    return fork


def test_files_hold_nothing_of_others_and_nothing_that_was_taken_back(subject: Subject, tmp_path: Path) -> None:
    """A sequence with other neighbours, which took other tokens back, leaves the same bytes.

    So no byte comes from either.
    """
    files = []
    for seed in (0xA5, 0x3C):
        memory = HybridMemory(
            subject.spec,
            "8MiB",
            rollback_window=WINDOW,
            page_tokens=4,
            fold=subject.fold,
            host_budget=1,
            swap_dir=tmp_path / str(seed),
        )
        sequence = left_by_others(subject, memory, seed)
        memory.save(sequence, tmp_path / "saved")
        memory.swap_out(sequence)
        (swapped,) = (tmp_path / str(seed)).iterdir()
        files.append(((tmp_path / "saved").read_bytes(), swapped.read_bytes()))
        assert bytes([seed] * 16) not in files[-1][0]
    assert files[0] == files[1]


def test_files_of_families_hold_nothing_of_others_either(subject: Subject, tmp_path: Path) -> None:
    """The rows of a block are those of all members of the file that hold it, and of no others.

    A sequence that is left out leaves no rows.
    """
    files = []
    for seed in (0xA5, 0x3C):
        options = {"rollback_window": WINDOW, "page_tokens": 4, "fold": subject.fold}
        memory = HybridMemory(subject.spec, "8MiB", **options)  # type: ignore[arg-type]
        first = left_by_others(subject, memory, seed)
        shorter = memory.checkpoint(first)
        fork, left_out = memory.fork(first), memory.fork(first)
        subject.feed(memory, left_out, [subject.tokens(3, seed=seed)])
        subject.feed(memory, fork, [subject.tokens(3, seed=4), subject.tokens(5, seed=seed)])
        memory.rollback(fork, n_tokens=5)
        memory.checkpoint(fork)
        subject.feed(memory, fork, [subject.tokens(4, seed=5)])
        away = memory.checkpoint(fork)
        memory.swap_out(away)
        subject.feed(memory, fork, [subject.tokens(2, seed=seed)])
        memory.rollback(fork, n_tokens=3)
        memory.close(memory.fork(shorter))
        memory.save(first, tmp_path / "saved", checkpoints=True, forks={"fork": fork})
        files.append((tmp_path / "saved").read_bytes())
        assert bytes([seed] * 16) not in files[-1]
    assert files[0] == files[1]
