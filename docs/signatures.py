"""Writes a short reference into docs/reference/*.md, for those who read the pages in the repository and not on the
site.

    python docs/signatures.py      brings the pages up to date; a test compares

Behind each `::: NAME` a page gets the signatures of its members with the first sentence of each docstring, between two
comments. On the site, where everything stands in full, docs/hooks.py leaves that part out. The page of the command line
gets its tables of options.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

import griffe
import typer
import yaml

from hybridmem import defaults
from hybridmem.chat.cli import app

ROOT = Path(__file__).parent.parent
PAGES = ROOT / "docs" / "reference"
_COLUMNS = 110
_BEGIN, _END = "<!-- signatures: made by docs/signatures.py -->\n", "<!-- end of signatures -->\n"
MADE = re.compile(rf"\n{re.escape(_BEGIN)}.*?{re.escape(_END)}", re.DOTALL)
"""What the site leaves out."""
_DIRECTIVE = re.compile(r"^::: ([\w.]+)\n((?:    .*\n)*)", re.MULTILINE)
_COMMANDS = re.compile(
    r"(?<=<!-- commands: made by docs/signatures.py -->\n\n).*?(?=\n<!-- end of commands -->)", re.DOTALL
)


def make_page(text: str) -> str:
    """A page of the reference with the parts that are made from the source as it is."""
    text = MADE.sub("", text if text.endswith("\n") else text + "\n")
    text = _COMMANDS.sub(lambda _: list_commands(), text)
    return _DIRECTIVE.sub(lambda match: f"{match[0]}\n{_BEGIN}\n{list_members(match[1], match[2])}\n{_END}", text)


def list_members(path: str, options_text: str = "") -> str:
    """A block of text with an object's signature, those of its members, and the first sentence of each."""
    found = _load()[path.removeprefix("hybridmem.")]
    options = (yaml.safe_load(textwrap.dedent(options_text)) or {}).get("options", {})
    is_module = found.is_module
    if is_module and options.get("members") is False:  # a text of its own, such as a legend
        return f"```text\n{found.docstring.value.strip()}\n```\n"
    lines: list[str] = [] if is_module else _describe(found, 0)
    if options.get("members") is not False and (is_module or found.is_class):
        for member in _members(found, options):
            lines += ["", *_describe(member, 0 if is_module else 4)]
            if is_module and member.is_class:
                for own in _members(member, options):
                    lines += ["", *_describe(own, 4)]
    if not any(lines):
        lines = textwrap.wrap(_first_sentence(found), _COLUMNS)
    return "\n".join(["```text", *lines[not lines[0] :], "```", ""])


@cache
def _load() -> Any:
    return griffe.GriffeLoader(search_paths=[str(ROOT)]).load("hybridmem")


def _members(found: Any, options: dict[str, Any]) -> Iterator[Any]:
    """Those that the site shows: public ones with a docstring, inherited ones too, in the order of the source."""
    hidden = [rule[1:] for rule in ["!^_", *options.get("filters", ())] if rule.startswith("!")]
    known = dict(found.members)
    if found.is_class and options.get("inherited_members", True):
        known |= {name: member for name, member in found.inherited_members.items() if name not in known}
    for name, member in known.items():
        target = member.final_target if member.is_alias and found.is_class else member
        is_shown = not target.is_alias and target.has_docstring and not any(re.search(rule, name) for rule in hidden)
        if is_shown and target.path.startswith("hybridmem."):
            yield target


def _describe(found: Any, indent: int) -> list[str]:
    """A signature, and below it the first sentence of the docstring."""
    if found.is_attribute:
        signature = f"{found.name}: {found.annotation}" if found.annotation is not None else found.name
        lines = [signature]
    else:
        parameters = (
            [p for p in found.parameters if p.name not in ("self", "cls")] if hasattr(found, "parameters") else []
        )
        returns = "" if found.is_class or found.returns is None else f" -> {found.returns}"
        lines = (
            [found.name]
            if found.is_class and not parameters
            else _call(found.name, list(_arguments(parameters)), returns)
        )
    said = textwrap.wrap(_first_sentence(found), _COLUMNS - indent - 4)
    return textwrap.indent("\n".join([*lines, *(f"    {line}" for line in said)]), " " * indent).splitlines()


def _call(name: str, arguments: list[str], returns: str) -> list[str]:
    line = f"{name}({', '.join(arguments)}){returns}"
    if len(line) <= _COLUMNS - 4:
        return [line]
    lines = [f"{name}("]
    for argument in arguments:
        if len(lines) > 1 and len(lines[-1]) + len(argument) + 2 <= _COLUMNS - 4:
            lines[-1] += f" {argument},"
        else:
            lines.append(f"        {argument},")
    return [*lines, f"    ){returns}"]


def _arguments(parameters: list[Any]) -> Iterator[str]:
    is_keyword_only = False
    for parameter in parameters:
        if str(parameter.annotation) == "Never":  # it is there to be refused with a hint
            continue
        kind = str(parameter.kind.value)
        if kind == "keyword-only" and not is_keyword_only:
            yield "*"
        is_keyword_only |= kind in ("keyword-only", "variadic positional")
        stars = {"variadic positional": "*", "variadic keyword": "**"}.get(kind, "")
        value = getattr(defaults, str(parameter.default), parameter.default)
        default = "" if value in (None, "_NOT_GIVEN") or stars else f" = {value}"
        yield f"{stars}{parameter.name}{'' if parameter.annotation is None else f': {parameter.annotation}'}{default}"


def _first_sentence(found: Any) -> str:
    paragraph = " ".join(found.docstring.value.strip().partition("\n\n")[0].split()) if found.docstring else ""
    sentence = re.match(r".*?\.(?=\s|$)", paragraph)
    return sentence[0] if sentence else paragraph


def list_commands() -> str:
    """Each command of `hybrid-memory` with its options, from their own help texts."""
    group = typer.main.get_command(app)
    lines: list[str] = []
    for name, command in sorted(group.commands.items()):  # type: ignore[attr-defined]
        lines += [
            f"## hybrid-memory {name}",
            "",
            command.help,
            "",
            "| option | default | |",
            "|---|---|---|",
            *_options(command),
            "",
        ]
    return "\n".join(lines)


def _options(command: object) -> Iterator[str]:
    for option in command.params:  # type: ignore[attr-defined]
        default = "" if option.default is None or option.default is False else f"`{option.default}`"
        names = ", ".join(f"`{n}`" for n in (*option.opts, *option.secondary_opts))
        yield f"| {names} | {'required' if option.required else default} | {escape(option.help or '', quote=False)} |"


if __name__ == "__main__":
    for page in sorted(PAGES.glob("*.md")):
        page.write_text(make_page(page.read_text(encoding="utf-8")), encoding="utf-8")
