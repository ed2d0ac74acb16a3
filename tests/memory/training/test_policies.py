"""Gradients under eviction policies are those of plain autograd in which each query reads the same rows."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridmem.memory import HybridMemory
from hybridmem.memory.eviction import (
    H2O,
    TOVA,
    EvictionPolicy,
    ExpectedAttention,
    KNorm,
    PyramidKV,
    Recent,
    Scissorhands,
    SnapKV,
)
from hybridmem.memory.kernels.double_precision import precision_for
from hybridmem.memory.training import Tape, chunk
from hybridmem.memory.training import tape as tape_module
from hybridmem.models import Trainable, from_transformers
from tests.extent import only_in_long
from tests.inside import layer_memories
from tests.memory.training import peers
from tests.models.checkpoints import draw_tokens
from tests.subjects import IS_FULL

WINDOW, CHUNK = 3, 8
PROMPT, DROPPED, ADDED, OTHER = (draw_tokens(n, seed=n) for n in (37, 9, 14, 15))
BACK = len(PROMPT) + len(DROPPED) - WINDOW
POLICIES: tuple[EvictionPolicy, ...] = (
    Recent(6, sinks=2, every=4), H2O(6, recent=2, every=4), KNorm(6, every=4), TOVA(6, every=4),
    SnapKV(6, recent=2, observed=3, every=4), PyramidKV(6, recent=2, observed=3, every=4, steepness=3),
    Scissorhands(6, recent=2, every=4), ExpectedAttention(6, sinks=1, recent=2, every=4),
)  # fmt: skip


class Cuts:
    """Is a memory that is fed in the steps of a tape, with the rows that each query reads of it.

    Attributes:
        is_read: for each attention layer, (G, T, R) of one text.
    """

    def __init__(self, model: Any, policy: EvictionPolicy, spec: Any) -> None:
        self._model, self._memory = model, HybridMemory(spec, "8MiB", rollback_window=WINDOW)
        self._policy, self._layers = policy, [layer for layer, _ in spec.of_kind("attention")]

    def read(self, *ends: tuple[list[int], int | None]) -> dict[int, Tensor]:
        """Feed parts of a text, each with the length to which it is rolled back afterwards."""
        text, n_tokens = self._memory.open(), sum(len(tokens) for tokens, _ in ends)
        specs = self._memory.spec.layers
        is_read = {
            layer: torch.zeros(specs[layer][0].n_kv_heads, n_tokens, n_tokens, dtype=torch.bool)  # type: ignore[union-attr]
            for layer in self._layers
        }
        for tokens, back_to in ends:
            while tokens:
                start = text.length
                n = min(len(tokens), CHUNK - start % CHUNK)
                for number, layer in enumerate(self._layers):
                    kept, folded_at = self._kept(text, number)
                    own = is_read[layer]
                    own[:, start : start + n] = False  # A token that was rolled back may have set it.
                    for group, positions in enumerate(kept):
                        own[group, start : start + n, positions] = True
                    for t in range(start, start + n):
                        own[:, t, folded_at : t + 1] = True
                with self._memory.step({text: tokens[:n]}) as step:
                    self._model(step)
                tokens = tokens[n:]
            if back_to is not None:
                self._memory.rollback(text, to=back_to)
        return {layer: own[:, : text.length, : text.length] for layer, own in is_read.items()}

    def _kept(self, text: Any, number: int) -> tuple[list[Tensor], int]:
        """Return the positions that each head keeps of a text, and the position from which all rows are there."""
        every = self._policy.every
        folded_at = max(0, text.length - WINDOW) // every * every
        if folded_at == 0:
            return [], 0
        policies = [self._policy.of_layer(i, len(self._layers)) for i in range(len(self._layers))]
        memories = [m for m in layer_memories(self._memory).values() if hasattr(m, "kept_positions")]
        (own,) = [memory for memory in memories if memory.policy == policies[number]]
        return [*own.kept_positions(text.slot, policies[:number].count(policies[number])).T], folded_at


@contextmanager
def reading(reference: Any, is_read: dict[int, Tensor]) -> Iterator[None]:
    """Let the attention of each layer of transformers' model read only these rows."""
    hooks = []
    for layer, own in is_read.items():
        attention = reference.model.layers[layer].self_attn
        heads = own.repeat_interleave(attention.config.num_attention_heads // len(own), 0)
        mask = torch.zeros(heads.shape, dtype=torch.float64).masked_fill(~heads, -torch.inf)

        def hook(module: Any, args: Any, kwargs: dict[str, Any], mask: Tensor = mask) -> tuple[Any, dict[str, Any]]:
            return args, kwargs | {"attention_mask": mask[None]}

        hooks.append(attention.register_forward_pre_hook(hook, with_kwargs=True))
    yield
    for handle in hooks:
        handle.remove()


# In the first layer of Llama, the keys of equal tokens have equal lengths. So only rounding would choose between them
# for KNorm.
CASES = [(name, p) for name in ("jamba", "llama") for p in POLICIES if (name, type(p)) != ("llama", KNorm)]
OF_LATENTS = [("deepseek-v3-no-experts", policy) for policy in POLICIES]
"""Values are a part of the keys there, and all query heads share one."""
QUICK = [*CASES[:2], OF_LATENTS[1]]


@only_in_long
@pytest.mark.parametrize(
    ("name", "policy"), CASES + OF_LATENTS if IS_FULL else QUICK, ids=lambda x: getattr(x, "label", x)
)
def test_rows_that_were_read_have_gradients(name: str, policy: EvictionPolicy) -> None:
    model = peers.random_model(name, torch.float64)
    reference = peers.reference_of(model)
    reference.set_attn_implementation("eager")
    trainable = Trainable.of(model).model()
    trainable.memory_spec = trainable.memory_spec.with_policy(policy)
    tape = Tape(trainable, chunk_tokens=CHUNK, rollback_window=WINDOW)
    text = tape.open()
    found = {"prompt": tape.run({text: PROMPT})[text]}
    twin = tape.fork(text)
    found["dropped"] = tape.run({text: DROPPED})[text]
    tape.rollback(text, to=BACK)
    ends = tape.run({text: ADDED, twin: OTHER})
    found |= {"added": ends[text], "other": ends[twin]}
    sum(values.sum() for values in found.values()).backward()

    own = from_transformers(copy.deepcopy(model).float())
    cuts = Cuts(own, policy, own.memory_spec.with_policy(policy))
    n = len(PROMPT)
    histories = {
        "prompt": (PROMPT, 0, [(PROMPT, None)]),
        "dropped": (PROMPT + DROPPED, n, [(PROMPT, None), (DROPPED, None)]),
        "added": (PROMPT + DROPPED[: BACK - n] + ADDED, BACK, [(PROMPT, None), (DROPPED, BACK), (ADDED, None)]),
        "other": (PROMPT + OTHER, n, [(PROMPT, None), (OTHER, None)]),
    }
    for part, (tokens, since, history) in histories.items():
        is_read = cuts.read(*history)
        assert any(not rows.tril().eq(torch.ones_like(rows).tril()).all() for rows in is_read.values())
        with precision_for(torch.float64), reading(reference, is_read):
            values = peers.logprobs(reference, tokens, since)
            torch.autograd.backward(values.sum())
        assert torch.allclose(found[part], values, atol=1e-10), part
    error, where = peers.worst(model, reference)
    assert error <= 1e-10, f"{error} in {where}"


def test_texts_that_share_chunks_read_what_each_reads_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other texts move no cut, and each text has its own kept rows."""
    texts = [[draw_tokens(n, seed=n) for n in counts] for counts in ((19, 5), (22, 8), (17, 6))]
    shared = list[int]()

    class Counted(chunk.Chunk):
        def forward(self) -> tuple[Tensor, Tensor]:
            shared.append(len(self._pieces))
            return super().forward()

    monkeypatch.setattr(tape_module, "Chunk", Counted)
    model = peers.random_model("jamba", torch.float64)
    trainable = Trainable.of(model)

    def gradients(*groups: list[list[list[int]]]) -> tuple[list[Tensor], dict[str, Tensor]]:
        model.zero_grad()
        values = list[Tensor]()
        for group in groups:
            own = trainable.model()
            own.memory_spec = own.memory_spec.with_policy(H2O(6, recent=2, every=4))
            tape = Tape(own, chunk_tokens=2 * CHUNK, rollback_window=WINDOW)
            branches = [tape.open() for _ in group]
            for part in zip(*group, strict=True):
                values += tape.run(dict(zip(branches, part, strict=True))).values()
        torch.cat(values).sum().backward()
        return values, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    together, found = gradients(texts)
    assert max(shared) > 1
    shared.clear()
    alone, expected = gradients(*[[text] for text in texts])
    assert max(shared) == 1
    for i, own in enumerate(together):
        assert torch.allclose(own, alone[i % 3 * 2 + i // 3], atol=1e-12)
    for name, grad in expected.items():
        assert (found[name] - grad).abs().max() <= 1e-10 * grad.abs().max(), name
