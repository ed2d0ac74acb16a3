"""Calls all layer memories of a model together, for steps over trees of draft tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from hybridmem.memory.attention.offload import HostedAttention
from hybridmem.memory.attention_cache import AttentionCache
from hybridmem.memory.blocks.arrays import Int64s
from hybridmem.memory.errors import SpecError
from hybridmem.memory.interface import LayerMemory, Packed, Plans
from hybridmem.memory.layer_memories import LayerMemories, Place, Places
from hybridmem.memory.recurrent_state import RecurrentState
from hybridmem.memory.sequences.draft_trees import DraftTrees
from hybridmem.memory.trees.attention import TreeAttention, TreeHostedAttention
from hybridmem.memory.trees.recurrence import TreeRecurrence


class Branching(Protocol):
    """Declares how a layer memory takes a step in which requests have trees.

    It is plan -> begin -> (the model runs) -> give_back -> settle -> keep. Then the layer memory commits the plan as in
    any step. Its `commit` with no kept tokens aborts at any time before.
    """

    def plan(self, trees: DraftTrees) -> Any:
        """Allocate the blocks that the step will write. Raises CapacityError with nothing changed."""
        ...

    def begin(self, plan: Any) -> None:
        """Copy the blocks that the step must not write in place."""
        ...

    def give_back(self, plan: Any) -> None:
        """Release the blocks that were allocated because any path might be accepted."""
        ...

    def settle(self, plan: Any, accepted: Packed) -> Any:
        """Return the plan of a step that has only the accepted tokens, `accepted`."""
        ...

    def keep(self, plan: Any, paths: Mapping[int, Int64s]) -> None:
        """Move the rows of the accepted paths, request -> tokens, to where the settled plan has them."""
        ...

    def scratch_bytes(self, plan: Any) -> int:
        """Return the bytes outside of the budget that a step holds now."""
        ...


class _AsItIs:
    """Takes steps of a layer memory whose tokens do not see each other, such as cross-attention."""

    def __init__(self, memory: LayerMemory[Any]) -> None:
        self._memory = memory

    def __getattr__(self, name: str) -> Any:
        return getattr(self._memory, name)

    def plan(self, trees: DraftTrees) -> Any:
        return self._memory.plan(trees.packed)

    def begin(self, plan: Any) -> None:
        self._memory.begin(plan)

    def give_back(self, plan: Any) -> None:
        """Do nothing, because no block was allocated."""

    def settle(self, plan: Any, accepted: Packed) -> Any:
        return plan

    def keep(self, plan: Any, paths: Mapping[int, Int64s]) -> None:
        """Do nothing, because no row was stored."""

    def scratch_bytes(self, plan: Any) -> int:
        return 0


class TreeMemories:
    """Holds for each layer memory what takes its steps over trees.

    Attributes:
        places: (layer, kind, name) -> what serves it in such a step.
    Raises SpecError, which names the layer memories that cannot take such steps.
    """

    def __init__(self, layers: LayerMemories, places: Places) -> None:
        self._layers = layers
        found = {name: _branching(name, memory) for name, memory in layers.items()}
        if unable := [name for name, branching in found.items() if branching is None]:
            raise SpecError(
                f"trees of drafts are not for {'; '.join(unable)}: what a token sees there depends on more than the "
                "rows before it; leave parents= out, and feed one path of the tree"
            )
        self._branching: dict[str, Any] = found
        # One place may have several keys. It gets one object for all of them.
        own = {place: _at(place, found[place.group]) for place in places.values()}
        self.places: Places = {key: own[place] for key, place in places.items()}

    def begin(self, trees: DraftTrees) -> Plans:
        """Plan and begin a step in all layer memories. If one of them raises CapacityError, nothing has changed."""
        plans: Plans = {}
        try:
            for name, branching in self._branching.items():
                plans[name] = branching.plan(trees)
            for name, plan in plans.items():
                self._branching[name].begin(plan)
        except BaseException:
            self._layers.commit(plans, trees.packed.nothing)
            raise
        return plans

    def give_back(self, plans: Plans) -> None:
        """Release the blocks that were allocated because any path might be accepted. The plans can still be aborted."""
        for name, plan in plans.items():
            self._branching[name].give_back(plan)

    def settle(self, plans: Plans, accepted: Packed) -> None:
        """Replace plans by those of a step with only the accepted tokens. After an error they can still be aborted."""
        for name in plans:
            plans[name] = self._branching[name].settle(plans[name], accepted)

    def keep(self, plans: Plans, paths: Mapping[int, Int64s]) -> None:
        """Move the rows of the accepted paths to where the settled plans have them."""
        for name, plan in plans.items():
            self._branching[name].keep(plan, paths)

    def scratch_bytes(self, plans: Plans) -> int:
        """Return the bytes outside of the budget that a step holds now for its trees."""
        return sum(int(self._branching[name].scratch_bytes(plan)) for name, plan in plans.items())


def _branching(name: str, memory: Any) -> Branching | None:
    """Return the object that takes a layer memory's steps over trees, or None if the layer memory cannot take any."""
    if isinstance(memory, RecurrentState):
        return TreeRecurrence(memory)
    if isinstance(memory, HostedAttention):
        near = _all_rows(memory.near)
        return None if near is None else TreeHostedAttention(memory, near)
    if (cache := _all_rows(memory)) is not None:
        return TreeAttention(cache)
    return _AsItIs(memory) if name == "cross-attention" else None


def _all_rows(memory: Any) -> AttentionCache | None:
    """Return the attention cache if its queries read all rows; None for its subclasses, whose queries do not."""
    return memory if type(memory) is AttentionCache and not memory.selects else None


def _at(place: Place, branching: Any) -> Place:
    return Place(place.group, branching, place.number, place.position)
