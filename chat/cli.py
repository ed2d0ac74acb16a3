"""The `hybrid-memory` command: `generate` text for several prompts at once, and the `demo` that checks itself.

The libraries behind a command are imported when it runs: torch and transformers would make `--help` wait for seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from chat.simulate_command import simulate

if TYPE_CHECKING:
    from chat.display import Reply
    from chat.generation import Batch
    from chat.prompts import Tokenizer
    from models import LanguageModel

app = typer.Typer(
    name="hybrid-memory",
    help="One memory for attention caches and recurrent states: generate with many prompts at once, or watch the demo.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)

Model = Annotated[str, typer.Option(help='a checkpoint\'s folder, a hub id, or "embedded" for the small model that is included')]
Device = Annotated[str, typer.Option(help="where the model and its memory live, such as cpu or cuda")]
Dtype = Annotated[str, typer.Option(help="auto (the checkpoint's own), float32, bfloat16 or float16")]
Budget = Annotated[str, typer.Option(help="bytes that the memory may use at most, such as 512MiB")]


@app.command()
def generate(
    prompt: Annotated[list[str], typer.Option(help="what to continue or to reply to; repeat it for several at once", show_default=False)],
    model: Model = "embedded",
    max_tokens: Annotated[int, typer.Option(min=1, help="new tokens per prompt at most")] = 128,
    device: Device = "cpu",
    dtype: Dtype = "auto",
    budget: Budget = "1GiB",
    is_chat: Annotated[
        bool | None,
        typer.Option("--chat/--raw", help="whether to use the chat template; unless given, if the model has one", show_default=False),
    ] = None,
) -> None:
    """Reply to several prompts at once, greedily, in one batch."""
    with _one_line_errors():
        from chat.display import make_console, show_replies
        from chat.generation import Batch
        from chat.prompts import encode_prompt, find_stop_ids
        from memory import HybridMemory

        language_model, tokenizer = _load(model, device, dtype)
        prompts = [encode_prompt(tokenizer, text, is_chat=is_chat) for text in prompt]
        memory = HybridMemory(language_model.memory_spec, budget)
        batch = Batch(language_model, memory, find_stop_ids(tokenizer, language_model))
        show_replies(make_console(), _decode(batch, tokenizer, prompts, max_tokens))
        typer.echo(str(batch.speed), err=True)


@app.command()
def warmup() -> None:
    """Compile the CPU kernels for this machine now, so that the first use of the library does not wait for them."""
    from rich.console import Console

    from memory.kernels import cpu

    console = Console()
    with console.status("compiling CPU kernels"):
        seconds = cpu.warm_up()
    console.print(f"CPU kernels are ready ({seconds:.1f} s; numba keeps them on disk)")


@app.command()
def demo(
    users: Annotated[int, typer.Option(min=2, help="how many talk at once")] = 8,
    turns: Annotated[int, typer.Option(min=2, max=24, help="turns of each user's dialogue")] = 8,
    seed: Annotated[int, typer.Option(help="another seed, other dialogues")] = 0,
    model: Model = "embedded",
    device: Device = "cpu",
    dtype: Dtype = "auto",
    budget: Budget = "1GiB",
) -> None:
    """Many users talk to one model at once; facts are edited by rollback, conversations forked, leaks looked for.

    Every answer is compared with what is right; exits with 1 if one is wrong or if history was computed twice.
    """
    with _one_line_errors():
        from chat.demo import run_demo
        from chat.display import live_stage, make_console, print_report

        console = make_console()
        language_model, tokenizer = _load(model, device, dtype)
        with live_stage(console) as on_word:
            report = run_demo(language_model, tokenizer, n_users=users, n_turns=turns, seed=seed, budget=budget, on_word=on_word)
        print_report(console, report)
    if not report.is_ok:
        raise typer.Exit(1)


def _load(model: str, device: str, dtype: str) -> tuple[LanguageModel, Tokenizer]:
    from chat.prompts import load_tokenizer
    from models import load_model
    from models.loading import find_folder

    folder = find_folder(model)
    return load_model(folder, device=device, dtype=dtype), load_tokenizer(folder)


def _decode(batch: Batch, tokenizer: Tokenizer, prompts: list[list[int]], max_tokens: int) -> Iterator[list[Reply]]:
    """Replies in the order of `prompts`, after every step."""
    from chat.display import Reply
    from chat.generation import generate as generate_tokens

    replies = [Reply() for _ in prompts]
    ids: list[list[int]] = [[] for _ in prompts]
    for step in generate_tokens(batch, prompts, max_tokens):
        for i, new in step:
            ids[i].append(new.token_id)
            replies[i] = Reply(tokenizer.decode(ids[i], skip_special_tokens=True), new.is_last)
        yield replies


@contextmanager
def _one_line_errors() -> Iterator[None]:
    """Turn what the library refuses into one line on stderr and exit code 1; anything else is a bug and keeps its traceback."""
    from memory import HybridMemoryError

    try:
        yield
    except HybridMemoryError as error:
        typer.echo(f"error: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(1) from None


app.command()(_one_line_errors()(simulate))
