"""Caches the prefixes of prompts in a radix tree over token ids, whose nodes hold checkpoints of a memory.

Attention can continue from any position at which two prompts part; a recurrent layer only from a position whose state
was kept. So the tree holds both: the tokens that were seen, and the checkpoints along them.

    You are a helpful ... | system prompt ends *  | What is my dog called? *
                                                  | My cat is called Zoe. *       * a checkpoint

A hit is a fork of the nearest checkpoint, rolled back by at most the rollback window. Checkpoints take their bytes from
the memory's own budget. When it is full they are closed: first those that save the least recomputation per byte and
have not been used for long (after Pan et al. 2024, "Marconi").
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from memory.blocks.arguments import is_integer
from memory.blocks.arrays import EMPTY, Int64s
from memory.blocks.copying import refuse_to_copy
from memory.errors import BatchError, SequenceError, SpecError
from memory.hybrid import HybridMemory, require_memory
from memory.interface import Sequence
from memory.prefix.radix_tree import NOTHING_SEEN, Node, first_marked, marked_above, split
from memory.prefix.victims import Ranking
from memory.sequences.interrupts import uninterrupted, uninterrupted_call
from memory.sequences.token_buffer import common_prefix

_CLOSED = "this prefix cache is closed; make another one"
_RECLAIMED_SHARE = 64
"""Checkpoints are closed until 1/64 of the budget is freed, even if less is missing. To find those of least worth costs
a look at all of them, and a full memory lacks a little room at almost every step."""


@dataclass(frozen=True)
class Lookup:
    """Says how many tokens of a prompt the cache can reuse, and why not more.

    Attributes:
        n_tokens: length of the prompt.
        by_attention: leading tokens that were seen before; a memory of attention alone could reuse them all.
        by_recurrent: leading tokens behind which a state can be had: that of a checkpoint, or of one rolled back.
        reused: the lesser of the two, and less than `n_tokens`: the last token must be fed for its output.
        why: the reason in words.
    """

    n_tokens: int
    by_attention: int
    by_recurrent: int
    reused: int
    why: str

    @property
    def recomputed(self) -> int:
        return self.n_tokens - self.reused


@dataclass(frozen=True)
class PrefixStats:
    """Counts the hits of a cache, and what it holds.

    Attributes:
        n_lookups, n_hits: prompts opened, and those of which tokens were reused.
        n_tokens, n_reused: tokens of these prompts, and those of them that were reused.
        n_checkpoints, n_evicted: checkpoints that it holds, and those that were closed because the budget was full.
        private_bytes: sum of what closing each checkpoint alone would free; closing all frees at least that.
    """

    n_lookups: int
    n_hits: int
    n_tokens: int
    n_reused: int
    n_checkpoints: int
    n_evicted: int
    private_bytes: int

    @property
    def hit_rate(self) -> float:
        """Return the share of all prompts' tokens that were reused."""
        return self.n_reused / self.n_tokens if self.n_tokens else 0.0


class PrefixCache:
    """Keeps checkpoints of a memory, and finds the longest reusable prefix of a prompt.

    A user who sees how many tokens of a prompt were reused, or how soon the reply begins, can find out what others have
    asked. So prefixes have owners, any hashable values: what was inserted for one owner is found for this owner only,
    as if each had a cache of its own. They share the budget. The owner is None unless it is given, and then all users
    find all prompts.

    Args:
        grid_tokens: `cuts` returns each multiple of this, so that a prompt that parts from others at a position without
            a checkpoint recomputes at most so many tokens; 0 for no such grid.
    Raises:
        SpecError: a model whose sequences depend on more than their tokens (on an encoder), or a wrong `grid_tokens`.
    """

    def __init__(self, memory: HybridMemory, *, grid_tokens: int = 512) -> None:
        if not is_integer(grid_tokens, 0):
            raise SpecError(f"grid_tokens={grid_tokens!r}; give a number of tokens, or 0 for no grid")
        require_memory(memory, "PrefixCache(memory)")
        if memory.spec.of_kind("cross-attention"):
            raise SpecError(
                f"sequences of {memory.spec.model} depend on an encoder, so equal tokens are no equal prefix"
            )
        self._memory: HybridMemory | None = memory
        self.grid_tokens = grid_tokens
        self._lot_bytes = memory.budget_bytes // _RECLAIMED_SHARE
        self._roots: dict[Hashable, Node] = {}  # by owner
        self._checkpoints: dict[Sequence, Node] = {}
        self._ranking = Ranking()
        self._clock = 0
        self._n_lookups = self._n_hits = self._n_tokens = self._n_reused = self._n_evicted = 0
        self._reclaimer = _reclaimer(weakref.ref(self), weakref.ref(memory), self._checkpoints)
        memory.add_reclaimer(self._reclaimer)

    __reduce_ex__ = refuse_to_copy("make one beside each memory; it fills with what is inserted")

    @property
    def memory(self) -> HybridMemory:
        """Return the memory whose checkpoints it keeps. Raises SequenceError: the cache is closed."""
        if self._memory is None:
            raise SequenceError(_CLOSED)
        return self._memory

    # Looking up

    def find(self, token_ids: Seq[int] | Int64s, owner: Hashable = None) -> Lookup:
        """Return what `open` would reuse; nothing changes. Cost: O(tokens matched); int64 arrays are not converted."""
        return self._find(_as_tokens(token_ids), owner)[0]

    def open(self, token_ids: Seq[int] | Int64s, owner: Hashable = None) -> tuple[Sequence, Lookup]:
        """Open a sequence that holds the longest reusable prefix of a prompt already.
        Feed it the rest, `token_ids[lookup.reused:]`, which is at least one token.

        Raises BatchError: no tokens. Cost: `find` and a fork; no tensor is copied.
        """
        tokens = _as_tokens(token_ids)
        if not len(tokens):
            raise BatchError("an empty prompt has no prefix; give at least one token")
        lookup, node = self._find(tokens, owner)
        self._n_lookups += 1
        self._n_tokens += lookup.n_tokens
        if node is None or node.mark is None:
            return self.memory.open(), lookup
        self._touch(node)
        self._n_hits += 1
        self._n_reused += lookup.reused
        with uninterrupted_call() as _until_return:
            sequence = self.memory.fork(node.mark)
            if sequence.length > lookup.reused:
                self.memory.rollback(sequence, to=lookup.reused)
            return sequence, lookup

    def _find(self, tokens: Int64s, owner: Hashable) -> tuple[Lookup, Node | None]:
        n_matched, path, beyond = self._walk(tokens, owner)
        limit = min(n_matched, len(tokens) - 1)
        best, reused = None, 0
        for node in path:
            if node.mark is not None and node.depth <= limit:
                best, reused = node, node.depth
        # A checkpoint a little behind the last common token may be rolled back to it.
        for node in (*(node for node in path if node.depth > limit), *first_marked(beyond)) if limit > reused else ():
            if node.mark is not None and limit > reused and node.mark.horizon <= limit:
                best, reused = node, limit
        by_recurrent = reused if reused < limit else n_matched
        return Lookup(len(tokens), n_matched, by_recurrent, reused, _why(len(tokens), n_matched, reused)), best

    def _walk(self, tokens: Int64s, owner: Hashable) -> tuple[int, list[Node], Node | None]:
        """Return the number of tokens that match, the nodes that end within them, and the node to search further in.

        That is the one inside of which they end, or, if they end between nodes, the last of the path; None if nothing
        is below.
        """
        node, at = self._roots.get(owner, NOTHING_SEEN), 0
        path: list[Node] = []
        while at < len(tokens):
            child = node.children.get(int(tokens[at]))
            if child is None:
                break
            n_common = common_prefix(child.tokens, tokens[at:])
            at += n_common
            if n_common < len(child.tokens):
                return at, path, child
            path.append(child)
            node = child
        return at, path, node if node.children else None

    # Remembering

    def cuts(self, token_ids: Seq[int] | Int64s, start: int, marks: Seq[int] = (), owner: Hashable = None) -> list[int]:
        """Return the positions at which a prefill should pause and `insert` a checkpoint, ascending.

        They lie in (start, len(token_ids)): the position at which this prompt parts from those seen before, the
        positions `marks` of the caller, and the multiples of `grid_tokens`.

        Raises BatchError: a mark that is no position of the prompt.
        """
        tokens = _as_tokens(token_ids)
        if not isinstance(marks, Iterable):
            raise BatchError(f"marks={marks!r}; give a list of positions in the prompt")
        for mark in marks:
            if not is_integer(mark, 0) or mark > len(tokens):
                raise BatchError(
                    f"mark {mark!r} is no position of a prompt of {len(tokens)} tokens; give 0 <= mark <= {len(tokens)}"
                )
        n_matched = self._walk(tokens, owner)[0]
        wanted = {int(mark) for mark in marks} | {n_matched}
        if self.grid_tokens:
            wanted |= set(range(0, len(tokens), self.grid_tokens))
        return sorted(position for position in wanted if start < position < len(tokens))

    def insert(self, sequence: Sequence, owner: Hashable = None) -> None:
        """Keep a checkpoint of a sequence at its present length, for this owner.

        Nothing happens for an empty sequence, at a position that has a checkpoint already, and for a sequence from
        whose middle tokens were dropped: its memory is not what feeding its tokens would give.

        Raises SequenceError. Cost: O(tokens) and a checkpoint, which copies no tensor.
        """
        held_bytes = self.memory.counters.held_bytes(sequence)
        tokens = sequence.tokens if sequence.is_whole else EMPTY
        if not len(tokens):
            return
        with uninterrupted():
            node = self._node_at(tokens, owner)
            if node.mark is None:
                node.mark = self.memory.checkpoint(sequence)
                self._checkpoints[node.mark] = node
                self._ranking.add(node.mark, node.depth - marked_above(node), held_bytes)
                self._count_saved_below(node, node.depth)
            self._touch(node)

    def _count_saved_below(self, node: Node, start: int) -> None:
        """Note that the nearest checkpoints below a node save the tokens from `start` on."""
        below = list(node.children.values())
        while below:
            child = below.pop()
            if child.mark is not None:
                self._ranking.saves(child.mark, child.depth - start)
            else:
                below.extend(child.children.values())

    def _node_at(self, tokens: Int64s, owner: Hashable) -> Node:
        """Return the node that ends with these tokens; make it if there is none."""
        node, at = self._roots.setdefault(owner, Node(EMPTY, 0, None, owner=owner)), 0
        while at < len(tokens):
            rest = tokens[at:]
            child = node.children.get(int(rest[0]))
            if child is None:
                node.children[int(rest[0])] = leaf = Node(rest.copy(), len(tokens), node)
                return leaf
            n_common = common_prefix(child.tokens, rest)
            if n_common < len(child.tokens):
                child = split(child, n_common)
            node, at = child, child.depth
        return node

    def _touch(self, node: Node) -> None:
        self._clock += 1
        if node.mark is not None:
            self._ranking.use(node.mark, self._clock)

    # Forgetting

    def reclaim(self, missing_bytes: int) -> bool:
        """Close checkpoints, those of least worth first, until `missing_bytes` more are free; True if any was closed.

        More are closed at once, up to 1/64 of the budget, so that the next calls find room. A checkpoint that shares
        all its bytes frees none: it is closed last, and only for `missing_bytes`.
        """
        free_bytes, n_before = self.memory.free_bytes, len(self._checkpoints)
        lot_bytes = max(missing_bytes, self._lot_bytes)
        chosen, n_promised = list[Sequence](), 0
        for checkpoint, n_bytes in self._ranking.ascending(self._clock, self.memory.counters.private_bytes):
            if n_promised >= (lot_bytes if n_bytes else missing_bytes):
                break
            chosen.append(checkpoint)
            n_promised += n_bytes
        for checkpoint in chosen:
            # Two that share blocks only with each other free more than was promised for each.
            if self.memory.free_bytes - free_bytes >= lot_bytes:
                break
            self._evict(checkpoint)
        self._n_evicted += n_before - len(self._checkpoints)
        return len(self._checkpoints) < n_before

    def _evict(self, checkpoint: Sequence) -> None:
        """Close a checkpoint, and remove the nodes that only led to it."""
        node: Node | None = self._checkpoints.pop(checkpoint)
        assert node is not None
        node.mark = None
        self._ranking.remove(checkpoint)
        self._count_saved_below(node, marked_above(node))
        self.memory.close(checkpoint)
        while node is not None and node.parent is not None and node.mark is None and len(node.children) < 2:
            parent, first = node.parent, int(node.tokens[0])
            if node.children:  # one child, which takes its tokens
                (child,) = node.children.values()
                child.tokens, child.parent = np.concatenate([node.tokens, child.tokens]), parent
                parent.children[first] = child
                return
            del parent.children[first]
            node = parent
        if node is not None and node.parent is None and not node.children:
            del self._roots[node.owner]

    def clear(self) -> None:
        """Close all checkpoints and forget all tokens."""
        with uninterrupted():
            for checkpoint in list(self._checkpoints):
                self._evict(checkpoint)

    def close(self) -> None:
        """Close all checkpoints and release the memory, which can be used further. Later use raises SequenceError.

        Closing it again does nothing. `with PrefixCache(memory) as cache:` closes it at the end.
        """
        if self._memory is not None and self._memory.is_open:
            self.clear()
            self._memory.remove_reclaimer(self._reclaimer)
        self._memory = None
        self._checkpoints.clear()
        self._roots = {}

    def __enter__(self) -> PrefixCache:
        if self._memory is None:
            raise SequenceError(_CLOSED)
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def stats(self) -> PrefixStats:
        """Return the counts since the cache was made, and the checkpoints that it holds."""
        held = [*self._checkpoints]
        private_bytes = int(self.memory.counters.private_bytes(held).sum())
        counts = (self._n_lookups, self._n_hits, self._n_tokens, self._n_reused, len(held), self._n_evicted)
        return PrefixStats(*counts, private_bytes)

    def __repr__(self) -> str:
        where = "closed" if self._memory is None else f"with {len(self._checkpoints)} checkpoints in {self._memory!r}"
        return f"<PrefixCache {where}>"


def _reclaimer(
    cache: weakref.ref[PrefixCache], memory: weakref.ref[HybridMemory], checkpoints: dict[Sequence, Node]
) -> Callable[[int], bool]:
    """Return the function that a full memory calls for room; it refers to the cache only weakly.

    If the cache was deleted without `close`, no lookup can find its checkpoints: all of them are closed.
    """

    def reclaim(missing_bytes: int) -> bool:
        if (living := cache()) is not None:
            return living.reclaim(missing_bytes)
        owner = memory()
        assert owner is not None, "the memory is the caller"
        owner.remove_reclaimer(reclaim)
        for checkpoint in checkpoints:
            owner.close(checkpoint)
        return bool(checkpoints)

    return reclaim


def _as_tokens(token_ids: Seq[int] | Int64s) -> Int64s:
    try:
        tokens = np.asarray(token_ids)
    except ValueError as error:
        raise BatchError(f"{token_ids!r} are no token ids; give a flat list or array of integers") from error
    if tokens.ndim > 1:
        raise BatchError(f"token ids have shape {tokens.shape}; give one axis, one prompt at a time")
    if not tokens.ndim or (len(tokens) and tokens.dtype.kind not in "iu"):
        raise BatchError(
            f"token_ids={token_ids!r}; give a list or array of integer token ids: encode text with the model's "
            "tokenizer first"
        )
    return tokens.astype(np.int64, copy=False)


def _why(n_tokens: int, n_matched: int, reused: int) -> str:
    if not n_matched:
        return "nothing like it was seen before"
    if reused == n_tokens - 1:
        return "all but the last token, which must be fed for its output"
    if reused == n_matched:
        return f"all {n_matched} tokens that were seen before"
    seen = f"{n_matched} tokens were seen before, and attention could reuse them; "
    if not reused:
        return seen + "recurrent states were kept nowhere on that way"
    return seen + f"recurrent states were kept at {reused}, and tokens {reused} ... {n_matched - 1} are computed again"
