"""Makes the engine of a server, and keeps its prefix cache in a folder from one start to the next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from chat.engine.engine import Engine
from chat.prompts import Tokenizer
from chat.server import ServerOptions
from memory import FormatError, HybridMemory, MismatchError
from memory.prefix import PrefixCache
from models import LanguageModel


def make_engine(
    model: LanguageModel,
    memory: HybridMemory,
    tokenizer: Tokenizer,
    prefixes: PrefixCache | None,
    folder: Path | None,
    options: ServerOptions,
    say: Callable[[str], None],
    **sizes: Any,
) -> tuple[Engine, ServerOptions]:
    """Return an engine that has taken a step, so that the first request waits for no kernel, and the server's options.

    With a folder, its prefixes are those of the last server, and what the engine knows is saved when this one stops.

    Raises MismatchError: the folder is that of another model or other options, and saving would replace it.
    """
    engine = Engine(model, memory, tokenizer, prefixes=prefixes, **sizes)
    generation = engine.submit([0], max_tokens=1)
    engine.run()
    if generation.error is not None:
        raise generation.error
    if prefixes is None:
        return engine, options
    prefixes.clear()
    if folder is None:
        return engine, options
    load_prefixes(prefixes, folder, say)
    return engine, replace(options, on_stop=partial(save_prefixes, prefixes, folder, say))


def load_prefixes(prefixes: PrefixCache, folder: Path, say: Callable[[str], None]) -> None:
    """Load a cache from a folder that an earlier server has left. What cannot be read is computed again, and said.

    Raises MismatchError: the folder is that of another model or other options, and saving would replace it.
    """
    if not (folder / "checkpoints.safetensors").exists():
        return
    try:
        say(f"{prefixes.load(folder)} prefixes from {folder}")
    except MismatchError:
        raise
    except FormatError as error:
        say(f"prefixes are computed again: {error}")


def save_prefixes(prefixes: PrefixCache, folder: Path, say: Callable[[str], None]) -> None:
    """Save a cache for the next server. A folder that cannot be written is said; what was there before stays."""
    try:
        prefixes.save(folder)
    except OSError as error:
        say(f"prefixes could not be written to {folder}: {error}")
