"""`hybrid-memory plan`: its options, and what it does with them. Libraries are imported when it runs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from memory import MemorySpec

Option = typer.Option


def plan(
    model: Annotated[str, Option(help='a checkpoint\'s folder, a config.json, a hub id, or "embedded"; weights are not read')] = "embedded",
    budget: Annotated[str, Option(help="bytes for memories, such as 80GiB")] = "1GiB",
    context: Annotated[str, Option(help="tokens that a session may grow to, such as 32k (k is 1,024)")] = "32k",
    window: Annotated[int, Option(min=0, help="tokens that can be taken back without a checkpoint: the rollback window")] = 64,
    keep: Annotated[str, Option(help="share of the context that eviction policies keep")] = "20%",
    device: Annotated[str, Option(help="where the memory would live; a CPU trades bytes for speed")] = "cuda",
    dtype: Annotated[str, Option(help="auto (the checkpoint's own), float32, bfloat16 or float16")] = "auto",
    state_dtype: Annotated[str, Option(help="of recurrent states: auto (the model's own), float32, bfloat16 or float16")] = "auto",
    encoder: Annotated[str | None, Option(help="tokens of an encoder's input, for models that have one", show_default=False)] = None,
    weights: Annotated[bool, Option("--weights", help="take the weights' bytes off the budget first")] = False,
    is_json: Annotated[bool, Option("--json", help="print JSON")] = False,
) -> None:
    """How many sessions of a model fit into a budget, from its config alone; what eviction and few bits buy, and what others would take."""
    from chat.display import make_console
    from chat.planning.quantities import read_share, read_tokens
    from chat.planning.report import Question, make_report
    from chat.planning.view import print_plan
    from memory.arena import read_budget

    spec = _read_spec(model, device, dtype)
    options: dict[str, Any] = {"rollback_window": window, "state_dtype": _read_state_dtype(state_dtype)}
    encoder_tokens = 0 if encoder is None else read_tokens("--encoder", encoder)
    question = Question(spec, read_budget(budget), read_tokens("--context", context), read_share("--keep", keep), encoder_tokens, options)
    report = make_report(question)
    if is_json:
        typer.echo(json.dumps(report.to_json(), indent=1))
    else:
        print_plan(make_console(), report)


def _read_spec(model: str, device: str, dtype: str) -> MemorySpec:
    from dataclasses import replace

    import torch

    from memory import SpecError
    from models import plan_memory
    from models.loading import find_config, read_config

    config, _ = read_config(find_config(model))
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise SpecError(f"--device {device} is no device ({error}); give cpu, cuda ...") from error
    return replace(plan_memory(config, config.architectures[0], dtype=dtype), device=place)


def _read_state_dtype(text: str) -> Any:
    import torch

    from memory import SpecError

    names = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if text not in names:
        raise SpecError(f"--state-dtype {text!r}; give auto, float32, bfloat16 or float16")
    return names[text]
