"""Serves a model over HTTP: the command `hybrid-memory serve`."""

from __future__ import annotations

from functools import partial

import typer

from chat.commands.option_table import Chosen, command_of
from chat.commands.serve_options import SERVE
from chat.commands.start import find_extra, load, name_of, one_line_errors


def run_server(chosen: Chosen) -> None:
    """Answer OpenAI's clients: /v1/chat/completions and /v1/completions, /v1/models, /health and /metrics."""
    find_extra("fastapi", "prometheus_client", "uvicorn")
    from chat.commands.serving import find_places, make_engine
    from chat.server import ServerOptions, bind, make_app, run
    from memory import HybridMemory
    from memory.prefix import PrefixCache

    places = find_places(chosen, chosen.arguments_of("memory"))
    options = ServerOptions(**chosen.arguments_of("server") | {"save_seconds": places.save_seconds})
    with bind(chosen["host"], chosen["port"], has_key=options.api_key is not None) as listener:
        model, tokenizer = load(*(chosen[name] for name in ("model", "device", "dtype", "weights")))
        memory = HybridMemory(model.memory_spec, **places.memory)
        cache = PrefixCache(memory, max_bytes=places.prefix_bytes) if chosen["prefix_cache"] else None
        say = partial(typer.echo, err=True)
        sizes = chosen.arguments_of("engine")
        engine, options = make_engine(model, memory, tokenizer, cache, places.prefixes, options, say, **sizes)
        name = name_of(chosen["model"])
        run(make_app(engine, tokenizer, name, options), listener, lambda url: say(f"{name} answers at {url}/v1"))


def _run(chosen: Chosen) -> None:
    with one_line_errors(f"loading {chosen['model']} …"):
        run_server(chosen)


_run.__doc__ = run_server.__doc__
serve = command_of(SERVE, _run, name="serve")
