"""Finds out whether a node of a tree is an ancestor of another one, without a list of all ancestors for each node."""

from __future__ import annotations


class Ancestors:
    """Says whether a node is an ancestor of another one, while the tree grows.

    Each node has a link to its parent, and a jump to a node further above. So any ancestor is found in O(log nodes)
    steps (Myers, An applicative random-access stack, 1983). In a chain of n nodes, a set of ancestors for each node
    would take n squared entries in all.
    """

    def __init__(self) -> None:
        self._depths = dict[str, int]()
        self._parents = dict[str, str]()
        self._jumps = dict[str, str]()

    def __contains__(self, node: str) -> bool:
        return node in self._depths

    def add(self, node: str, parent: str | None) -> None:
        """Add a node below `parent`, which was added before. None: the node is a root."""
        if parent is None:
            self._depths[node], self._parents[node], self._jumps[node] = 0, node, node
            return
        depths, jump = self._depths, self._jumps[parent]
        further = self._jumps[jump]
        is_even = depths[parent] - depths[jump] == depths[jump] - depths[further]
        depths[node], self._parents[node], self._jumps[node] = (
            depths[parent] + 1,
            parent,
            further if is_even else parent,
        )

    def has(self, node: str, *, over: str | None) -> bool:
        """Return whether `node` is `over` itself or an ancestor of it. Cost: O(log nodes)."""
        if over is None or over not in self._depths or node not in self._depths:
            return False
        depth = self._depths[node]
        while self._depths[over] > depth:
            jump = self._jumps[over]
            over = jump if self._depths[jump] >= depth else self._parents[over]
        return over == node
