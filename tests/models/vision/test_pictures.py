"""A model that sees gives transformers' logits for prompts with pictures, and keeps them on every way back."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.architectures import SEES
from hybridmem.memory import BatchError, DropError, HybridMemory, Sequence
from hybridmem.memory.kernels.double_precision import precision_for
from hybridmem.models import from_transformers, load_model, plan_memory, weight_bytes
from hybridmem.models.layers.decoder import Decoder
from hybridmem.models.vision.pictures import Picture
from tests.extent import few_cases, one_in, only_in_long
from tests.models.seeing import (
    LINE_BREAK,
    PROCESSORS,
    SPECIAL,
    WRITERS,
    draw_picture,
    joined,
    logits_of_peer,
    write_minicpm_v,
)
from tests.tolerances import assert_split_close

WIDE, TALL = draw_picture(1, 72, 40), draw_picture(2, 24, 64)
PARITY = 5e-5
"""Of logits, whose std is above 1."""


@dataclass(frozen=True)
class Seeing:
    folder: Path
    peer: PreTrainedModel
    model: Decoder

    def memory(self, window: int = 16) -> HybridMemory:
        return HybridMemory(self.model.memory_spec, "16MiB", rollback_window=window, poison=True)

    def read(self, image: Image.Image) -> Picture:
        assert self.model.pictures is not None
        return self.model.pictures.read(image)

    def expected(self, parts: list[int | Picture], images: list[Image.Image]) -> Tensor:
        assert self.model.pictures is not None
        return logits_of_peer(self.peer, self.model.pictures, parts, images)

    def expected_in_float64(self, parts: list[int | Picture], images: list[Image.Image]) -> Tensor:
        assert self.model.pictures is not None
        exact = copy.deepcopy(self.peer).double()
        exact.set_experts_implementation("eager")  # The others multiply no float64.
        with precision_for(torch.float64):
            return logits_of_peer(exact, self.model.pictures, parts, images)

    def ids(self, *parts: int | Picture) -> list[int]:
        assert self.model.pictures is not None
        return self.model.pictures.placed(joined(*parts), SPECIAL.get)

    def fed(self, memory: HybridMemory, sequence: Sequence, *parts: int | Picture, chunk: int = 512) -> Tensor:
        logits = memory.run(self.model, {sequence: self.ids(*parts)}, max_tokens=chunk, outputs="all")
        assert logits is not None
        return logits


@pytest.fixture(scope="module", params=one_in(2, WRITERS))
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    folder = tmp_path_factory.mktemp("seeing")
    peer = WRITERS[request.param](folder)
    return Seeing(folder, peer, load(folder))


def load(folder: Path) -> Decoder:
    model = load_model(folder)
    assert isinstance(model, Decoder) and model.pictures is not None
    if (processor := PROCESSORS.get(type(model).__name__)) is not None:
        model.pictures.processor = processor()
    return model


@few_cases
def test_logits_are_those_of_transformers(seeing: Seeing) -> None:
    wide, tall = seeing.read(WIDE), seeing.read(TALL)
    parts = [7, 8, wide, 9, 10, 11, tall, 12, wide, 13, 14]
    expected = seeing.expected(parts, [WIDE, TALL, WIDE])
    memory = seeing.memory()
    for chunk in (512, 7):
        logits = seeing.fed(memory, memory.open(), *parts, chunk=chunk)
        assert expected.std() > 1
        if (logits - expected).abs().max() >= PARITY:  # On some processors, transformers' own rounding is as large.
            exact = seeing.expected_in_float64(parts, [WIDE, TALL, WIDE])
            assert (logits - exact).abs().max() < (expected - exact).abs().max()


@only_in_long
def test_pictures_of_minicpm_v_stand_at_the_start_and_side_by_side(tmp_path: Path) -> None:
    """Without numbers between them, a picture may be the first of a sequence, and the next may follow at once."""
    peer = write_minicpm_v(tmp_path)
    seeing = Seeing(tmp_path, peer, load(tmp_path))
    assert seeing.model.pictures is not None
    seeing.model.pictures.processor.use_image_id = False
    wide, tall = seeing.read(WIDE), seeing.read(TALL)
    parts = [wide, tall, LINE_BREAK, wide, LINE_BREAK, LINE_BREAK, 9, LINE_BREAK, 10]
    expected = seeing.expected(parts, [WIDE, TALL, WIDE])
    memory = seeing.memory()
    for chunk in (512, 5):
        logits = seeing.fed(memory, memory.open(), *parts, chunk=chunk)
        assert expected.std() > 1 and (logits - expected).abs().max() < PARITY


def test_the_table_of_architectures_names_what_sees(seeing: Seeing) -> None:
    (name,) = seeing.peer.config.architectures
    named = [name for names in SEES.values() for name in names]
    assert name.removesuffix("ForConditionalGeneration") in named and len(named) == len(WRITERS)


def test_a_step_mixes_pictures_text_and_single_tokens_of_several_sequences(seeing: Seeing) -> None:
    wide, tall = seeing.read(WIDE), seeing.read(TALL)
    memory = seeing.memory()
    alice, bob, carol = memory.open(), memory.open(), memory.open()
    seeing.fed(memory, alice, 7, wide, 8)
    seeing.fed(memory, bob, 9)
    requests = {alice: [10], bob: seeing.ids(tall, 11), carol: seeing.ids(12, wide)}
    with memory.step(requests) as step:
        logits = seeing.model(step)
    for row, parts, images in (
        (0, [7, wide, 8, 10], [WIDE]), (1, [9, tall, 11], [TALL]), (2, [12, wide], [WIDE]),
    ):  # fmt: skip
        assert (logits[row] - seeing.expected(parts, images)[-1]).abs().max() < PARITY


@few_cases
def test_what_follows_a_picture_keeps_its_positions_on_every_way_back(seeing: Seeing, tmp_path: Path) -> None:
    """Positions after a picture are less than the number of tokens before. So only the tokens can tell them."""
    wide = seeing.read(WIDE)
    parts = [7, 8, 9, wide, 10, 11, 12, 13, 14, 15]
    expected = seeing.expected(parts, [WIDE])
    ids = seeing.ids(*parts)
    n = len(ids)
    memory = seeing.memory(window=n)
    alice = memory.open()
    seeing.fed(memory, alice, *parts)
    mark = memory.checkpoint(alice)
    # The positions are behind the picture, at its end, inside and before it.
    for to in (n - 1, n - 6, n - 7, n - 20, 3, 1):
        memory.rollback(alice, to=to)
        logits = memory.run(seeing.model, {alice: ids[to:]}, outputs="all")
        assert logits is not None
        assert_split_close(logits, expected[to:])
    fork = memory.fork(alice)
    memory.rollback(fork, to=n - 4)
    bob = memory.open()
    memory.reorder({bob: fork, alice: mark})
    memory.save(bob, tmp_path / "bob.safetensors")
    memory.swap_out(bob)
    memory.swap_in(bob)
    loaded = memory.load(tmp_path / "bob.safetensors")
    with memory.step({bob: ids[-4:], loaded: ids[-4:], alice: [16]}) as step:
        logits = seeing.model(step)
    more = seeing.expected([*parts, 16], [WIDE])[-1:]
    assert_split_close(logits, torch.cat([expected[-1:], expected[-1:], more]))


def test_an_edit_before_a_picture_moves_what_follows_it(seeing: Seeing) -> None:
    wide = seeing.read(WIDE)
    memory = seeing.memory(window=64)
    alice = memory.open()
    seeing.fed(memory, alice, 7, 8, 9, wide, 10, 11)
    memory.rollback(alice, to=1)
    logits = seeing.fed(memory, alice, 20, wide, 10, 11)
    assert_split_close(logits, seeing.expected([7, 20, wide, 10, 11], [WIDE])[1:])


def test_an_aborted_step_and_a_refused_part_leave_positions_as_they_were(seeing: Seeing) -> None:
    wide = seeing.read(WIDE)
    ids = seeing.ids(wide)
    memory = seeing.memory(window=64)
    alice = memory.open()
    seeing.fed(memory, alice, 7)
    with pytest.raises(ZeroDivisionError), memory.step({alice: ids}) as step:
        seeing.model(step)
        raise ZeroDivisionError
    with memory.step({alice: [*ids, 8, 9]}) as step:
        seeing.model(step)
        step.accept({alice: len(ids) + 1})
    logits = seeing.fed(memory, alice, 10)
    assert_split_close(logits, seeing.expected([7, wide, 8, 10], [WIDE])[-1:])


@few_cases
def test_loaded_sequences_can_compute_a_picture_again_elsewhere(seeing: Seeing, tmp_path: Path) -> None:
    wide = seeing.read(WIDE)
    memory = seeing.memory()
    alice = memory.open()
    seeing.fed(memory, alice, 7, wide, 8)
    memory.save(alice, tmp_path / "alice.safetensors")
    other = load(seeing.folder)
    assert other.pictures is not None
    elsewhere = HybridMemory(other.memory_spec, "16MiB", rollback_window=16)
    loaded = elsewhere.load(tmp_path / "alice.safetensors")
    ids = loaded.tokens.tolist()
    elsewhere.rollback(loaded, to=0)
    logits = elsewhere.run(other, {loaded: ids}, outputs="all")
    assert logits is not None and other.pictures.n_computed == 0
    assert_split_close(logits, seeing.expected([7, wide, 8], [WIDE]))


def test_the_middle_of_a_sequence_with_a_picture_cannot_be_dropped(seeing: Seeing) -> None:
    wide = seeing.read(WIDE)
    memory = seeing.memory()
    alice = memory.open()
    seeing.fed(memory, alice, 7, wide, 8, 9)
    with pytest.raises(DropError, match="hold a picture"):
        memory.drop(alice, 2, 6, approximate=True)


def test_unknown_rows_are_refused_before_anything_changes(seeing: Seeing) -> None:
    memory = seeing.memory()
    alice = memory.open()
    with pytest.raises(BatchError, match="give the picture again"):
        memory.step({alice: [7, (1 << 62) + (5 << 16)]})
    assert alice.length == 0


def test_a_model_of_transformers_brings_its_tower(seeing: Seeing) -> None:
    model = from_transformers(seeing.peer)
    assert isinstance(model, Decoder) and model.pictures is not None
    with pytest.raises(ValueError, match=r"set model\.pictures\.processor"):
        model.pictures.processor  # noqa: B018
    assert seeing.model.pictures is not None
    model.pictures.processor = seeing.model.pictures.processor
    assert torch.equal(model.pictures.read(WIDE).passage.rows, seeing.read(WIDE).passage.rows)


def test_the_tower_runs_once_for_each_picture_and_is_loaded_at_the_first(seeing: Seeing) -> None:
    model = load(seeing.folder)
    assert model.pictures is not None
    before = weight_bytes(model)
    first = model.pictures.read(WIDE)
    assert weight_bytes(model) > before
    again, other = model.pictures.read(WIDE.copy()), model.pictures.read(TALL)
    assert model.pictures.n_computed == 2
    assert joined(again) == joined(first) != joined(other)
    spec = plan_memory(seeing.peer.config, seeing.peer.config.architectures[0])
    assert spec.same_memories(model.memory_spec)
