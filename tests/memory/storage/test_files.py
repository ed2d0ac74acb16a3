"""Sequences are saved, loaded and swapped.

The tests say what files hold, what is refused, and that nothing changes then.
"""

from __future__ import annotations

import fcntl
import gc
import json
import multiprocessing
import os
import random
import signal
import stat
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from safetensors.torch import load, save

from hybridmem.memory import (
    AttentionSpec,
    CapacityError,
    CrossAttentionSpec,
    FormatError,
    HybridMemory,
    MemorySpec,
    RecurrentSpec,
    Sequence,
    SequenceError,
    SpecError,
)
from hybridmem.memory.blocks.arena import Arena
from hybridmem.memory.eviction import H2O
from hybridmem.memory.layer_memories import LayerMemories
from hybridmem.memory.recurrences import FAMILIES
from hybridmem.memory.rotary import UNROTATED
from hybridmem.memory.sequences.folding import Fold
from hybridmem.memory.storage.checksums import checksum_of
from tests.extent import only_in_long
from tests.inside import arena_bytes, forged_file
from tests.toy import VOCAB, FamilyToy, Toy

TOY = Toy()


def make(**options: Any) -> HybridMemory:
    return HybridMemory(
        TOY.memory_spec, **({"budget": "2MiB", "rollback_window": 6, "page_tokens": 4, "poison": True} | options)
    )


def feed(memory: HybridMemory, sequence: Sequence, tokens: list[int]) -> torch.Tensor:
    with memory.step({sequence: tokens}, outputs="all") as step:
        return TOY(step)


def opened(memory: HybridMemory, n_tokens: int = 30) -> Sequence:
    sequence = memory.open()
    feed(memory, sequence, [i % VOCAB for i in range(n_tokens)])
    return sequence


def state_of(memory: HybridMemory) -> tuple[Any, ...]:
    usage = memory.usage()
    return usage.used_bytes, usage.host_bytes, usage.disk_bytes, len(usage.by_sequence)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    memory = make()
    memory.save(opened(memory), tmp_path / "saved")
    return tmp_path / "saved"


# The tests below are about files.


def test_equal_sequences_make_equal_files(tmp_path: Path) -> None:
    """They do so however often they are saved, and wherever they have been."""
    memory = make(host_pages="2MiB")
    sequence = opened(memory)
    memory.save(sequence, tmp_path / "0")
    memory.save(sequence, tmp_path / "1")
    memory.save(memory.load(tmp_path / "0"), tmp_path / "2")
    memory.to_host(sequence)
    memory.save(sequence, tmp_path / "3")
    memory.swap_out(sequence)
    memory.save(sequence, tmp_path / "4")
    memory.save(sequence, "memory://bucket/5")
    written = [path.read_bytes() for path in sorted(tmp_path.iterdir())]
    assert len(written) == 5 and len({*written, fsspec.filesystem("memory").cat_file("/bucket/5")}) == 1


def test_files_are_those_of_safetensors(saved: Path) -> None:
    """Safetensors would have written the same file, except for the order of names in the header."""
    data = saved.read_bytes()
    n_header = int.from_bytes(data[:8], "little")
    header, tensors = json.loads(data[8 : 8 + n_header]), load(data)
    theirs = save(tensors, header["__metadata__"])
    assert json.loads(theirs[8 : 8 + int.from_bytes(theirs[:8], "little")]) == header
    assert theirs[8 + int.from_bytes(theirs[:8], "little") :] == data[8 + n_header :]
    saved.write_bytes(theirs)  # The memory also reads what safetensors wrote.
    assert make().load(saved).length == 30


def test_encoder_rows_of_others_stay_behind(tmp_path: Path) -> None:
    spec = MemorySpec(((CrossAttentionSpec(3, 1, 5), CrossAttentionSpec(2, 2, 3, name="other")),), VOCAB)
    written = []
    for seed in (0xA5, 0x3C):
        memory = HybridMemory(spec, "1MiB", page_tokens=4)
        arena_bytes(memory).fill_(seed)
        rows = [(torch.full((n, g, d), 0.5), torch.full((n, g, d), 0.25)) for n in (9,) for g, d in ((1, 5), (2, 3))]
        memory.save(memory.open(encoder=rows), tmp_path / "saved")
        written.append((tmp_path / "saved").read_bytes())
    assert written[0] == written[1]


def test_files_are_their_owners_alone(tmp_path: Path) -> None:
    """The mode does not depend on the process's own default, nor on an earlier file."""
    memory = make(host_budget=1, swap_dir=tmp_path / "swap")
    sequence = opened(memory)
    (tmp_path / "saved").touch(0o644)
    before = os.umask(0)
    try:
        memory.save(sequence, tmp_path / "saved")
        memory.swap_out(sequence)
    finally:
        os.umask(before)
    (swapped,) = (tmp_path / "swap").iterdir()
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "saved", swapped)} == {0o600}
    assert (tmp_path / "swap").stat().st_mode & 0o777 == 0o700


def test_a_new_name_reaches_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed = list[tuple[bool, bool]]()

    def fsync(descriptor: int) -> None:
        flushed.append((stat.S_ISDIR(os.fstat(descriptor).st_mode), (tmp_path / "saved").exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    memory = make()
    memory.save(opened(memory), tmp_path / "saved")
    assert flushed == [(False, False), (True, True)]


def test_what_killed_writers_left_is_removed_and_what_others_write_is_not(tmp_path: Path) -> None:
    memory = make()
    sequence = opened(memory)
    dead, alive, other = (
        tmp_path / f"{name}.{i * 32}.part" for name, i in (("saved", "a"), ("saved", "b"), ("saved by others", "c"))
    )
    for path in (dead, alive, other, tmp_path / "saved.part"):
        path.write_bytes(b"half")
    with alive.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        memory.save(sequence, tmp_path / "saved")
        assert not dead.exists() and alive.exists() and other.exists() and (tmp_path / "saved.part").exists()
    memory.save(sequence, tmp_path / "saved")
    assert not alive.exists() and other.exists()


def test_whoever_loses_the_file_before_it_is_locked_writes_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, taken = fcntl.flock, list[Path]()

    def late(descriptor: int, operation: int) -> None:
        if operation == fcntl.LOCK_EX and not taken:
            taken.extend(tmp_path.glob("saved.*.part"))
            taken[0].unlink()
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    memory = make()
    memory.save(opened(memory), tmp_path / "saved")
    assert taken and memory.load(tmp_path / "saved").length == 30


def test_any_damaged_byte_and_any_missing_end_is_found(saved: Path) -> None:
    data, rng, memory = saved.read_bytes(), random.Random(0), make()
    before = state_of(memory)
    places = {0, 7, 8, 9, len(data) - 1, *(rng.randrange(len(data)) for _ in range(150))}
    for place in places:
        saved.write_bytes(data[:place] + bytes([data[place] ^ (1 << rng.randrange(8))]) + data[place + 1 :])
        with pytest.raises(FormatError):
            memory.load(saved)
    for n in (0, 1, 8, 100, len(data) // 2, len(data) - 1):
        saved.write_bytes(data[:n])
        with pytest.raises(FormatError, match="saved"):
            memory.load(saved)
    saved.write_bytes(data)
    assert state_of(memory) == before
    memory.check()
    assert memory.load(saved).length == 30


@pytest.mark.parametrize(
    "change", ["peak", "drops", "tokens", "lengths", "positions", "blocks", "missing", "signature", "version", "format"]
)
def test_a_file_with_a_right_checksum_and_wrong_content_is_refused(saved: Path, change: str) -> None:
    data = saved.read_bytes()
    metadata = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
    tensors, about, (entry,) = load(data), json.loads(metadata["about"]), json.loads(metadata["members"])
    records = entry["records"]
    if change == "peak":
        entry["peak"] = 10_000
    elif change == "drops":
        entry["drops"] = [["nowhere", 1]]
    elif change == "tokens":
        tensors["tokens/0"][3] = VOCAB
    elif change == "lengths":
        tensors["tokens/0"], entry["length"] = torch.zeros(500, dtype=torch.int64), 500
    elif change == "positions":
        next(r for name, r in records.items() if name.startswith("recurrence"))["positions"] = [9, 9, 9]
    elif change == "blocks":
        tensors = {
            name: tensor[:, :64].contiguous() if name.startswith("blocks/") else tensor
            for name, tensor in tensors.items()
        }
    elif change == "missing":
        entry["records"] = {name: record for name, record in records.items() if not name.startswith("recurrence")}
    elif change == "signature":
        del about["signature"]
    metadata |= {"about": json.dumps(about), "members": json.dumps([entry])}
    metadata |= {"version": {"version": "99"}, "format": {"format": "a novel"}}.get(change, {})
    saved.write_bytes(forged_file(tensors, metadata))
    memory = make()
    with pytest.raises(FormatError, match="saved"):
        memory.load(saved)
    memory.check()
    assert state_of(memory) == (0, 0, 0, 0)


def test_files_of_others_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for content in (b"", b"\x89PNG\r\n", b"{}" * 50, save({"weight": torch.zeros(3)})):
        path.write_bytes(content)
        with pytest.raises(FormatError, match="file"):
            make().load(path)
    with pytest.raises(FormatError, match="cannot be read"):
        make().load(tmp_path / "nothing")
    with pytest.raises(FormatError, match="cannot be read"):
        make().load("no-such-protocol://bucket/name")


@pytest.mark.parametrize(
    "options, named", [({"rollback_window": 7}, "rollback_window=6, not 7"), (
        {"page_tokens": 8}, "page_tokens=4, not 8"
    ),
                       ({"fold": "replay"}, "fold='keep', not 'replay'"),
                       ({"dtype": torch.bfloat16}, r"dtype='torch\.float32'")],
)  # fmt: skip
def test_a_memory_that_is_not_alike_says_in_what(saved: Path, options: dict[str, Any], named: str) -> None:
    with pytest.raises(FormatError, match=named):
        make(**options).load(saved)


def test_a_memory_of_another_model_or_policy_refuses(saved: Path) -> None:
    spec = MemorySpec(((AttentionSpec(6, 2, 4),),), VOCAB)
    for other in (spec, TOY.memory_spec.with_policy(H2O(64))):
        with pytest.raises(FormatError, match="other layers"):
            HybridMemory(other, "2MiB", rollback_window=6, page_tokens=4).load(saved)


def test_tails_that_hold_something_else_are_refused_where_states_are_left_behind(tmp_path: Path) -> None:
    """The sizes match, but the bytes mean something else. Only the rings tell.

    States at the newest token have no rings, so there it makes no difference.
    """
    model = FamilyToy(FAMILIES["linear_attention"])
    ((spec,), _) = model.memory_spec.layers
    assert isinstance(spec, RecurrentSpec) and spec.states[0].ring is not None
    turned = replace(spec, states=(replace(spec.states[0], ring=spec.states[0].ring[::-1]),))
    folds: tuple[Fold, ...] = ("defer", "replay")
    for fold in folds:
        memory, other = (
            HybridMemory(replace(model.memory_spec, layers=((own,), (own,))), "2MiB", rollback_window=6, fold=fold)
            for own in (spec, turned)
        )
        sequence = memory.open()
        with memory.step({sequence: list(range(13))}) as step:
            model(step)
        memory.save(sequence, tmp_path / fold)
        if fold == "replay":
            assert other.load(tmp_path / fold).length == 13
        else:
            with pytest.raises(FormatError, match="other layers"):
                other.load(tmp_path / fold)
        other.check()


def test_paths_may_be_urls(tmp_path: Path) -> None:
    memory = make()
    sequence = opened(memory)
    memory.save(sequence, "memory://bucket/alice")
    assert fsspec.filesystem("memory").exists("/bucket/alice")
    assert memory.load("memory://bucket/alice").tokens.tolist() == sequence.tokens.tolist()
    memory.save(sequence, f"file://{tmp_path}/alice")
    assert memory.load(tmp_path / "alice").length == sequence.length


def test_loading_asks_about_the_loaded_sequence_alone(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not depend on how many others there are, nor on how free memory is divided."""
    memory, asked = make(), list[int]()
    for _ in range(5):
        opened(memory, 3)
    check_slot = LayerMemories.check_slot
    monkeypatch.setattr(
        LayerMemories, "check_slot", lambda kinds, slot, *at: (asked.append(slot), check_slot(kinds, slot, *at))
    )
    monkeypatch.setattr(Arena, "check", lambda *_: pytest.fail("the whole arena was audited"))
    assert asked == [] and [memory.load(saved).slot] == asked


def test_a_full_memory_loads_nothing(saved: Path) -> None:
    other = make()
    other.load(saved)
    used_bytes = other.usage().used_bytes
    memory = make(budget=2 * used_bytes + 64)
    memory.load(saved), memory.load(saved)
    before = state_of(memory)
    with pytest.raises(CapacityError, match="the sequence needs"):
        memory.load(saved)
    assert state_of(memory) == before
    memory.check()


def test_a_dry_run_has_nothing_to_save(tmp_path: Path) -> None:
    memory = make(device="meta", poison=False)
    sequence = memory.open()
    memory.run(None, {sequence: [1] * 30})
    with pytest.raises(SpecError, match="meta"):
        memory.save(sequence, tmp_path / "file")
    assert not list(tmp_path.iterdir())
    memory.swap_out(sequence)
    assert memory.usage().host_bytes and not memory.usage().used_bytes
    memory.swap_in(sequence)
    memory.check()


def test_checkpoints_and_what_is_swapped_out_are_saved_as_well(tmp_path: Path) -> None:
    memory = make()
    sequence = opened(memory)
    mark = memory.checkpoint(sequence)
    memory.swap_out(sequence)
    for i, source in enumerate((mark, sequence)):
        memory.save(source, tmp_path / f"{i}")
        loaded = memory.load(tmp_path / f"{i}")
        assert not loaded.is_checkpoint
        assert torch.equal(feed(memory, loaded, [1, 2]), feed(memory, memory.fork(mark), [1, 2]))


def test_where_tokens_were_dropped_stays_known(tmp_path: Path) -> None:
    """The first token after them is where it would have been, with the rows that it would have."""
    spec = MemorySpec(((AttentionSpec(1, 1, 4, rotation=UNROTATED),),), VOCAB)
    memory, other = (HybridMemory(spec, "1MiB", rollback_window=30) for _ in range(2))
    sequence, rows = memory.open(), torch.ones(30, 1, 4)
    with memory.step({sequence: [1] * 30}) as step:
        step.attend(0, rows, rows, rows)
    memory.drop(sequence, 3, 9)
    memory.save(sequence, tmp_path / "saved")
    loaded = other.load(tmp_path / "saved")
    for to, is_whole in ((24, False), (4, False), (3, True)):
        other.rollback(loaded, to=to)
        assert loaded.is_whole == is_whole


def _save_forever(folder: str, ready: Any) -> None:
    memory = make(budget="16MiB")
    first, second = opened(memory, 30), opened(memory, 60)
    memory.save(first, f"{folder}/saved")
    memory.save(with_checkpoint(memory, 30), f"{folder}/family", checkpoints=True)
    ready.set()
    while True:
        for family in (with_checkpoint(memory, 60), with_checkpoint(memory, 30)):
            memory.save(family, f"{folder}/family", checkpoints=True)
        memory.save(second, f"{folder}/saved")
        memory.save(first, f"{folder}/saved")


def with_checkpoint(memory: HybridMemory, n_tokens: int) -> Sequence:
    sequence = opened(memory, n_tokens)
    memory.checkpoint(sequence)
    feed(memory, sequence, [1] * 7)
    return sequence


@only_in_long
def test_whoever_is_killed_while_saving_leaves_a_whole_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the same file that this process writes, although another process hashes text in another order."""
    monkeypatch.setenv("PYTHONHASHSEED", "99")
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    rng = random.Random(1)
    process = context.Process(target=_save_forever, args=(str(tmp_path), ready), daemon=True)
    process.start()
    assert ready.wait(600)
    time.sleep(rng.uniform(0.01, 0.1))
    assert process.pid is not None
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    memory = make()
    loaded = memory.load(tmp_path / "saved")
    assert loaded.length in (30, 60)
    left = (tmp_path / "saved").read_bytes()
    memory.save(opened(memory, loaded.length), tmp_path / "saved")
    assert (tmp_path / "saved").read_bytes() == left
    family = memory.load(tmp_path / "family", family=True)
    n_tokens, left = family.checkpoints[0].length, (tmp_path / "family").read_bytes()
    assert (family.sequence.length, n_tokens) in ((37, 30), (67, 60))
    memory.save(with_checkpoint(memory, n_tokens), tmp_path / "family", checkpoints=True)
    assert (tmp_path / "family").read_bytes() == left
    assert sorted(path.name for path in tmp_path.iterdir()) == ["family", "saved"]


# The tests below are about swapping.


def test_what_is_away_can_only_wait_be_saved_or_closed() -> None:
    memory = make()
    sequence = opened(memory)
    mark = memory.checkpoint(sequence)
    memory.swap_out(sequence)
    for refused in (
        lambda: memory.step({sequence: [1]}), lambda: memory.fork(sequence), lambda: memory.checkpoint(sequence),
        lambda: memory.rollback(sequence, to=29), lambda: memory.reorder({sequence: mark}),
        lambda: memory.drop(sequence, 0, 1), lambda: memory.swap_out(sequence),
        lambda: memory.can_rollback(sequence, to=29),
    ):  # fmt: skip
        with pytest.raises(SequenceError, match="swap_in"):
            refused()
    with pytest.raises(SequenceError, match="not swapped out"):
        memory.swap_in(mark)
    assert sequence.length == 30
    memory.check()
    memory.close(sequence)
    assert memory.usage().host_bytes == 0 and sequence.closed and not sequence.is_swapped


def test_a_checkpoint_that_is_away_is_no_way_back_until_it_returns() -> None:
    memory = make()
    sequence = opened(memory)
    mark = memory.checkpoint(sequence)
    feed(memory, sequence, [1] * 20)
    assert memory.can_rollback(sequence, to=30)
    memory.swap_out(mark)
    assert not memory.can_rollback(sequence, to=30) and not memory.can_rollback(sequence, to=mark)
    memory.swap_in(mark)
    memory.rollback(sequence, to=mark)
    assert sequence.length == 30


def test_an_open_step_keeps_its_sequences() -> None:
    memory = make()
    sequence = opened(memory)
    with memory.step({sequence: [1]}) as step:
        with pytest.raises(SequenceError, match="open step"):
            memory.swap_out(sequence)
        TOY(step)
    assert sequence.length == 31


def test_host_memory_overflows_into_files_the_longest_waiting_first(tmp_path: Path) -> None:
    n_bytes = make_bytes()
    memory = make(host_budget=2 * n_bytes, swap_dir=tmp_path / "swap")
    sequences = [opened(memory) for _ in range(4)]
    for sequence in sequences:
        memory.swap_out(sequence)
    assert (memory.usage().host_bytes, memory.usage().disk_bytes) == (2 * n_bytes, 2 * n_bytes)
    assert len(list((tmp_path / "swap").iterdir())) == 2
    memory.swap_in(sequences[0])
    assert memory.usage().disk_bytes == n_bytes
    memory.close(sequences[1])
    assert not list((tmp_path / "swap").iterdir())


def make_bytes() -> int:
    memory = make()
    opened(memory)
    return sum(next(iter(memory.usage().by_sequence.values())).by_kind.values())


def test_without_room_outside_a_sequence_stays() -> None:
    memory = make(host_budget=100)
    sequence = opened(memory)
    with pytest.raises(CapacityError, match="host_budget"):
        memory.swap_out(sequence)
    feed(memory, sequence, [1])
    memory.check()


def test_without_room_inside_a_sequence_waits_on(tmp_path: Path) -> None:
    memory = make(budget=3 * make_bytes())
    sequence = opened(memory)
    memory.swap_out(sequence)
    others = [opened(memory) for _ in range(3)]
    with pytest.raises(CapacityError):
        memory.swap_in(sequence)
    memory.check()
    assert sequence.is_swapped
    memory.close(others[0])
    memory.swap_in(sequence)
    memory.close(others[1])
    assert torch.equal(feed(memory, sequence, [1]), feed(memory, others[2], [1]))


def test_files_of_processes_that_are_gone_are_removed_once_nobody_else_swaps_there(tmp_path: Path) -> None:
    left = [
        tmp_path / name
        for name in (f"swapped-{'a' * 32}.safetensors", f"swapped-{'b' * 32}.safetensors.{'c' * 32}.part")
    ]
    others = [tmp_path / name for name in (f"{'a' * 32}.safetensors", "swapped-mine.safetensors")]
    first, second, third = (make(host_budget=1, swap_dir=tmp_path) for _ in range(3))
    for path in others:
        path.touch()
    first.swap_out(opened(first))
    for path in left:
        path.touch()
    waits = opened(second)
    second.swap_out(waits)  # The first memory is still there, and may have written these files.
    assert all(path.exists() for path in left)
    del first
    gc.collect()
    second.swap_in(waits)
    del second, waits
    gc.collect()
    sequence = opened(third)
    third.swap_out(sequence)
    assert not any(path.exists() for path in left) and all(path.exists() for path in others)
    third.swap_in(sequence)
    assert feed(third, sequence, [1]).isfinite().all()


def test_files_go_with_their_memory(tmp_path: Path) -> None:
    memory = make(host_budget=1, swap_dir=tmp_path)
    memory.swap_out(opened(memory))
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-1])
    del memory
    gc.collect()
    assert not list(tmp_path.iterdir())


def test_the_folder_of_swapped_files_may_be_a_store() -> None:
    store = fsspec.filesystem("memory")
    memory = make(host_budget=1, swap_dir="memory://swapped/here")
    sequence, other = opened(memory), opened(memory)
    expected = feed(memory, memory.fork(sequence), [1])
    memory.swap_out(sequence)
    memory.swap_out(other)
    assert len(store.ls("/swapped/here", detail=False)) == 2
    memory.swap_in(sequence)
    assert torch.equal(feed(memory, sequence, [1]), expected)
    (left,) = store.ls("/swapped/here", detail=False)
    store.rm_file(left)
    with pytest.raises(FormatError, match="cannot be read"):
        memory.swap_in(other)
    memory.close(other)
    memory.check()
    del memory
    gc.collect()
    assert not store.ls("/swapped/here", detail=False)


def test_a_sequence_that_is_back_goes_on_as_one_that_was_never_away(tmp_path: Path) -> None:
    memory = make(swap_dir=tmp_path)
    sequence, twin = memory.open(), memory.open()
    for owner in (sequence, twin):
        feed(memory, owner, [1] * 30)
    memory.swap_out(sequence)
    memory.swap_in(sequence)
    for owner in (sequence, twin):
        feed(memory, owner, [2] * 20)
    assert sequence.horizon == twin.horizon > 10
    mine, others = memory.usage().by_sequence.values()
    assert (mine.total_bytes, mine.swapped_bytes) == (others.total_bytes, 0)


def test_a_damaged_swap_file_is_named_and_nothing_else_is_lost(tmp_path: Path) -> None:
    memory = make(host_budget=1, swap_dir=tmp_path)
    sequence, other = opened(memory), opened(memory)
    memory.swap_out(sequence)
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(FormatError):
        memory.swap_in(sequence)
    memory.check()
    assert sequence.is_swapped
    feed(memory, other, [1])
    memory.close(sequence)


# The tests below are about room.


def test_what_is_optional_goes_before_anything_is_refused() -> None:
    memory = make(budget=3 * make_bytes())
    optional = [memory.checkpoint(opened(memory)) for _ in range(3)]
    for live in memory.sequences:
        if not live.is_checkpoint:
            memory.close(live)
    asked: list[int] = []

    def reclaim(missing_bytes: int) -> bool:
        asked.append(missing_bytes)
        if optional:
            memory.close(optional.pop())
            return True
        return False

    memory.add_reclaimer(reclaim)
    for n_left in (2, 1, 0):
        opened(memory)
        memory.check()
        assert len(optional) == n_left
    assert len(asked) == 3 and all(n > 0 for n in asked)
    with pytest.raises(CapacityError):
        opened(memory)
    memory.check()


@pytest.mark.parametrize("about", [[], 5, "text"])
def test_forged_contents_are_refused_though_their_checksum_is_right(saved: Path, about: object) -> None:
    tensors, data = load(saved.read_bytes()), saved.read_bytes()
    metadata = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
    metadata |= {"about": json.dumps(about)}
    saved.write_bytes(forged_file(tensors, metadata))
    with pytest.raises(FormatError, match="never writes"):
        make().load(saved)
    saved.write_bytes(save({"tokens/0": torch.zeros(3, dtype=torch.bfloat16)}, metadata))
    with pytest.raises(FormatError, match="never writes"):
        make().load(saved)


def test_every_kind_of_damage_changes_the_checksum() -> None:
    """Bytes are zeroed, moved, flipped or cut.

    They are in the pieces of a tensor, in its last rows, or after them.
    """
    content = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (3 << 19) + 777, np.uint8))
    n_row = 2048

    def digest(tensor: torch.Tensor) -> str:
        return checksum_of({"blocks/x": tensor}, {"version": "1"})

    def swapped(a: int, b: int, n: int) -> torch.Tensor:
        changed = content.clone()
        changed[a : a + n], changed[b : b + n] = content[b : b + n], content[a : a + n]
        return changed

    def flipped(*places: int) -> torch.Tensor:
        changed = content.clone()
        for place in places:
            changed[place] ^= 128
        return changed

    zeroed = content.clone()
    zeroed[5 * n_row : 7 * n_row] = 0
    damaged = [
        zeroed, swapped(0, n_row, n_row), swapped(0, 8, 8), swapped(0, 1 << 20, 4096), flipped(7), flipped(7, 15),
        flipped(7, 7 + n_row), flipped(len(content) - 1), flipped((1 << 20) + 7), content[:-1], content.roll(8),
    ]  # fmt: skip
    assert len({digest(tensor) for tensor in [content, *damaged]}) == 1 + len(damaged)
