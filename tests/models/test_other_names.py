"""An option that has another library's name is refused with the name that it has here."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, JambaForCausalLM

from hybridmem.memory import HybridMemory, HybridMemoryError, Sequence
from hybridmem.models import EMBEDDED, HybridCache, attach, load_model
from tests.extent import few_cases

IDS = torch.tensor([[1, 5, 6, 7]])
CACHE = "cache" if "cache" in inspect.signature(JambaForCausalLM.forward).parameters else "past_key_values"
"""The name of the argument, which transformers 5.24 has changed."""


class Scene:
    def __init__(self) -> None:
        self.model: Any = load_model("embedded")
        self.hf: Any = AutoModelForCausalLM.from_pretrained(EMBEDDED).eval()
        self.attached = attach(self.hf)
        self.memory: Any = HybridMemory(self.model.memory_spec, "16MiB")
        self.sequence: Any = self.memory.open()
        self.memory.run(self.model, {self.sequence: [1, 2, 3]})

    def used_cache(self) -> HybridCache:
        cache = HybridCache(self.memory, [self.memory.open()])
        self.hf.generate(IDS, **{CACHE: cache}, max_new_tokens=4, do_sample=False)
        return cache


@pytest.fixture(scope="module")
def scene() -> Scene:
    return Scene()


MISTAKES: dict[str, tuple[Callable[[Scene], object], str]] = {
    "memory.run(hf_model, ...)": (lambda s: s.memory.run(s.hf, {s.sequence: [1]}), "from_transformers(hf_model)"),
    "HybridMemory(hf_model)": (lambda s: HybridMemory(s.hf), "attach(hf_model)"),
    "HybridMemory(model)": (lambda s: HybridMemory(s.model), "model.memory_spec"),
    "generate(past_key_values=memory)": (
        lambda s: s.hf.generate(IDS, **{CACHE: s.memory}, max_new_tokens=2), "HybridCache(memory, [memory.open()])"
    ),
    "a shorter prompt on a used cache": (
        lambda s: s.hf.generate(IDS[:, :2], **{CACHE: s.used_cache()}, max_new_tokens=2), "whole dialogue"
    ),
    "another prompt on a used cache": (
        lambda s: s.hf.generate(torch.full((1, 20), 9), **{CACHE: s.used_cache()}, max_new_tokens=2), "position 0"
    ),
    "a.rollback()": (lambda s: s.sequence.rollback(), "memory.rollback(sequence, n_tokens=2)"),
    "a.fork()": (lambda s: s.sequence.fork(), "memory.fork(sequence)"),
    "len(a)": (lambda s: len(s.sequence), "sequence.length"),
    "memory[0]": (lambda s: s.memory[0], "memory.sequences"),
    "for s in memory": (lambda s: list(s.memory), "memory.sequences"),
    "run(model, a, ids)": (lambda s: s.memory.run(s.model, s.sequence, [1]), "{sequence: token_ids}"),
    "rollback(a, n=2)": (lambda s: s.memory.rollback(s.sequence, n=2), "n_tokens=2"),
    "rollback(a, 2)": (lambda s: s.memory.rollback(s.sequence, 2), "to=2 keeps the first 2"),
    "fork(a, at=3)": (lambda s: s.memory.fork(s.sequence, at=3), "memory.rollback(fork, to=position)"),
    "checkpoint(a, 3)": (lambda s: s.memory.checkpoint(s.sequence, 3), "memory.rollback(fork, to=position)"),
    "window=": (lambda s: HybridMemory(s.model.memory_spec, window=3), "rollback_window"),
    "open(ids)": (lambda s: s.memory.open([1, 2]), "memory.run(model, {sequence: token_ids})"),
    "close(*[])": (lambda s: s.memory.close(*[]), "memory.close_all()"),
    "torch_dtype=": (lambda s: load_model("embedded", torch_dtype="auto"), "the option is dtype"),
    "device_map=": (lambda s: load_model("embedded", device_map="auto"), "device='cuda'"),
    "model.eval()": (lambda s: s.model.eval(), "only computes"),
    "model.to()": (lambda s: s.model.to("cuda"), "device=..."),
    "model.generate()": (lambda s: s.model.generate(IDS), "hybridmem.chat.engine.Engine"),
    "memory.crop()": (lambda s: s.memory.crop(-1), "memory.rollback(sequence, n_tokens=2)"),
    "memory.get_seq_length()": (lambda s: s.memory.get_seq_length(), "HybridCache"),
}  # fmt: skip


@few_cases
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_with_the_right_call(scene: Scene, name: str) -> None:
    mistake, remedy = MISTAKES[name]
    with pytest.raises((TypeError, AttributeError, HybridMemoryError)) as caught:
        mistake(scene)
    assert remedy in str(caught.value)
    scene.memory.check()
    assert scene.sequence.length == 3


def test_names_that_nobody_knows_are_told_as_ever(scene: Scene) -> None:
    for owner in (scene.sequence, scene.memory, scene.model):
        with pytest.raises(AttributeError, match=r"has no attribute 'colour'$"):
            _ = owner.colour
        assert not hasattr(owner, "colour")
    with pytest.raises(TypeError, match=r"memory.fork\(\) does not take colour=1$"):
        scene.memory.fork(scene.sequence, colour=1)


def test_a_handle_is_true_whatever_it_holds(scene: Scene) -> None:
    empty: Sequence = scene.memory.open()
    assert empty


def test_a_prompt_that_goes_on_is_taken(scene: Scene) -> None:
    """This also holds after a crop, and with rows that are padded on the left."""
    cache = HybridCache(scene.memory, [scene.memory.open() for _ in range(2)])
    prompt = torch.tensor([[0, 0, 1, 5], [1, 5, 6, 7]])
    said = scene.hf.generate(
        prompt, attention_mask=torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]]), **{CACHE: cache}, max_new_tokens=3,
        min_new_tokens=3, do_sample=False,
    )  # fmt: skip
    cache.crop(-1)
    longer = torch.cat([said[:, : cache.get_seq_length()], torch.tensor([[8, 9], [8, 9]])], 1)
    mask = torch.ones_like(longer)
    mask[0, :2] = 0
    scene.hf.generate(longer, attention_mask=mask, **{CACHE: cache}, max_new_tokens=2, do_sample=False)
