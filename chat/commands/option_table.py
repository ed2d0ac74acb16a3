"""Makes a command's options from a table, for the command line, a configuration file and the environment.

Each row is an `Option`. Its name "max_body" is --max-body on the command line, `max_body = ...` in the file that
--config names, and HYBRID_MEMORY_MAX_BODY in the environment. The command line overrides the environment, which
overrides the file, which overrides the default. click applies this order by itself, because the file's values are the
context's `default_map`. CONTRIBUTING.md says why it is not pydantic-settings.
"""

from __future__ import annotations

import difflib
import inspect
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from hybridmem.chat.commands.toml_files import read_tables, read_toml

ENVIRONMENT = "HYBRID_MEMORY_"
_OTHER_VARIABLES = ("HYBRID_MEMORY_CACHE", "HYBRID_MEMORY_CONFIG", "HYBRID_MEMORY_KERNELS")
_OF_KUBERNETES = re.compile(r"HYBRID_MEMORY(_\w+)?_(SERVICE_(HOST|PORT\w*)|PORT(_\d+_(TCP|UDP|SCTP)\w*)?)")
"""Matches the variables that Kubernetes sets for a service called hybrid-memory... They are not options."""
_TRUTHS = ("1", "true", "t", "yes", "y", "on", "0", "false", "f", "no", "n", "off")
Kind = Literal["text", "texts", "bytes", "whole", "number", "flag", "tables"]
_TYPES: dict[Kind, Any] = {
    "text": str, "texts": list[str], "bytes": str, "whole": int, "number": float, "flag": bool, "tables": str,
}  # fmt: skip
_WORDS: dict[Kind, str] = {
    "text": "a text",
    "texts": "a list of texts",
    "bytes": 'bytes, such as 1048576 or "1MiB"',
    "whole": "a whole number",
    "number": "a number",
    "flag": "true or false",
    "tables": "tables, each under [[NAME]], or a file that holds them",
}


@dataclass(frozen=True)
class Option:
    """Holds one option of a command, as one row of a table.

    Attributes:
        kind: the type of the value. An option of kind "texts" may be repeated on the command line; in the environment,
            spaces separate its values. The value of kind "tables" stands in the configuration file, or in a file of its
            own; the command line, the environment and the configuration file may name that file.
        default: the value if the option is not given. None: there is none, or the help text explains it.
        to: the object that gets the option as an argument, and the argument's name, such as "server.max_body_bytes". If
            the name is left out, the argument has the option's name. "": the command itself reads the option.
        least, most: the limits of a number, both inclusive. choices: the only texts that are allowed.
    """

    name: str
    kind: Kind
    default: Any
    help: str
    to: str = ""
    least: float | None = None
    most: float | None = None
    choices: tuple[str, ...] = ()

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return ENVIRONMENT + self.name.upper()

    def parameter(self) -> inspect.Parameter:
        """Return the option as a parameter of a function, from which typer reads it."""
        settings: dict[str, Any] = {}
        if self.kind in ("whole", "number"):
            settings = {"min": self.least, "max": self.most}
        if self.kind == "tables":
            settings = {"metavar": "FILE", "callback": self._read_tables}
        if self.choices:
            settings = {"autocompletion": lambda: list(self.choices), "callback": self._check_choice}
        has_default = self.default not in (None, "", False, ())
        info = typer.Option(
            envvar=self.variable, show_envvar=False, help=self.help, show_default=has_default, **settings
        )
        of = _TYPES[self.kind]
        annotation: Any = Annotated[of | None if self.default is None else of, info]
        return inspect.Parameter(self.name, inspect.Parameter.KEYWORD_ONLY, default=self.default, annotation=annotation)

    def _check_choice(self, value: str | None) -> str | None:
        if value is not None and value not in self.choices:
            raise typer.BadParameter(f"{value!r}; give {self._wanted()}")
        return value

    def _read_tables(self, value: str | None) -> Any:
        try:
            return None if value is None else read_tables(self.name, Path(value))
        except ValueError as wanted:
            raise typer.BadParameter(f"{value!r}; give {wanted}") from None

    def read(self, value: object) -> Any:
        """Convert a value of the configuration file to the value that the command line would give.

        Raises ValueError.
        """
        if self.kind == "bytes" and type(value) is int:
            return str(value)
        if self.kind == "tables" and isinstance(value, str):
            return read_tables(self.name, Path(value))
        if not self._takes(value):
            raise ValueError(self._wanted())
        return float(value) if self.kind == "number" else value  # type: ignore[arg-type]

    def check_text(self, text: str) -> None:
        """Check a value from the environment, before click reads it. Raises ValueError."""
        value: object = text
        try:
            if self.kind in ("whole", "number"):
                value = _TYPES[self.kind](text)
        except ValueError:
            raise ValueError(self._wanted()) from None
        if self.kind == "flag":
            value = True if text.strip().lower() in _TRUTHS else text
        if not self._takes([] if self.kind in ("texts", "tables") else value):
            raise ValueError(self._wanted())

    def _takes(self, value: object) -> bool:
        if self.kind in ("texts", "tables"):
            of = str if self.kind == "texts" else dict
            return isinstance(value, list) and all(isinstance(each, of) for each in value)
        if self.kind in ("whole", "number"):
            is_one = type(value) is int or (self.kind == "number" and type(value) is float)
            low, high = (-float("inf") if self.least is None else self.least), self.most
            return is_one and low <= value and (high is None or value <= high)  # type: ignore[operator]
        return type(value) is _TYPES[self.kind] and (not self.choices or value in self.choices)

    def _wanted(self) -> str:
        if self.choices:
            return "one of " + ", ".join(map(repr, self.choices))
        if self.least is None and self.most is None:
            return _WORDS[self.kind]
        least = "" if self.least is None else f" of at least {self.least:g}"
        return _WORDS[self.kind] + least + ("" if self.most is None else f", at most {self.most:g}")


class Chosen(Mapping[str, Any]):
    """Holds the value of each option, whichever source set it."""

    def __init__(self, rows: Iterable[Option], values: Mapping[str, Any]) -> None:
        self._rows = tuple(rows)
        self._values = {row.name: values[row.name] for row in self._rows}

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Any:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def arguments_of(self, what: str) -> dict[str, Any]:
        """Return the arguments of `what`, by name: the options whose rows name it in `to`.

        Raises SpecError if the text of an option of kind "bytes" is not a number of bytes.
        """
        targets = {row: row.to.partition(".") for row in self._rows}
        return {name or row.name: self._convert(row) for row, (whose, _, name) in targets.items() if whose == what}

    def _convert(self, row: Option) -> Any:
        value = self._values[row.name]
        if row.kind == "bytes" and value is not None:
            return read_bytes(row, value)
        return tuple(value or ()) if row.kind in ("texts", "tables") else value


def read_bytes(row: Option, text: str) -> int:
    """Return a number of bytes. Raises SpecError, naming the option."""
    from hybridmem.memory import SpecError
    from hybridmem.memory.blocks import read_budget

    try:
        return read_budget(text)
    except SpecError:
        raise SpecError(f"{row.flag}={text!r}; give bytes, such as 512KiB or 1MB") from None


def command_of(rows: tuple[Option, ...], run: Callable[[Chosen], None], *, name: str) -> Callable[..., None]:
    """Return a function for `typer.Typer.command`, with an option for each row, and with --config.

    Args:
        run: the command. Its docstring is the help text.
        name: the command's name, for messages.
    """

    def call(context: typer.Context, **values: Any) -> None:
        from_file = context.meta.get(_FILE, {})
        names = [row.name for row in rows if row.kind == "tables"]
        tables = {name: from_file.get(name) if values[name] is None else values[name] for name in names}
        run(Chosen(rows, {**values, **tables}))

    context = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    parameters = [context, *(row.parameter() for row in rows), _config_of(rows, name)]
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    call.__doc__, call.__name__ = run.__doc__, name
    return call


_FILE = "hybrid-memory.config"
"""The key under which a context's `meta` holds the values of the configuration file."""


def _config_of(rows: tuple[Option, ...], name: str) -> inspect.Parameter:
    """Return the option --config, which is read before the others and becomes their defaults."""

    def read(context: typer.Context, path: Path | None) -> Path | None:
        if context.resilient_parsing:  # The shell only asks for completions.
            return path
        try:
            check_environment(rows, os.environ, name)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint=ENVIRONMENT + "...") from None
        try:
            values = {} if path is None else read_file(rows, path)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
        context.meta[_FILE] = values
        texts = {row.name: values[row.name] for row in rows if row.kind != "tables" and row.name in values}
        context.default_map = {**(context.default_map or {}), **texts}
        return path

    info = typer.Option(
        help=f"Read options from this TOML file. {ENVIRONMENT}NAME in the environment takes precedence over the file, "
        "and the command line over both.",
        envvar=ENVIRONMENT + "CONFIG",
        show_envvar=False,
        metavar="FILE",
        is_eager=True,
        callback=read,
        show_default=False,
    )
    annotation = Annotated[Path | None, info]
    return inspect.Parameter("config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def read_file(rows: tuple[Option, ...], path: Path) -> dict[str, Any]:
    """Read a configuration file. Raises ValueError; the message names the file, the key and the remedy."""
    try:
        given = read_toml(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as TOML: {error}") from None
    by_name = {row.name: row for row in rows}
    values = {}
    for key, value in given.items():
        if key not in by_name:
            raise ValueError(f"{path}: there is no option {key!r}{_nearest(key, by_name)}")
        try:
            values[key] = by_name[key].read(value)
        except ValueError as wanted:
            raise ValueError(f"{path}: {key} = {value!r}; give {wanted}") from None
    return values


def check_environment(rows: tuple[Option, ...], environment: Mapping[str, str], name: str) -> None:
    """Check the variables HYBRID_MEMORY_*.

    Raises ValueError if one names no option, or if its value is not allowed.
    """
    by_variable = {row.variable: row for row in rows}
    for variable, text in environment.items():
        if row := by_variable.get(variable):
            try:
                if text:
                    row.check_text(text)
            except ValueError as wanted:
                raise ValueError(f"{variable}={text!r} in the environment; give {wanted}") from None
        elif variable.startswith(ENVIRONMENT) and variable not in _OTHER_VARIABLES:
            if not _OF_KUBERNETES.fullmatch(variable):
                nearest = _nearest(variable, [*by_variable, *_OTHER_VARIABLES])
                raise ValueError(f"{variable} in the environment is no option of {name}{nearest}; unset it")


def _nearest(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
