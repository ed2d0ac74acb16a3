"""Damages bytes and JSON values as an attacker would: extreme numbers, wrong types, cuts, copies, deep nesting."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

EDGES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 7, 255, 2**15, 2**31 - 1, 2**31, 2**32, 2**40, 2**53 + 1, 2**63 - 1, 2**63, 2**64,
    -(2**31), -(2**63), 0.0, -0.5, 1.5, 1e-300, 1e300, "", " ", "0", "-1", "x", "nan", "../../x", "/etc/passwd", "\x00",
    "\u202e", "\ud7ff", "%s%n{0}", "x" * 5000, [], [[]], {}, {"": None}, [0], [-1], [2**63], ["x"], {"x": 1},
)  # fmt: skip
"""Values that take the place of any other."""

_BYTES = (b"", b"\x00", b"\xff" * 8, b"\x00" * 8, b"{", b"[", b'"', b"\\", b"}}", b"\n", b"\xef\xbb\xbf", b"\xc0\x80")


def damage_bytes(data: bytes, random: Random) -> bytes:
    """Return the bytes with one to eight changes: flipped bits, extreme numbers, cuts, and copies of other places."""
    changed = bytearray(data)
    for _ in range(random.choice((1, 1, 1, 2, 4, 8))):
        at = random.randrange(len(changed) + 1)
        # Headers are at the beginning of files, so damage there is likelier.
        near = random.randrange(min(len(changed), 4096) + 1)
        at = random.choice((at, near, near))
        kind = random.randrange(7)
        if kind == 0 and at < len(changed):
            changed[at] ^= 1 << random.randrange(8)
        elif kind == 1:
            changed[at : at + 1] = bytes([random.randrange(256)])
        elif kind == 2:
            width = random.choice((1, 2, 4, 8))
            edge = random.choice((0, 1, -1, 2**31 - 1, 2**31, 2**63 - 1, 2**63, 2**64 - 1)) % 2 ** (8 * width)
            changed[at : at + width] = edge.to_bytes(width, "little")
        elif kind == 3:
            del changed[at : at + random.choice((1, 2, 8, 64, 1 << 20))]
        elif kind == 4:
            start = random.randrange(len(changed) + 1)
            changed[at:at] = changed[start : start + random.choice((1, 8, 64, 1024))]
        elif kind == 5:
            changed[at:at] = random.choice(_BYTES)
        else:
            changed[at:at] = bytes(random.randrange(256) for _ in range(random.randrange(1, 9)))
    return bytes(changed)


def damage_json(value: Any, random: Random) -> Any:
    """Return a copy of a JSON value with one to four changes, each somewhere in it."""
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        value = _damaged(value, random, lambda root=value: _somewhere(root, random))
    return value


def _damaged(value: Any, random: Random, donor: Callable[[], Any]) -> Any:
    """Damage the value itself, or one of the values inside it."""
    if isinstance(value, dict | list) and value and random.random() < 0.85:
        copy = value.copy()
        key = random.choice(list(copy)) if isinstance(copy, dict) else random.randrange(len(copy))
        kind = random.random()
        if kind < 0.06:
            del copy[key]
        elif kind < 0.1 and isinstance(copy, list):
            copy.insert(key, copy[random.randrange(len(copy))])
        elif kind < 0.1 and isinstance(copy, dict):
            copy[str(key) + random.choice(("x", "", "\x00"))] = copy[key]
        elif kind < 0.14 and isinstance(copy, list):
            copy = copy * random.choice((2, 100))
        else:
            copy[key] = _damaged(copy[key], random, donor)
        return copy
    kind = random.random()
    if isinstance(value, str) and kind < 0.3:
        return _damaged_text(value, random, donor)
    if isinstance(value, int | float) and not isinstance(value, bool) and kind < 0.6:
        return random.choice((value + 1, value - 1, -value, value * 2, value // 2, value + 0.5, str(value), [value]))
    if kind < 0.75:
        return random.choice(EDGES)
    if kind < 0.95:
        return donor()
    return _deep(random)


def _damaged_text(text: str, random: Random, donor: Callable[[], Any]) -> Any:
    """Damage a text. A text that is itself JSON, as in the metadata of safetensors, is damaged as a JSON value."""
    if text[:1] in ("{", "["):
        try:
            return json.dumps(_damaged(json.loads(text), random, donor))
        except ValueError:
            pass
    at = random.randrange(len(text) + 1)
    return text[:at] + str(random.choice(EDGES))[:50] + text[at + random.randrange(3) :]


def _somewhere(value: Any, random: Random) -> Any:
    """Return the value, or a random value inside it."""
    while isinstance(value, dict | list) and value and random.random() < 0.8:
        value = random.choice(list(value.values()) if isinstance(value, dict) else value)
    return value


def _deep(random: Random) -> Any:
    value: Any = random.choice(EDGES)
    for _ in range(random.choice((10, 300, 900))):
        value = [value] if random.random() < 0.5 else {"x": value}
    return value
