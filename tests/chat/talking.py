"""Holds what tests of sessions and templates share: models that count what they compute and say what they are told."""

from __future__ import annotations

import hashlib
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from hybridmem.chat.engine.engine import Engine
from hybridmem.memory import HybridMemory, Step
from hybridmem.memory.prefix.cache import PrefixCache
from hybridmem.models import load_model
from tests.models.checkpoints import write_checkpoint
from tests.models.families.jamba import jamba_config
from tests.models.families.llama import llama_config
from tests.models.families.mamba import mamba_config

TALKERS = ("embedded", "llama", "mamba", "jamba")
_VOCAB = 932
"""Tokens of the embedded tokenizer."""


def load_talker(name: str, folder: Path) -> Any:
    """Return the embedded model, or a random one of attention alone, of Mamba alone, or of both."""
    if name == "embedded":
        return load_model("embedded")
    make = {"llama": llama_config, "mamba": mamba_config, "jamba": jamba_config}[name]
    config: PreTrainedConfig = make(vocab_size=_VOCAB, eos_token_id=2)
    return load_model(write_checkpoint(folder / name, config))


class Counted:
    """Is a model that counts what it computes.

    Attributes:
        n_fed: tokens that it computed.
        prefixes: everything up to and with each of these tokens -> how often it was computed.
        says: position -> the token that it says there, whatever it would have said.
        digest: of all its logits, bit for bit.
        fails_in: raise in the step after so many.
    """

    def __init__(self, model: Any) -> None:
        self.model, self.memory_spec, self.config = model, model.memory_spec, model.config
        self.n_fed = 0
        self.prefixes: Counter[tuple[int, ...]] = Counter()
        self.says: dict[int, int] = {}
        self.digest = hashlib.sha256()
        self.fails_in: int | None = None

    def __call__(self, step: Step) -> Tensor:
        if self.fails_in is not None:
            self.fails_in -= 1
            if self.fails_in < 0:
                raise RuntimeError("the model broke")
        logits: Tensor = self.model(step)
        self.n_fed += len(step.token_ids)
        for i, sequence in enumerate(step.sequences):
            held, new = sequence.tokens.tolist(), step.tokens[i].tolist()
            for n in range(1, len(new) + 1):
                self.prefixes[(*held, *new[:n])] += 1
            end = len(held) + len(new)
            if end in self.says and step.outputs == "last":
                logits[i] = torch.zeros_like(logits[i])
                logits[i, self.says[end]] = 9.0
        self.digest.update(logits.numpy().tobytes())
        return logits

    def say(self, token_ids: list[int], at: int) -> None:
        """Let the model say these tokens from position `at` on."""
        self.says = {at + i: token for i, token in enumerate(token_ids)}


def make_engine(
    model: Any, tokenizer: Any, *, rollback_window: int = 8, has_prefixes: bool = True, budget: str = "16MiB"
) -> Engine:
    memory = HybridMemory(model.memory_spec, budget, rollback_window=rollback_window, page_tokens=4, poison=True)
    prefixes = PrefixCache(memory, grid_tokens=0) if has_prefixes else None
    return Engine(Counted(model), memory, tokenizer, prefixes=prefixes)


def decode_fresh(model: Any, prompt: list[int], max_tokens: int, stop_ids: tuple[int, ...]) -> list[int]:
    """Return what the model says greedily when it reads all of this for the first time, in a memory of its own."""
    memory, ids, new = HybridMemory(model.memory_spec, "8MiB", poison=True), list[int](), prompt
    sequence = memory.open()
    while len(ids) < max_tokens and not (ids and ids[-1] in stop_ids):
        with memory.step({sequence: new}) as step:
            new = [int(model(step)[0].argmax())]
        ids += new
    return ids


def assert_all_given_back(engine: Engine) -> None:
    if engine.prefixes is not None:
        engine.prefixes.clear()
    engine.memory.check()
    assert engine.memory.usage().used_bytes == 0 and not engine.memory.usage().by_sequence
