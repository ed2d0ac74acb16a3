"""Describes trees of draft tokens: which token of a request follows which, and which of them lie on one path.

This module computes positions and indices only, without tensors.

    the sequence ......... length |  0 - 1 - 3      parents = [-1, 0, 0, 1]
                                  |   \\- 2          depths  = [ 0, 1, 1, 2]

A token's parent comes before the token in its request, and -1 stands for the sequence's end. So a token's position is
the sequence's length plus its depth. Rows are stored in the order of the request, and branches share those of the
tokens that they have in common.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from hybridmem.memory.blocks.arguments import is_integer
from hybridmem.memory.blocks.arrays import EMPTY, Int64s, ranges, starts_of
from hybridmem.memory.errors import BatchError, SequenceError
from hybridmem.memory.interface import Packed, Sequence


@dataclass(frozen=True)
class DraftTree:
    """Holds one request's tree.

    Attributes:
        parents: (n,) the index of each token's parent among the request's tokens, which is smaller than its own; or -1.
    """

    parents: Int64s

    @cached_property
    def depths(self) -> Int64s:
        """Return (n,) how many tokens of the tree come before each token on its path."""
        depths = np.zeros_like(self.parents)
        for i, parent in enumerate(self.parents.tolist()):
            depths[i] = 0 if parent < 0 else depths[parent] + 1
        return depths

    @cached_property
    def n_levels(self) -> int:
        """Return the number of tokens of the longest path."""
        return int(self.depths.max()) + 1

    @property
    def is_chain(self) -> bool:
        """True if each token follows the one before, as those of a request without a tree do."""
        return bool((self.parents == np.arange(-1, len(self.parents) - 1)).all())

    @cached_property
    def leaves(self) -> Int64s:
        """Return the tokens that no other token follows. Each token lies on the path of one of them."""
        return np.setdiff1d(np.arange(len(self.parents)), self.parents)

    def path_to(self, node: int) -> Int64s:
        """Return the tokens from the sequence's end to this token, which is the last of them."""
        found = []
        while node >= 0:
            found.append(node)
            node = int(self.parents[node])
        return np.array(found[::-1], np.int64)

    def check_path(self, path: object, sequence: Sequence) -> Int64s:
        """Return a path as an array. Raises BatchError unless it is a list of tokens that follow each other."""
        given = path.tolist() if hasattr(path, "tolist") else path
        if not isinstance(given, list | tuple) or not all(is_integer(node) for node in given):
            raise BatchError(
                f"accepting {path!r} of the tree of {sequence!r}; give the list of the tokens to keep, which are one "
                "path of the tree from the sequence's end, or an empty list"
            )
        parents, before = self.parents.tolist(), -1
        for node in given:
            if not 0 <= node < len(parents) or parents[node] != before:
                follows = [child for child, parent in enumerate(parents) if parent == before]
                where = "the sequence's end" if before < 0 else f"token {before}"
                raise BatchError(
                    f"accepting {given} of the tree of {sequence!r}: token {node} does not follow {where}; there, "
                    f"{follows or 'nothing'} does"
                )
            before = int(node)
        return np.array(given, np.int64)


def read_trees(parents: object, sequences: list[Sequence], counts: Int64s) -> dict[int, DraftTree]:
    """Read and check the parents of requests: index of a sequence -> its tree. Chains are left out.

    Raises BatchError or SequenceError, which name the sequence and the value.
    """
    if not isinstance(parents, Mapping):
        raise BatchError(f"parents={parents!r}; give {{sequence: the index of each token's parent, or -1}}")
    found = dict[int, DraftTree]()
    for sequence, given in parents.items():
        if sequence not in sequences:
            raise SequenceError(f"parents are given for {sequence!r}, which has no tokens in this step")
        i = sequences.index(sequence)
        tree = DraftTree(_read_parents(given, sequence, int(counts[i])))
        if not tree.is_chain:
            found[i] = tree
    return found


def _read_parents(given: Any, sequence: Sequence, n_tokens: int) -> Int64s:
    values = given.tolist() if hasattr(given, "tolist") else given
    if not isinstance(values, list | tuple) or not all(is_integer(parent) for parent in values):
        raise BatchError(f"parents of {sequence!r} are {given!r}; give an integer for each token")
    if len(values) != n_tokens:
        raise BatchError(f"{sequence!r} has {len(values)} parents for {n_tokens} tokens; give one for each token")
    for i, parent in enumerate(values):
        if not -1 <= parent < i:
            raise BatchError(
                f"the parent of token {i} of {sequence!r} is {parent}; give the index of a token before it, or -1 for "
                "the sequence's end"
            )
    return np.array(values, np.int64)


@dataclass(frozen=True)
class DraftTrees:
    """Holds the trees of a step, by the step's own order of requests.

    Attributes:
        packed: the step. Its positions are those that the model sees, and its peaks are those of the longest paths.
        trees: index of a request -> its tree, in ascending order.
    """

    packed: Packed
    trees: dict[int, DraftTree]

    @staticmethod
    def of(packed: Packed, trees: dict[int, DraftTree], peaks: Int64s) -> DraftTrees:
        """Place the trees of the caller's requests in a step. `peaks` (S,) are the sequences' peaks before the step."""
        placed = dict(sorted((int(packed.place[i]), tree) for i, tree in trees.items()))
        positions, new_peaks = packed.positions.copy(), packed.peaks.copy()
        for i, tree in placed.items():
            positions[packed.cu_seqlens[i] : packed.cu_seqlens[i + 1]] = packed.starts[i] + tree.depths
            new_peaks[i] = max(peaks[i], packed.starts[i] + tree.n_levels)
        return DraftTrees(replace(packed, positions=positions, peaks=new_peaks), placed)

    @cached_property
    def requests(self) -> Int64s:
        """Return the requests that have trees, ascending."""
        return np.fromiter(self.trees, np.int64, len(self.trees))

    @cached_property
    def others(self) -> Int64s:
        """Return the requests without trees, ascending."""
        return np.setdiff1d(np.arange(len(self.packed.slots)), self.requests)

    @cached_property
    def nodes(self) -> Int64s:
        """Return (N,) the packed indices of all tokens of trees."""
        return ranges(self.packed.cu_seqlens[:-1][self.requests], self.packed.cu_seqlens[1:][self.requests])

    @cached_property
    def other_tokens(self) -> Int64s:
        """Return the packed indices of the tokens of requests without trees."""
        return ranges(self.packed.cu_seqlens[:-1][self.others], self.packed.cu_seqlens[1:][self.others])

    @cached_property
    def stored(self) -> Packed:
        """Return the step in the positions at which its rows are stored: one after the other, after the sequence."""
        return replace(self.packed, positions=ranges(self.packed.starts, self.packed.ends))

    @cached_property
    def deepest(self) -> Packed:
        """Return the step as if each tree were its longest path. Its token ids are no tokens."""
        counts = self.packed.counts.copy()
        counts[self.requests] = [tree.n_levels for tree in self.trees.values()]
        return self._with_counts(counts, np.zeros(int(counts.sum()), np.int64), self.packed.peaks)

    def accepted(self, paths: Mapping[int, Int64s], peaks: Int64s) -> Packed:
        """Return the step of the accepted tokens alone, as if no other tokens had been drafted.

        Args:
            paths: request -> the tokens of its tree to keep, perhaps none.
            peaks: (S,) the sequences' peaks before the step.
        """
        counts, new_peaks = self.packed.counts.copy(), self.packed.peaks.copy()
        tokens = [np.arange(*self.packed.cu_seqlens[i : i + 2]) for i in range(len(counts))]
        for i, path in paths.items():
            tokens[i], counts[i] = self.packed.cu_seqlens[i] + path, len(path)
            new_peaks[i] = max(int(peaks[i]), int(self.packed.starts[i]) + len(path))
        return self._with_counts(counts, self.packed.token_ids[np.concatenate(tokens)], new_peaks)

    def _with_counts(self, counts: Int64s, token_ids: Int64s, peaks: Int64s) -> Packed:
        packed = self.packed
        positions = ranges(packed.starts, packed.starts + counts)
        return Packed(packed.slots, packed.starts, starts_of(counts), peaks, token_ids, positions, packed.place)

    @cached_property
    def paths_to_nodes(self) -> tuple[Int64s, Int64s]:
        """Return the tokens on the path to each token, token after token, and (N + 1,) where each path begins.

        Tokens are counted from the first of their tree.
        """
        paths = [tree.path_to(node) for tree in self.trees.values() for node in range(len(tree.parents))]
        return np.concatenate(paths), starts_of(np.fromiter(map(len, paths), np.int64, len(paths)))

    @cached_property
    def paths(self) -> Paths:
        """Return the paths to all leaves."""
        rows, counts, owners = list[Int64s](), list[int](), list[int]()
        firsts = starts_of(self.packed.counts[self.requests]).tolist()
        for at, (first, tree) in enumerate(zip(firsts, self.trees.values(), strict=False)):
            for leaf in tree.leaves.tolist():
                rows.append(first + tree.path_to(leaf))
                counts.append(len(rows[-1]))
                owners.append(at)
        return Paths(np.concatenate(rows or [EMPTY]), starts_of(np.array(counts, np.int64)), np.array(owners, np.int64))


@dataclass(frozen=True)
class Paths:
    """Holds the paths to the leaves of all trees of a step.

    Attributes:
        rows: the tokens of each path, path after path, as indices of `DraftTrees.nodes`.
        cu_rows: (P + 1,) path p has rows [cu_rows[p], cu_rows[p + 1]).
        owners: (P,) the path's tree, as an index of `DraftTrees.requests`, ascending.
    """

    rows: Int64s
    cu_rows: Int64s
    owners: Int64s

    def part(self, begin: int, end: int) -> Paths:
        """Return paths [begin, end)."""
        cu_rows = self.cu_rows[begin : end + 1]
        return Paths(self.rows[cu_rows[0] : cu_rows[-1]], cu_rows - cu_rows[0], self.owners[begin:end])
