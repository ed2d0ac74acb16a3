"""Reads TOML files of options."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file. Raises OSError, or ValueError if it is not TOML."""
    return dict(tomllib.loads(path.read_text(encoding="utf-8")))


def read_tables(name: str, path: Path) -> list[dict[str, Any]]:
    """Read a file that holds only tables of one name. Raises ValueError; the message says what is wanted instead."""
    try:
        given = read_toml(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"a TOML file of tables, each under [[{name}]]: {error}") from None
    tables = given.get(name)
    if len(given) != 1 or not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ValueError(f"a TOML file of tables, each under [[{name}]], and nothing else")
    return tables
