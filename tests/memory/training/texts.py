"""Makes texts with a rollback and a fork in their history, computed through a tape and by transformers."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridmem.memory.kernels.double_precision import precision_for
from hybridmem.memory.training import Tape
from hybridmem.models import Trainable
from tests.memory.training import peers
from tests.models.checkpoints import draw_tokens


class Texts(NamedTuple):
    """Holds texts of one prompt, and the sizes of chunks in which they are computed.

    Chunks of up to 64 tokens are cut in the prompt, and after the fork and the rollback; those of 512 only in the
    prompt. One reference serves all sizes, because transformers' gradients over whole texts cost more than ours.
    """

    chunk_sizes: tuple[int, ...]
    prompt: list[int]
    dropped: list[int]
    added: list[int]
    other: list[int]

    @property
    def chunks(self) -> str:
        return "-".join(map(str, self.chunk_sizes))

    @classmethod
    def draw(cls, chunk_sizes: tuple[int, ...], n_prompt: int, n_later: int) -> Texts:
        counts = (n_prompt, n_later + 4, n_later, n_later + 1)
        return cls(chunk_sizes, *(draw_tokens(n, seed=n) for n in counts))


SHORT = Texts.draw((1, 7), 20, 5)
MIDDLE = Texts.draw((64,), 150, 70)
LONG = Texts.draw((512,), 530, 5)


def weighted(values: Tensor) -> Tensor:
    """Return a loss in which every token counts, with a weight of its own."""
    weights = torch.randn(len(values), generator=torch.Generator().manual_seed(len(values)), dtype=torch.float64)
    return (values * weights).sum()


def record(tape: Tape, texts: Texts) -> dict[str, Tensor]:
    """Record the texts with a rollback and a fork in their history. Return the values of each part."""
    text = tape.open()
    values = {"prompt": tape.run({text: texts.prompt})[text]}
    twin = tape.fork(text)
    values["dropped"] = tape.run({text: texts.dropped})[text]
    tape.rollback(text, to=len(texts.prompt) + 3)
    found = tape.run({text: texts.added, twin: texts.other})
    return {**values, "added": found[text], "other": found[twin]}


def expect(reference: Any, texts: Texts) -> dict[str, Tensor]:
    """Return the same values by transformers, each from a whole text."""
    prompt, n_prompt = texts.prompt, len(texts.prompt)
    whole = {
        "prompt": (prompt, 0),
        "dropped": (prompt + texts.dropped, n_prompt),
        "added": (prompt + texts.dropped[:3] + texts.added, n_prompt + 3),
        "other": (prompt + texts.other, n_prompt),
    }
    return {part: peers.logprobs(reference, tokens, since) for part, (tokens, since) in whole.items()}


def go_back(model: Any, texts: Texts, chunk_tokens: int) -> dict[str, Tensor]:
    """Give a model of transformers its gradients by a tape. Returns the values of each part."""
    found = record(Tape(Trainable.of(model).model(), chunk_tokens=chunk_tokens), texts)
    sum(weighted(values) for values in found.values()).backward()
    return found


def expect_gradients(reference: Any, texts: Texts) -> dict[str, Tensor]:
    """Give a model of transformers its gradients by torch over whole texts. Returns the values of each part."""
    with precision_for(next(reference.parameters()).dtype):
        expected = expect(reference, texts)
        torch.autograd.backward(sum(weighted(values) for values in expected.values()))
    peers.undo_rescaling(reference)
    return expected
