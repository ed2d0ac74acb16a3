"""Lists the commands that measure the engine and the server: load, drafts, grammars, traces, replicas and the page."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from benchmarks import agent_trace, schemas, serving
from benchmarks import drafts as engine_drafts
from benchmarks import page as page_
from benchmarks.commands.options import Out, Quick, Threads, app, known, run


@app.command(name="agent-trace")
def agent_trace_(
    scale: Annotated[
        float | None,
        typer.Option("--scale", min=0.001, help="Of all lengths; 1 is 142 thousand tokens, 0.25 unless given."),
    ] = None,
    quick: Quick = False,
    out: Out = None,
) -> None:
    """Measure how much of an agent's prompts a server computes again: stored responses, chats, a restart."""
    tests = ("tests/chat/server/sessions/test_restarts.py", "tests/chat/server/sessions/test_responses.py")
    run(agent_trace.agent_trace, tests, quick, out, None, scale=scale)


@app.command(name="serving")
def serving_(
    before: Annotated[str, typer.Option("--before", help="The commit to compare with.")] = serving.BEFORE,
    at_once: Annotated[
        list[int] | None, typer.Option("--at-once", min=1, help="Requests; may be repeated; 1 to 128 unless given.")
    ] = None,
    rounds: Annotated[int | None, typer.Option("--rounds", min=1, help="Of some seconds for each server.")] = None,
    quick: Quick = False,
    out: Out = None,
) -> None:
    """Measure a server under load, beside an earlier commit: throughput, and time to the first token.

    With --at-once, the rows of other loads stay in the folder's file, if they were measured on the same machine.
    """
    measure = partial(serving.serving, before=before, loads=at_once or serving.LOADS, rounds=rounds, out=out)
    run(measure, ("tests/chat/engine/test_generations.py",), quick, out, None)


@app.command(name="page")
def page_view(quick: Quick = False, out: Out = None, threads: Threads = None) -> None:
    """Measure the web page: its bytes, its first paint, what watching the memory costs, and 10,000 sequences."""
    page_.require_browser()
    run(page_.page, ("tests/chat/server/test_memory_view.py",), quick, out, threads)


@app.command()
def drafts(
    text: Annotated[
        list[int] | None, typer.Option("--text", min=0, max=len(engine_drafts.TEXTS) - 1, help="Its number; repeated.")
    ] = None,
    rounds: Annotated[int | None, typer.Option("--rounds", min=1)] = None,
    quick: Quick = False,
    out: Out = None,
    threads: Threads = None,
) -> None:
    """Measure drafts in the engine: where they pay, and that they cost nothing where they do not.

    With --text, the rows of other texts stay in the folder's file, if they were measured on the same machine.
    """
    texts = [engine_drafts.TEXTS[number] for number in text or ()]
    tests = ("tests/chat/engine/test_drafting.py",)
    measure = partial(engine_drafts.measure, texts=texts, rounds=rounds, out=out)
    run(measure, tests, quick, out, threads)


@app.command()
def cluster(
    part: Annotated[
        list[str] | None, typer.Option("--part", help="move, routers or failures; may be repeated; all unless given.")
    ] = None,
    quick: Quick = False,
    out: Out = None,
) -> None:
    """Measure two replicas on a local Ray: reuse by each router, what failures cost, and the time to move a session."""
    from benchmarks import cluster as clusters  # This module needs Ray.

    parts = known(part, clusters.PARTS, n_quick=None)
    tests = ("tests/cluster/routing/test_policy.py", "tests/cluster/store/test_leases.py")
    run(clusters.cluster, tests, quick, out, None, parts=parts, kept=out)


@app.command(name="schemas")
def schemas_(
    table: Annotated[
        list[str] | None, typer.Option("--table", help=f"One of {', '.join(schemas.TABLES)}; may be repeated.")
    ] = None,
    quick: Quick = False,
    out: Out = None,
    threads: Threads = None,
) -> None:
    """Measure structured output for 1,000 JSON schemas: how many replies are valid, and how much masks add to a step.

    With --table, the other tables stay in the folder's file, if they were measured on the same machine.
    """
    tables = known(table, schemas.TABLES, n_quick=None)
    measure = partial(schemas.schemas_, tables=tables, out=out)
    run(measure, ("tests/benchmarks/test_schemas.py",), quick, out, threads)
