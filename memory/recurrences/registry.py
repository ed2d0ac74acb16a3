"""The families of recurrences that are known, each with a small layer to try it on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Generator

from memory.errors import SpecError
from memory.specs import RecurrentSpec
from memory.state.access import Recurrence

Example = Callable[[Generator], tuple[RecurrentSpec, Recurrence]]
"""Makes a small layer with random weights in float32: its spec, and the recurrence that runs rows of that spec.

Rows of numbers between -1 and 1 must be valid, and must matter.
"""


@dataclass(frozen=True)
class Family:
    """A family of recurrences.

    Attributes:
        name: as `RecurrentSpec.family`.
        example: a small layer; the conformance suite runs on it.
        is_exact: whether a replay gives the bits of the first run. Not so where the fold holds a matrix product, whose
            sums depend on how many rows it is given.
    """

    name: str
    example: Example
    is_exact: bool


FAMILIES: dict[str, Family] = {}


def register_family(name: str, *, is_exact: bool = True) -> Callable[[Example], Example]:
    """Function decorator: the function makes an example of the family `name`."""

    def add(example: Example) -> Example:
        if name in FAMILIES:
            raise SpecError(f"the family {name!r} is registered already; give this one a name of its own")
        FAMILIES[name] = Family(name, example, is_exact)
        return example

    return add
