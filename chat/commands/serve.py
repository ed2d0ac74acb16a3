"""Serves a model over HTTP: the command `hybrid-memory serve`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import typer

from hybridmem.chat.commands.fleet_options import FLEET, has_replicas, is_fleet, run_fleet
from hybridmem.chat.commands.option_table import Chosen, command_of
from hybridmem.chat.commands.serve_options import SERVE
from hybridmem.chat.commands.start import (
    Unread,
    check_budget,
    choose_threads,
    find_extra,
    load,
    loading,
    name_of,
    one_line_errors,
)

if TYPE_CHECKING:
    from hybridmem.chat.engine.draft_models import JobDrafter
    from hybridmem.chat.engine.engine import Engine
    from hybridmem.chat.prompts import Tokenizer
    from hybridmem.chat.server import ServerOptions


_MODULES = ("starlette.applications", "uvicorn")
"""A server needs these modules, which do not import torch."""


@dataclass(frozen=True)
class Served:
    """Holds the parts of a server: the engine, the server's options, and the model's name for clients."""

    engine: Engine
    tokenizer: Tokenizer
    options: ServerOptions
    name: str


def make_served(chosen: Chosen, say: Callable[[str], None], *, keeps_prefixes: bool = True) -> Served:
    """Load the model, and make an engine with a memory. Raises the library's errors.

    Args:
        keeps_prefixes: whether the server keeps its prefix cache in a folder for its next start. It is false for
            replicas, which share a store instead.
    """
    from hybridmem.chat.commands.drafter import Budgets, make_drafter
    from hybridmem.chat.commands.head_drafter import AUTO, NONE, check_draft_options, make_head_drafter
    from hybridmem.chat.commands.serving import find_places, make_engine, memory_options, warn_without_template
    from hybridmem.chat.engine.drafting import Speculation
    from hybridmem.chat.server import ServerOptions
    from hybridmem.chat.server.embedding import find_pooling
    from hybridmem.memory import HybridMemory
    from hybridmem.memory.prefix import PrefixCache
    from hybridmem.models.loading.folders import find_folder

    places = find_places(chosen, memory_options(chosen))
    places = places if keeps_prefixes else replace(places, prefixes=None, save_seconds=None)
    pooling = chosen["pooling"] or find_pooling(find_folder(chosen["model"]))
    more = {"save_seconds": places.save_seconds, "pooling": pooling}
    options = ServerOptions(**chosen.arguments_of("server") | more)

    check_draft_options(chosen["draft_model"], chosen["draft_head"], places.memory.get("rollback_window"))

    def check(unread: Unread) -> None:
        check_budget(unread.spec, **{name: places.memory[name] for name in ("budget", "rollback_window")})

    model, tokenizer = load(
        chosen["model"], chosen["device"], chosen["dtype"], chosen["weights"], check,
        reproducible=chosen["reproducible"], draft_head=chosen["draft_head"] == AUTO,
    )  # fmt: skip
    warn_without_template(name_of(chosen["model"]), tokenizer, say)
    drafter: JobDrafter | None = None
    budgets, has_cache = Budgets.of(places.memory, places.prefix_bytes), chosen["prefix_cache"]
    if chosen["draft_model"] is not None:
        drafter, budgets = make_drafter(
            chosen["draft_model"], model, tokenizer, budgets, weights=chosen["weights"], has_cache=has_cache
        )
    elif chosen["draft_head"] != NONE:
        drafter, budgets = make_head_drafter(
            chosen["draft_head"], model, budgets, weights=chosen["weights"], has_cache=has_cache
        )
    memory = HybridMemory(model.memory_spec, **budgets.memory)
    choose_threads(model, memory, chosen["threads"])
    cache = PrefixCache(memory, max_bytes=budgets.prefix_bytes) if has_cache else None
    speculation = Speculation(looks_up=chosen["speculation"] == "prompt-lookup", drafter=drafter)
    sizes = chosen.arguments_of("engine") | {"speculation": speculation}
    engine, options = make_engine(model, memory, tokenizer, cache, places.prefixes, options, say, **sizes)
    return Served(engine, tokenizer, options, name_of(chosen["model"]))


def run_server(chosen: Chosen) -> None:
    """Answer OpenAI's clients: /v1/chat/completions and /v1/completions, /v1/models, /health and /metrics."""
    find_extra("prometheus_client", "starlette", "uvicorn")
    from hybridmem.chat.commands.serving import find_places, memory_options
    from hybridmem.chat.server import ServerOptions, bind, make_app, run

    find_places(chosen, memory_options(chosen))  # Report wrong options before the server takes a port.
    has_key = bool(ServerOptions(**chosen.arguments_of("server")).all_keys)
    if is_fleet(chosen):
        run_fleet(chosen)
        return
    with bind(chosen["host"], chosen["port"], has_key=has_key) as listener:
        say = partial(typer.echo, err=True)
        served = make_served(chosen, say)
        app = make_app(served.engine, served.tokenizer, served.name, served.options)
        run(app, listener, lambda url: say(f"{served.name} answers at {url}/v1, and shows its page at {url}/"))


def _run(chosen: Chosen) -> None:
    # The replicas of a fleet load the model in processes of their own.
    is_loaded_here = not has_replicas(chosen)
    with loading(chosen["model"], chosen["device"], *_MODULES) if is_loaded_here else one_line_errors():
        run_server(chosen)


_run.__doc__ = run_server.__doc__
serve = command_of(SERVE + FLEET, _run, name="serve")
