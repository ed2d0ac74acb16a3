"""Holds what commands do at their start: load a model, look for an extra's packages, print errors in one line."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import typer

from hybridmem import pages_ahead, torch_ahead

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from hybridmem.chat.prompts import Tokenizer
    from hybridmem.memory import HybridMemory, MemorySpec
    from hybridmem.models import LanguageModel
    from hybridmem.models.weights.formats import WeightFormat

ABOUT_EMBEDDED = (
    "The embedded model is tiny, and talks about nothing but what you tell it: names, cities, colours and numbers, "
    'spelt as you like. Say "My cat is called Tom." or "I live in Berlin.", change your mind, and ask: "What is my '
    'cat called?"'
)

_GARBAGE = 100_000
"""So many new objects let Python's garbage collector run, while a model is loaded and used."""

_BUSY = 0.5
"""A machine is busy if more than this share of its processors has had work over the last minute."""


@dataclass(frozen=True)
class Unread:
    """Holds what is known of a model before its weights are read: its tokenizer, its config, and its memory's spec."""

    tokenizer: Tokenizer
    config: PreTrainedConfig
    spec: MemorySpec


def load(
    model: str, device: str, dtype: str, weights: str, check: Callable[[Unread], None] | None = None, *,
    reproducible: bool = False, draft_head: bool = False,
) -> tuple[LanguageModel, Tokenizer]:  # fmt: skip
    """Load a model and its tokenizer, named by a folder, a hub id or "embedded". Raises the library's errors.

    What headers, config and tokenizer can refuse is refused before the weights are read, which may take minutes.

    Args:
        check: raises the errors of a command that cannot do its work with this model.
        reproducible, draft_head: see `load_model`.
    """
    from hybridmem.chat.prompts import load_tokenizer
    from hybridmem.models.loading.load import open_model

    # Imported objects live until the exit, so garbage collections, which are more frequent from now on, need not visit
    # them.
    gc.freeze()
    gc.set_threshold(_GARBAGE)
    opened, format = open_model(model, device=device, dtype=dtype), cast("WeightFormat", weights)
    spec, tokenizer = opened.dry_spec(format, reproducible=reproducible), load_tokenizer(opened.file or opened.place)
    if check is not None:
        check(Unread(tokenizer, opened.config, spec))
    language_model = opened.load(weights=format, reproducible=reproducible, draft_head=draft_head)
    show("")
    return language_model, tokenizer


def check_budget(spec: MemorySpec, budget: str, **options: Any) -> None:
    """Raise SpecError if a memory of this budget and these options cannot be made. No memory is taken."""
    from hybridmem.memory import HybridMemory

    HybridMemory(spec, budget, device="meta", **options)


def read_prompts(unread: Unread, texts: list[str], *, is_chat: bool | None, max_tokens: int) -> list[list[int]]:
    """Return the token ids of prompts, as `encode_prompt` does. Raises BatchError if a prompt is empty or too long."""
    from hybridmem.chat.engine.context import fit_reply, named_context_tokens
    from hybridmem.chat.engine.requests import read_token_ids
    from hybridmem.chat.prompts import encode_prompt

    prompts = [encode_prompt(unread.tokenizer, text, is_chat=is_chat) for text in texts]
    for prompt in prompts:
        read_token_ids(prompt, unread.spec.vocab_size)
        fit_reply(len(prompt), max_tokens, named_context_tokens(unread.config))
    return prompts


def choose_threads(model: LanguageModel, memory: HybridMemory, n_threads: int | None = None) -> None:
    """Let the model use `n_threads` threads on the CPU, or by default as many as pay now; see `set_threads`."""
    from hybridmem.chat.engine.threads import set_threads

    show("measuring how many threads pay …")
    set_threads(model, memory, n_threads)
    show("")


def wait_passively_if_busy() -> None:
    """Let the threads of kernels sleep while they wait, if the machine has other work.

    Call it before torch is imported.

    Threads that sleep make a step of a small model twice as slow on a quiet machine, and ten times as fast on a busy
    one. OpenMP reads this variable once. If the user has set the variable, it is left as it is.
    """
    with suppress(OSError):  # Some systems do not tell their load.
        n_processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        if os.getloadavg()[0] > _BUSY * n_processors:
            os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def name_of(model: str) -> str:
    """Return the name by which clients call a model: its folder's name, or its hub id."""
    folder = Path(model).expanduser()
    return folder.resolve().name if folder.is_dir() else folder.stem if folder.is_file() else model


def find_extra(*modules: str) -> None:
    """Raise SpecError if a package that only the server needs is not installed."""
    from hybridmem.memory import SpecError

    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        raise SpecError(f"serve needs {', '.join(missing)}; install them with: pip install 'hybridmem[server]'")


def show(line: str) -> None:
    """Show a line about what the user is waiting for. On a terminal, it replaces the line before."""
    if sys.stderr is not None and sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[2K{line}")
        sys.stderr.flush()


@contextmanager
def loading(model: str, device: str, *meanwhile: str) -> Iterator[None]:
    """Say that a model is loaded, begin what takes long, and turn errors into one line as `one_line_errors` does.

    Args:
        meanwhile: modules that the command needs, beside transformers, and that do not import torch.
    """
    show(line := f"loading {model} …")
    pages_ahead.begin(model, device)
    if device == "cpu":
        torch_ahead.begin("transformers", *meanwhile)
    with one_line_errors(line):
        yield


@contextmanager
def one_line_errors(at_first: str = "") -> Iterator[None]:
    """Turn the library's errors into one line on stderr and exit code 1.

    Other errors are bugs and keep their traceback.

    `at_first` is shown before anything is imported.
    """
    show(at_first)
    from hybridmem.memory import HybridMemoryError

    try:
        yield
    except HybridMemoryError as error:
        from hybridmem.chat.console import harmless

        show("")
        typer.echo(f"error: {' '.join(harmless(str(error)).split())}", err=True)
        raise typer.Exit(1) from None
