"""Writes and reads one safetensors file for a sequence with its checkpoints and forks. Shared data is stored once.


    tensors    tokens/N (n,) int64, the tokens of one buffer; blocks/NAME OF A POOL (n, block_bytes) uint8;
               passages/N (rows, bytes of a row) uint8, the rows of embeddings of a picture
    metadata   format, version, about (the signature of the memory), members, passages, checksum over all of this

Each member is a sequence or a checkpoint. The file has its length, its record, and which blocks of each pool it refers
to. Tokens and blocks that no earlier member has are the member's own, and its entry has a checksum over these. So
damaged bytes cost only the members that refer to them. The first member is the sequence for which the file was saved.
"""

from __future__ import annotations

import json
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from hybridmem.memory.blocks.arrays import EMPTY, Int64s, ranges
from hybridmem.memory.errors import FormatError
from hybridmem.memory.layer_memories import Held
from hybridmem.memory.storage.checksums import RangesChecksum, checksum_of
from hybridmem.memory.storage.files import (
    BLOCKS,
    CHECKSUM,
    FORMAT_VERSION,
    SEQUENCES_FORMAT,
    require_bytes,
    write_tensors,
)
from hybridmem.memory.storage.names import Names
from hybridmem.memory.storage.passages import SavedPassage, as_tensors, passages_in
from hybridmem.memory.storage.reading import Content, read_content

MemberKind = Literal["sequence", "checkpoint", "fork"]
_TOKENS = "tokens/"


@dataclass(frozen=True)
class Member:
    """Describes one sequence or checkpoint in a file.

    Attributes:
        name: the name under which a fork was saved.
        family: a number. Members with equal numbers belong to one family, so a member may be rolled back to a
            checkpoint among them.
        buffer: the number of the buffer with its tokens. The member has the first `length` tokens of it.
        drops: what `Ledger.drops` returns, with drops numbered from 1.
        held: the member's records, and the blocks of the file to which it refers.
    """

    kind: MemberKind
    name: str
    family: int
    buffer: int
    length: int
    peak: int
    drops: tuple[tuple[int, int], ...]
    held: Held

    def __str__(self) -> str:
        return f"{self.kind}{f' {self.name!r}' if self.name else ''} of {self.length} tokens"


@dataclass(frozen=True)
class SavedFamily:
    """Holds the content of a file.

    Attributes:
        about: facts about the memory that saved the file, as JSON values. After reading, the file's `version` is here,
            too.
        members: all members that are not damaged.
        tokens: the tokens of each buffer, as many as the longest member in the buffer has.
        blocks: pool -> the blocks in pieces, each (n, block_bytes).
        damaged: a text that says which members of a file were left out.
        passages: the rows of pictures in the tokens.
    """

    path: str
    about: dict[str, Any]
    members: list[Member]
    tokens: list[Int64s]
    blocks: dict[str, list[Tensor]]
    damaged: tuple[str, ...] = ()
    passages: tuple[SavedPassage, ...] = ()

    def renamed(self, names: Names) -> SavedFamily:
        """Return the same content with other names for layer memories and pools."""
        members = [replace(member, held=names.renamed_held(member.held)) for member in self.members]
        return replace(self, members=members, blocks=names.of_pools(self.blocks))

    def blocks_for(self, members: Seq[Member]) -> tuple[list[Held], dict[str, Tensor]]:
        """Return the blocks to which some of the members refer, and which of these blocks each member holds."""
        blocks, numbers = dict[str, Tensor](), dict[str, Int64s]()
        for pool, pieces in self.blocks.items():
            whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
            wanted = np.unique(np.concatenate([EMPTY, *(m.held.numbers.get(pool, EMPTY) for m in members)]))
            if len(wanted):
                blocks[pool] = whole if len(wanted) == len(whole) else whole[torch.from_numpy(wanted)]
                numbers[pool] = np.zeros(len(whole), np.int64)
                numbers[pool][wanted] = np.arange(len(wanted))
        held = [
            Held(m.held.records, {pool: numbers[pool][of] for pool, of in m.held.numbers.items() if len(of)})
            for m in members
        ]
        return held, blocks


def write_family(saved: SavedFamily) -> None:
    """Write a file completely or not at all. Raises what `write_tensors` raises, and SpecError in a dry run."""
    require_bytes(piece for pieces in saved.blocks.values() for piece in pieces)
    tensors = {BLOCKS + pool: pieces for pool, pieces in saved.blocks.items()}
    tensors |= {f"{_TOKENS}{i}": [torch.from_numpy(tokens)] for i, tokens in enumerate(saved.tokens)}
    of_passages, about_passages = as_tensors(saved.passages)
    tensors |= of_passages
    entries = [_entry(member) | {CHECKSUM: own} for member, own in zip(saved.members, _checksums(saved), strict=True)]
    metadata = {
        "format": SEQUENCES_FORMAT,
        "version": FORMAT_VERSION,
        "about": json.dumps(saved.about, sort_keys=True),
        "members": json.dumps(entries, sort_keys=True),
        **about_passages,
    }
    write_tensors(saved.path, tensors, metadata, lambda: checksum_of({}, metadata))


def read_family(path: str) -> SavedFamily:
    """Read a file. Raises FormatError, for example if its header or its first member is damaged."""
    return family_in(read_content(path, SEQUENCES_FORMAT))


def family_in(content: Content, *, only_first: bool = False) -> SavedFamily:
    """Return the family in a file of `write_family`, given what `read_content` returned. Raises FormatError.

    Args:
        only_first: leave out all members except the first.
    """
    content.check(covers_tensors=False)
    path, tensors, metadata = content.path, content.tensors, content.metadata
    try:
        about = {**json.loads(metadata["about"]), "version": int(metadata["version"])}
        entries = json.loads(metadata["members"])[: 1 if only_first else None]
        most = max((len(own) for own in tensors.values() if own.dim()), default=0)
        members = [_read_entry(entry, most) for entry in entries]
        tokens = [tensors[f"{_TOKENS}{i}"].numpy() for i in range(1 + max(m.buffer for m in members))]
        blocks = {name.removeprefix(BLOCKS): [own] for name, own in tensors.items() if name.startswith(BLOCKS)}
        passages, lost = passages_in(tensors, metadata)
        saved = SavedFamily(path, about, members, tokens, blocks, passages=tuple(passages))
        _check(saved)
        right = [own == entry[CHECKSUM] for own, entry in zip(_checksums(saved), entries, strict=True)]
    except (KeyError, ValueError, TypeError, IndexError, AttributeError, RecursionError, OverflowError) as error:
        raise FormatError(f"{path} holds what memory.save never writes ({error!r}); save the sequence again") from error
    whole = [all(right[i] for i in needed) for needed in _needed(saved)]
    if not whole[0]:
        raise FormatError(f"{path} is damaged: its checksum is not that of its content; save the sequence again")
    left_out = tuple(str(member) for member, is_whole in zip(members, whole, strict=True) if not is_whole)
    members = [member for member, is_whole in zip(members, whole, strict=True) if is_whole]
    lengths = [max((m.length for m in members if m.buffer == i), default=0) for i in range(len(tokens))]
    tokens = [own[:length] for own, length in zip(tokens, lengths, strict=True)]
    return replace(saved, members=members, tokens=tokens, damaged=(*left_out, *lost))


# The functions below write and read the entries of members, as JSON.


def _entry(member: Member) -> dict[str, Any]:
    return {
        "kind": member.kind, "name": member.name, "family": member.family, "buffer": member.buffer,
        "length": member.length, "peak": member.peak, "drops": member.drops, "records": member.held.records,
        "blocks": {pool: _runs(numbers) for pool, numbers in member.held.numbers.items()},
    }  # fmt: skip


def _read_entry(entry: dict[str, Any], most: int) -> Member:
    if entry["kind"] not in get_args(MemberKind):
        raise ValueError(f"a {entry['kind']!r}")
    numbers = {str(pool): _numbers(runs, most) for pool, runs in entry["blocks"].items()}
    drops = tuple((int(position), int(number)) for position, number in entry["drops"])
    family, buffer, length, peak = (int(entry[name]) for name in ("family", "buffer", "length", "peak"))
    held = Held(dict(entry["records"]), numbers)
    return Member(entry["kind"], str(entry["name"]), family, buffer, length, peak, drops, held)


def _runs(numbers: Int64s) -> list[list[int]]:
    """Return [first, count] of each stretch of consecutive numbers.

    There are few stretches, because most blocks are in order.
    """
    starts = np.flatnonzero(np.diff(numbers, prepend=-2) != 1)
    counts = np.diff(starts, append=len(numbers))
    runs: list[list[int]] = np.stack([numbers[starts], counts], 1).tolist()
    return runs


def _numbers(runs: list[list[int]], most: int) -> Int64s:
    """Return the numbers that `_runs` has encoded. No block occurs twice, so there are at most `most`."""
    starts, counts = np.array(runs, np.int64).reshape(-1, 2).T
    if ((counts < 0) | (counts > most)).any() or counts.sum() > most:
        raise ValueError(f"runs of blocks {runs!r:.80}")
    return ranges(starts, starts + counts)


def _check(saved: SavedFamily) -> None:
    """Raise ValueError unless each member lies within the tokens and blocks, and the first is the sequence."""
    if any(tokens.ndim != 1 for tokens in saved.tokens):
        raise ValueError("tokens of several axes")
    if wrong := [pool for pool, (own,) in saved.blocks.items() if own.dtype != torch.uint8]:
        raise ValueError(f"blocks of {wrong[0]} that are no bytes")
    for i, member in enumerate(saved.members):
        if (member.kind == "sequence") != (i == 0) or any(number < 1 for _, number in member.drops):
            raise ValueError(f"the kind or the drops of member {i}")
        if not 0 <= member.buffer < len(saved.tokens) or not 0 <= member.length <= len(saved.tokens[member.buffer]):
            raise ValueError(f"the tokens of member {i}")
        for pool, numbers in member.held.numbers.items():
            if len(numbers) and not 0 <= numbers.min() <= numbers.max() < len(saved.blocks[pool][0]):
                raise ValueError(f"the blocks of member {i}")


# The functions below compute checksums.


def _ends(saved: SavedFamily) -> dict[str, Int64s]:
    """Return, for each pool and each buffer of tokens, where each member's own part ends: (members,), ascending."""
    n = len(saved.members)
    ends = {BLOCKS + pool: np.zeros(n, np.int64) for pool in saved.blocks}
    ends |= {f"{_TOKENS}{i}": np.zeros(n, np.int64) for i in range(len(saved.tokens))}
    for i, member in enumerate(saved.members):
        ends[f"{_TOKENS}{member.buffer}"][i] = member.length
        for pool, numbers in member.held.numbers.items():
            ends[BLOCKS + pool][i] = numbers.max(initial=-1) + 1
    return {name: np.maximum.accumulate(own) for name, own in ends.items()}


def _checksums(saved: SavedFamily) -> list[str]:
    """Return for each member the checksum of its own tokens and blocks, as hexadecimal text."""
    digests = [RangesChecksum() for _ in saved.members]
    pieces = {BLOCKS + pool: of for pool, of in saved.blocks.items()}
    pieces |= {f"{_TOKENS}{i}": [torch.from_numpy(tokens)] for i, tokens in enumerate(saved.tokens)}
    for name, ends in sorted(_ends(saved).items()):
        starts = np.concatenate([[0], ends[:-1]])
        for i in np.flatnonzero(ends > starts).tolist():
            digests[i].begin(name, int(starts[i]), int(ends[i]))
        at = 0
        for piece in pieces[name]:
            first, last = np.searchsorted(ends, [at, at + len(piece) - 1], side="right").tolist()
            for i in range(first, min(last + 1, len(ends))):
                digests[i].update(piece[max(starts[i] - at, 0) : max(ends[i] - at, 0)])
            at += len(piece)
    return [digest.hexdigest() for digest in digests]


def _needed(saved: SavedFamily) -> list[set[int]]:
    """Return for each member the set of members to whose own tokens or blocks it refers, itself included."""
    ends = _ends(saved)
    found = []
    for i, member in enumerate(saved.members):
        needed = {i}
        for pool, numbers in member.held.numbers.items():
            needed.update(np.searchsorted(ends[BLOCKS + pool], numbers, side="right").tolist())
        if member.length:
            last = int(np.searchsorted(ends[f"{_TOKENS}{member.buffer}"], member.length - 1, side="right"))
            needed.update(j for j in range(last + 1) if saved.members[j].buffer == member.buffer)
        found.append(needed)
    return found
