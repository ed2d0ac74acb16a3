"""Makes random JSON schemas out of the parts that schemas of people have: `make_schemas`."""

from __future__ import annotations

import random
from collections.abc import Callable

from benchmarks.schema_cases import (
    BY_HAND,
    DATE,
    EMAIL,
    FLAG,
    NUMBER,
    TEXT,
    TIME,
    UUID,
    WHOLE,
    Schema,
    limited,
    many,
    matching,
    maybe,
    obj,
    one,
    sized,
)

_WORDS = (
    "id name title kind status count total price city country tags items owner created updated enabled email score "
    "width height unit code message level path size parent children start end notes"
).split()
_PATTERNS = (
    "^[A-Z]{2,4}$",
    "^[a-z-]{1,12}$",
    "^[0-9]{4}$",
    "^v[0-9]+\\.[0-9]+$",
    "^(low|medium|high)$",
    "^#[0-9a-f]{6}$",
)


def make_schemas(n: int, seed: int = 0) -> list[tuple[str, Schema]]:
    """Return `n` pairs of family and schema: those written by hand, or a sample of them, and random ones."""
    rng = random.Random(seed)
    by_hand = [(family, schema) for family, schemas in BY_HAND.items() for schema in schemas]
    if n < len(by_hand):
        return rng.sample(by_hand, n // 2) + [_made(rng) for _ in range(n - n // 2)]
    return by_hand + [_made(rng) for _ in range(n - len(by_hand))]


def _made(rng: random.Random) -> tuple[str, Schema]:
    depth = rng.choice((1, 1, 2, 2, 3))
    return f"generated, depth {depth}", _object(rng, depth)


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(_WORDS, rng.randint(1, 6 - depth))
    n_required = rng.randint(min(1, len(names)), len(names))
    properties = {name: _any(rng, depth - 1) for name in names}
    if rng.random() < 0.2:
        described = {name: schema | {"description": f"The {name}."} for name, schema in properties.items()}
        return {"type": "object", "properties": described, "required": names[:n_required], "title": "Thing"}
    required = {name: properties[name] for name in names[:n_required]}
    return obj({name: properties[name] for name in names[n_required:]}, **required)


def _any(rng: random.Random, depth: int) -> Schema:
    if depth <= 0 or rng.random() < 0.5:
        return _SCALARS[rng.randrange(len(_SCALARS))](rng)
    kinds: tuple[Callable[[], Schema], ...] = (
        lambda: _object(rng, depth),
        lambda: many(_any(rng, depth - 1), minItems=rng.randint(0, 1), maxItems=rng.randint(1, 3)),
        lambda: maybe(_object(rng, depth)),
        lambda: {"anyOf": [_object(rng, depth), WHOLE]},
        lambda: {"type": "object", "additionalProperties": _any(rng, depth - 1), "maxProperties": 2},
    )
    return rng.choice(kinds)()


_SCALARS: tuple[Callable[[random.Random], Schema], ...] = (
    lambda rng: rng.choice((TEXT, WHOLE, NUMBER, FLAG)),
    lambda rng: rng.choice((DATE, TIME, EMAIL, UUID)),
    lambda rng: one(*rng.sample(_WORDS, rng.randint(1, 4))),
    lambda rng: sized(low := rng.randint(0, 5), low + rng.randint(0, 30)),
    lambda rng: limited(low := rng.randint(-100, 100), low + rng.randint(0, 1000)),
    lambda rng: limited(low := rng.randint(-10, 10), low + rng.randint(1, 10), "number"),
    lambda rng: matching(rng.choice(_PATTERNS)),
    lambda rng: maybe(rng.choice((TEXT, WHOLE, FLAG))),
    lambda rng: {"const": rng.choice((1, "fixed", True, None))},
    lambda rng: many(rng.choice((TEXT, WHOLE, one("a", "b"))), maxItems=3),
)
