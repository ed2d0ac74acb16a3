"""Makes the engine of a server, and keeps its prefix cache in a folder from one start to the next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from chat.engine.engine import Engine
from chat.prompts import Tokenizer
from chat.server import ServerOptions
from memory import FormatError, HybridMemory, MismatchError, SpecError
from memory.prefix import PrefixCache
from memory.storage.files import check_url, list_names
from memory.storage.folders import CHECKPOINTS_FILE
from models import LanguageModel


def check_prefix_options(has_cache: bool, max_bytes: str, folder: str | None, save_every: float | None) -> None:
    """Raise SpecError for an option that would have no effect, or a URL that cannot be opened."""
    if not has_cache and (max_bytes != "0" or folder is not None):
        raise SpecError("--prefix-bytes and --prefixes keep what --no-prefix-cache does without; leave out one side")
    if folder is None and save_every is not None:
        raise SpecError(f"--save-every {save_every:g} names no folder; give it with --prefixes FOLDER")
    if folder is not None:
        check_url("--prefixes", folder)


def make_engine(
    model: LanguageModel,
    memory: HybridMemory,
    tokenizer: Tokenizer,
    prefixes: PrefixCache | None,
    folder: str | None,
    options: ServerOptions,
    say: Callable[[str], None],
    **sizes: Any,
) -> tuple[Engine, ServerOptions]:
    """Return an engine that has taken a step, so that the first request waits for no kernel, and the server's options.

    With a folder, its prefixes are those of the last server, and what the engine knows is saved by `options.save`.

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
    return engine, replace(options, save=partial(save_prefixes, engine, prefixes, folder, say))


def load_prefixes(prefixes: PrefixCache, folder: str, say: Callable[[str], None]) -> None:
    """Load a cache from a folder that an earlier server has left. What cannot be read is computed again, and said.

    Raises MismatchError: the folder is that of another model or other options, and saving would replace it.
    """
    if CHECKPOINTS_FILE not in list_names(folder):
        return
    try:
        say(f"{prefixes.load(folder)} prefixes from {folder}")
    except MismatchError:
        raise
    except FormatError as error:
        say(f"prefixes are computed again: {error}")


def save_prefixes(engine: Engine, prefixes: PrefixCache, folder: str, say: Callable[[str], None]) -> None:
    """Save a cache for the next server, between two steps of the engine.

    A folder that cannot be written is said; what was there before stays.
    """
    try:
        with engine.lock:
            prefixes.save(folder)
    except OSError as error:
        say(f"prefixes could not be written to {folder}: {error}")
