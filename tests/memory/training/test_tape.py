"""A tape refuses by name what it cannot do, and then nothing has changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hybridmem.memory import (
    BatchError,
    CrossAttentionSpec,
    HybridMemory,
    MemorySpec,
    RollbackError,
    SequenceError,
    SpecError,
    StepError,
)  # fmt: skip
from hybridmem.memory.eviction import Quest
from hybridmem.memory.quantization import Quantized
from hybridmem.memory.training import Tape
from hybridmem.models import Trainable, UnsupportedModelError, add_lora, from_transformers, load_model
from tests.memory.training import peers
from tests.models.checkpoints import draw_tokens
from tests.models.gguf_files import write_gguf

TOKENS = draw_tokens(20)


@pytest.fixture(scope="module")
def trainable() -> Trainable:
    return Trainable.of(peers.random_model("jamba"))


def test_logits_are_those_of_inference(trainable: Trainable) -> None:
    model = from_transformers(trainable.weights)
    memory = HybridMemory(model.memory_spec, "2MiB")
    with memory.step({memory.open(): TOKENS}, outputs="all") as step:
        expected = model(step)
    tape = Tape(trainable.model(), chunk_tokens=6)
    text = tape.open()
    found = tape.run({text: TOKENS}, head=lambda logits, _: logits)[text]
    assert text.last_logits is not None
    assert torch.allclose(torch.cat([found, text.last_logits[None]]), expected, atol=1e-4)
    assert (text.length, text.tokens) == (len(TOKENS), TOKENS)


def test_a_second_backward_is_refused(trainable: Trainable) -> None:
    tape = Tape(trainable.model())
    root = tape.open()
    tape.feed({root: TOKENS})
    one, other = tape.fork(root), tape.fork(root)
    values = tape.run({one: TOKENS[:3], other: TOKENS[3:5]})
    values[one].sum().backward()
    with pytest.raises(StepError, match="sum up all losses before the one backward"):
        values[other].sum().backward()


def test_what_comes_after_tokens_of_a_backward_is_refused(trainable: Trainable) -> None:
    """The backward went through the first two of three chunks.

    The third chunk and all later ones would read these.
    """
    tape = Tape(trainable.model(), chunk_tokens=3)
    text = tape.open()
    first, later = (tape.run({text: tokens})[text].sum() for tokens in (TOKENS[:6], TOKENS[6:9]))
    first.backward()
    with pytest.raises(StepError, match="record a new tape"):
        later.backward()
    with pytest.raises(StepError, match="record a new tape"):
        tape.run({text: TOKENS[:2]})
    tape.run({tape.open(): TOKENS})  # Another text of the tape does not need them.


@pytest.mark.parametrize("tokens", ([], [1.5], [99999], [-1], [[1, 2]], [True], "abc", 5, [2**70]))
def test_wrong_tokens(trainable: Trainable, tokens: Any) -> None:
    tape = Tape(trainable.model())
    text = tape.open()
    with pytest.raises(BatchError):
        tape.run({text: tokens})
    assert text.length == 0


def test_no_requests(trainable: Trainable) -> None:
    with pytest.raises(BatchError, match="give tokens for at least one text"):
        Tape(trainable.model()).run({})


def test_a_text_of_another_tape(trainable: Trainable) -> None:
    tape, other = Tape(trainable.model()), Tape(trainable.model())
    for call in (tape.fork, lambda text: tape.run({text: TOKENS}), lambda text: tape.rollback(text, to=0)):
        with pytest.raises(SequenceError, match="no text of this tape"):
            call(other.open())


@pytest.mark.parametrize("to", (-1, 21, 1.0, True))
def test_rollback_to_no_position(trainable: Trainable, to: Any) -> None:
    tape = Tape(trainable.model())
    text = tape.open()
    tape.feed({text: TOKENS})
    with pytest.raises(RollbackError, match="give a position from 0 to 20"):
        tape.rollback(text, to=to)
    assert text.length == 20


def test_encoders_are_refused() -> None:
    class Model:
        memory_spec = MemorySpec(((CrossAttentionSpec(2, 2, 4),),), 8)

    with pytest.raises(SpecError, match="reads an encoder's output"):
        Tape(Model())


def test_pages_for_each_query_and_storages_are_refused(trainable: Trainable) -> None:
    model = trainable.model()
    spec = model.memory_spec
    for lossy, message in (
        (spec.with_policy(Quest(64)), r"Quest\(64\).*leave it out with spec.with_policy\(None\)"),
        (spec.with_storage(Quantized(8)), r"bits=8.*leave the storage out with spec.with_storage\(None\)"),
    ):
        model.memory_spec = lossy
        with pytest.raises(SpecError, match=message):
            Tape(model)


def test_float64_is_for_training_alone() -> None:
    model = peers.random_model("jamba", torch.float64)
    trained = Trainable.of(model).model()
    assert trained.memory_spec.dtype == torch.float64
    with pytest.raises(SpecError, match=r"dtype=torch\.float64; give 'float32'"):
        HybridMemory(trained.memory_spec, "2MiB")


def test_what_is_no_model_of_transformers_is_refused(trainable: Trainable) -> None:
    wrongs: list[Any] = ["embedded", None, trainable.model()]
    for wrong in wrongs:
        with pytest.raises(UnsupportedModelError, match=r"Trainable\.load\(\) reads"):
            Trainable.of(wrong)


def test_weights_of_files_in_float64(tmp_path: Path) -> None:
    reference = peers.random_model("bamba").double()
    reference.save_pretrained(tmp_path)
    trainable = Trainable.load(tmp_path, dtype="float64")
    assert {p.dtype for p in trainable.parameters()} == {torch.float64}
    values = []
    for own in (trainable, Trainable.of(reference)):
        tape = Tape(own.model(), chunk_tokens=7)
        text = tape.open()
        values.append(tape.run({text: TOKENS})[text])
        values[-1].sum().backward()
    assert torch.equal(*values)
    expected = dict(reference.named_parameters())
    for name, parameter in trainable.named_parameters():
        assert torch.equal(parameter.grad, expected[name.removeprefix("weights.")].grad), name


def test_coded_weights_in_float64(tmp_path: Path) -> None:
    peers.random_model("llama").save_pretrained(tmp_path)
    file = write_gguf(tmp_path, tmp_path / "model.gguf", "Q8_0")
    single, double = (
        dict(Trainable.load(file, dtype=dtype).named_parameters()) for dtype in ("float32", torch.float64)
    )
    for name, parameter in double.items():
        assert parameter.dtype == torch.float64
        assert torch.allclose(parameter, single[name].double(), rtol=1e-6), name


def test_a_chunk_has_a_token(trainable: Trainable) -> None:
    with pytest.raises(SpecError, match="chunk_tokens"):
        Tape(trainable.model(), chunk_tokens=0)


def test_lora_trains_thin_matrices_and_is_saved(tmp_path: Any) -> None:
    trainable = Trainable.of(peers.random_model("jamba"))
    with pytest.raises(SpecError, match="ends with 'nothing'"):
        add_lora(trainable, ["nothing"])
    with pytest.raises(SpecError, match="no matrix's name ends with 'nothing'"):
        add_lora(trainable, "nothing")
    with pytest.raises(SpecError, match="rank=0"):
        add_lora(trainable, "q_proj.weight", rank=0)
    parameters = add_lora(trainable, ["q_proj.weight", "x_proj.weight"], rank=2)
    before = {name: p.clone() for name, p in trainable.named_parameters() if not p.requires_grad}
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for _ in range(2):  # The first step moves B alone, because B is zero.
        tape = Tape(trainable.model(), chunk_tokens=7)
        text = tape.open()
        loss = -tape.run({text: TOKENS})[text].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert all(p.grad is not None and p.grad.any() for p in parameters)
    assert all(torch.equal(dict(trainable.named_parameters())[name], p) for name, p in before.items())
    trainable.save(tmp_path)
    model = load_model(tmp_path)
    memory = HybridMemory(model.memory_spec, "2MiB")
    with memory.step({memory.open(): TOKENS}) as step:
        logits = model(step)
    tape = Tape(trainable.model())
    text = tape.open()
    tape.feed({text: TOKENS})
    assert text.last_logits is not None
    assert torch.allclose(logits[0], text.last_logits, atol=1e-4)
