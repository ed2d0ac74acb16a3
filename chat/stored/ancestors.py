"""Knows which nodes of a tree are above which, without a list of them for each node."""

from __future__ import annotations


class Ancestors:
    """Answers whether a node is above another one, while a tree grows.

    Each node has its parent and a jump to a node further above, so that any node above is found in O(log nodes) steps
    (Myers, An applicative random-access stack, 1983). Of a chain of n nodes, sets of all nodes above each would take
    n squared entries.
    """

    def __init__(self) -> None:
        self._depths = dict[str, int]()
        self._parents = dict[str, str]()
        self._jumps = dict[str, str]()

    def __contains__(self, node: str) -> bool:
        return node in self._depths

    def add(self, node: str, parent: str | None) -> None:
        """Add a node below one that is there; None: it is a root."""
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
        """True if `node` is `over` itself, or above it. Cost: O(log nodes)."""
        if over is None or over not in self._depths or node not in self._depths:
            return False
        depth = self._depths[node]
        while self._depths[over] > depth:
            jump = self._jumps[over]
            over = jump if self._depths[jump] >= depth else self._parents[over]
        return over == node
