"""Saved sequences of every format version that is read: files that older versions of the library wrote, and this one's."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.testing import assert_close

from memory import AttentionSpec, FormatError, HybridMemory, MemorySpec, RecurrentSpec, Rotation, StateTensor
from memory.eviction import H2O, SnapKV
from memory.quantization import Float8, Quantized
from tests.data.sequences.write import OPTIONS, SUBJECTS, TOKENS, VOCAB, feed, make

FOLDER = Path(__file__).parent.parent / "data" / "sequences"
VERSIONS = ("version_2", "version_3")


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", SUBJECTS)
def test_a_file_of_any_version_goes_on_as_its_sequence_would(version: str, name: str) -> None:
    spec, options = SUBJECTS[name]
    _, twin = twins = make(name)
    memory = HybridMemory(spec, **OPTIONS, **options)
    loaded = memory.load(FOLDER / version / f"{name}.safetensors")
    assert loaded.tokens.tolist() == TOKENS[:43] == twin.tokens.tolist() and loaded.horizon == twin.horizon
    memory.check()
    for tokens in ([5], [8, 1, 3], [2] * 9):
        assert_close(feed(memory, loaded, tokens), feed(*twins, tokens))
    memory.rollback(loaded, n_tokens=4)
    twins[0].rollback(twin, n_tokens=4)
    assert_close(feed(memory, loaded, [7]), feed(*twins, [7]))


@pytest.mark.parametrize("name", SUBJECTS)
def test_files_say_what_they_said(name: str, tmp_path: Path) -> None:
    """Whoever changes what a file says gives the format another version, and keeps reading this one."""
    memory, sequence = make(name)
    memory.save(sequence, tmp_path / "file")
    written, kept = (read(path) for path in (tmp_path / "file", FOLDER / VERSIONS[-1] / f"{name}.safetensors"))
    assert written == kept


def read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """All but the bytes of a file: its metadata, without the checksum, and the tensors' shapes."""
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    metadata = header.pop("__metadata__")
    return {name: text for name, text in metadata.items() if name != "sha256"}, header


ATTENTION = AttentionSpec(4, 2, 8, rotation=Rotation((1.0, 0.1)))
STATES = RecurrentSpec("family", (5,), (StateTensor("mean", (5,)),))
LATENT = AttentionSpec(4, 1, 8, value_dim=6)


def spec_of(*memories: Any, **changes: Any) -> MemorySpec:
    return MemorySpec((memories,), **{"vocab_size": VOCAB, "model": "toy"} | changes)


BASE = spec_of(ATTENTION, STATES)
DIFFERENT: list[tuple[MemorySpec, MemorySpec, dict[str, Any], str]] = [
    (BASE, replace(BASE, vocab_size=VOCAB + 1), {}, "vocab_size=97"),
    (BASE, BASE, {"dtype": "bfloat16"}, "dtype="),
    (BASE, BASE, {"page_tokens": 8}, "page_tokens=4"),
    (BASE, BASE, {"rollback_window": 7}, "rollback_window=6"),
    (BASE, BASE, {"fold": "replay"}, "fold='keep'"),
    (BASE, BASE, {"state_dtype": "bfloat16"}, "layers[0][1].states.mean.dtype='torch.float32'"),
    (BASE, spec_of(STATES, ATTENTION), {}, "layers[0][0]."),
    (BASE, spec_of(replace(ATTENTION, n_query_heads=2), STATES), {}, "n_query_heads=4, not 2"),
    (BASE, spec_of(replace(ATTENTION, n_kv_heads=4), STATES), {}, "n_kv_heads=2, not 4"),
    (BASE, spec_of(replace(ATTENTION, head_dim=16), STATES), {}, "head_dim=8, not 16"),
    (BASE, spec_of(replace(ATTENTION, name="other"), STATES), {}, "name='attention', not 'other'"),
    (BASE, spec_of(replace(ATTENTION, window=9), STATES), {}, "window=None, not 9"),
    (BASE, spec_of(replace(ATTENTION, rotation=None), STATES), {}, "rotation="),
    (BASE, spec_of(replace(ATTENTION, rotation=Rotation((1.0, 0.2))), STATES), {}, "rotation.frequencies="),
    (BASE, spec_of(replace(ATTENTION, rotation=Rotation((1.0, 0.1), "interleaved")), STATES), {}, "rotation.pairing='half'"),
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
    (BASE, spec_of(ATTENTION, replace(STATES, states=(StateTensor("mean", (4,)),))), {}, "states.mean.shape[0]=5, not 4"),
    (BASE, spec_of(ATTENTION, replace(STATES, states=(StateTensor("sum", (5,)),))), {}, "states."),
    (BASE, spec_of(ATTENTION, replace(STATES, states=(StateTensor("mean", (5,), initial=1.0),))), {}, "initial=0.0, not 1.0"),
]
"""Of the memory that saves, of the one that loads, options of the latter, and what the refusal names."""


@pytest.mark.parametrize(("saved", "loading", "options", "named"), DIFFERENT, ids=lambda x: x if isinstance(x, str) else None)
def test_the_first_entry_that_differs_is_named(
    saved: MemorySpec, loading: MemorySpec, options: dict[str, Any], named: str, tmp_path: Path
) -> None:
    memory = HybridMemory(saved, **OPTIONS | {"rollback_window": 6})
    memory.save(memory.open(), tmp_path / "file")
    assert memory.load(tmp_path / "file").length == 0
    other = HybridMemory(loading, **OPTIONS | options)
    with pytest.raises(FormatError) as caught:
        other.load(tmp_path / "file")
    assert named in str(caught.value) and re.search("load it with|make a memory with", str(caught.value))
    assert not other.sequences


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", ["replay", "defer", "policy", "storage", "latent"])
def test_a_memory_of_another_spec_refuses_a_file_of_any_version(version: str, name: str) -> None:
    spec, options = SUBJECTS["keep"]
    memory = HybridMemory(spec, **OPTIONS, **options)
    with pytest.raises(FormatError, match="was saved from a memory of"):
        memory.load(FOLDER / version / f"{name}.safetensors")
    assert not memory.sequences
