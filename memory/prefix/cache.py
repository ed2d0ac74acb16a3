"""Caches the prefixes of prompts in a radix tree over token ids, whose nodes hold checkpoints of a memory.

Attention can continue from any position at which two prompts part; a recurrent layer only from a position whose state
was kept. So the tree holds both: the tokens that were seen, and the checkpoints along them.

    You are a helpful ... | system prompt ends *  | What is my dog called? *
                                                  | My cat is called Zoe. *       * a checkpoint

A hit is a fork of the nearest checkpoint, rolled back by at most the rollback window. Checkpoints take their bytes from
the memory's own budget. When it is full they give way: first those that save the least recomputation per byte and have
not been used for long (after Pan et al. 2024, "Marconi"). They move to host memory, then to files (`max_bytes`), from
where a hit brings them back; or they are closed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Set
from collections.abc import Sequence as Seq
from pathlib import Path

from memory.blocks.arena import read_budget
from memory.blocks.arguments import is_integer
from memory.blocks.arrays import EMPTY, Int64s
from memory.blocks.copying import refuse_to_copy
from memory.errors import BatchError, CapacityError, FormatError, SequenceError, SpecError
from memory.hybrid import HybridMemory, require_memory
from memory.interface import Sequence
from memory.prefix.lookup import Lookup, PrefixStats, Tier, explain, read_prompt
from memory.prefix.outside import Outside
from memory.prefix.radix_tree import Node, RadixTree, first_marked, marked_above, relatives
from memory.prefix.saved import entries_of, owned
from memory.prefix.victims import Ranking
from memory.sequences.interrupts import uninterrupted, uninterrupted_call

_CLOSED = "this prefix cache is closed; make another one"
_RECLAIMED_SHARE = 64
"""Checkpoints are closed until 1/64 of the budget is freed, even if less is missing. To find those of least worth costs
a look at all of them, and a full memory lacks a little room at almost every step."""


class PrefixCache:
    """Keeps checkpoints of a memory, and finds the longest reusable prefix of a prompt.

    A user who sees how many tokens of a prompt were reused, or how soon the reply begins, can find out what others have
    asked. So prefixes have owners, any hashable values: what was inserted for one owner is found for this owner only,
    as if each had a cache of its own. They share the budget. The owner is None unless it is given, and then all users
    find all prompts.

    Args:
        grid_tokens: `cuts` returns each multiple of this, so that a prompt that parts from others at a position without
            a checkpoint recomputes at most so many tokens; 0 for no such grid.
        max_bytes: bytes that checkpoints may take outside of the budget, in host memory and files together, like "8GiB"
            (what else is swapped out counts too); how many of them in which is the memory's `host_budget`, `swap_dir`
            and `disk_budget`. 0: checkpoints that give way are closed.
    Raises:
        SpecError: a model whose sequences depend on more than their tokens (on an encoder), or a wrong option.
    """

    def __init__(self, memory: HybridMemory, *, grid_tokens: int = 512, max_bytes: float | str = 0) -> None:
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
        self._tree = RadixTree()
        self._checkpoints: dict[Sequence, Node] = {}
        self._ranking = Ranking()
        self._outside = Outside(memory, 0 if max_bytes in (0, "0") else read_budget(max_bytes, "max_bytes"))
        self._clock = 0
        self._n_lookups = self._n_hits = self._n_tokens = self._n_reused = self._n_evicted = self._n_lost = 0
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
        return self._find(read_prompt(token_ids), owner)[0]

    def open(self, token_ids: Seq[int] | Int64s, owner: Hashable = None) -> tuple[Sequence, Lookup]:
        """Open a sequence that holds the longest reusable prefix of a prompt already.
        Feed it the rest, `token_ids[lookup.reused:]`, which is at least one token.

        Raises BatchError: no tokens. Cost: `find` and a fork; a tensor is copied only if the checkpoint is outside of
        the budget: then what others there do not share with it is copied back.
        """
        tokens = read_prompt(token_ids)
        if not len(tokens):
            raise BatchError("an empty prompt has no prefix; give at least one token")
        lookup, node = self._find_in_budget(tokens, owner)
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

    def fetch(self, token_ids: Seq[int] | Int64s, owner: Hashable = None) -> list[Sequence]:
        """Begin to read the files of the checkpoint that `open` would use, in another thread; return it, if it has any.

        `open` would wait for them; ask `has_arrived` before.
        """
        node = self._find(read_prompt(token_ids), owner)[1] if self._outside.has_any else None
        if node is None or node.mark is None or not node.mark.is_swapped or self._outside.fetch(node.mark):
            return []
        return [node.mark]

    def has_arrived(self, checkpoint: Sequence) -> bool:
        """True if nothing that `fetch` has begun for a checkpoint is still being read."""
        return checkpoint not in self._outside.ranking or self._outside.fetch(checkpoint)

    def note_speed(self, seconds_a_token: float) -> None:
        """Note how long a token of a prompt takes. What takes longer to read back is closed, not moved outside."""
        self._outside.seconds_a_token = seconds_a_token

    def _find_in_budget(self, tokens: Int64s, owner: Hashable) -> tuple[Lookup, Node | None]:
        """Find as `_find`, and bring the checkpoint back into the budget; without room for it, find another one."""
        passed_over = set[Node]()
        while True:
            lookup, node = self._find(tokens, owner, passed_over)
            if node is None or node.mark is None or not node.mark.is_swapped:
                return lookup, node
            try:
                with uninterrupted():
                    self._outside.bring_back(node.mark)
                    self._ranking.add(node.mark, node.depth - marked_above(node), self._held_bytes(node.mark))
                    self._touch(node)
            except CapacityError:
                passed_over.add(node)
            except (FormatError, OSError):  # what its file held is computed again
                self._evict(node.mark)
                self._n_lost += 1
            else:
                return lookup, node

    def _find(
        self, tokens: Int64s, owner: Hashable, passed_over: Set[Node] = frozenset()
    ) -> tuple[Lookup, Node | None]:
        n_matched, path, beyond = self._tree.walk(tokens, owner)
        limit = min(n_matched, len(tokens) - 1)
        best, reused = None, 0
        for node in path:
            if node.mark is not None and node.depth <= limit and node not in passed_over:
                best, reused = node, node.depth
        # A checkpoint a little behind the last common token may be rolled back to it.
        for node in (*(node for node in path if node.depth > limit), *first_marked(beyond)) if limit > reused else ():
            if node.mark is not None and limit > reused and node.mark.horizon <= limit and node not in passed_over:
                best, reused = node, limit
        by_recurrent = reused if reused < limit else n_matched
        tier: Tier = "" if best is None or best.mark is None else self._outside.tier_of(best.mark)
        why = explain(len(tokens), n_matched, reused)
        return Lookup(len(tokens), n_matched, by_recurrent, reused, why, tier), best

    # Remembering

    def cuts(self, token_ids: Seq[int] | Int64s, start: int, marks: Seq[int] = (), owner: Hashable = None) -> list[int]:
        """Return the positions at which a prefill should pause and `insert` a checkpoint, ascending.

        They lie in (start, len(token_ids)): the position at which this prompt parts from those seen before, the
        positions `marks` of the caller, and the multiples of `grid_tokens`.

        Raises BatchError: a mark that is no position of the prompt.
        """
        tokens = read_prompt(token_ids)
        if not isinstance(marks, Iterable):
            raise BatchError(f"marks={marks!r}; give a list of positions in the prompt")
        for mark in marks:
            if not is_integer(mark, 0) or mark > len(tokens):
                raise BatchError(
                    f"mark {mark!r} is no position of a prompt of {len(tokens)} tokens; give 0 <= mark <= {len(tokens)}"
                )
        n_matched = self._tree.walk(tokens, owner)[0]
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
            node = self._tree.node_at(tokens, owner)
            if node.mark is not None and node.mark.is_swapped:
                self._close(node.mark)  # the same was computed again, and is in the budget
                node.mark = None
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
                self._ranking_of(child.mark).saves(child.mark, child.depth - start)
            else:
                below.extend(child.children.values())

    def _touch(self, node: Node) -> None:
        self._clock += 1
        if node.mark is not None:
            self._ranking_of(node.mark).use(node.mark, self._clock)

    def _ranking_of(self, checkpoint: Sequence) -> Ranking:
        return self._outside.ranking if checkpoint in self._outside.ranking else self._ranking

    def _held_bytes(self, checkpoint: Sequence) -> int:
        return self.memory.counters.held_bytes(checkpoint)

    # Forgetting

    def reclaim(self, missing_bytes: int) -> bool:
        """Make checkpoints give way, those of least worth first, until `missing_bytes` more are free; True if any did.

        More do so at once, up to 1/64 of the budget, so that the next calls find room. A checkpoint that shares all its
        bytes frees none: it gives way last, and only for `missing_bytes`.
        """
        free_bytes = self.memory.free_bytes
        lot_bytes = max(missing_bytes, self._lot_bytes)
        chosen, n_promised = list[Sequence](), 0
        for checkpoint, n_bytes in self._ranking.ascending(self._clock, self.memory.counters.private_bytes):
            if n_promised >= (lot_bytes if n_bytes else missing_bytes):
                break
            chosen.append(checkpoint)
            n_promised += n_bytes
        n_gone = 0
        for checkpoint in chosen:
            # Two that share blocks only with each other free more than was promised for each.
            if self.memory.free_bytes - free_bytes >= lot_bytes:
                break
            self._give_way(checkpoint)
            n_gone += 1
        return n_gone > 0

    def _give_way(self, checkpoint: Sequence) -> None:
        """Move a checkpoint out of the budget; close it if that does not pay, or if there is no room outside."""
        node = self._checkpoints[checkpoint]
        saved = node.depth - marked_above(node)
        if self._outside.take(checkpoint, relatives(node), saved, self._clock, self._drop_outside):
            self._ranking.remove(checkpoint)
        else:
            self._n_evicted += 1
            self._evict(checkpoint)

    def _drop_outside(self, checkpoint: Sequence) -> None:
        """Close a checkpoint outside of the budget for lack of room there."""
        self._n_evicted += 1
        self._evict(checkpoint)

    def _close(self, checkpoint: Sequence) -> Node:
        """Close a checkpoint, and return the node that it was the mark of."""
        node = self._checkpoints.pop(checkpoint)
        node.mark = None
        self._ranking_of(checkpoint).remove(checkpoint)
        self.memory.close(checkpoint)
        return node

    def _evict(self, checkpoint: Sequence) -> None:
        """Close a checkpoint, and remove the nodes that only led to it."""
        node = self._close(checkpoint)
        self._count_saved_below(node, marked_above(node))
        self._tree.prune(node)

    # Across restarts

    def save(self, folder: str | Path) -> int:
        """Write all checkpoints to a folder, instead of those that it holds; return the bytes of their blocks.

        What several of them share is written once, and what the folder has already is not written again. The folder can
        be read at any time: a save that fails or is killed leaves what was there. Owners are None, texts, bytes or
        integers.

        Raises SpecError: a dry run, no folder, or another owner. OSError. Cost: the bytes of new blocks.
        """
        return self.memory.folders.save(folder, entries_of(self._tree.roots))

    def load(self, folder: str | Path) -> int:
        """Add the checkpoints of a folder, which a cache like this one saved; return their number.

        Their blocks are read when a prompt needs them. A file that is damaged or gone then costs its checkpoint alone.

        Raises FormatError: no such folder, a damaged list, or that of another memory; nothing has changed. Cost: their
        tokens, read.
        """
        with uninterrupted():
            n_before = len(self._checkpoints)
            for label, checkpoint in owned(self.memory.folders.load(folder)):
                node = self._tree.node_at(checkpoint.tokens, label)
                if node.mark is not None:
                    self.memory.close(checkpoint)
                    continue
                node.mark = checkpoint
                self._checkpoints[checkpoint] = node
                self._outside.add(checkpoint, node.depth - marked_above(node), self._clock, 1)
                self._count_saved_below(node, node.depth)
            return len(self._checkpoints) - n_before

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
            self._outside.close()
        self._memory = None
        self._checkpoints.clear()
        self._tree = RadixTree()

    def __enter__(self) -> PrefixCache:
        if self._memory is None:
            raise SequenceError(_CLOSED)
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def stats(self) -> PrefixStats:
        """Return the counts since the cache was made, and the checkpoints that it holds."""
        held = [*self._checkpoints]
        outside = self._outside
        private_bytes = int(self.memory.counters.private_bytes(held).sum())
        counts = (self._n_lookups, self._n_hits, self._n_tokens, self._n_reused, len(held), self._n_evicted)
        moves = len(outside.ranking), outside.n_moved, outside.n_returned, self._n_lost
        return PrefixStats(*counts, private_bytes, *moves)

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
