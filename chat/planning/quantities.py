"""Reads numbers as people write them."""

from __future__ import annotations

import re

from hybridmem.memory import SpecError

_MOST_TOKENS = 1 << 24


def read_tokens(option: str, text: str) -> int:
    """Read a number of tokens, such as `32768`, `32k` or `1M`. Raises SpecError.

    k is 1,024 and M its square, as model makers use them.
    """
    match = re.fullmatch(r"\s*(\d{1,9}(?:\.\d{1,6})?)\s*([kKmM]?)\s*", text, re.ASCII)
    n_tokens = float(match[1]) * 1024 ** " km".index(match[2].lower() or " ") if match else 0.0
    if not (1 <= n_tokens <= _MOST_TOKENS and n_tokens == int(n_tokens)):
        raise SpecError(
            f"{option} {text!r}; give a whole number of tokens from 1 to 16M, such as 8000, 32k or 1M (k is 1,024)"
        )
    return int(n_tokens)


def read_share(option: str, text: str) -> float:
    """Read a share, such as `0.2` or `20%`. Raises SpecError."""
    match = re.fullmatch(r"\s*(\d{1,3}(?:\.\d{1,6})?|\.\d{1,6})\s*(%?)\s*", text, re.ASCII)
    share = float(match[1]) / (100 if match[2] else 1) if match else 0.0
    if not 0 < share <= 1:
        raise SpecError(f"{option} {text!r}; give a share of the context, above 0 and at most 1, such as 0.2 or 20%")
    return share
