"""The tests say what a sequence shares with its checkpoints and forks in a file, and what damage loses."""

from __future__ import annotations

import json
import random
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save

from hybridmem.memory import CapacityError, Family, FormatError, HybridMemory, Sequence, SequenceError, SpecError
from hybridmem.memory.interface import Dropped
from hybridmem.memory.storage.checksums import checksum_of
from hybridmem.memory.storage.family_files import read_family
from tests.extent import few_cases, only_in_long, pick
from tests.inside import held_bytes, ledger_of
from tests.memory.storage.test_files import feed, make, opened, state_of
from tests.subjects import Subject, make_subject
from tests.toy import HOST, VOCAB

SUBJECTS = ("toy", "toy-window", "toy-h2o", "toy-4-bit", "toy-quest-4-bit", "toy replay", "toy-attention")


def saved_family(path: Path) -> tuple[HybridMemory, Family]:
    """Save a sequence that was rolled back to before its second checkpoint, and a fork with other tokens."""
    memory = make()
    sequence = opened(memory)
    first = memory.checkpoint(sequence)
    fork = memory.fork(sequence)
    feed(memory, sequence, [1] * 20)
    second = memory.checkpoint(sequence)
    feed(memory, fork, [2] * 9)
    third = memory.checkpoint(fork)
    feed(memory, fork, [3])
    memory.rollback(sequence, n_tokens=3)
    memory.save(sequence, path, checkpoints=True, forks={"other way": fork})
    return memory, Family(sequence, [first, second, third], {"other way": fork})


def members(family: Family) -> list[Sequence]:
    return [family.sequence, *family.checkpoints, *family.forks.values()]


def header_of(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    data = path.read_bytes()
    return load(data), json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]


def rewrite(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    """Write a family's file whose header has the right checksum."""
    metadata = {name: text for name, text in metadata.items() if name != "checksum"}
    path.write_bytes(save(tensors, metadata | {"checksum": checksum_of({}, metadata)}))


# The tests below are about what comes back.


def test_empty_sequences_of_several_families_stay_of_several(tmp_path: Path) -> None:
    memory = make()
    first, second = memory.open(), memory.open()
    for sequence in (first, second):
        memory.checkpoint(sequence)
    memory.save(first, tmp_path / "empty", checkpoints=True, forks={"second": second})
    family = memory.load(tmp_path / "empty", family=True)
    for sequence in (*family.checkpoints, *family.forks.values(), family.sequence):
        memory.close(sequence)
        memory.check()


class History:
    """Is a memory with sequences of one family and with strangers.

    They were fed, forked, rolled back, swapped and closed.
    """

    def __init__(self, subject: Subject, rng: random.Random) -> None:
        self.subject, self.rng = subject, rng
        options: dict[str, Any] = {"rollback_window": 6, "page_tokens": 4, "fold": subject.fold, "poison": True}
        self.memory = HybridMemory(subject.spec, "8MiB", host_pages="8MiB", **options)
        self.options = options
        self.family = [self.memory.open()]
        self.checkpoints: list[Sequence] = []
        stranger = self.memory.open()
        self.subject.feed(self.memory, stranger, [subject.tokens(40, seed=77)])
        self.memory.close(stranger)

    def grow(self, n_operations: int) -> None:
        for _ in range(n_operations):
            memory, rng = self.memory, self.rng
            live = [sequence for sequence in self.family if not sequence.is_swapped]
            chosen = rng.choice(live)
            match rng.randrange(10):
                case 0 if len(self.family) < 4:
                    self.family.append(memory.fork(rng.choice([*live, *self.near()])))
                case 1 | 2:
                    self.checkpoints.append(memory.checkpoint(chosen))
                case 3 if chosen.length:
                    memory.rollback(chosen, to=rng.randint(max(chosen.horizon, chosen.length - 5), chosen.length))
                case 4 if self.near():
                    memory.rollback(chosen, to=rng.choice(self.near()))
                case 5 if self.near():
                    memory.swap_out(rng.choice(self.near()))
                case 6:
                    (memory.to_device if chosen.is_on_host else memory.to_host)(chosen)
                case 7 if self.near() and len(self.checkpoints) > 2:
                    closed = rng.choice(self.near())
                    self.checkpoints.remove(closed)
                    memory.close(closed)
                case _:
                    steps = [self.subject.tokens(rng.choice([1, 2, 7, 13]), seed=rng.randrange(99))]
                    self.subject.feed(memory, chosen, steps)

    def near(self) -> list[Sequence]:
        return [checkpoint for checkpoint in self.checkpoints if not checkpoint.is_swapped]


@few_cases
@pytest.mark.parametrize("seed", range(pick(2, 6)))
@pytest.mark.parametrize("name", SUBJECTS)
def test_a_family_goes_on_as_if_it_had_never_been_saved(name: str, seed: int, tmp_path: Path) -> None:
    subject = make_subject(name, tmp_path / "model", HOST)
    history = History(subject, random.Random(f"{name} {seed}"))
    history.grow(40)
    memory, (sequence, *forks) = history.memory, history.family
    named = {f"fork {i}": fork for i, fork in enumerate(forks)}
    memory.save(sequence, tmp_path / "saved", checkpoints=True, forks=named)
    marks = sorted(history.checkpoints, key=lambda mark: mark.id)

    other = HybridMemory(subject.spec, "8MiB", **history.options)
    loaded = other.load(tmp_path / "saved", family=True)
    other.check()
    assert list(loaded.forks) == list(named) and len(loaded.checkpoints) == len(marks)
    other.save(loaded.sequence, tmp_path / "again", checkpoints=True, forks=loaded.forks)
    assert (tmp_path / "again").read_bytes() == (tmp_path / "saved").read_bytes()

    pairs = list(zip([sequence, *marks, *forks], members(loaded), strict=True))
    if not any(one.is_swapped or one.is_on_host for one, _ in pairs):
        held = held_bytes(memory, [one for one, _ in pairs])
        assert other.usage().used_bytes == held, "they share what they shared"
    for mark in marks:
        if mark.is_swapped:
            memory.swap_in(mark)
    for to in range(sequence.length + 1):
        assert other.resume_point(loaded.sequence, to) == memory.resume_point(sequence, to)
    for one, two in pairs:
        assert (one.tokens.tolist(), one.horizon, one.is_checkpoint) == (
            two.tokens.tolist(),
            two.horizon,
            two.is_checkpoint,
        )
        mine, theirs = memory.fork(one), other.fork(two)
        if one.is_on_host:
            memory.to_device(mine)
        ends = [subject.tokens(1, seed=5), subject.tokens(9, seed=6)]
        assert torch.equal(subject.feed(memory, mine, ends), subject.feed(other, theirs, ends))
        if two.is_checkpoint:
            other.rollback(loaded.sequence, to=two)
            assert loaded.sequence.tokens.tolist() == two.tokens.tolist()
    for handle in list(other.sequences):
        other.close(handle)
    assert other.usage().used_bytes == 0
    other.check()


def test_rollback_by_position_goes_through_a_loaded_checkpoint(tmp_path: Path) -> None:
    memory, family = saved_family(tmp_path / "saved")
    other = make()
    loaded = other.load(tmp_path / "saved", family=True)
    other.rollback(loaded.sequence, to=30)
    memory.rollback(family.sequence, to=30)
    assert torch.equal(feed(other, loaded.sequence, [5, 6]), feed(memory, family.sequence, [5, 6]))
    other.rollback(loaded.sequence, to=loaded.checkpoints[2])
    assert loaded.sequence.tokens.tolist() == family.checkpoints[2].tokens.tolist()


def test_the_sequence_alone_can_be_loaded_from_any_file(tmp_path: Path) -> None:
    memory, family = saved_family(tmp_path / "saved")
    memory.save(family.sequence, tmp_path / "alone")
    one, two = make(), make()
    first, second = one.load(tmp_path / "saved"), two.load(tmp_path / "alone", family=True)
    assert (second.checkpoints, second.forks) == ([], {})
    assert one.usage().used_bytes == two.usage().used_bytes
    assert torch.equal(feed(one, first, [1]), feed(two, second.sequence, [1]))


def test_chosen_checkpoints_and_no_others(tmp_path: Path) -> None:
    memory, family = saved_family(tmp_path / "saved")
    memory.save(family.sequence, tmp_path / "few", checkpoints=[family.checkpoints[1]])
    found = [(member.kind, member.length) for member in read_family(str(tmp_path / "few")).members]
    assert found == [("sequence", 47), ("checkpoint", 50)]


def test_families_stay_apart(tmp_path: Path) -> None:
    """Two sequences of different families in one file are of different families after loading."""
    memory = make()
    one, two = opened(memory), opened(memory)
    memory.checkpoint(two)
    memory.save(one, tmp_path / "saved", checkpoints=True, forks={"two": two})
    loaded = memory.load(tmp_path / "saved", family=True)
    (mark,) = loaded.checkpoints
    assert memory.can_rollback(loaded.forks["two"], mark) and not memory.can_rollback(loaded.sequence, mark)


def test_what_checkpoints_share_is_in_the_file_once(tmp_path: Path) -> None:
    memory = make()
    sequence = opened(memory, 4)
    sizes = []
    for _ in range(4):
        memory.save(sequence, tmp_path / "saved", checkpoints=True)
        sizes.append((tmp_path / "saved").stat().st_size)
        assert sum(map(len, read_family(str(tmp_path / "saved")).tokens)) == sequence.length
        memory.checkpoint(sequence)
    assert sizes[-1] - sizes[0] < 3000, "entries alone"


def test_drops_that_checkpoints_have_in_common_stay_common(tmp_path: Path) -> None:
    memory = make()
    sequence = opened(memory)
    before = memory.checkpoint(sequence)
    # Only the ledger drops tokens, because keys of toys cannot be rotated.
    ledger_of(memory).drop(Dropped.of(sequence.slot, 3, 3, 30, 30, approximate=False), 4)
    after = memory.checkpoint(sequence)
    memory.save(sequence, tmp_path / "saved", checkpoints=True)
    other = make()
    ledger_of(other).n_drops = 7
    loaded = other.load(tmp_path / "saved", family=True)
    found = [ledger_of(memory).drops(one.slot) for one in (sequence, before, after)]
    assert found == [((4, 1),), (), ((4, 1),)]
    assert [ledger_of(other).drops(one.slot) for one in members(loaded)] == [((4, 8),), (), ((4, 8),)]
    assert ledger_of(other).n_drops == 8


# The tests below are about what is lost.


@only_in_long
def test_damage_costs_those_whose_bytes_it_hits(tmp_path: Path) -> None:
    path = tmp_path / "saved"
    saved_family(path)
    data, rng = path.read_bytes(), random.Random(0)
    n_header = 8 + int.from_bytes(data[:8], "little")
    lost = set[tuple[int, ...]]()
    for _ in range(150):
        at = rng.randrange(n_header, len(data))
        path.write_bytes(data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :])
        memory = make()
        before = state_of(memory)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                loaded = memory.load(path, family=True)
            except FormatError:
                assert state_of(memory) == before and not warned
                with pytest.raises(FormatError, match="saved is damaged"):
                    memory.load(path)
                lost.add((0,))
                continue
        assert memory.load(path).length == loaded.sequence.length == 47
        memory.check()
        kept = [one.length for one in members(loaded)[1:]]
        gone = tuple(length for length in (30, 50, 39, 40) if length not in kept)
        (warning,) = warned
        assert gone and all(f"of {length} tokens" in str(warning.message) for length in gone)
        lost.add(gone)
    assert {(0,), (50,)} <= lost and len(lost) > 2, "each has bytes of its own"


def test_a_damaged_header_and_a_torn_file_load_nothing(tmp_path: Path) -> None:
    path = tmp_path / "saved"
    saved_family(path)
    data, rng, memory = path.read_bytes(), random.Random(1), make()
    before, n_header = state_of(memory), 8 + int.from_bytes(data[:8], "little")
    torn = [data[:n] for n in (0, 1, 8, 100, n_header, len(data) // 2, len(data) - 1)]
    for at in (0, 7, 8, 9, *(rng.randrange(n_header) for _ in range(80))):
        torn.append(data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :])
    for content in torn:
        path.write_bytes(content)
        for family in (False, True):
            with pytest.raises(FormatError, match="saved"):
                memory.load(path, family=family)  # type: ignore[call-overload]
    assert state_of(memory) == before
    memory.check()


def change_entry(n: int, **changes: Any) -> Callable[[list[dict[str, Any]]], object]:
    return lambda entries: entries[n].update(changes)


def assert_refused(path: Path) -> None:
    """Assert that a memory refuses to load the family in this file, and stays as it was."""
    memory = make()
    before = state_of(memory)
    with pytest.raises(FormatError, match="saved"):
        memory.load(path, family=True)
    memory.check()
    assert state_of(memory) == before


@few_cases
@pytest.mark.parametrize(
    "change",
    [
        change_entry(0, kind="checkpoint"), change_entry(1, kind="sequence"), change_entry(1, kind="nobody"),
        change_entry(1, length=10**6), change_entry(1, length=-1), change_entry(2, buffer=9),
        change_entry(2, buffer=-1),
        change_entry(1, peak=3), change_entry(1, blocks={"nothing": [[0, 1]]}),
        change_entry(1, records={}), change_entry(1, drops=[[3, -1]]), change_entry(1, drops=5),
        lambda entries: next(iter(entries[1]["blocks"].values())).append([10**9, 1]),
        lambda entries: next(iter(entries[1]["blocks"].values())).append([0, 1 << 50]),
        lambda entries: entries.clear(), lambda entries: entries.insert(0, 5),
    ],
)  # fmt: skip
def test_a_family_with_a_right_checksum_and_wrong_content_is_refused(
    change: Callable[[list[dict[str, Any]]], object], tmp_path: Path
) -> None:
    path = tmp_path / "saved"
    saved_family(path)
    tensors, metadata = header_of(path)
    entries = json.loads(metadata["members"])
    change(entries)
    rewrite(path, tensors, metadata | {"members": json.dumps(entries)})
    assert_refused(path)


@pytest.mark.parametrize("change", ["tokens of two axes", "blocks of numbers"])
def test_a_family_with_tensors_that_are_none_of_ours_is_refused(change: str, tmp_path: Path) -> None:
    path = tmp_path / "saved"
    saved_family(path)
    tensors, metadata = header_of(path)
    for name, tensor in tensors.items():
        if change == "tokens of two axes" and name.startswith("tokens"):
            tensors[name] = tensor[:, None]
        elif change == "blocks of numbers" and name.startswith("blocks"):
            tensors[name] = tensor.view(torch.int8)
    rewrite(path, tensors, metadata)
    assert_refused(path)


def test_a_family_without_room_loads_nothing_and_names_its_bytes(tmp_path: Path) -> None:
    saved_family(tmp_path / "saved")
    other = make()
    other.load(tmp_path / "saved", family=True)
    used_bytes = other.usage().used_bytes
    memory = make(budget=used_bytes - 64)
    before = state_of(memory)
    with pytest.raises(CapacityError, match="the 5 sequences and checkpoints need") as refused:
        memory.load(tmp_path / "saved", family=True)
    assert refused.value.needed == used_bytes and state_of(memory) == before
    memory.check()
    assert memory.load(tmp_path / "saved").length == 47


def test_files_of_families_are_their_owners_alone(tmp_path: Path) -> None:
    saved_family(tmp_path / "saved")
    assert (tmp_path / "saved").stat().st_mode & 0o777 == 0o600


def test_what_cannot_be_saved_together_is_refused(tmp_path: Path) -> None:
    memory = make()
    sequence, closed = opened(memory), memory.open()
    mark = memory.checkpoint(sequence)
    memory.close(closed)
    for options, message in (
        ({"checkpoints": [sequence]}, "is no checkpoint"),
        ({"checkpoints": [closed]}, "closed"),
        ({"checkpoints": 3}, "give True for all of the family"),
        ({"checkpoints": ["x"]}, "no sequence"),
        ({"forks": {"x": mark}}, "is a checkpoint"),
        ({"forks": {"x": make().open()}}, "another memory"),
        ({"forks": [sequence]}, "give a name for each"),
        ({"forks": {1: sequence}}, "give a name for each"),
    ):
        with pytest.raises(SequenceError, match=re.escape(message)):
            memory.save(sequence, tmp_path / "saved", **options)  # type: ignore[arg-type]
    dry = make(device="meta", poison=False)
    with pytest.raises(SpecError, match="meta"):
        dry.save(opened_dry(dry), tmp_path / "saved", checkpoints=True)
    assert not list(tmp_path.iterdir())


def opened_dry(memory: HybridMemory) -> Sequence:
    sequence = memory.open()
    memory.run(None, {sequence: [i % VOCAB for i in range(30)]})
    return sequence


def test_a_checkpoint_can_be_saved_with_its_family(tmp_path: Path) -> None:
    memory, family = saved_family(tmp_path / "saved")
    memory.save(family.checkpoints[0], tmp_path / "mark", checkpoints=True)
    other = make()
    loaded = other.load(tmp_path / "mark", family=True)
    assert not loaded.sequence.is_checkpoint and loaded.sequence.length == 30
    assert [mark.length for mark in loaded.checkpoints] == [30, 50, 39]
