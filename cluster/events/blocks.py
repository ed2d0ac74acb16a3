"""Cuts resumable prefixes into blocks of equal length, because routers of other projects count prefixes in blocks.

Such a router counts the blocks with which a prompt begins, and assumes that a replica can continue after each of them.
So a block is listed only if the memory can continue after it and after every block before it. That needs a checkpoint
there, or one that rolls back to there. If blocks have the length of the prefix cache's grid, these are the checkpoints
of the grid.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hybridmem.memory.prefix import Resumable, as_label, digests_at


@dataclass(frozen=True)
class Block:
    """Holds a block of tokens after which a prompt can continue.

    Attributes:
        parent: the digest of the block before it. None for the first block.
        owner: the owner whose prompts can continue, as text. None: prompts of all owners can.
        tier: the tier of the checkpoint.
    """

    digest: bytes
    parent: bytes | None
    token_ids: tuple[int, ...]
    owner: str | None
    tier: str


def resumable_blocks(prefixes: Iterable[Resumable], block_tokens: int) -> dict[bytes, Block]:
    """Return digest -> block, each block after its parent. Cost: one pass over the tokens of each checkpoint."""
    found: dict[bytes, Block] = {}
    for prefix in prefixes:
        mark = prefix.checkpoint
        if mark.closed or prefix.n_tokens != mark.length:
            continue
        tokens, horizon, parent = mark.tokens, mark.horizon, None
        for position, digest in digests_at(tokens, range(block_tokens, mark.length + 1, block_tokens), prefix.owner):
            if position >= horizon and digest not in found:
                ids = tuple(tokens[position - block_tokens : position].tolist())
                owner = None if prefix.owner is None else str(as_label(prefix.owner)[1])
                found[digest] = Block(digest, parent, ids, owner, prefix.tier)
            parent = digest
    return _with_parents(found)


def _with_parents(found: dict[bytes, Block]) -> dict[bytes, Block]:
    """Return the blocks whose ancestors are all listed, parents first."""
    children: dict[bytes | None, list[Block]] = {}
    for block in found.values():
        children.setdefault(block.parent, []).append(block)
    whole: dict[bytes, Block] = {}
    waiting = children.get(None, [])
    while waiting:
        block = waiting.pop()
        whole[block.digest] = block
        waiting.extend(children.get(block.digest, ()))
    return whole


def changes(before: dict[bytes, Block], now: dict[bytes, Block]) -> tuple[list[Block], list[Block]]:
    """Return the removed blocks and the new ones, parents first."""
    gone = [block for digest, block in before.items() if digest not in now]
    return gone, [block for digest, block in now.items() if digest not in before]
