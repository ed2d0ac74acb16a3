"""Counts brackets and commas of a JSON body before it is parsed. numpy does it, so other threads can run meanwhile."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

UInt8s: TypeAlias = NDArray[np.uint8]

_IS_VALUE = np.isin(np.arange(256), list(b"{[:"))
"""True for each byte value that begins an object, an array or the value of a key."""


def has_more_values(body: bytes, most: int) -> bool:
    """Return whether a body has more objects, arrays and keys than `most`. Brackets inside of strings do not count."""
    if _count(np.frombuffer(body, np.uint8), b"{[:") <= most:
        return False
    signs = _read_signs(body)
    is_in_string = np.logical_xor.accumulate(signs == ord('"'))
    return int(np.count_nonzero(_IS_VALUE[signs] & ~is_in_string)) > most


def count_longest_list(body: bytes, least: int) -> int:
    """For each array, count the numbers with which it begins.

    They are one more than the commas after the array's bracket, up to the next string or bracket.
    """
    if _count(np.frombuffer(body, np.uint8), b",") < least - 1:
        return 0
    signs = _read_signs(body)
    edges = np.flatnonzero((signs == ord('"')) | (signs == ord("[")) | (signs == ord("]")))
    is_outside = np.cumsum(signs[edges] == ord('"')) % 2 == 0
    lists = np.flatnonzero((signs[edges] == ord("["))[:-1] & is_outside[:-1] & (np.diff(edges) >= least))
    longest = max((_count(signs[edges[i] : edges[i + 1]], b",") + 1 for i in lists), default=0)
    return longest if longest >= least else 0


def _read_signs(body: bytes) -> UInt8s:
    """Return the body's bytes without escaped ones. Each remaining quotation mark begins or ends a string."""
    return np.frombuffer(body.replace(rb"\\", b"").replace(rb"\"", b"") if b"\\" in body else body, np.uint8)


def _count(signs: UInt8s, wanted: bytes) -> int:
    return sum(int(np.count_nonzero(signs == sign)) for sign in wanted)
