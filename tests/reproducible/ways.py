"""Makes ways to the same text: other chunks, company, detours, forks, checkpoints, drafts, swaps and files."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice, repeat
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from hybridmem.memory import HybridMemory, Sequence
from hybridmem.models import LanguageModel

CHUNKS = (1, 1, 1, 2, 3, 7, 16, 17, 33, 64)


@dataclass
class Walk:
    """Holds a sequence on its way through a text, and the logits that it has seen at each position so far."""

    model: LanguageModel
    tokens: list[int]
    random: Random
    memory: HybridMemory
    folder: Path
    sequence: Sequence = field(init=False)
    logits: list[Tensor] = field(default_factory=list)
    others: list[Sequence] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sequence = self.memory.open()

    @property
    def at(self) -> int:
        return len(self.logits)

    def odd(self, n_tokens: int) -> list[int]:
        """Return tokens of another text."""
        return [self.random.randrange(self.model.memory_spec.vocab_size) for _ in range(n_tokens)]

    def feed(self, n_tokens: int, others: dict[Sequence, list[int]] | None = None, n_odd: int = 0) -> None:
        """Feed the next tokens of the text in one step, followed by `n_odd` other tokens that are rejected."""
        own = self.tokens[self.at : self.at + n_tokens]
        requests = [(self.sequence, own + self.odd(n_odd)), *(others or {}).items()]
        self.random.shuffle(requests)
        counts = tuple(len(tokens) if each is self.sequence else 1 for each, tokens in requests)
        with self.memory.step(dict(requests), outputs=counts) as step:
            rows = self.model(step)
            if n_odd:
                step.accept({self.sequence: len(own)})
        before = 0
        for (each, _), count in zip(requests, counts, strict=True):
            if each is self.sequence:
                self.logits += rows[before : before + len(own)].clone()
            before += count

    def walk(self, steps: dict[str, Callable[[Walk], None]]) -> Tensor:
        """Take random steps up to the end of the text."""
        names = [*steps]
        while self.at < len(self.tokens):
            steps[self.random.choice(names)](self)
        return torch.stack(self.logits)


def chunk(walk: Walk) -> None:
    walk.feed(walk.random.choice(CHUNKS))


def company(walk: Walk) -> None:
    """Feed a chunk together with other sequences, long and short."""
    while len(walk.others) < 4:
        walk.others.append(walk.memory.open())
    chosen = walk.random.sample(walk.others, walk.random.randint(1, 4))
    requests = {other: walk.odd(walk.random.choice((1, 1, 2, 5, 18, 40))) for other in chosen}
    walk.feed(walk.random.choice(CHUNKS), requests)


def detour(walk: Walk) -> None:
    """Feed other tokens, in one step or several, and take them back."""
    n_odd = walk.random.randint(1, walk.memory.rollback_window)
    fed = walk.odd(n_odd)
    cut = walk.random.randint(0, n_odd)
    for tokens in (fed[:cut], fed[cut:]):
        if tokens:
            walk.memory.run(walk.model, {walk.sequence: tokens})
    walk.memory.rollback(walk.sequence, n_tokens=n_odd)


def redo(walk: Walk) -> None:
    """Take back tokens of the text itself, and feed them again."""
    reached = walk.memory.resume_point(walk.sequence, max(0, walk.at - walk.random.randint(1, 12)))
    walk.memory.rollback(walk.sequence, to=reached)
    seen, walk.logits = walk.logits, walk.logits[:reached]
    walk.feed(min(walk.random.choice(CHUNKS), len(walk.tokens) - reached))
    n = min(len(seen), walk.at)
    if n < len(seen):  # The outputs of tokens that were fed twice are compared as well: the second ones stay.
        walk.memory.run(walk.model, {walk.sequence: walk.tokens[n : len(seen)]})
        walk.logits = walk.logits + seen[n:]


def fork(walk: Walk) -> None:
    """Continue with a fork. The first sequence gets other tokens and is closed."""
    old, walk.sequence = walk.sequence, walk.memory.fork(walk.sequence)
    walk.memory.run(walk.model, {old: walk.odd(walk.random.randint(1, 20))})
    walk.memory.close(old)


def checkpoint(walk: Walk) -> None:
    """Continue from a checkpoint in another sequence, as from a cached prefix."""
    mark = walk.memory.checkpoint(walk.sequence)
    walk.memory.run(walk.model, {walk.sequence: walk.odd(walk.random.randint(1, 70))})
    walk.memory.rollback(walk.sequence, to=mark)
    walk.memory.close(mark)


def drafts(walk: Walk) -> None:
    """Feed tokens and then wrong drafts, none of which is accepted."""
    walk.feed(walk.random.randint(1, 6), n_odd=walk.random.randint(1, 5))


def tree(walk: Walk) -> None:
    """Feed a tree of drafts in which the text is one path."""
    n = min(walk.random.randint(1, 5), len(walk.tokens) - walk.at)
    own, tokens, parents, path = walk.tokens[walk.at : walk.at + n], list[int](), list[int](), list[int]()
    for token in own:
        for _ in range(walk.random.randint(0, 2)):
            tokens += walk.odd(1)
            parents.append(path[-1] if path else -1)
        parents.append(path[-1] if path else -1)
        path.append(len(tokens))
        tokens.append(token)
    with walk.memory.step({walk.sequence: tokens}, outputs="all", parents={walk.sequence: parents}) as step:
        rows = walk.model(step)
        step.accept({walk.sequence: path})
    walk.logits += rows[torch.tensor(path)].clone()


def swap(walk: Walk) -> None:
    walk.memory.swap_out(walk.sequence)
    walk.memory.swap_in(walk.sequence)


def reload(walk: Walk) -> None:
    """Save the sequence, and load it into a new memory, as after a restart."""
    path = walk.folder / "sequence"
    walk.memory.save(walk.sequence, path)
    old, walk.others = walk.memory, []
    walk.memory = renewed(walk)
    old.close_all()
    walk.sequence = walk.memory.load(path)


def renewed(walk: Walk) -> HybridMemory:
    return memory_of(walk.model, fold=walk.memory.fold)


def memory_of(model: LanguageModel, budget: str = "16MiB", **options: Any) -> HybridMemory:
    given: dict[str, Any] = {"rollback_window": 8, "page_tokens": 4, **options}
    return HybridMemory(model.memory_spec, budget, **given)


WAYS: dict[str, dict[str, Callable[[Walk], None]]] = {
    "chunks": {"chunk": chunk},
    "company": {"company": company},
    "detours": {"chunk": chunk, "detour": detour, "redo": redo},
    "forks": {"chunk": chunk, "fork": fork, "checkpoint": checkpoint},
    "drafts": {"chunk": chunk, "drafts": drafts},
    "trees": {"chunk": chunk, "tree": tree},
    "files": {"chunk": chunk, "swap": swap, "reload": reload},
}
ALL = {name: step for steps in WAYS.values() for name, step in steps.items()} | {"company": company}


def by(model: LanguageModel, tokens: list[int], seed: int, steps: dict[str, Callable[[Walk], None]],
       **options: Any) -> Tensor:  # fmt: skip
    """Return the logits of each position of a text, (n, vocab), reached by a random walk of these steps."""
    with tempfile.TemporaryDirectory() as folder:
        memory = memory_of(model, **options)
        walk = Walk(model, tokens, Random(seed), memory, Path(folder))
        return walk.walk(steps)


def singly(model: LanguageModel, tokens: list[int], **options: Any) -> Tensor:
    """Return the logits of each position of a text, (n, vocab), whose tokens are fed one by one."""
    return in_chunks(model, tokens, repeat(1, len(tokens)), **options)


def in_chunks(model: LanguageModel, tokens: list[int], chunks: Iterable[int], **options: Any) -> Tensor:
    """Return the logits of each position of a text, (n, vocab), whose tokens are fed in chunks of these lengths."""
    memory = memory_of(model, **options)
    sequence, left, found = memory.open(), iter(tokens), []
    for n_tokens in chunks:
        with memory.step({sequence: list(islice(left, n_tokens))}, outputs=(n_tokens,)) as step:
            found.append(model(step).clone())
    return torch.cat(found)


def n_differing(found: Tensor, expected: Tensor) -> int:
    """Count the positions whose logits differ in any bit."""
    bits = torch.int32 if found.dtype is torch.float32 else torch.int16
    return int((found.view(bits) != expected.view(bits)).any(-1).sum())
