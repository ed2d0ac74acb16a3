"""The command line, the file and the environment give `serve` the same options. Unknown ones are refused."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from hybridmem.chat.cli import app as commands
from hybridmem.chat.commands.fleet_options import FLEET
from hybridmem.chat.commands.option_table import Chosen, Option, command_of
from hybridmem.chat.commands.serve_options import SERVE
from hybridmem.chat.commands.serving import memory_options
from hybridmem.chat.engine.engine import Engine
from hybridmem.chat.server import ServerOptions
from hybridmem.chat.simulation.simulation import Setup
from hybridmem.cluster.simulation.replicas import Sizes
from hybridmem.memory import HybridMemory


def run(arguments: list[str], **environment: str) -> tuple[Any, dict[str, Any]]:
    """Return what the table's command gets for these arguments, without serving."""
    got: dict[str, Any] = {}
    app = typer.Typer()
    app.command()(command_of(SERVE + FLEET, lambda chosen: got.update(chosen), name="serve"))
    return CliRunner().invoke(app, arguments, env=environment), got


def sample(row: Option, n: int, folder: Path) -> tuple[list[str], str, object]:
    """Return a value that is not the default, as arguments, in the environment and in the file."""
    if row.kind == "tables":
        path = folder / f"{row.name}-{n}.toml"
        path.write_text(f'[[{row.name}]]\nname = "a{n}"\nlimit = {n}\n')
        return [row.flag, str(path)], str(path), str(path)
    if row.choices:
        other = [choice for choice in row.choices if choice != row.default]
        return [row.flag, other[n % len(other)]], other[n % len(other)], other[n % len(other)]
    if row.kind == "flag":
        return [row.flag if not row.default else row.flag.replace("--", "--no-")], str(not row.default), not row.default
    if row.kind == "texts":
        return [row.flag, "a", row.flag, f"b{n}"], f"a b{n}", ["a", f"b{n}"]
    if row.kind in ("whole", "number"):
        n += 100 + math.ceil(row.least or 0)
        return [row.flag, str(n)], str(n), n
    return [row.flag, f"{100 + n}"], f"{100 + n}", f"{100 + n}"


def test_all_three_sources_say_the_same_and_the_nearer_one_counts(tmp_path: Path) -> None:
    """All options are tried at once.

    Typer takes 15 ms to make a command of eighty options.
    """
    rows, path = SERVE + FLEET, tmp_path / "server.toml"
    samples = [{row: sample(row, n, tmp_path) for row in rows} for n in range(3)]
    default, values = run([])[1], []

    def say_in_the_file(n: int) -> None:
        path.write_text("".join(f"{row.name} = {json.dumps(samples[n][row][2])}\n" for row in rows))

    for n in range(3):
        say_in_the_file(n)
        by_arguments = run([word for row in rows for word in samples[n][row][0]])[1]
        by_variables = run([], **{row.variable: samples[n][row][1] for row in rows})[1]
        by_file = run(["--config", str(path)])[1]
        for row in rows:
            name = row.name
            assert by_arguments[name] == by_variables[name] == by_file[name] != default[name], name
        values.append(by_arguments)

    # A flag has only two values, so the nearer place sets it to its default.
    say_in_the_file(1)
    nearer = {row.variable: str(row.default) if row.kind == "flag" else samples[0][row][1] for row in rows}
    by_variables = run(["--config", str(path)], **nearer)[1]
    nearest = list[str]()
    for row in rows:
        back = row.flag if row.default else row.flag.replace("--", "--no-")
        nearest += [back] if row.kind == "flag" else samples[2][row][0]
    variables = {row.variable: samples[0][row][1] for row in rows}
    by_arguments = run(["--config", str(path), *nearest], **variables)[1]
    for row in rows:
        name, is_flag = row.name, row.kind == "flag"
        assert by_variables[name] == (row.default if is_flag else values[0][name]), name
        assert by_arguments[name] == (row.default if is_flag else values[2][name]), name


def test_tables_stand_in_the_file_or_in_one_of_their_own(tmp_path: Path) -> None:
    tables, config = tmp_path / "keys.toml", tmp_path / "server.toml"
    tables.write_text('[[keys]]\nname = "ada"\nkey = "a"\n')
    config.write_text('port = 1\n[[keys]]\nname = "bob"\nkey = "b"\n')
    assert [key["name"] for key in run(["--config", str(config)])[1]["keys"]] == ["bob"]
    assert [key["name"] for key in run(["--config", str(config), "--keys", str(tables)])[1]["keys"]] == ["ada"]


@pytest.mark.parametrize("text", ["", "port = 1", "keys = 1", 'keys = "keys.toml"', "[[keys]]\n[other]", None])
def test_a_file_of_tables_holds_nothing_else(text: str | None, tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    if text is not None:
        path.write_text(text)
    (tmp_path / "server.toml").write_text(f"keys = {json.dumps(str(path))}")
    for result, got in (
        run(["--keys", str(path)]),
        run([], HYBRID_MEMORY_KEYS=str(path)),
        run(["--config", str(tmp_path / "server.toml")]),
    ):
        said = "".join(result.stderr.replace("│", " ").split())
        assert (result.exit_code, got) == (2, {}) and "keys.toml" in said and "[[keys]]" in said


def test_every_row_is_an_argument_of_what_it_names() -> None:
    takes = {
        "server": {field.name for field in dataclasses.fields(ServerOptions)},
        "memory": set(inspect.signature(HybridMemory).parameters),
        "engine": set(inspect.signature(Engine).parameters),
    }
    chosen = Chosen(SERVE, {row.name: row.default for row in SERVE})
    for whose, names in takes.items():
        assert chosen.arguments_of(whose).keys() <= names
    assert {row.to.partition(".")[0] for row in SERVE} <= {"", *takes}
    server = chosen.arguments_of("server")
    assert ServerOptions(**server) == ServerOptions(), "the table's defaults are those of a program"


def test_defaults_that_stand_in_several_places_are_the_same() -> None:
    """`hybridmem.defaults` names them, and every place that has one of them as a default says the same number."""
    memory, engine = inspect.signature(HybridMemory).parameters, inspect.signature(Engine).parameters
    options, own = {row.name: row.default for row in SERVE}, {f.name: f.default for f in dataclasses.fields(Setup)}
    window, step_tokens = memory["rollback_window"].default, engine["step_tokens"].default
    assert options["rollback_window"] == own["rollback_window"] == window
    assert inspect.signature(Sizes.of).parameters["rollback_window"].default == window
    assert options["step_tokens"] == own["step_tokens"] == step_tokens


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prot = 1", ["'prot'", "did you mean 'port'"]),
        ("max-body = 1", ["'max-body'", "did you mean 'max_body'"]),
        ('port = "8000"', ["port = '8000'", "a whole number", "65535"]),
        ("port = true", ["port = True"]),
        ("port = 70000", ["70000", "65535"]),
        ("grace = nan", ["grace = nan"]),
        ("max_running = 1.5", ["max_running = 1.5"]),
        ('prefix_cache = "no"', ["true or false"]),
        ('allowed_host = "a"', ["a list of texts"]),
        ("budget = 1.5", ["budget = 1.5", "1MiB"]),
        ("port", ["TOML"]),
        ("port = 1\nport = 2", ["TOML"]),
    ],
)
def test_a_file_is_refused_by_name(text: str, words: list[str], tmp_path: Path) -> None:
    path = tmp_path / "server.toml"
    path.write_text(text)
    result, got = run(["--config", str(path)])
    said = " ".join(result.stderr.replace("│", " ").split())
    assert (result.exit_code, got) == (2, {}) and "server.toml" in said.replace(" ", "")
    for word in words:
        assert word in said


def test_a_file_that_is_not_there_is_named() -> None:
    assert "nowhere.toml" in run([], HYBRID_MEMORY_CONFIG="nowhere.toml")[0].stderr


@pytest.mark.parametrize(
    ("name", "value", "word"),
    [
        ("HYBRID_MEMORY_PROT", "1", "HYBRID_MEMORY_PORT"),
        ("HYBRID_MEMORY_PORT", "tcp://10.0.0.1:80", "a whole number"),
        ("HYBRID_MEMORY_GRACE", "-1", "at least 0"),
        ("HYBRID_MEMORY_PREFIX_CACHE", "maybe", "true or false"),
    ],
)
def test_the_environment_is_refused_by_name(name: str, value: str, word: str) -> None:
    result, got = run([], **{name: value})
    said = " ".join(result.stderr.replace("│", " ").split())
    assert (result.exit_code, got) == (2, {}) and name in said and word in said


@pytest.mark.parametrize(
    ("arguments", "budget"),
    [([], "8MiB"), (["--model", "folder"], "1GiB"), (["--budget", "3GiB"], 3 << 30), (["--model=x", "--budget=5"], 5)],
)
def test_the_embedded_model_has_a_budget_that_fills(arguments: list[str], budget: object) -> None:
    found: list[dict[str, Any]] = []
    app = typer.Typer()
    app.command()(command_of(SERVE + FLEET, lambda chosen: found.append(memory_options(chosen)), name="serve"))
    CliRunner().invoke(app, arguments)
    assert found[0]["budget"] == budget


def test_variables_of_others_are_left_alone() -> None:
    others = {"HYBRID_MEMORY_CACHE": "/tmp", "HYBRID_MEMORY_SERVICE_HOST": "10.0.0.1", "HYBRID_MEMORY_MODEL": ""}
    assert run([], **others, HYBRID_MEMORY_PORT_80_TCP_ADDR="10.0.0.1")[1]["model"] == "embedded"


def test_shells_complete_the_options() -> None:
    environment = {"_HYBRID_MEMORY_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": "hybrid-memory serve --max-b"}
    result = CliRunner().invoke(commands, [], prog_name="hybrid-memory", env=environment)
    assert "--max-body" in result.stdout and "--max-tokens" not in result.stdout


def test_the_files_of_the_guide_are_read(tmp_path: Path) -> None:
    guide = (Path(__file__).parents[3] / "docs" / "how-to" / "server.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```toml[^\n]*\n(.*?)```", guide, re.DOTALL)
    (tmp_path / "server.toml").write_text("".join(blocks))
    result, got = run(["--config", str(tmp_path / "server.toml")])
    assert result.exit_code == 0 and got["save_every"] == 300 and len(got["allowed_origin"]) == 2
    assert [key.name for key in ServerOptions(keys=got["keys"]).keys] == ["ada", "bob"]
