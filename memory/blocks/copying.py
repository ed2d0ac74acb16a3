"""Refuses copies of objects that are bound to one memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from hybridmem.memory.errors import SequenceError


def refuse_to_copy(remedy: str) -> Callable[[Any, Any], NoReturn]:
    """Return a `__reduce_ex__` for objects that cannot be copied, pickled or sent to another process.

    The function raises SequenceError, whose message names the remedy.
    """

    def refuse(self: Any, protocol: Any) -> NoReturn:
        raise SequenceError(f"a {type(self).__name__} cannot be copied, pickled or sent to another process; {remedy}")

    return refuse
