"""Defines the step over trees of draft tokens. Each sequence has a tree, or a chain of tokens as in any step."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hybridmem.memory.blocks.arrays import Int64s
from hybridmem.memory.blocks.scoped import without_gradients
from hybridmem.memory.errors import BatchError, SequenceError
from hybridmem.memory.interface import Packed, Plans, Sequence
from hybridmem.memory.layer_memories import LayerMemories, Places
from hybridmem.memory.sequences.batch import TokenLists
from hybridmem.memory.sequences.draft_trees import DraftTree, DraftTrees, read_trees
from hybridmem.memory.step import Rows, Step, StepOwner
from hybridmem.memory.trees.memories import TreeMemories


class TreeStep(Step):
    """Feeds new tokens to a model, some of which branch: `memory.step(requests, parents={sequence: parents})`.

    The model runs as in any step. Each token sees its sequence and the tokens on its path, at the position that is the
    sequence's length plus its depth. One path of each tree is then accepted; without that, leaving the step raises
    BatchError, and every sequence is as it was. Raises BatchError or SequenceError if the parents make no trees.

    Args:
        parents: see `HybridMemory.step`. Sequences whose tokens are a chain need no parents.
    """

    def __init__(
        self, owner: StepOwner, sequences: list[Sequence], tokens: TokenLists, outputs: Rows, parents: object
    ) -> None:
        super().__init__(owner, sequences, tokens, outputs)
        self._given = read_trees(parents, sequences, tokens.counts)
        self._paths: dict[int, Int64s] = {}
        self._trees: DraftTrees | None = None

    @property
    def _memories(self) -> TreeMemories:
        """Return the object that takes the steps of all layer memories. See `Step._places` for why it is not held."""
        memories: TreeMemories = self.owner.trees
        return memories

    @property
    def _places(self) -> Places:
        return self._memories.places if self._given else super()._places

    def plan(self, layers: LayerMemories, packed: Packed) -> tuple[Packed, Plans]:
        """See `Step.plan`."""
        if not self._given:
            return super().plan(layers, packed)
        peaks: Int64s = self.owner.ledger.peaks[packed.slots]
        self._trees = trees = DraftTrees.of(packed, self._given, peaks)
        return trees.packed, self._memories.begin(trees)

    def layout(self, most_tokens: int | None = None) -> None:
        """Return None: such a step is not replayed, because each tree has other paths."""
        self._entered()

    @property
    def scratch_bytes(self) -> int:
        """Return the bytes outside of the budget that the step holds now for its trees: rows that wait for acceptance,
        and states of one layer at a time.
        """
        return self._memories.scratch_bytes(self._entered().plans)

    def accept(self, accepted: Mapping[Sequence, int | list[int]]) -> None:
        """Keep one path of each of these sequences' trees, or only the first n tokens of a chain.

        Args:
            accepted: sequence -> the tokens of its tree to keep, by their indices among the sequence's tokens, from the
                sequence's end on; an empty list keeps nothing. For a chain it is such a list, or the number of tokens.
        Raises:
            SequenceError: a sequence is not in this step. BatchError: the tokens are no path of the tree.
            RollbackError: more tokens of a chain would be taken back than the rollback window holds.
        """
        self._entered()
        if not isinstance(accepted, Mapping):
            raise BatchError(f"{accepted!r} accepts nothing; give {{sequence: tokens of one path}}")
        paths, numbers = dict[int, Int64s](), dict[Sequence, int | list[int]]()
        for sequence, given in accepted.items():
            if sequence not in self.sequences:
                raise SequenceError(f"{sequence!r} is not in this step; accept only what was fed")
            i = self.sequences.index(sequence)
            if i in self._given:
                paths[i] = self._given[i].check_path(given, sequence)
            elif isinstance(given, list | tuple | np.ndarray):
                chain = DraftTree(np.arange(-1, int(self.tokens.counts[i]) - 1))
                numbers[sequence] = len(chain.check_path(given, sequence))
            else:
                numbers[sequence] = given
        super().accept(numbers)
        self._paths |= paths

    def _kept(self, packed: Packed) -> Int64s:
        """Let all layer memories keep the accepted paths. From here on, the open step has only their tokens."""
        kept, opened, trees = super()._kept(packed), self._entered(), self._trees
        if trees is None:
            return kept
        if missing := [self.sequences[i] for i in self._given if i not in self._paths]:
            raise BatchError(
                f"no path of the tree of {missing[0]!r} is accepted; say which tokens to keep, as in step.accept"
                "({sequence: [0, 2]}), or [] for none. Every sequence is as it was"
            )
        paths = {int(packed.place[i]): path for i, path in self._paths.items()}
        kept[list(paths)] = [len(path) for path in paths.values()]
        accepted = trees.accepted(paths, self.owner.ledger.peaks[packed.slots])
        self.owner.settle(opened, accepted, self._memories)
        if not self.owner.store.is_dry:
            with without_gradients():
                self._memories.keep(opened.plans, paths)
        return kept
