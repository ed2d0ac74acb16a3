"""Declares the `hybrid-memory` command: `generate`, `chat`, `serve`, and the `demo`, which checks itself.

Each command imports its libraries when it runs. If this module imported torch and transformers, `--help` would take
seconds.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import hybridmem
from hybridmem.chat.commands.cluster import cluster
from hybridmem.chat.commands.inspect import inspect
from hybridmem.chat.commands.plan import plan
from hybridmem.chat.commands.serve import serve
from hybridmem.chat.commands.simulate import simulate
from hybridmem.chat.commands.start import (
    ABOUT_EMBEDDED,
    Unread,
    check_budget,
    choose_threads,
    load,
    loading,
    one_line_errors,
    read_prompts,
    wait_passively_if_busy,
)

if TYPE_CHECKING:
    from hybridmem.chat.console import Reply
    from hybridmem.chat.engine.engine import Engine

app = typer.Typer(
    name="hybrid-memory",
    help="One memory for attention caches and recurrent states. Generate for many prompts at once, watch the demo, or "
    "serve.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)

Model = Annotated[
    str,
    typer.Option(
        help='Name a checkpoint\'s folder, a GGUF file, a hub id, or "embedded" for the small model that is included.'
    ),
]
Device = Annotated[str, typer.Option(help="The model and its memory live on this device, such as cpu or cuda.")]
Dtype = Annotated[str, typer.Option(help="Compute in float32, bfloat16 or float16; auto takes the checkpoint's own.")]
Weights = Annotated[
    str,
    typer.Option(
        help="auto keeps the bits of the files, dense makes floats in --dtype; int8, int8-row or int4 round (CPU only)."
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="The model uses this many threads on the CPU. By default, it uses as few as are hardly slower than more.",
        show_default=False,
    ),
]
Reproducible = Annotated[
    bool,
    typer.Option("--reproducible", help="Give a text the same logits, bit for bit, however it was reached (CPU only)."),
]
Budget = Annotated[str, typer.Option(help="The memory uses at most this many bytes, such as 512MiB.")]


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"hybridmem {hybridmem.__version__}")
        raise typer.Exit


@app.callback()
def _read_common_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def generate(
    prompt: Annotated[
        list[str],
        typer.Option(
            help="The text to continue or to reply to. Repeat the option for several prompts.", show_default=False
        ),
    ],
    model: Model = "embedded",
    max_tokens: Annotated[int, typer.Option(min=1, help="Generate at most this many tokens for each prompt.")] = 128,
    device: Device = "cpu",
    dtype: Dtype = "auto",
    weights: Weights = "auto",
    budget: Budget = "1GiB",
    threads: Threads = None,
    reproducible: Reproducible = False,
    is_chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="Use the chat template, or take the prompt as plain text. The default is --chat if the model has one.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Reply to several prompts at once, greedily, in one batch."""
    with loading(model, device):
        from hybridmem.chat.console import make_console, show_replies
        from hybridmem.chat.engine.engine import Engine
        from hybridmem.memory import HybridMemory

        prompts = list[list[int]]()

        def check(unread: Unread) -> None:
            check_budget(unread.spec, budget)
            prompts.extend(read_prompts(unread, prompt, is_chat=is_chat, max_tokens=max_tokens))

        language_model, tokenizer = load(model, device, dtype, weights, check, reproducible=reproducible)
        memory = HybridMemory(language_model.memory_spec, budget)
        choose_threads(language_model, memory, threads)
        engine = Engine(language_model, memory, tokenizer)
        show_replies(make_console(), _stream_replies(engine, prompts, max_tokens))
        typer.echo(str(engine.stats), err=True)


@app.command()
def chat(
    model: Model = "embedded",
    system: Annotated[str | None, typer.Option(help="The system message, which tells the model how to behave.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="A reply has at most this many tokens (256).", show_default=False)
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(min=0, help="0 gives the most likely reply; higher values give more varied ones (0)."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed draws the same replies again.")] = None,
    resume: Annotated[
        str | None, typer.Option(help="Continue the conversation that /save wrote to this folder.", metavar="FOLDER")
    ] = None,
    device: Device = "cpu",
    dtype: Dtype = "auto",
    weights: Weights = "auto",
    budget: Budget = "1GiB",
    threads: Threads = None,
    reproducible: Reproducible = False,
    draft_model: Annotated[
        str | None,
        typer.Option(
            help="Draft the next tokens of replies with this smaller model, where that saves time. It has the same "
            "tokenizer. --budget is for both.",
            show_default=False,
        ),
    ] = None,
    draft_head: Annotated[
        str,
        typer.Option(
            help="Draft with layers that read the model's hidden states, where that saves time: auto takes those of "
            "the checkpoint, if it has any; or name a folder. --budget is for both."
        ),
    ] = "none",
) -> None:
    """Talk to a model; /edit, /undo, /regenerate and /branch change the conversation.

    The part of the conversation that stays is not computed again. Type /help for all commands.
    """
    with loading(model, device):
        from hybridmem.chat.commands.terminal import Settings, run_terminal

        settings = Settings(
            budget, system, max_tokens, temperature, seed, resume, threads, draft_model, draft_head, weights
        )
        language_model, tokenizer = load(
            model, device, dtype, weights, settings.check, reproducible=reproducible, draft_head=draft_head == "auto"
        )  # fmt: skip
        if model == "embedded" and sys.stdin.isatty():
            typer.echo(ABOUT_EMBEDDED, err=True)
        run_terminal(language_model, tokenizer, settings)


@app.command()
def warmup(
    model: Model = "embedded",
    dtype: Dtype = "auto",
    weights: Weights = "auto",
    is_all: Annotated[
        bool,
        typer.Option(
            "--all", help="Compile the kernels of all models, in float32 and bfloat16, not only those of --model."
        ),
    ] = False,
    to: Annotated[
        Path | None,
        typer.Option(
            help="Keep the kernels in this folder, as for a container image in which HYBRID_MEMORY_CACHE names it.",
            metavar="FOLDER",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Compile the CPU kernels for this machine now, so that the first use of the library does not wait for them."""
    with one_line_errors():
        import torch

        from hybridmem.memory import CrossAttentionSpec, HybridMemory, SpecError
        from hybridmem.memory.build import compiled_ahead
        from hybridmem.memory.kernels import cpu
        from hybridmem.memory.kernels.cpu.parts import NAMES, cache_folder, is_kept
        from hybridmem.models.products import choice

        if to is not None:
            os.environ["HYBRID_MEMORY_CACHE"] = str(to)
            if not is_kept():
                raise SpecError(f"{to} cannot be written; name another folder with --to")
        started = time.perf_counter()
        if is_all:
            for each in (torch.float32, torch.bfloat16):
                cpu.warm_up(NAMES, each)
                choice.compile_ahead(choice.kinds_of(each))
        else:
            loaded = load(model, "cpu", dtype, weights)[0]
            spec = loaded.memory_spec
            cpu.warm_up(compiled_ahead(spec), spec.dtype)
            if not any(isinstance(own, CrossAttentionSpec) for layer in spec.layers for own in layer):
                with HybridMemory(spec, "256MiB") as memory:
                    n_bytes = 2 * memory.needed_bytes(1)
                with HybridMemory(spec, max(n_bytes, 1 << 28)) as memory, memory.step({memory.open(): [0]}) as step:
                    # The step makes the model compile its own kernels, which `warm_up` above does not know.
                    loaded(step)
        seconds = time.perf_counter() - started
        where = f"kept in {cache_folder()}" if is_kept() else "for this process only"
        typer.echo(f"CPU kernels are ready ({seconds:.1f} s; {where})")


@app.command()
def demo(
    users: Annotated[int, typer.Option(min=2, help="This many users talk at once.")] = 8,
    turns: Annotated[int, typer.Option(min=2, max=24, help="Each user's dialogue has this many turns.")] = 8,
    seed: Annotated[int, typer.Option(help="Another seed makes other dialogues.")] = 0,
    model: Model = "embedded",
    device: Device = "cpu",
    dtype: Dtype = "auto",
    weights: Weights = "auto",
    budget: Budget = "1GiB",
) -> None:
    """Let many users talk to one model at once, edit facts by rollback, fork conversations, and look for leaks.

    Every answer is compared with the right one. Exits with 1 if an answer is wrong or if history was computed twice.
    """
    with loading(model, device):
        from hybridmem.chat.commands.demo import check_tokenizer, run_demo
        from hybridmem.chat.commands.demo_view import live_stage, print_report
        from hybridmem.chat.console import make_console

        def check(unread: Unread) -> None:
            check_budget(unread.spec, budget)
            check_tokenizer(unread.tokenizer)

        console = make_console()
        language_model, tokenizer = load(model, device, dtype, weights, check)
        if model == "embedded":
            console.print(ABOUT_EMBEDDED, highlight=False)
        with live_stage(console) as on_word:
            report = run_demo(
                language_model, tokenizer, n_users=users, n_turns=turns, seed=seed, budget=budget, on_word=on_word
            )
        print_report(console, report)
    if not report.is_ok:
        raise typer.Exit(1)


def _stream_replies(engine: Engine, prompts: list[list[int]], max_tokens: int) -> Iterator[list[Reply]]:
    """Yield all replies, in the order of `prompts`, after each step of the engine."""
    from hybridmem.chat.console import Reply

    generations = [engine.submit(prompt, max_tokens=max_tokens) for prompt in prompts]
    while not engine.is_idle:
        for generation in engine.step():
            if generation.error is not None:
                raise generation.error
        yield [Reply(generation.text, generation.is_finished) for generation in generations]


app.command()(serve)
app.add_typer(cluster)
for _command in (simulate, plan, inspect):
    app.command()(one_line_errors()(_command))


def main() -> None:
    """Run the command line.

    Python's garbage collector does not run while libraries are imported, nor at the exit. Importing torch alone makes
    half a million live objects, so each collection takes a tenth of a second.
    """
    wait_passively_if_busy()
    gc.set_threshold(2_000_000)
    atexit.register(gc.freeze)
    app()
