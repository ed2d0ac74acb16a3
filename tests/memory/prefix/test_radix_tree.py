"""The radix tree, its digests and its texts are compared with a plain list of the marked prompts."""

from __future__ import annotations

import hashlib
import random
from typing import Any, cast

import numpy as np
import pytest

from hybridmem.memory import BatchError, FormatError, HybridMemory, Sequence, SpecError
from hybridmem.memory.prefix import PrefixCache
from hybridmem.memory.prefix.digests import DIGEST_BYTES, digests_at
from hybridmem.memory.prefix.lookup import Lookup, PrefixStats, explain, read_prompt
from hybridmem.memory.prefix.radix_tree import Node, RadixTree, is_shared, marked_above, marks_below, relatives
from hybridmem.memory.prefix.saved import as_label, as_owner, entries_of
from tests.inside import prefix_roots
from tests.toy import Toy

Prompt = tuple[int, ...]
TOY = Toy()


class Mark:
    """Has what the tree reads of a checkpoint."""

    def __init__(self, id: int, is_swapped: bool) -> None:
        self.id, self.is_swapped = id, is_swapped


def common(a: Prompt, b: Prompt) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class Forest:
    """Holds a tree, and the prompts that are marked in it."""

    def __init__(self, seed: int) -> None:
        self.rng, self.tree = random.Random(seed), RadixTree()
        self.marks: dict[Prompt, Mark] = {}
        self.nodes: dict[Prompt, Node] = {}

    def draw(self) -> Prompt:
        base = self.rng.choice([(), *self.marks])
        return (*base[: self.rng.randint(0, len(base))], *self.rng.choices(range(2), k=self.rng.randint(0, 4)))

    def change(self, i: int) -> None:
        prompt = self.draw()
        if self.marks and self.rng.random() < 0.3:
            gone = self.rng.choice([*self.marks])
            node = self.nodes.pop(gone)
            del self.marks[gone]
            node.mark = None
            self.tree.prune(node)
        elif prompt and prompt not in self.marks:
            node = self.tree.node_at(np.array(prompt), "me")
            assert node.mark is None and node.depth == len(prompt)
            self.marks[prompt] = Mark(i, self.rng.random() < 0.3)
            node.mark, self.nodes[prompt] = cast(Sequence, self.marks[prompt]), node

    def is_node(self, prompt: Prompt) -> bool:
        """True if prompts part here, or one is marked."""
        return prompt in self.marks or len({p[len(prompt)] for p in self.below(prompt)}) > 1

    def below(self, prompt: Prompt) -> list[Prompt]:
        return [p for p in self.marks if len(p) > len(prompt) and p[: len(prompt)] == prompt]

    def related(self, own: Prompt) -> tuple[list[Mark], set[Mark]]:
        """Return the nearest checkpoint above in the budget, and the next ones below that part from `own`."""
        inside = [p for p, mark in self.marks.items() if not mark.is_swapped and p != own]
        above = max((p for p in inside if own[: len(p)] == p), key=len, default=())
        around = [p for p in inside if common(p, own) > len(above) and own[: len(p)] != p]
        first = [p for p in around if not any(common(p, own) < len(q) < len(p) and p[: len(q)] == q for q in inside)]
        return [self.marks[above]] if above else [], {self.marks[p] for p in first}


@pytest.mark.parametrize("seed", range(2))
def test_a_tree_is_what_a_list_of_marked_prompts_says(seed: int) -> None:
    forest = Forest(seed)
    for i in range(90):
        forest.change(i)
        tree, marks = forest.tree, forest.marks
        assert tree.n_tokens == len({p[:n] for p in marks for n in range(1, len(p) + 1)})
        assert list(tree.roots) == (["me"] if marks else [])
        asked = forest.draw()
        n_matched, path, beyond = tree.walk(np.array(asked, np.int64), "me")
        assert n_matched == max((common(p, asked) for p in marks), default=0)
        assert [node.depth for node in path] == [n for n in range(1, n_matched + 1) if forest.is_node(asked[:n])]
        assert (beyond is None) == (not forest.below(asked[:n_matched])) and tree.walk(np.array([0]), "you")[0] == 0
        below = sorted((marks[p] for p in forest.below(asked)), key=lambda mark: mark.id) if asked else None
        assert below is None or marks_below(tree, np.array(asked), "me") == below
        for prompt, node in forest.nodes.items():
            assert marked_above(node) == max((len(p) for p in marks if prompt[: len(p)] == p != prompt), default=0)
            parts = {p[:n] for p in forest.below(prompt) for n in range(len(prompt), len(p))}
            between = [p for p in parts if not any(p[:n] in marks for n in range(len(prompt) + 1, len(p) + 1))]
            assert is_shared(node) == any(len({q[len(p)] for q in forest.below(p)}) > 1 for p in between)
            above, around = forest.related(prompt)
            found = cast(list[Mark], relatives(node))
            assert found[: len(above)] == above and {*found[len(above) :]} == around and len(found) == len({*found})
    assert len(forest.marks) > 5


def test_relatives_are_looked_for_at_a_few_nodes() -> None:
    """Thousands of prompts may begin alike. A search ends after 64 relatives or 256 nodes."""
    for is_swapped, n_found in ((False, 64), (True, 1)):
        tree = RadixTree()
        for i in range(400):
            tree.node_at(np.array([7, i]), None).mark = cast(Sequence, Mark(i, is_swapped and i != 399))
        own = tree.node_at(np.array([7, 1000]), None)
        assert len(relatives(own)) == n_found
        own.parent.children = dict(reversed(own.parent.children.items()))  # type: ignore[union-attr]
        assert len(relatives(own)) == (0 if is_swapped else 64)


# The tests below are about digests.


PROMPTS = ([1] * 20, [1] * 12 + [2] * 8, [3] * 5)


def filled(
    owners: tuple[Any, ...] = (None,), window: int = 4, prompts: tuple[list[int], ...] = PROMPTS
) -> tuple[HybridMemory, PrefixCache]:
    memory = HybridMemory(TOY.memory_spec, "4MiB", rollback_window=window, device="meta", fold="keep")
    cache = PrefixCache(memory, grid_tokens=8)
    for owner in owners:
        for prompt in prompts:
            sequence, found = cache.open(prompt, owner)
            for end in [*cache.cuts(prompt, found.reused, owner=owner), len(prompt)]:
                memory.run(None, {sequence: prompt[sequence.length : end]})
                cache.insert(sequence, owner)
            memory.close(sequence)
    return memory, cache


def test_digests_name_what_a_cache_can_continue_from() -> None:
    memory, cache = filled((None, "bob", b"\x01"))
    named = cache.resumable()
    by_checkpoint: dict[Sequence, list[int]] = {}
    for prefix in named:
        tokens, n = prefix.checkpoint.tokens, prefix.n_tokens
        ((at, digest),) = digests_at(tokens, [n, 0, -1, len(tokens) + 1], prefix.owner)
        text = f"hybrid-memory prefix 1 {as_label(prefix.owner)}\n".encode()
        expected = hashlib.sha256(text + tokens[:n].astype("<i8").tobytes()).digest()
        assert (at, digest) == (n, prefix.digest) == (n, expected[:16]) and len(digest) == DIGEST_BYTES == 16
        assert prefix.tier == "budget"
        by_checkpoint.setdefault(prefix.checkpoint, []).append(n)
    marks = [s for s in memory.sequences if s.is_checkpoint]
    assert {*by_checkpoint} == {*marks} and len(marks) == 3 * 6
    for mark, places in by_checkpoint.items():
        assert places == [*([mark.horizon] if 0 < mark.horizon < mark.length else []), mark.length]
    assert {0, 12} < {mark.horizon for mark in marks}
    assert [(p.owner, p.n_tokens) for p in named if p.is_shared] == [(None, 8), ("bob", 8), (b"\x01", 8)]
    for window, prompts, places in (
        (0, ([1] * 9,), [8, 9]),
        (1, ([5] * 2,), [1, 2]),
        (4, ([6] * 18,), [4, 8, 12, 12, 16, 18]),
    ):
        memory, cache = filled(window=window, prompts=prompts)
        assert sorted(prefix.n_tokens for prefix in cache.resumable()) == places
        for prefix in cache.resumable():
            assert [*digests_at(np.array(prompts[0]), [prefix.n_tokens])] == [(prefix.n_tokens, prefix.digest)]
    several = [*digests_at(np.arange(9), (9, 4, 4))]
    assert [at for at, _ in several] == [4, 9] and [*digests_at(np.arange(9), [4])] == several[:1]


# The tests below are about what lookups say, and what files hold of owners and trees.


def test_a_lookup_says_what_is_computed_again_and_from_where_the_rest_comes() -> None:
    for n_matched, reused, tier, n_taken_back, replayed, source in (
        (0, 0, "", 0, 0, "nothing"), (10, 0, "", 0, 9, "nothing"), (7, 4, "budget", 0, 3, "checkpoint"),
        (7, 7, "budget", 2, 0, "window"), (10, 8, "host", 1, 1, "host"), (10, 9, "disk", 0, 0, "disk"),
    ):  # fmt: skip
        lookup = Lookup(10, n_matched, reused, reused, explain(10, n_matched, reused), cast(Any, tier), n_taken_back)
        assert (lookup.recomputed, lookup.replayed, lookup.source) == (10 - reused, replayed, source)
    assert PrefixStats(*[0] * 7).hit_rate == 0.0 and PrefixStats(2, 1, 40, 10, 1, 0, 64).hit_rate == 0.25
    assert PrefixStats(*[0] * 7) == PrefixStats(*[0] * 13) and lookup == Lookup(10, 10, 9, 9, lookup.why, "disk")
    for bad in (3, [[1, 2]], [[1], [2, 3]], [0.5], "text", None):
        with pytest.raises(BatchError):
            read_prompt(cast(Any, bad))
    tokens = np.arange(3)
    assert read_prompt(tokens) is tokens and read_prompt([]).tolist() == [] and read_prompt([True + 1]).tolist() == [2]


def test_owners_go_into_files_and_come_back() -> None:
    for owner in (None, "bob", b"\x00\xff", 7, ""):
        assert as_owner(as_label(owner)) == owner
    for odd in (True, 1.5, (), object()):
        with pytest.raises(SpecError, match="cannot be written"):
            as_label(odd)
    for label in ([], ["bytes", "xyz"], ["str"], None, 3):
        with pytest.raises(FormatError, match="no owner"):
            as_owner(cast(Any, label))


def test_entries_and_lines_show_what_goes_on_from_what() -> None:
    memory, cache = filled((None, "bob"))
    roots = prefix_roots(cache)
    entries = [*entries_of(roots)]
    assert [(e.checkpoint.length, e.parent, e.label) for e in entries] == [
        (length, above + first if above >= 0 else -1, label)
        for first, label in ((0, ["NoneType", None]), (6, ["str", "bob"]))
        for length, above in ((8, -1), (16, 0), (20, 1), (16, 0), (20, 3), (5, -1))
    ]
    assert [e.checkpoint.tokens.tolist()[-1] for e in entries[:6]] == [1, 1, 1, 2, 2, 3]
    lines = cache.tree().splitlines()
    own = [line.split(" tokens")[0] for line in lines]
    assert own == [
        "8",
        "  16",
        "    20",
        "  16",
        "    20",
        "5",
        "of 'bob'",
        "8",
        "  16",
        "    20",
        "  16",
        "    20",
        "5",
    ]
    assert all(line.endswith("B, in the budget") for line in lines if "tokens" in line)
    assert memory.counters.held_bytes(entries[0].checkpoint) > 0
