"""Sequences saved in format version 1 were written once and must stay readable. The tests fix what files say."""

from __future__ import annotations

import enum
import functools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from hybridmem.memory import (
    UNROTATED,
    AttentionSpec,
    CrossAttentionSpec,
    FormatError,
    HybridMemory,
    IndexSpec,
    MemorySpec,
    RecurrentSpec,
    Rotation,
    StateTensor,
    eviction,
)
from hybridmem.memory.eviction import (
    H2O,
    Budget,
    Candidates,
    EvictionPolicy,
    Quest,
    SnapKV,
)  # fmt: skip
from hybridmem.memory.quantization import Float8, Quantized, Storage
from hybridmem.memory.sequences.folding import Fold, TailRules
from hybridmem.memory.storage.files import CHECKSUM
from hybridmem.memory.storage.names import CHOICES
from hybridmem.memory.storage.signature import signature_of
from tests.data.sequences.write import OPTIONS, SUBJECTS, TOKENS, VOCAB, feed, make, save_family

FOLDER = Path(__file__).parent.parent.parent / "data" / "sequences" / "version_1"


@pytest.mark.parametrize("name", SUBJECTS)
def test_a_file_goes_on_as_its_sequence_would(name: str) -> None:
    spec, options = SUBJECTS[name]
    _, twin = twins = make(name)
    memory = HybridMemory(spec, **OPTIONS, **options)
    loaded = memory.load(FOLDER / f"{name}.safetensors")
    assert loaded.tokens.tolist() == TOKENS[:43] == twin.tokens.tolist()
    assert loaded.horizon == twin.horizon
    memory.check()
    for tokens in ([5], [8, 1, 3], [2] * 9):
        assert_close(feed(memory, loaded, tokens), feed(*twins, tokens))
    memory.rollback(loaded, n_tokens=4)
    twins[0].rollback(twin, n_tokens=4)
    assert_close(feed(memory, loaded, [7]), feed(*twins, [7]))


def test_a_family_goes_on_as_its_members_would() -> None:
    spec, options = SUBJECTS["keep"]
    memory, (other, twin) = HybridMemory(spec, **OPTIONS, **options), make("keep")
    loaded = memory.load(FOLDER / "family.safetensors", family=True)
    memory.check()
    assert loaded.checkpoints[0].length == 43 and loaded.forks["fork"].length == 52
    feed(other, twin, TOKENS[:9])
    assert_close(feed(memory, loaded.forks["fork"], [7]), feed(other, twin, [7]))


@pytest.fixture
def renamed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Gives all classes of specs, policies and storages other names.

    Layer memories and pools then have other names too.
    """
    classes = (AttentionSpec, CrossAttentionSpec, RecurrentSpec, StateTensor, Rotation, *CHOICES)
    names = [(cls, cls.__name__, cls.__qualname__) for cls in classes]
    for cls, name, qualname in names:
        # The fixture `monkeypatch` cannot restore these names.
        cls.__name__, cls.__qualname__ = f"New{name}", f"New{qualname}"
        monkeypatch.setattr(cls, "__repr__", lambda self: "new")
        if issubclass(cls, Budget | Storage):
            monkeypatch.setattr(cls, "label", "new label")
    yield
    for cls, name, qualname in names:
        cls.__name__, cls.__qualname__ = name, qualname


@pytest.mark.usefixtures("renamed")
@pytest.mark.parametrize("name", SUBJECTS)
def test_a_file_can_be_read_after_renames(name: str) -> None:
    spec, options = SUBJECTS[name]
    memory = HybridMemory(spec, **OPTIONS, **options)
    assert memory.load(FOLDER / f"{name}.safetensors").length == 43
    memory.check()


@pytest.mark.parametrize("name", SUBJECTS)
def test_files_say_what_they_said(name: str, tmp_path: Path) -> None:
    """A change of what a file says needs another version of the format. This version must still be read."""
    memory, sequence = make(name)
    memory.save(sequence, tmp_path / "file")
    written, kept = (read(path) for path in (tmp_path / "file", FOLDER / f"{name}.safetensors"))
    assert written == kept
    save_family(*make("keep"), tmp_path / "file")
    assert read(tmp_path / "file")[1] == read(FOLDER / "family.safetensors")[1]


def read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return all of a file but its bytes: its metadata, the length of checksums, and the shapes of tensors.

    Sums of attention, which some policies keep, have other last bits on other processors.
    """
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    metadata = header.pop("__metadata__")
    metadata = {name: text for name, text in metadata.items() if name != CHECKSUM}
    return metadata | {
        "members": re.sub(r'(?<="checksum": ")\w+', lambda sum: "x" * len(sum[0]), metadata["members"])
    }, header


ATTENTION = AttentionSpec(4, 2, 8, rotation=Rotation((1.0, 0.1)))
STATES = RecurrentSpec("family", (5,), (StateTensor("mean", (5,)),))
TWO_STATES = replace(STATES, states=(*STATES.states, StateTensor("sum", (3,))))
LATENT = AttentionSpec(4, 1, 8, value_dim=6)
CROSS = CrossAttentionSpec(4, 2, 8)
INDEX = IndexSpec(4, 8, 2)


def spec_of(*memories: Any, **changes: Any) -> MemorySpec:
    return MemorySpec((memories,), **{"vocab_size": VOCAB, "model": "toy"} | changes)


BASE = spec_of(ATTENTION, STATES)
DIFFERENT: list[tuple[MemorySpec, MemorySpec, dict[str, Any], str]] = [
    (BASE, replace(BASE, vocab_size=VOCAB + 1), {}, "vocab_size=97"),
    (BASE, BASE, {"dtype": "bfloat16"}, "dtype="),
    (BASE, BASE, {"page_tokens": 8}, "page_tokens=4"),
    (BASE, BASE, {"rollback_window": 7}, "rollback_window=6"),
    (BASE, BASE, {"fold": "replay"}, "fold='keep'"),
    (BASE, BASE, {"state_dtype": "bfloat16"}, "layers[0][1].states[0].dtype='torch.float32'"),
    (BASE, spec_of(STATES, ATTENTION), {}, "layers[0][0]."),
    (BASE, spec_of(replace(ATTENTION, n_query_heads=2), STATES), {}, "n_query_heads=4, not 2"),
    (BASE, spec_of(replace(ATTENTION, n_kv_heads=4), STATES), {}, "n_kv_heads=2, not 4"),
    (BASE, spec_of(replace(ATTENTION, head_dim=16), STATES), {}, "head_dim=8, not 16"),
    (BASE, spec_of(replace(ATTENTION, name="other"), STATES), {}, "name='attention', not 'other'"),
    (BASE, spec_of(replace(ATTENTION, window=9), STATES), {}, "window=None, not 9"),
    (BASE, spec_of(replace(ATTENTION, rotation=None), STATES), {}, "rotation="),
    (BASE, spec_of(replace(ATTENTION, rotation=Rotation((1.0, 0.2))), STATES), {}, "rotation.frequencies="),
    (
        BASE,
        spec_of(replace(ATTENTION, rotation=Rotation((1.0, 0.1), "interleaved")), STATES),
        {},
        "rotation.pairing='half'",
    ),
    (BASE, spec_of(replace(ATTENTION, rotation=Rotation((1.0, 0.1), start=2)), STATES), {}, "rotation.start=0, not 2"),
    (BASE, spec_of(replace(ATTENTION, has_bias=True), STATES), {}, "has_bias=False, not True"),
    (spec_of(LATENT), spec_of(replace(LATENT, value_dim=4)), {}, "value_dim=6, not 4"),
    (BASE, BASE.with_policy(H2O(16)), {}, "policy=None"),
    (BASE.with_policy(H2O(16)), BASE.with_policy(H2O(32)), {}, "policy.budget_tokens=16, not 32"),
    (BASE.with_policy(H2O(16)), BASE.with_policy(SnapKV(16)), {}, "policy.class='H2O', not 'SnapKV'"),
    (BASE, BASE.with_storage(Quantized(4)), {}, "storage=None"),
    (BASE.with_storage(Quantized(4)), BASE.with_storage(Quantized(8)), {}, "storage.bits=4, not 8"),
    (BASE.with_storage(Quantized(4)), BASE.with_storage(Quantized(4, group=32)), {}, "storage.group=64, not 32"),
    (BASE.with_storage(Quantized(4)), BASE.with_storage(Float8()), {}, "storage.class='Quantized', not 'Float8'"),
    (BASE, spec_of(ATTENTION, replace(STATES, family="other")), {}, "family='family', not 'other'"),
    (BASE, spec_of(ATTENTION, replace(STATES, row_shape=(6,))), {}, "row_shape[0]=5, not 6"),
    (BASE, spec_of(ATTENTION, replace(STATES, states=(StateTensor("mean", (4,)),))), {}, "states[0].shape[0]=5, not 4"),
    (
        BASE,
        spec_of(ATTENTION, replace(STATES, states=(StateTensor("sum", (5,)),))),
        {},
        "states[0].name='mean', not 'sum'",
    ),
    (
        BASE,
        spec_of(ATTENTION, replace(STATES, states=(StateTensor("mean", (5,), initial=1.0),))),
        {},
        "initial=0.0, not 1.0",
    ),
    (
        spec_of(TWO_STATES),
        spec_of(replace(TWO_STATES, states=TWO_STATES.states[::-1])),
        {},
        "states[0].name='mean', not 'sum'",
    ),
    (BASE, spec_of(ATTENTION, replace(STATES, name="other")), {}, "layers[0][1].name='recurrence', not 'other'"),
    (BASE, spec_of(ATTENTION), {}, "layers[0]="),
    (BASE, replace(BASE, layers=(*BASE.layers, ())), {}, "layers=[[{'"),
    (spec_of(CROSS), spec_of(replace(CROSS, n_query_heads=2)), {}, "n_query_heads=4, not 2"),
    (spec_of(CROSS), spec_of(replace(CROSS, n_kv_heads=4)), {}, "n_kv_heads=2, not 4"),
    (spec_of(CROSS), spec_of(replace(CROSS, head_dim=16)), {}, "head_dim=8, not 16"),
    (spec_of(CROSS), spec_of(replace(CROSS, name="other")), {}, "name='cross_attention', not 'other'"),
    (BASE.with_policy(H2O(16, recent=8)), BASE.with_policy(H2O(16, sinks=1, recent=8)), {}, "policy.sinks=0, not 1"),
    (BASE.with_policy(H2O(16)), BASE.with_policy(H2O(16, recent=8)), {}, "policy.recent=16, not 8"),
    (BASE.with_policy(H2O(16)), BASE.with_policy(H2O(16, every=8)), {}, "policy.every=32, not 8"),
    (BASE.with_policy(H2O(16)), BASE.with_policy(H2O(16, decay=0.5)), {}, "policy.decay=1.0, not 0.5"),
    (BASE.with_policy(Quest(64)), BASE.with_policy(Quest(64, select_up_to=1)), {}, "policy.select_up_to=16, not 1"),
]
"""Of the memory that saves, of the one that loads, options of the latter, and what the refusal names."""


@pytest.mark.parametrize(
    ("saved", "loading", "options", "named"), DIFFERENT, ids=lambda x: x if isinstance(x, str) else None
)
def test_the_first_entry_that_differs_is_named(
    saved: MemorySpec, loading: MemorySpec, options: dict[str, Any], named: str, tmp_path: Path
) -> None:
    memory = HybridMemory(saved, **OPTIONS | {"rollback_window": 6})
    said = [(torch.zeros(1, 2, 8),) * 2] if saved == spec_of(CROSS) else None
    memory.save(memory.open() if said is None else memory.open(encoder=said), tmp_path / "file")
    assert memory.load(tmp_path / "file").length == 0
    other = HybridMemory(loading, **OPTIONS | options)
    with pytest.raises(FormatError) as caught:
        other.load(tmp_path / "file")
    assert named in str(caught.value) and re.search("load it with|make a memory with", str(caught.value))
    assert not other.sequences


@pytest.mark.parametrize("name", ["replay", "defer", "policy", "storage", "latent"])
def test_a_memory_of_another_spec_refuses_a_file(name: str) -> None:
    spec, options = SUBJECTS["keep"]
    memory = HybridMemory(spec, **OPTIONS, **options)
    with pytest.raises(FormatError, match="was saved from a memory of"):
        memory.load(FOLDER / f"{name}.safetensors")
    assert not memory.sequences


def test_what_a_deferred_state_keeps_of_tokens_is_compared(tmp_path: Path) -> None:
    saved, loading = (
        spec_of(RecurrentSpec("family", (5,), (StateTensor("mean", (5,), ring=(((size,), None),)),))) for size in (2, 3)
    )  # fmt: skip
    memory = HybridMemory(saved, **OPTIONS, fold="defer")
    memory.save(memory.open(), tmp_path / "file")
    with pytest.raises(FormatError, match=re.escape("tail[0].shape[0]=2, not 3")):
        HybridMemory(loading, **OPTIONS, fold="defer").load(tmp_path / "file")


OTHERS: list[tuple[Any, dict[str, Any], set[str]]] = [
    (
        replace(ATTENTION, n_query_heads=4, n_kv_heads=2),
        {
            "n_query_heads": 8, "n_kv_heads": 4, "head_dim": 16, "name": "x", "window": 9, "policy": H2O(16),
            "storage": Float8(), "value_dim": 4, "rotation": UNROTATED, "has_bias": True, "n_chosen": 3,
        },
        {"span_tokens"},  # The next row covers this field.
    ),
    (
        replace(ATTENTION, n_chosen=2), {"span_tokens": 2}, {x.name for x in fields(ATTENTION)} - {"span_tokens"},
    ),
    (CROSS, {"n_query_heads": 8, "n_kv_heads": 4, "head_dim": 16, "name": "x"}, set()),
    (
        INDEX,
        {
            "n_query_heads": 8, "head_dim": 16, "n_chosen": 3, "name": "x", "rotation": UNROTATED, "span_tokens": 2,
        },
        set(),
    ),
    (STATES, {"family": "x", "row_shape": (6,), "states": TWO_STATES.states, "name": "x"}, set()),
    (
        STATES.states[0], {"name": "x", "shape": (6,), "dtype": torch.float16, "initial": 1.0, "ring": ((5,), None)},
        {"keeps_dtype", "ring"},  # As far as they decide, the dtype and the parts of a tail say the same.
    ),
    (ATTENTION.rotation, {"frequencies": (1.0, 0.2), "layout": "interleaved", "start": 1}, set()),
]  # fmt: skip
"""What is remembered, another value of each of its fields, and fields that decide nothing by themselves."""


@pytest.mark.parametrize(("part", "others", "silent"), OTHERS, ids=lambda x: type(x).__name__)
def test_every_field_of_a_spec_is_part_of_the_signature(part: Any, others: dict[str, Any], silent: set[str]) -> None:
    assert {x.name for x in fields(part)} == others.keys() | silent  # A new field needs a decision.
    for name in others.keys() - silent:
        assert signed(part) != signed(replace(part, **{name: others[name]})), name


def signed(part: Any, fold: Fold = "keep") -> dict[str, Any]:
    if isinstance(part, StateTensor):
        part = replace(STATES, states=(part,))
    if isinstance(part, Rotation):
        part = replace(ATTENTION, rotation=part)
    return signature_of(spec_of(part), 4, TailRules.of(fold, 6))


def test_policies_and_storages_have_names_in_files() -> None:
    """A new one needs an entry, and so does a new parameter."""
    ours = {cls for name in eviction.__all__ if issubclass(cls := getattr(eviction, name), Budget)} | {
        Quantized,
        Float8,
    }
    assert CHOICES.keys() == ours - {Budget, EvictionPolicy}
    for cls, named in CHOICES.items():
        assert list(named.parameters.values()) == [x.name for x in fields(cls)]


class Mode(enum.IntEnum):
    ONE = 1
    TWO = 2


class Weighing:
    def __init__(self, weight: float) -> None:
        self.weight, self._cache = weight, object()

    @functools.cached_property
    def half(self) -> float:
        return self.weight / 2


def longest(x: Any) -> Any:
    return x


@dataclass(frozen=True)
class Own(EvictionPolicy):
    """Is a user's policy."""

    extra: Any = field(default=None, kw_only=True)
    notes: Any = field(default=None, kw_only=True, compare=False)

    def rank(self, rows: Candidates, scores: torch.Tensor) -> torch.Tensor:
        return rows.positions.float()


def read_once(weighing: Weighing) -> Weighing:
    assert weighing.half
    return weighing


class Held:
    """Can be hashed, as fields of policies must be, but holds something that cannot."""

    def __init__(self, value: Any) -> None:
        self.value = value


VALUES: list[tuple[str, Any, Any, Any]] = [
    ("integer", 1, 1, 2), ("type", 1, 1, 1.0), ("text", "a", "a", "b"),
    ("not a number", float("nan"), float("nan"), 0.0),
    ("numpy number", np.float32(0.5), np.float32(0.5), np.float32(0.25)), ("enum", Mode.ONE, Mode.ONE, Mode.TWO),
    ("set", frozenset({"a", "b"}), frozenset({"b", "a"}), frozenset({"a"})), ("tuple", (1, (2,)), (1, (2,)), (1, (3,))),
    ("bytes", b"a", b"a", b"b"), ("path", PurePosixPath("a"), PurePosixPath("a"), PurePosixPath("b")),
    ("dtype", torch.int8, torch.int8, torch.int16), ("tensor", torch.ones(2), torch.ones(2), torch.zeros(2)),
    ("shape", torch.ones(2, 1), torch.ones(2, 1), torch.ones(2)), ("function", longest, longest, read_once),
    ("partial", functools.partial(longest, 1), functools.partial(longest, 1), functools.partial(longest, 2)),
    ("object", Weighing(1.0), read_once(Weighing(1.0)), Weighing(2.0)), ("policy", H2O(16), H2O(16), H2O(32)),
    ("array", Held(np.arange(3)), Held(np.arange(3)), Held(np.arange(3.0))),
    ("array of objects", *(Held(np.array([1, text], object)) for text in "aab")),
    ("mapping", Held({"a": 1, "b": 2}), Held({"b": 2, "a": 1}), Held({"a": 1, "b": 3})),
    ("complex", 1j, 1j, 2j), ("range", range(3), range(3), range(4)),
]  # fmt: skip
"""A field of a user's policy: its value in a file, the same again, and another one."""


@pytest.mark.parametrize(("saved", "same", "other"), [x[1:] for x in VALUES], ids=[x[0] for x in VALUES])
def test_fields_of_a_users_policy_are_compared_by_value(saved: Any, same: Any, other: Any, tmp_path: Path) -> None:
    def memory_with(extra: Any, notes: str) -> HybridMemory:
        return HybridMemory(spec_of(AttentionSpec(4, 2, 8)).with_policy(Own(16, extra=extra, notes=notes)), **OPTIONS)

    saving = memory_with(saved, "of the first")
    saving.save(saving.open(), tmp_path / "file")
    assert memory_with(same, "of the second").load(tmp_path / "file").length == 0
    with pytest.raises(FormatError, match=re.escape("layers[0][0].policy.extra")):
        memory_with(other, "of the first").load(tmp_path / "file")
