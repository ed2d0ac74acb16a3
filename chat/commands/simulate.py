"""Declares the options of `hybrid-memory simulate`, and runs it. Libraries are imported when it runs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hybridmem.chat.commands.start import load
from hybridmem.defaults import PREFIX_GRID_TOKENS, ROLLBACK_WINDOW, STEP_TOKENS

if TYPE_CHECKING:
    from hybridmem.chat.simulation.agents import AgentHabits
    from hybridmem.chat.simulation.report import Report
    from hybridmem.chat.simulation.simulation import Setup
    from hybridmem.chat.simulation.workload import Habits, Workload
    from hybridmem.memory import MemorySpec

_RUNNING, _DRY_RUNNING = 64, 512
_DRY_STEP_TOKENS = 4096
"""The tokens of one step. A dry run stands for a large machine, so its steps are larger."""

Option = typer.Option


Weights = Annotated[
    str, Option(help="auto keeps the bits of the files; dense, int8, int8-row or int4. Dry runs have no weights.")
]
System = Annotated[str | None, Option(help="All users share this system prompt, if the chat template has that role.")]
MessageTokens = Annotated[
    int | None, Option(min=1, help="Make up messages with this mean length, instead of dialogues.")
]
HostBudget = Annotated[str | None, Option(help="Swap out this many bytes to host memory; more goes to --swap-dir.")]
SwapDir = Annotated[Path | None, Option(help="Swap out to this folder what exceeds --host-budget, or everything.")]
GridTokens = Annotated[int, Option(min=0, help="New prompts leave checkpoints this many tokens apart; 0: none.")]
MaxRunning = Annotated[
    int | None, Option(min=1, help="One step feeds at most this many replies: 64, or 512 in dry runs.")
]
StepTokens = Annotated[
    int | None, Option(min=2, help="One step feeds about this many tokens: 256, or 4096 in dry runs.")
]
Speed = Annotated[str, Option(help='Run this many times faster than the wall clock. "max" uses a virtual clock.')]
IsDry = Annotated[bool, Option("--dry", help="Run all bookkeeping on device=meta, without a model.")]
Fleet = Annotated[
    int | None, Option(min=1, help="Simulate this many replicas under --users sessions, with each router.")
]
Alone = Annotated[str, Option(help='Which answers to compare with those of an unshared model: "wrong", "all", "none".')]


def simulate(
    context: typer.Context,
    users: Annotated[int, Option(min=1, help="This many users arrive, one after the other.")] = 200,
    workload: Annotated[
        str, Option(help='Simulate "chats", or "agents", which send their whole history each time.')
    ] = "chats",
    turns: Annotated[
        int | None, Option(min=1, help="Each user takes about this many turns: 6, or 43 for agents.")
    ] = None,
    seed: Annotated[int, Option(help="Another seed makes other users.")] = 0,
    rate: Annotated[float | None, Option(help="This many users arrive in a second: 10, or 0.05 agents.")] = None,
    think: Annotated[
        float | None, Option(help="A user waits this many seconds between actions: 2, or 8 for agents.")
    ] = None,
    pause: Annotated[
        float, Option(help="A pause takes this many seconds on average. The user is swapped out meanwhile.")
    ] = 10.0,
    edits: Annotated[float, Option(help="In this share of turns, a user changes an earlier message.")] = 0.12,
    regenerations: Annotated[
        float, Option(help="In this share of turns, a user asks for the last reply again.")
    ] = 0.08,
    branches: Annotated[float, Option(help="In this share of turns, a user branches, at most once.")] = 0.08,
    pauses: Annotated[float, Option(help="After this share of turns, a user pauses.")] = 0.12,
    openings: Annotated[int, Option(min=0, help="Users share this many different openings.")] = 4,
    system: System = None,
    message_tokens: MessageTokens = None,
    reply_tokens: Annotated[
        int | None, Option(min=1, help="Replies to made-up messages have this mean length.")
    ] = None,
    trace: Annotated[Path | None, Option(help="Replay the events of this JSONL file instead.")] = None,
    save_trace: Annotated[Path | None, Option(help="Write the events to this JSONL file.")] = None,
    model: Annotated[
        str, Option(help='Name a checkpoint\'s folder, a GGUF file, a hub id, or "embedded".')
    ] = "embedded",
    device: Annotated[str, Option(help="The model and its memory live on this device, such as cpu or cuda.")] = "cpu",
    dtype: Annotated[str, Option(help="Compute in float32, bfloat16 or float16; auto: the checkpoint's.")] = "auto",
    weights: Weights = "auto",
    budget: Annotated[
        str, Option(help="The memory uses at most this many bytes. A small budget causes swaps.")
    ] = "1GiB",
    host_budget: HostBudget = None,
    swap_dir: SwapDir = None,
    rollback_window: Annotated[
        int, Option(min=0, help="This many tokens can be taken back without a checkpoint.")
    ] = ROLLBACK_WINDOW,
    grid_tokens: GridTokens = PREFIX_GRID_TOKENS,
    prefixes: Annotated[bool, Option(help="Let prompts continue from what was computed before.")] = True,
    max_running: MaxRunning = None,
    step_tokens: StepTokens = None,
    max_tokens: Annotated[int, Option(min=1, help="A reply has at most this many tokens.")] = 32,
    speed: Speed = "max",
    is_dry: IsDry = False,
    alone: Alone = "wrong",
    json_file: Annotated[Path | None, Option("--json", help="Write the whole report to this file.")] = None,
    plots: Annotated[Path | None, Option(help="Write plots (PNG) to this folder. Needs matplotlib.")] = None,
    is_quiet: Annotated[bool, Option("--quiet", help="Show no live view.")] = False,
    fleet: Fleet = None,
) -> None:
    """Simulate many users, who chat, edit, regenerate, branch, pause and leave, and report latency, tokens and bytes.

    Exits with 1 if sharing the memory changed an answer, if an answer names what only other users have told, if a reply
    failed, or if bytes are in use at the end.
    """
    if fleet is not None:
        _simulate_fleet(context)
        return
    running, tokens = _find_sizes(max_running, step_tokens, is_dry=is_dry)
    chats = (pause, edits, regenerations, branches, pauses, openings, system)
    habits = _find_habits(context, workload, users, (turns, rate, think, message_tokens, reply_tokens), chats)
    events, about = _find_workload(habits, seed, trace, save_trace)
    numbers: dict[str, Any] = {
        "budget": budget, "host_budget": host_budget, "swap_dir": swap_dir, "rollback_window": rollback_window,
        "grid_tokens": grid_tokens if prefixes else None, "step_tokens": tokens, "max_running": running,
        "max_tokens": max_tokens, "resends": workload == "agents", "is_checked": model == "embedded", "seed": seed,
        "speed": None if is_dry else _read_speed(speed),
    }  # fmt: skip
    _check_outputs(alone, plots)
    setup = _make_setup(model, device, dtype, weights, numbers, is_dry=is_dry)
    report = _play(setup, events, about, alone=alone, is_quiet=is_quiet)
    _finish(report, json_file, plots)


_OF_FLEETS = {"turns": "turns", "rate": "sessions_per_second", "think": "think_seconds", "edits": "edits",
              "message_tokens": "message_tokens", "reply_tokens": "reply_tokens", "openings": "n_openings"}  # fmt: skip
"""Maps the options that also apply to a fleet to the fields of `FleetHabits`."""


def _simulate_fleet(context: typer.Context) -> None:
    """Simulate a fleet by the given options. Raises SpecError if a fleet does not have one of them."""
    from importlib import import_module

    from hybridmem.memory import SpecError

    both = {*_OF_FLEETS, "users", "fleet", "model", "dtype", "budget", "grid_tokens", "seed", "json_file"}
    given = {
        name: value
        for name, value in context.params.items()
        if (source := context.get_parameter_source(name)) is not None and source.name == "COMMANDLINE"
    }
    if unknown := sorted(given.keys() - both):
        raise SpecError(f"--{unknown[0].replace('_', '-')} is not simulated with --fleet; leave it out")
    numbers = {"n_sessions": context.params["users"], "replicas": context.params["fleet"]}
    numbers |= {name: context.params[name] for name in ("budget", "grid_tokens", "seed")}
    numbers |= {field: given[name] for name, field in _OF_FLEETS.items() if name in given}
    spec = _read_spec(context.params["model"], context.params["dtype"])
    import_module("hybridmem.cluster.commands.fleet").run_simulation(numbers, spec, context.params["json_file"])


def _read_spec(model: str, dtype: str) -> MemorySpec:
    from hybridmem.models import plan_memory
    from hybridmem.models.loading.folders import find_folder, read_config

    config, _ = read_config(find_folder(model))
    return plan_memory(config, config.architectures[0], dtype=dtype)


def _find_sizes(max_running: int | None, step_tokens: int | None, *, is_dry: bool) -> tuple[int, int]:
    """Return how many replies and how many tokens a step may have."""
    running = max_running or (_DRY_RUNNING if is_dry else _RUNNING)
    return running, step_tokens or max(_DRY_STEP_TOKENS if is_dry else STEP_TOKENS, 4 * running)


def _find_habits(
    context: typer.Context, workload: str, users: int, both: tuple[Any, ...], chats: tuple[Any, ...]
) -> Habits | AgentHabits:
    """Return the habits of the users.

    Raises SpecError for wrong values, and for options that this workload does not have.

    Args:
        both: the options that both workloads have; None where one was not given. chats: the options that only chats
            have.
    """
    from hybridmem.chat.simulation.agents import AgentHabits
    from hybridmem.chat.simulation.workload import Habits
    from hybridmem.memory import SpecError

    def named(*names: str) -> dict[str, Any]:
        return {name: value for name, value in zip(names, both, strict=True) if value is not None}

    if workload == "chats":
        names = ("pause_s", "edits", "regenerations", "branches", "pauses", "n_openings", "system")
        own = dict(zip(names, chats, strict=True))
        return Habits(n_users=users, **named("turns", "rate", "think_s", "message_tokens", "reply_tokens"), **own)
    if workload != "agents":
        raise SpecError(f'--workload {workload}; choose "chats" or "agents"')
    for name in ("pause", "edits", "regenerations", "branches", "pauses", "openings", "system"):
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise SpecError(f"--{name} is of chats; leave it out with --workload agents")
    return AgentHabits(n_agents=users, **named("turns", "rate", "tool_s", "result_tokens", "reply_tokens"))


def _find_workload(
    habits: Habits | AgentHabits, seed: int, trace: Path | None, save_trace: Path | None
) -> tuple[Workload, dict[str, object]]:
    """Return the workload, with its description for the report."""
    from hybridmem.chat.simulation.agents import AgentHabits, AgentWorkload
    from hybridmem.chat.simulation.traces import read_trace, write_trace
    from hybridmem.chat.simulation.workload import make_workload

    if trace is not None:
        workload: Workload = read_trace(trace)
        about: dict[str, object] = {"trace": trace.name}
    else:
        workload = AgentWorkload(habits, seed) if isinstance(habits, AgentHabits) else make_workload(habits, seed)
        about = {"seed": seed, **vars(habits)}
    if save_trace is not None:
        with _writing(save_trace):
            write_trace(save_trace, workload)
    return workload, about


def _check_outputs(alone: str, plots: Path | None) -> None:
    """Refuse wrong options of the output now, before the simulation runs."""
    from hybridmem.memory import SpecError
    from hybridmem.memory.pictures import need_matplotlib

    if alone not in ("wrong", "all", "none"):
        raise SpecError(f'--alone {alone}; choose "wrong", "all" or "none"')
    if plots is not None:
        need_matplotlib()


def _read_speed(speed: str) -> float | None:
    from hybridmem.memory import SpecError

    if speed == "max":
        return None
    try:
        number = float(speed)
    except ValueError:
        number = 0.0
    if not (math.isfinite(number) and number > 0):
        raise SpecError(f'--speed {speed}; give a number above 0, or "max"')
    return number


def _make_setup(
    model: str, device: str, dtype: str, weights: str, numbers: dict[str, Any], *, is_dry: bool
) -> Setup:  # fmt: skip
    """Return the model, memory and engine for the users.

    A dry run reads the config and the tokenizer, but no weights.
    """
    import torch

    from hybridmem.chat.prompts import load_tokenizer
    from hybridmem.chat.simulation.simulation import Setup
    from hybridmem.memory import FormatError, SpecError
    from hybridmem.models import plan_memory
    from hybridmem.models.loading.folders import find_folder, read_config

    if not is_dry:
        language_model, tokenizer = load(model, device, dtype, weights)
        return Setup(language_model.memory_spec, language_model, tokenizer, **numbers)
    if weights != "auto":
        raise SpecError(f"--weights {weights}: a dry run has no weights, and the budget is for the memory alone")
    folder = find_folder(model)
    config, _ = read_config(folder)
    try:
        # A dry run counts the bytes that this device would hold.
        kept = torch.device(device)
    except RuntimeError as error:
        raise SpecError(f"--device {device} is no device ({error}); give cpu, cuda ...") from error
    spec = replace(plan_memory(config, config.architectures[0], dtype=dtype), device=kept)
    try:
        tokenizer = load_tokenizer(folder)
    except FormatError:
        tokenizer = None
    return Setup(spec, None, tokenizer, **numbers)


def _play(setup: Setup, workload: Workload, about: dict[str, object], *, alone: str, is_quiet: bool) -> Report:
    from hybridmem.chat.console import make_console
    from hybridmem.chat.simulation.alone import compare_alone
    from hybridmem.chat.simulation.simulation import simulate as play
    from hybridmem.chat.simulation.view import live_dashboard, print_summary

    console = make_console()
    with live_dashboard(console, is_shown=not is_quiet) as on_step:
        report = play(setup, workload, on_step)
    report.workload = about
    compare_alone(setup, workload, report, which=alone)
    print_summary(console, report)
    return report


def _finish(report: Report, json_file: Path | None, plots: Path | None) -> None:
    """Write the files that the options ask for. Raises typer.Exit if the report shows a fault."""
    from hybridmem.chat.simulation.plots import write_plots

    if json_file is not None:
        with _writing(json_file):
            json_file.write_text(json.dumps(report.to_json(), indent=1) + "\n")
    if plots is not None:
        with _writing(plots):
            write_plots(report, plots)
    if not report.is_ok:
        raise typer.Exit(1)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    from hybridmem.memory import SpecError

    try:
        yield
    except OSError as error:
        raise SpecError(f"{path} cannot be written ({error}); give another path") from error
