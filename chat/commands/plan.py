"""Declares the options of `hybrid-memory plan`, and runs it. Libraries are imported when it runs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, cast

import typer

if TYPE_CHECKING:
    import torch

    from hybridmem.memory import MemorySpec
    from hybridmem.models import LanguageModel
    from hybridmem.models.weights.formats import WeightFormat

Option = typer.Option
_USUAL_CONTEXT_TOKENS = 32_768
_USUAL_WINDOW_TOKENS = 64


def plan(
    model: Annotated[
        str,
        Option(
            help='Name a checkpoint\'s folder, a GGUF file, a config.json, a hub id, or "embedded". Weights are not '
            "read."
        ),
    ] = "embedded",
    budget: Annotated[str, Option(help="The weights and memories share this many bytes, such as 160GiB.")] = "1GiB",
    context: Annotated[
        str,
        Option(
            help="A session may grow to this many tokens, such as 32k (k is 1,024); auto takes the model's own "
            "context, and 32k if its config names none."
        ),
    ] = "auto",
    window: Annotated[
        int, Option(min=0, help="The rollback window: this many tokens can be taken back without a checkpoint.")
    ] = _USUAL_WINDOW_TOKENS,
    keep: Annotated[str, Option(help="Eviction policies keep this share of the context.")] = "20%",
    device: Annotated[
        str,
        Option(
            help="The memory would live on this device; auto takes cuda if it is there, else cpu. On a CPU a memory "
            "takes more bytes to be faster."
        ),
    ] = "auto",
    dtype: Annotated[
        str, Option(help="Compute in float32, bfloat16 or float16; auto takes the checkpoint's own.")
    ] = "auto",
    state_dtype: Annotated[
        str,
        Option(help="Keep recurrent states in float32, bfloat16, float16, int8 or fp8; auto takes the model's own."),
    ] = "auto",
    encoder: Annotated[
        str | None,
        Option(help="The encoder's input has this many tokens, if the model has an encoder.", show_default=False),
    ] = None,
    weights: Annotated[
        str,
        Option(
            help="The budget also holds the weights: auto (in the files' bits, else --dtype), dense (in --dtype), "
            "int8, int8-row or int4. With none, it is for memories alone."
        ),
    ] = "auto",
    draft_model: Annotated[
        str | None,
        Option(help="Draft with this smaller model. Its weights and memory share the budget.", show_default=False),
    ] = None,
    draft_head: Annotated[
        str,
        Option(
            help="Draft with layers that read the model's hidden states: auto takes those of the checkpoint, if it has "
            "any; or name a folder. Their weights and memory share the budget."
        ),
    ] = "none",
    is_json: Annotated[bool, Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print how many sessions of a model fit into a budget beside its weights, from its config alone.

    Also prints what eviction policies and quantised storages save, and how many bytes other engines would need.
    """
    from dataclasses import replace

    from hybridmem.chat.commands.head_drafter import NONE, check_draft_options
    from hybridmem.chat.console import make_console
    from hybridmem.chat.engine.context import named_context_tokens
    from hybridmem.chat.planning.quantities import read_share, read_tokens
    from hybridmem.chat.planning.report import Question, make_report
    from hybridmem.chat.planning.view import print_plan
    from hybridmem.memory import SpecError
    from hybridmem.memory.blocks import read_budget
    from hybridmem.models import weight_bytes

    check_draft_options(draft_model, draft_head, window)
    is_counted = weights != "none"
    language_model, architecture = read_model(model, dtype, weights if is_counted else "auto")
    own_tokens = named_context_tokens(language_model.config)
    usual_tokens = own_tokens or _USUAL_CONTEXT_TOKENS
    context_tokens = usual_tokens if context == "auto" else read_tokens("--context", context)
    if window > max(context_tokens, _USUAL_WINDOW_TOKENS):
        raise SpecError(
            f"--window {window} reaches further back than a session of {context_tokens:,} tokens; give fewer tokens, "
            "or a longer --context"
        )
    drafting = None
    if draft_head != NONE:
        drafting = _read_draft_head(language_model, model, draft_head, weights if is_counted else "auto")
    budget_bytes, taken = read_budget(budget), weight_bytes(language_model)
    if draft_model is not None:
        drafter, _ = read_model(draft_model, dtype, weights if is_counted else "auto")
        drafting, taken = drafter.memory_spec, taken + weight_bytes(drafter)
    if drafting is not None:
        drafting = replace(drafting, device=_read_device(device))
    spec = replace(language_model.memory_spec, device=_read_device(device), model=model).with_state_dtype(
        _read_state_dtype(state_dtype)
    )
    question = Question(
        spec, architecture, budget_bytes, context_tokens, window,
        read_share("--keep", keep), 0 if encoder is None else read_tokens("--encoder", encoder), taken, is_counted,
        drafting, own_tokens,
    )  # fmt: skip
    report = make_report(question)
    if is_json:
        typer.echo(json.dumps(report.to_json(), indent=1))
    else:
        print_plan(make_console(), report)


def read_model(model: str, dtype: str, weights: str) -> tuple[LanguageModel, str]:
    """Read a model without its weights, and the name of its architecture.

    The checkpoint's files decide which heads are tied.
    """
    from hybridmem.models.loading.dry import find_files
    from hybridmem.models.loading.folders import find_config, read_config
    from hybridmem.models.loading.load import dry_model

    place = find_config(model)
    config, _ = read_config(place)
    architecture, format, files = config.architectures[0], cast("WeightFormat", weights), find_files(place, config)
    return dry_model(config, architecture, dtype=dtype, weights=format, files=files), architecture


def _read_draft_head(language_model: LanguageModel, model: str, draft_head: str, weights: str) -> MemorySpec | None:
    """Give a model its draft head, without weights. Return the spec of the head's memory, or None without a head."""
    from hybridmem.chat.commands.head_drafter import AUTO
    from hybridmem.memory import SpecError
    from hybridmem.models.loading.draft_heads import dry_draft_head, folder_beside
    from hybridmem.models.loading.folders import find_config

    place = find_config(model if draft_head == AUTO else draft_head)
    head = dry_draft_head(language_model, place, weights=weights)
    if head is None and draft_head == AUTO and (beside := folder_beside(place)) is not None:
        head = dry_draft_head(language_model, beside, weights=weights)
    if head is None and draft_head != AUTO:
        raise SpecError(
            f"--draft-head {draft_head} holds no draft head for this model; give a folder with one, or auto"
        )
    language_model.draft_head = head  # type: ignore[attr-defined]  # So its weights are counted, and shared ones once.
    return None if head is None else head.memory_spec


def _read_device(device: str) -> torch.device:
    import torch

    from hybridmem.memory import SpecError

    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise SpecError(f"--device {device} is no device ({error}); give cpu, cuda ...") from error


def _read_state_dtype(text: str) -> str | None:
    from hybridmem.memory import SpecError

    names = ("float32", "bfloat16", "float16", "int8", "fp8")
    if text not in ("auto", *names):
        raise SpecError(f"--state-dtype {text!r}; give auto, {', '.join(names[:-1])} or {names[-1]}")
    return None if text == "auto" else text
