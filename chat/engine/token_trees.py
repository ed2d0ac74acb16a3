"""Defines drafts that branch: where several tokens may come next, all of them are verified in one step.

    text ... the |  0 cat - 1 sat - 2 on        parents = [-1, 0, 1, -1, 3]
                 |  3 dog - 4 ran

A draft is a list of tokens. In a chain, each token follows the one before. In a tree, tokens have parents.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from hybridmem.memory import HybridMemory, SpecError

_LOG = logging.getLogger("hybridmem.chat")


class TokenTree(list[int]):
    """Holds the tokens of a draft that branches. Tokens with the same parent differ.

    Attributes:
        parents: for each token, the index of the token before it, which is smaller; or -1 for the end of the text.
        n_first: the first path has this many tokens, which are the first of the list. It is the likeliest.
    """

    def __init__(self, branches: Sequence[Sequence[int]]) -> None:
        """Merge paths that each begin at the end of the text. Where they begin alike, they share their tokens."""
        super().__init__()
        self.parents: list[int] = []
        self.n_first = len(branches[0])
        nodes = dict[tuple[int, int], int]()
        for branch in branches:
            node = -1
            for token_id in branch:
                before, node = node, nodes.setdefault((node, token_id), len(self))
                if node == len(self):
                    self.append(token_id)
                    self.parents.append(before)


def branch(first: Sequence[int], others: Iterable[Sequence[int]]) -> list[int]:
    """Return a draft with this path and others: a tree, or the path itself if the others add nothing."""
    tree = TokenTree([first, *others])
    return tree if len(tree) > len(first) else list(first)


def parents_of(draft: Sequence[int]) -> Sequence[int]:
    """Return for each token of a draft the index of the token before it, or -1 for the end of the text."""
    return draft.parents if isinstance(draft, TokenTree) else range(-1, len(draft) - 1)


def n_first(draft: Sequence[int]) -> int:
    """Return how many tokens the likeliest path of a draft has."""
    return draft.n_first if isinstance(draft, TokenTree) else len(draft)


def next_nodes(draft: Sequence[int]) -> dict[tuple[int, int], int]:
    """Map each token's parent and id to its index in the draft."""
    return {pair: node for node, pair in enumerate(zip(parents_of(draft), draft, strict=True))}


def right_nodes(draft: Sequence[int], token_ids: Iterable[int]) -> list[int]:
    """Return which tokens of a draft are right if the text goes on with these tokens. They are one path."""
    following, path = next_nodes(draft), list[int]()
    for token_id in token_ids:
        node = following.get((path[-1] if path else -1, token_id))
        if node is None:
            break
        path.append(node)
    return path


def n_levels(draft: Sequence[int]) -> int:
    """Return how many tokens the longest path of a draft has."""
    depths = list[int]()
    for parent in parents_of(draft):
        depths.append(1 if parent < 0 else 1 + depths[parent])
    return max(depths, default=0)


def has_branch_at(draft: Sequence[int], n_right: int) -> bool:
    """Return whether there is an alternative to the first path's token with this index."""
    before = n_right - 1
    return any(parent == before for parent in list(parents_of(draft))[n_first(draft) :])


def takes_trees(memory: HybridMemory) -> bool:
    """Return whether a memory takes steps over trees. The reason why not is logged."""
    sequence = memory.open()
    try:
        memory.step({sequence: [0, 0]}, parents={sequence: [-1, -1]})  # It is never entered, so it changes nothing.
    except SpecError as error:
        _LOG.info("drafts are chains: %s", error)
        return False
    finally:
        memory.close(sequence)
    return True
