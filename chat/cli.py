"""Declares the `hybrid-memory` command: `generate`, `chat`, `serve`, and the `demo`, which checks itself.

The libraries behind a command are imported when it runs: torch and transformers would make `--help` wait for seconds.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from chat.commands.inspect import inspect
from chat.commands.plan import plan
from chat.commands.simulate import simulate

if TYPE_CHECKING:
    from chat.console import Reply
    from chat.engine.engine import Engine
    from chat.prompts import Tokenizer
    from models import LanguageModel
    from models.loading.weight_formats import WeightFormat

app = typer.Typer(
    name="hybrid-memory",
    help="One memory for attention caches and recurrent states: generate with many prompts at once, watch the demo, or "
    "serve.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)

Model = Annotated[
    str, typer.Option(help='a checkpoint\'s folder, a hub id, or "embedded" for the small model that is included')
]
Device = Annotated[str, typer.Option(help="where the model and its memory live, such as cpu or cuda")]
Dtype = Annotated[str, typer.Option(help="auto (the checkpoint's own), float32, bfloat16 or float16")]
Weights = Annotated[str, typer.Option(help="int8 or int4 rounds weights to these, on the CPU; auto: --dtype")]
Budget = Annotated[str, typer.Option(help="bytes that the memory may use at most, such as 512MiB")]


@app.command()
def generate(
    prompt: Annotated[
        list[str],
        typer.Option(help="what to continue or to reply to; repeat it for several at once", show_default=False),
    ],
    model: Model = "embedded",
    max_tokens: Annotated[int, typer.Option(min=1, help="new tokens per prompt at most")] = 128,
    device: Device = "cpu",
    dtype: Dtype = "auto",
    weights: Weights = "auto",
    budget: Budget = "1GiB",
    is_chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="whether to use the chat template; unless given, if the model has one",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Reply to several prompts at once, greedily, in one batch."""
    with _one_line_errors(f"loading {model} …"):
        from chat.console import make_console, show_replies
        from chat.engine.engine import Engine
        from chat.prompts import encode_prompt
        from memory import HybridMemory

        language_model, tokenizer = _load(model, device, dtype, weights)
        prompts = [encode_prompt(tokenizer, text, is_chat=is_chat) for text in prompt]
        memory = HybridMemory(language_model.memory_spec, budget)
        engine = Engine(language_model, memory, tokenizer)
        show_replies(make_console(), _stream_replies(engine, prompts, max_tokens))
        typer.echo(str(engine.stats), err=True)


@app.command()
def chat(
    model: Model = "embedded",
    system: Annotated[str | None, typer.Option(help="a first message that tells the model how to behave")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="tokens of a reply at most (256)", show_default=False)
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0, help="0 for the most likely reply, more for others (0)")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="draws the same replies again")] = None,
    resume: Annotated[
        str | None, typer.Option(help="the folder of a conversation that /save wrote", metavar="FOLDER")
    ] = None,
    device: Device = "cpu",
    dtype: Dtype = "auto",
    weights: Weights = "auto",
    budget: Budget = "1GiB",
) -> None:
    """Talk to a model; /edit, /undo, /regenerate and /branch change the conversation.

    What stays of it is not computed again. See /help.
    """
    with _one_line_errors(f"loading {model} …"):
        from chat.commands.terminal import Settings, run_terminal

        language_model, tokenizer = _load(model, device, dtype, weights)
        run_terminal(language_model, tokenizer, Settings(budget, system, max_tokens, temperature, seed, resume))


@app.command()
def warmup(
    model: Model = "embedded",
    dtype: Dtype = "auto",
    weights: Weights = "auto",
    is_all: Annotated[
        bool, typer.Option("--all", help="kernels of all models, in float32 and bfloat16, not only those of --model")
    ] = False,
    to: Annotated[
        Path | None,
        typer.Option(
            help="fill this folder, for an image of a container, where HYBRID_MEMORY_CACHE names it",
            metavar="FOLDER",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Compile the CPU kernels for this machine now, so that the first use of the library does not wait for them."""
    with _one_line_errors():
        import torch

        from memory import SpecError
        from memory.build import compiled_ahead
        from memory.kernels import cpu
        from memory.kernels.cpu.compiled import cache_folder, is_kept
        from memory.kernels.cpu.warm_up import NAMES
        from models.layers.paired import compile_pairs, multiplies_pairs_fastest
        from models.layers.quantised import compile_products

        if to is not None:
            os.environ["HYBRID_MEMORY_CACHE"] = str(to)
            if not is_kept():
                raise SpecError(f"{to} cannot be written; name another folder with --to")
        started = time.perf_counter()
        if is_all:
            for each in (torch.float32, torch.bfloat16):
                cpu.warm_up(NAMES, each)
                compile_products(each, "int8", "int4")
            if multiplies_pairs_fastest():
                compile_pairs()
        else:
            spec = _load(model, "cpu", dtype, weights)[0].memory_spec
            cpu.warm_up(compiled_ahead(spec), spec.dtype)
        seconds = time.perf_counter() - started
        where = f"kept in {cache_folder()}" if is_kept() else "for this process only"
        typer.echo(f"CPU kernels are ready ({seconds:.1f} s; {where})")


@app.command()
def demo(
    users: Annotated[int, typer.Option(min=2, help="how many talk at once")] = 8,
    turns: Annotated[int, typer.Option(min=2, max=24, help="turns of each user's dialogue")] = 8,
    seed: Annotated[int, typer.Option(help="another seed, other dialogues")] = 0,
    model: Model = "embedded",
    device: Device = "cpu",
    dtype: Dtype = "auto",
    weights: Weights = "auto",
    budget: Budget = "1GiB",
) -> None:
    """Let many users talk to one model at once: facts are edited by rollback, conversations forked, leaks looked for.

    Every answer is compared with what is right; exits with 1 if one is wrong or if history was computed twice.
    """
    with _one_line_errors(f"loading {model} …"):
        from chat.commands.demo import run_demo
        from chat.console import live_stage, make_console, print_report

        console = make_console()
        language_model, tokenizer = _load(model, device, dtype, weights)
        with live_stage(console) as on_word:
            report = run_demo(
                language_model, tokenizer, n_users=users, n_turns=turns, seed=seed, budget=budget, on_word=on_word
            )
        print_report(console, report)
    if not report.is_ok:
        raise typer.Exit(1)


ApiKey = Annotated[
    str | None,
    typer.Option(
        envvar="HYBRID_MEMORY_API_KEY",
        help="what clients must send; better set in the environment",
        show_default=False,
    ),
]
AllowedHost = Annotated[
    list[str] | None,
    typer.Option(
        help="name that clients may call the server by, beside loopback's; may be repeated", show_default=False
    ),
]
AllowedOrigin = Annotated[
    list[str] | None,
    typer.Option(help="page that may send requests, such as https://example.com; may be repeated", show_default=False),
]
RollbackWindow = Annotated[
    int, typer.Option(min=0, help="tokens by which a cached prefix may be longer than what is reused")
]
HostBudget = Annotated[
    str | None, typer.Option(help="bytes in host memory for requests that make room; unless given, any")
]
SwapDir = Annotated[str | None, typer.Option(help="folder or URL for what finds no room there", show_default=False)]
DiskBudget = Annotated[str | None, typer.Option(help="bytes of its files; unless given, any")]
ParseSpecial = Annotated[bool, typer.Option(help="let messages hold special tokens, so that clients can write turns")]
MaxTokens = Annotated[
    int | None,
    typer.Option(min=2, help="tokens of a prompt and its reply; unless given, what the model and the budget allow"),
]
DefaultTokens = Annotated[int, typer.Option(min=1, help="tokens of a chat's reply, where the request does not say")]
MaxConnections = Annotated[int, typer.Option(min=1, help="open at once; beyond, the longest idle one is closed")]
WithPrefixes = Annotated[bool, typer.Option(help="keep prompts and replies, for prompts that begin like them")]
PrefixBytes = Annotated[
    str, typer.Option(help="bytes that they may take outside of --budget: in host memory and files")
]
Prefixes = Annotated[str | None, typer.Option(help="folder or URL that keeps them across restarts", show_default=False)]
SaveEvery = Annotated[
    float | None, typer.Option(min=1, help="seconds after which the folder is written anew; unless given, at the end")
]
Grace = Annotated[float, typer.Option(min=0, help="seconds that replies may still take when the server is to stop")]


@app.command()
def serve(
    model: Model = "embedded",
    host: Annotated[str, typer.Option(help="address to listen on; others than loopback need an API key")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one")] = 8000,
    api_key: ApiKey = None,
    allowed_host: AllowedHost = None,
    allowed_origin: AllowedOrigin = None,
    device: Device = "cpu",
    dtype: Dtype = "auto",
    weights: Weights = "auto",
    budget: Budget = "1GiB",
    rollback_window: RollbackWindow = 32,
    host_budget: HostBudget = None,
    swap_dir: SwapDir = None,
    disk_budget: DiskBudget = None,
    parse_special: ParseSpecial = False,
    max_body: Annotated[str, typer.Option(help="bytes of a request's body")] = "1MiB",
    max_tokens: MaxTokens = None,
    default_tokens: DefaultTokens = 1024,
    max_requests: Annotated[int, typer.Option(min=1, help="answered at once; others are told to come back")] = 64,
    max_connections: MaxConnections = 768,
    max_peer_connections: Annotated[int, typer.Option(min=1, help="of those, from one address")] = 384,
    max_running: Annotated[int, typer.Option(min=1, help="replies in one step of the model")] = 64,
    step_tokens: Annotated[int, typer.Option(min=2, help="tokens in one step of the model")] = 256,
    prefix_cache: WithPrefixes = True,
    prefix_bytes: PrefixBytes = "0",
    prefixes: Prefixes = None,
    save_every: SaveEvery = None,
    grace: Grace = 10.0,
) -> None:
    """Answer OpenAI's clients: /v1/chat/completions and /v1/completions, /v1/models, /health and /metrics."""
    with _one_line_errors(f"loading {model} …"):
        _find_extra("fastapi", "prometheus_client", "uvicorn")
        from chat.commands.serving import check_prefix_options, make_engine
        from chat.server import ServerOptions, bind, make_app, run
        from memory import HybridMemory
        from memory.prefix import PrefixCache

        check_prefix_options(prefix_cache, prefix_bytes, prefixes, save_every)
        options = ServerOptions(
            api_key=api_key, allowed_hosts=tuple(allowed_host or ()), allowed_origins=tuple(allowed_origin or ()),
            max_body_bytes=_read_bytes("--max-body", max_body),
            max_tokens=max_tokens, default_tokens=default_tokens, max_requests=max_requests,
            max_connections=max_connections, max_peer_connections=max_peer_connections,
            grace_seconds=grace, parse_special=parse_special, save_seconds=save_every,
        )  # fmt: skip
        with bind(host, port, has_key=api_key is not None) as listener:
            language_model, tokenizer = _load(model, device, dtype, weights)
            memory = HybridMemory(
                language_model.memory_spec, budget,
                rollback_window=rollback_window, host_budget=host_budget, swap_dir=swap_dir, disk_budget=disk_budget,
            )  # fmt: skip
            cache = PrefixCache(memory, max_bytes=prefix_bytes) if prefix_cache else None
            say = partial(typer.echo, err=True)
            sizes = {"step_tokens": step_tokens, "max_running": max_running}
            engine, options = make_engine(language_model, memory, tokenizer, cache, prefixes, options, say, **sizes)
            name = _name_of(model)
            run(make_app(engine, tokenizer, name, options), listener, lambda url: say(f"{name} answers at {url}/v1"))


def _name_of(model: str) -> str:
    """Return the name of a model for clients: its folder's name, or what it was loaded by."""
    folder = Path(model).expanduser()
    return folder.resolve().name if folder.is_dir() else folder.stem if folder.is_file() else model


def _read_bytes(option: str, text: str) -> int:
    from memory import SpecError
    from memory.blocks.arena import read_budget

    try:
        return read_budget(text)
    except SpecError:
        raise SpecError(f"{option}={text!r}; give bytes, such as 512KiB or 1MB") from None


def _load(model: str, device: str, dtype: str, weights: str) -> tuple[LanguageModel, Tokenizer]:
    from chat.prompts import load_tokenizer
    from models import load_model
    from models.loading.folders import find_folder

    folder = find_folder(model)
    language_model = load_model(folder, device=device, dtype=dtype, weights=cast("WeightFormat", weights))
    tokenizer = load_tokenizer(folder)
    _show("")
    return language_model, tokenizer


def _stream_replies(engine: Engine, prompts: list[list[int]], max_tokens: int) -> Iterator[list[Reply]]:
    """Return the replies in the order of `prompts`, after every step."""
    from chat.console import Reply

    generations = [engine.submit(prompt, max_tokens=max_tokens) for prompt in prompts]
    while not engine.is_idle:
        for generation in engine.step():
            if generation.error is not None:
                raise generation.error
        yield [Reply(generation.text, generation.is_finished) for generation in generations]


def _show(line: str) -> None:
    """Show what the user waits for, on a terminal, in place of the line before."""
    if sys.stderr is not None and sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[2K{line}")
        sys.stderr.flush()


@contextmanager
def _one_line_errors(at_first: str = "") -> Iterator[None]:
    """Turn the library's errors into one line on stderr and exit code 1; others are bugs and keep their traceback.

    `at_first` is shown before anything is imported.
    """
    _show(at_first)
    from memory import HybridMemoryError

    try:
        yield
    except HybridMemoryError as error:
        from chat.console import harmless

        _show("")
        typer.echo(f"error: {' '.join(harmless(str(error)).split())}", err=True)
        raise typer.Exit(1) from None


def _find_extra(*modules: str) -> None:
    """Raise SpecError if a package that only the server needs is not installed."""
    from memory import SpecError

    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        raise SpecError(f"serve needs {', '.join(missing)}; install them with: pip install 'hybrid-memory[server]'")


for _command in (simulate, plan, inspect):
    app.command()(_one_line_errors()(_command))


def main() -> None:
    """Run the command line. Garbage is looked for less often, and no more at the end: importing torch alone makes half
    a million live objects, and each search among them takes a tenth of a second.
    """
    gc.set_threshold(100_000)
    atexit.register(gc.freeze)
    app()
