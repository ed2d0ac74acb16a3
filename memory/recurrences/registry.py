"""Registers the families of recurrences, each with a small layer on which it is tested."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Generator

from hybridmem.memory.errors import SpecError
from hybridmem.memory.specs import RecurrentSpec
from hybridmem.memory.state.access import Recurrence

Example = Callable[[Generator], tuple[RecurrentSpec, Recurrence]]
"""A function that makes a small layer with random float32 weights: its spec, and the recurrence for rows of that spec.

Any rows of numbers between -1 and 1 must be valid, and must change the outputs.
"""


@dataclass(frozen=True)
class Family:
    """Describes a family of recurrences.

    Attributes:
        name: the name of the family, as in `RecurrentSpec.family`.
        example: makes a small layer, on which the conformance suite runs.
        is_exact: True if replaying rows gives the same bits as the first run. That is false if the recurrence contains
            a matrix product, whose sums depend on the number of rows.
    """

    name: str
    example: Example
    is_exact: bool


FAMILIES: dict[str, Family] = {}


def register_family(name: str, *, is_exact: bool = True) -> Callable[[Example], Example]:
    """Register a family. This is a decorator for the function that makes the family's example."""

    def add(example: Example) -> Example:
        if name in FAMILIES:
            raise SpecError(f"the family {name!r} is registered already; give this one a name of its own")
        FAMILIES[name] = Family(name, example, is_exact)
        return example

    return add
