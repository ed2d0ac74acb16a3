"""Caches the prefixes of prompts in a radix tree over token ids, whose nodes hold checkpoints of a memory.

Attention can continue from any position up to which two prompts agree. A recurrent layer can continue only from a
position whose state was kept. So the tree holds both the tokens that were seen and the checkpoints along them.

    You are a helpful ... | system prompt ends *  | What is my dog called? *
                                                  | My cat is called Zoe. *       * a checkpoint

A hit is a fork of the nearest checkpoint, rolled back by at most the rollback window. Checkpoints take their bytes from
the memory's own budget. When the budget is full they give way, which means that they move out of it or are closed.
Those go first that save the least recomputation per byte and have not been used for long (after Pan et al. 2024,
"Marconi"). With `max_bytes` they move to host memory, then to files, and a hit brings them back into the budget.
Otherwise they are closed.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Hashable, Iterable, Set
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from time import monotonic

import numpy as np

from hybridmem.defaults import PREFIX_GRID_TOKENS
from hybridmem.memory.blocks.arena import read_budget
from hybridmem.memory.blocks.arguments import is_integer
from hybridmem.memory.blocks.arrays import EMPTY, Int64s
from hybridmem.memory.blocks.copying import refuse_to_copy
from hybridmem.memory.errors import BatchError, CapacityError, FormatError, SequenceError, SpecError
from hybridmem.memory.hybrid import HybridMemory, coordinator_of, require_memory
from hybridmem.memory.interface import Sequence
from hybridmem.memory.prefix.digests import Resumable, resumable_prefixes
from hybridmem.memory.prefix.kept import Kept, Record
from hybridmem.memory.prefix.lookup import Lookup, PrefixStats, Tier, explain, read_prompt, read_seconds
from hybridmem.memory.prefix.radix_tree import Node, first_marked, marks_below
from hybridmem.memory.prefix.saved import entries_of, tree_text
from hybridmem.memory.sequences.interrupts import uninterrupted_call

_CLOSED = "this prefix cache is closed; make another one"


class PrefixCache:
    """Keeps checkpoints of a memory, and finds the longest reusable prefix of a prompt.

    A user who sees how many tokens of a prompt were reused, or how soon the reply begins, can find out what others have
    asked. So prefixes have owners, which may be any hashable values. Only an owner finds what was inserted for that
    owner, as if each owner had a cache of its own. All owners share the budget. The default owner is None; if no owners
    are given, all users find all prompts.

    Args:
        grid_tokens: `cuts` returns each multiple of this number. So a prompt that differs from earlier ones after a
            position without a checkpoint recomputes at most this many tokens that were seen before. 0: there is no such
            grid.
        max_bytes: the most bytes, such as "8GiB", that checkpoints may take outside of the budget, in host memory and
            files together. Other swapped-out sequences count too. The memory's `host_budget` limits the bytes in host
            memory, and its `disk_budget` those of the files in `swap_dir`. 0: checkpoints that give way are closed.
        seconds_to_live: checkpoints that were not used for this time are closed, unless `insert` gives another time.
            None: they stay as long as there is room.
        now: returns the time in seconds.
    Raises:
        SpecError: the model has an encoder, so that sequences depend on more than their tokens; or an option is wrong.
    """

    def __init__(
        self, memory: HybridMemory, *, grid_tokens: int = PREFIX_GRID_TOKENS, max_bytes: float | str = 0,
        seconds_to_live: float | None = None, now: Callable[[], float] = monotonic,
    ) -> None:  # fmt: skip
        if not is_integer(grid_tokens, 0):
            raise SpecError(f"grid_tokens={grid_tokens!r}; give a number of tokens, or 0 for no grid")
        require_memory(memory, "PrefixCache(memory)")
        if memory.spec.of_kind("cross-attention"):
            raise SpecError(
                f"sequences of {memory.spec.model} depend on an encoder, so equal tokens are no equal prefix"
            )
        self.grid_tokens = grid_tokens
        self.seconds_to_live = read_seconds(seconds_to_live)
        n_outside = 0 if max_bytes in (0, "0") else read_budget(max_bytes, "max_bytes")
        self._own: Kept | None = Kept(memory, n_outside, now)
        self._n_lookups = self._n_hits = self._n_tokens = self._n_reused = self._n_lost = 0
        self._reclaimer = _reclaimer(weakref.ref(self), weakref.ref(memory), self._kept.records)
        memory.add_reclaimer(self._reclaimer)

    __reduce_ex__ = refuse_to_copy("make one beside each memory; it fills with what is inserted")

    @property
    def memory(self) -> HybridMemory:
        """Return the memory whose checkpoints it keeps. Raises SequenceError if the cache is closed."""
        return self._kept.memory

    @property
    def _kept(self) -> Kept:
        if self._own is None:
            raise SequenceError(_CLOSED)
        self._own.mend()
        return self._own

    def _changing(self) -> AbstractContextManager[None]:
        return self._kept.changing()

    # The methods below look up.

    def find(self, token_ids: Seq[int] | Int64s, owner: Hashable = None) -> Lookup:
        """Return what `open` would reuse, and change nothing.

        Cost: O(tokens matched). An int64 array is not converted.
        """
        tokens = read_prompt(token_ids)
        with self._changing():
            self._kept.expire()
        return self._find(tokens, owner)[0]

    def open(self, token_ids: Seq[int] | Int64s, owner: Hashable = None) -> tuple[Sequence, Lookup]:
        """Open a sequence that already holds the longest reusable prefix of a prompt.

        Feed it the other tokens, `token_ids[lookup.reused:]`, of which there is at least one.

        Raises BatchError if there are no tokens. Cost: `find` and a fork. If the checkpoint is outside of the budget,
        those of its blocks are copied back that no checkpoint in the budget shares.
        """
        tokens = read_prompt(token_ids)
        if not len(tokens):
            raise BatchError("an empty prompt has no prefix; give at least one token")
        with uninterrupted_call(holds_all=True) as _until_return, self._changing():
            self._kept.expire()
            lookup, node = self._find_in_budget(tokens, owner)
            self._n_lookups += 1
            self._n_tokens += lookup.n_tokens
            if node is None or node.mark is None:
                return self.memory.open(), lookup
            self._kept.touch(node)
            self._n_hits += 1
            self._n_reused += lookup.reused
            return coordinator_of(self.memory).handed_over(self._fork, node.mark, lookup.reused), lookup

    def _fork(self, checkpoint: Sequence, n_tokens: int, made: list[Sequence]) -> Sequence:
        sequence = coordinator_of(self.memory).copy(checkpoint, False, True, made)
        if sequence.length > n_tokens:
            self.memory.rollback(sequence, to=n_tokens)
        return sequence

    def checkpoints_of(self, token_ids: Seq[int] | Int64s, owner: Hashable = None) -> list[Sequence]:
        """Return the checkpoints of prefixes of these tokens, the shortest first.

        `open` could continue from each of them.
        """
        path = self._kept.tree.walk(read_prompt(token_ids), owner)[1]
        return [node.mark for node in path if node.mark is not None]

    def checkpoints_behind(self, token_ids: Seq[int] | Int64s, owner: Hashable = None) -> list[Sequence]:
        """Return the checkpoints of longer prompts that begin with these tokens, the newest last."""
        return marks_below(self._kept.tree, read_prompt(token_ids), owner)

    def fetch(self, token_ids: Seq[int] | Int64s, owner: Hashable = None) -> list[Sequence]:
        """Begin to read, in another thread, the files of the checkpoint that `open` would use.

        Return that checkpoint in a list, which is empty if the checkpoint has no files. `open` would wait for the
        files, so ask `has_arrived` before.
        """
        node = self._find(read_prompt(token_ids), owner)[1] if self._kept.outside.has_any else None
        if node is None or node.mark is None or not node.mark.is_swapped or self._kept.outside.fetch(node.mark):
            return []
        return [node.mark]

    def has_arrived(self, checkpoint: Sequence) -> bool:
        """True if the reading of a checkpoint's files, which `fetch` has begun, has finished."""
        return checkpoint not in self._kept.outside.ranking or self._kept.outside.fetch(checkpoint)

    def note_speed(self, seconds_a_token: float) -> None:
        """Set how long computing a token of a prompt takes.

        From then on, a checkpoint that takes longer to read back than to compute is closed instead of moved.
        """
        self._kept.outside.seconds_a_token = seconds_a_token

    @property
    def seconds_a_token(self) -> float | None:
        """Return the time that `note_speed` was last called with, or None."""
        return self._kept.outside.seconds_a_token

    def _find_in_budget(self, tokens: Int64s, owner: Hashable) -> tuple[Lookup, Node | None]:
        """Find the same as `_find`, and bring the checkpoint back into the budget.

        If the budget has no room for it, find another checkpoint.
        """
        passed_over = set[Node]()
        while True:
            lookup, node = self._find(tokens, owner, passed_over)
            if node is None or node.mark is None or not node.mark.is_swapped:
                return lookup, node
            try:
                self._kept.bring_back(node)
            except CapacityError:
                passed_over.add(node)
            except (FormatError, OSError):  # The tokens of the unreadable file are computed again.
                self._kept.evict(node.mark)
                self._n_lost += 1
            else:
                return lookup, node

    def _find(
        self, tokens: Int64s, owner: Hashable, passed_over: Set[Node] = frozenset()
    ) -> tuple[Lookup, Node | None]:
        n_matched, path, beyond = self._kept.tree.walk(tokens, owner)
        limit = min(n_matched, len(tokens) - 1)
        best, reused = None, 0
        for node in path:
            if node.mark is not None and node.depth <= limit and node not in passed_over:
                best, reused = node, node.depth
        # A checkpoint a little after the last common token may be rolled back to it.
        for node in (*(node for node in path if node.depth > limit), *first_marked(beyond)) if limit > reused else ():
            if node.mark is not None and limit > reused and node.mark.horizon <= limit and node not in passed_over:
                best, reused = node, limit
        by_recurrent = reused if reused < limit else n_matched
        tier: Tier = "" if best is None or best.mark is None else self._kept.outside.tier_of(best.mark)
        why = explain(len(tokens), n_matched, reused)
        n_taken_back = 0 if best is None else best.depth - reused
        return Lookup(len(tokens), n_matched, by_recurrent, reused, why, tier, n_taken_back), best

    # The methods below remember prefixes.

    def cuts(self, token_ids: Seq[int] | Int64s, start: int, marks: Seq[int] = (), owner: Hashable = None) -> list[int]:
        """Return the positions at which a prefill should pause and `insert` a checkpoint, ascending.

        The positions lie in (start, len(token_ids)). They are the position after which this prompt differs from those
        seen before, the caller's positions `marks`, and the multiples of `grid_tokens`.

        Raises BatchError if a mark is no position of the prompt.
        """
        tokens = read_prompt(token_ids)
        if not isinstance(marks, Iterable):
            raise BatchError(f"marks={marks!r}; give a list of positions in the prompt")
        for mark in marks:
            if not is_integer(mark, 0) or mark > len(tokens):
                raise BatchError(
                    f"mark {mark!r} is no position of a prompt of {len(tokens)} tokens; give 0 <= mark <= {len(tokens)}"
                )
        n_matched = self._kept.tree.walk(tokens, owner)[0]
        wanted = {int(mark) for mark in marks} | {n_matched}
        if self.grid_tokens:
            wanted |= set(range(0, len(tokens), self.grid_tokens))
        return sorted(position for position in wanted if start < position < len(tokens))

    def insert(
        self, sequence: Sequence, owner: Hashable = None, *, priority: float | None = None,
        seconds_to_live: float | None = None,
    ) -> None:  # fmt: skip
        """Keep a checkpoint of a sequence at its present length, for this owner.

        A position has at most one checkpoint. An empty sequence gets none. Neither does a sequence from whose middle
        tokens were dropped, because its memory is not what feeding its tokens would give.

        Args:
            priority: a factor on the checkpoint's worth when checkpoints give way. The default is 1.
            seconds_to_live: the checkpoint is closed if it was not used for this time. None: the time that was given to
                the cache.
        Raises:
            SequenceError: the handle is bad. SpecError: an option is bad. Nothing has changed then.
        Cost: O(tokens) and a checkpoint, which copies no tensor.
        """
        if priority is not None and not (isinstance(priority, int | float) and priority > 0):
            raise SpecError(f"priority={priority!r}; give a number above 0: 2 for twice the worth of others")
        seconds = self.seconds_to_live if read_seconds(seconds_to_live) is None else seconds_to_live
        kept = self._kept
        held_bytes = self.memory.counters.held_bytes(sequence)
        tokens = sequence.tokens if sequence.is_whole else EMPTY
        if not len(tokens):
            return
        with kept.changing():
            kept.expire()
            node, checkpoint, is_new = kept.keep(sequence, tokens, owner, held_bytes)
            if is_new or seconds_to_live is not None:
                kept.let_live(checkpoint, math.inf if seconds is None else seconds)
            if priority is not None:
                kept.prefer(checkpoint, priority)
            kept.touch(node)
            kept.bound_books()

    def pin(self, token_ids: Seq[int] | Int64s, owner: Hashable = None) -> int:
        """Keep the checkpoint that `open` would use for this prompt until `unpin` or `clear`.

        Return the checkpoint's position.

        It neither gives way nor expires, so no other sequence can use its part of the budget. Raises BatchError if
        there is no checkpoint.
        """
        return self._prefer(token_ids, owner, math.inf, math.inf)

    def unpin(self, token_ids: Seq[int] | Int64s, owner: Hashable = None) -> int:
        """Let a checkpoint that was pinned for the same prompt give way again, and expire as the cache says."""
        return self._prefer(token_ids, owner, 1.0, math.inf if self.seconds_to_live is None else self.seconds_to_live)

    def _prefer(self, token_ids: Seq[int] | Int64s, owner: Hashable, priority: float, seconds: float) -> int:
        tokens = read_prompt(token_ids)
        with self._changing():
            self._kept.expire()
            # No prompt contains the token -1, so `_find` may reuse all tokens before it.
            node = self._find(np.append(tokens, -1), owner)[1]
            if node is None or node.mark is None:
                raise BatchError(f"no checkpoint of these {len(tokens)} tokens is cached; insert a sequence with them")
            self._kept.prefer(node.mark, priority)
            self._kept.let_live(node.mark, seconds)
            return node.depth

    # The methods below forget prefixes.

    def reclaim(self, missing_bytes: int) -> bool:
        """Make checkpoints give way, least worth first, until `missing_bytes` are free. True if any byte was freed.

        Each call frees more than that, up to 1/64 of the budget, so that the next calls find room. Moving or closing a
        checkpoint that shares all its bytes frees none. So it gives way last, and only for `missing_bytes`.
        """
        with self._changing():
            return self._kept.reclaim(missing_bytes)

    def tree(self) -> str:
        """Return all checkpoints as text, with the tokens, bytes and tier of one checkpoint on each line.

        A checkpoint stands below the one that it continues.
        """
        return tree_text(self._kept.tree.roots, self._kept.outside.tier_of, self.memory.counters.held_bytes)

    def resumable(self) -> list[Resumable]:
        """Return the prefixes from which prompts can continue, by digests of tokens. Cost: one pass over all tokens."""
        return list(resumable_prefixes(self._kept.tree.roots, self._kept.outside.tier_of))

    # The methods below keep prefixes across restarts.

    def save(self, folder: str | Path, lock: AbstractContextManager[object] | None = None) -> int:
        """Write all checkpoints to a folder, replacing those that it holds. Return the bytes of all their blocks.

        Blocks that several checkpoints share are written once, and blocks that are already in the folder are not
        written again. The folder can be read at any time: a save that fails or is killed leaves the earlier content.
        Owners must be None, texts, bytes or integers. A `lock`, such as `engine.lock`, keeps other threads away from
        the memory. The caller must not hold it: this call holds it while it copies blocks, 64 MiB at a time, and
        releases it while it hashes and writes them.

        Raises SpecError in a dry run, if `folder` is no folder, or for an owner of another type; or OSError. Cost: the
        bytes of new blocks.
        """
        return self.memory.folders.save(folder, entries_of(self._kept.tree.roots), lock or nullcontext())

    def load(self, folder: str | Path) -> int:
        """Add the checkpoints of a folder that a cache with an equal memory has saved. Return their number.

        Their blocks are read when a prompt needs them. If a file is damaged or gone by then, only the checkpoints in
        that file are lost.

        Raises FormatError if there is no such folder, or if its list is damaged or comes from another memory. Then
        nothing has changed. Cost: reading the tokens of all checkpoints.
        """
        with self._changing():
            n_before = len(self._kept.nodes)
            self._kept.load(folder, self.seconds_to_live)
            return len(self._kept.nodes) - n_before

    def forget(self, token_ids: Seq[int] | Int64s, owner: Hashable = None, *, behind: int = 0) -> int:
        """Close the checkpoints of prefixes of these tokens, pinned ones too. Return their number.

        Two kinds of checkpoints stay, because other prompts need them: those after which several prompts continue
        differently, and those up to position `behind`.
        """
        tokens = read_prompt(token_ids)
        with self._changing():
            return self._kept.forget(tokens, owner, behind)

    def clear(self) -> None:
        """Close all checkpoints and forget all tokens."""
        with self._changing():
            for checkpoint in list(self._kept.nodes):
                self._kept.evict(checkpoint)

    def close(self) -> None:
        """Close all checkpoints and release the memory, which can still be used.

        Later use of the cache raises SequenceError, but closing it again does nothing. `with PrefixCache(memory) as
        cache:` closes the cache at the end.
        """
        if self._own is not None and self._own.memory.is_open:
            self.clear()
            self._own.memory.remove_reclaimer(self._reclaimer)
            self._own.outside.close()
        if self._own is not None:
            self._own.records.clear()
        self._own = None

    def __enter__(self) -> PrefixCache:
        if self._own is None:
            raise SequenceError(_CLOSED)
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def stats(self) -> PrefixStats:
        """Return the counts since the cache was made, and counts of the checkpoints that it holds now."""
        held = [*self._kept.nodes]
        outside = self._kept.outside
        private_bytes = int(self.memory.counters.private_bytes(held).sum())
        counts = (self._n_lookups, self._n_hits, self._n_tokens, self._n_reused, len(held), self._kept.n_evicted)
        moves = len(outside.ranking), outside.n_moved, outside.n_returned, self._n_lost
        return PrefixStats(*counts, private_bytes, *moves, self._kept.n_expired, self._kept.book_bytes)

    def __repr__(self) -> str:
        kept = self._own
        where = "closed" if kept is None else f"with {len(kept.nodes)} checkpoints in {kept.memory!r}"
        return f"<PrefixCache {where}>"


def _reclaimer(
    cache: weakref.ref[PrefixCache], memory: weakref.ref[HybridMemory], checkpoints: dict[Sequence, Record]
) -> Callable[[int], bool]:
    """Return the function that a full memory calls for room. It refers to the cache only weakly.

    If the cache was deleted without `close`, no lookup can find its checkpoints, so the function closes all of them.
    """

    def reclaim(missing_bytes: int) -> bool:
        if (living := cache()) is not None:
            return living.reclaim(missing_bytes)
        owner = memory()
        assert owner is not None, "the memory is the caller"
        owner.remove_reclaimer(reclaim)
        for checkpoint in checkpoints:
            if not checkpoint.closed:
                owner.close(checkpoint)
        return bool(checkpoints)

    return reclaim
