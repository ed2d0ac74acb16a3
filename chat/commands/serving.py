"""Makes the engine of a server, and keeps its prefix cache in a folder from one start to the next."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hybridmem.chat.commands.option_table import Chosen
from hybridmem.chat.engine.engine import Engine
from hybridmem.chat.prompts import Tokenizer
from hybridmem.chat.server import ServerOptions
from hybridmem.chat.stored.database import PREFIXES
from hybridmem.memory import FormatError, HybridMemory, MismatchError, SpecError
from hybridmem.memory.prefix import PrefixCache
from hybridmem.memory.storage import CHECKPOINTS_FILE, check_url, is_local, join_path, list_names
from hybridmem.models import LanguageModel

DRAFTS = "drafts"
"""The folder in that of the prefixes which holds what a drafter remembers of the same texts."""
_BUDGET, _DEMO_BUDGET = "1GiB", "8MiB"
_PREFIX_BYTES = "8GiB"
CONTINUING = ("/v1/completions", "/completion", "/v1/embeddings", "/v1/score", "/v1/rerank")
CHATTING = ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat")
"""Paths that work with a model without a chat template, and paths that then refuse every request."""
_SAVE_SECONDS = 60.0
"""With --sessions, the server saves the prefix cache after this many seconds, unless --save-every says otherwise."""


def warn_without_template(name: str, tokenizer: Tokenizer, say: Callable[[str], None]) -> None:
    """Say what a server can do with a model without a chat template, such as a base model. Otherwise say nothing."""
    if not tokenizer.chat_template:
        say(
            f"{name} has no chat template, so it only continues texts: {', '.join(CONTINUING)} and /api/generate with "
            f"raw work; {', '.join(CHATTING)} and the page's chats get error 400"
        )


@dataclass(frozen=True)
class Places:
    """Says where a server keeps checkpoints that do not fit into the budget, and those for its next start.

    Attributes:
        prefixes: the folder that the next start reads. None: nothing is kept.
        prefix_bytes: how many bytes the prefix cache may hold outside of the budget.
        save_seconds: the interval at which that folder is written again. None: it is written only at the end.
        memory: the options of the memory.
    """

    prefixes: str | None
    prefix_bytes: str
    save_seconds: float | None
    memory: dict[str, Any]


def memory_options(chosen: Chosen) -> dict[str, Any]:
    """Return the options of the memory.

    The embedded model gets a small budget unless one is given. That budget fills soon, so whoever tries the server sees
    what a full memory does.
    """
    options, usual = chosen.arguments_of("memory"), _DEMO_BUDGET if chosen["model"] == "embedded" else _BUDGET
    return options | {"budget": options["budget"] or usual}


def find_places(chosen: Mapping[str, Any], memory: dict[str, Any]) -> Places:
    """Return where checkpoints are kept: in the folder of sessions if there is one, unless an option says otherwise.

    Args:
        memory: the options of the memory.
    Raises:
        SpecError: an option would have no effect, or a URL cannot be opened.
    """
    has_cache, sessions, folder = chosen["prefix_cache"], chosen["sessions"], chosen["prefixes"]
    n_bytes, save_every = chosen["prefix_bytes"], chosen["save_every"]
    if not has_cache and (n_bytes not in (None, "0") or folder is not None):
        raise SpecError("--prefix-bytes and --prefixes keep what --no-prefix-cache does without; leave out one side")
    if folder is None and sessions is None and save_every is not None:
        raise SpecError(f"--save-every {save_every:g} names no folder; give it with --prefixes FOLDER")
    for option, place in (("--prefixes", folder), ("--sessions", sessions)):
        if place is not None:
            check_url(option, place)
    if sessions is None or not has_cache:
        return Places(folder, n_bytes or "0", save_every, memory)
    if not is_local(sessions):
        raise SpecError(f"--sessions {sessions}: its database needs a folder of this machine; name one")
    given = {name: value for name, value in memory.items() if value is not None}
    implied = {"swap_dir": str(Path(sessions) / "swapped"), "host_budget": memory["budget"]}
    folder, save_every = folder or str(Path(sessions) / PREFIXES), save_every or _SAVE_SECONDS
    return Places(folder, n_bytes or _PREFIX_BYTES, save_every, memory | implied | given)


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
    """Return an engine and the server's options. The engine has taken a step, so the first request waits for no kernel.

    With a folder, the engine begins with the last server's prefixes, and `options.save` saves the engine's own prefixes
    there. What a drafter remembers of texts is kept in a folder within it.

    Raises MismatchError: the folder is that of another model or other options, and saving would replace it.
    """
    engine = Engine(model, memory, tokenizer, prefixes=prefixes, **sizes)
    generation = engine.submit([0], max_tokens=1)
    engine.run()
    if generation.error is not None:
        raise generation.error
    if prefixes is None:
        return engine, options
    texts = engine.drafted_texts
    drafted = None if texts is None else texts.prefixes
    for cache in (prefixes, drafted):
        if cache is not None:
            cache.clear()
    if folder is None:
        return engine, options
    load_prefixes(prefixes, folder, say)
    if drafted is not None:
        load_prefixes(drafted, join_path(folder, DRAFTS), say, is_replaced=True)

    def save() -> None:
        save_prefixes(engine, prefixes, folder, say)
        if drafted is not None:
            save_prefixes(engine, drafted, join_path(folder, DRAFTS), say)

    return engine, replace(options, save=save)


def load_prefixes(prefixes: PrefixCache, folder: str, say: Callable[[str], None], *, is_replaced: bool = False) -> None:
    """Load a cache from a folder that an earlier server has written.

    Prefixes that cannot be read are reported, and computed again when they are needed.

    Args:
        is_replaced: whether prefixes of another model are reported and replaced as well, because they only spare time.
    Raises MismatchError: the folder is that of another model or other options, and saving would replace it.
    """
    if CHECKPOINTS_FILE not in list_names(folder):
        return
    try:
        say(f"{prefixes.load(folder)} prefixes from {folder}")
    except FormatError as error:
        if isinstance(error, MismatchError) and not is_replaced:
            raise
        say(f"prefixes are computed again: {error}")


def save_prefixes(engine: Engine, prefixes: PrefixCache, folder: str, say: Callable[[str], None]) -> None:
    """Save a cache for the next server, while the engine runs.

    The engine waits while blocks are copied, but not for the disk.

    If the folder cannot be written, this is reported, and the folder's earlier contents stay.
    """
    try:
        prefixes.save(folder, engine.lock)
    except OSError as error:
        say(f"prefixes could not be written to {folder}: {error}")
