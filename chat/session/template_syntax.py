"""Parses templates, which consist of text and of holes that a model fills.

Q: {question}\\nA: {answer:max_tokens=20,stop='\\n'}\\nConfidence: {score:choices=['low','high']}

{name}           a hole; {name} again is the same words again
{name:options}   as arguments of `Hole` are written in Python, on one line: max_tokens=20, stop='x' or stop=['x','y'],
choices=['a','b'] {{ and }}        braces
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from hybridmem.chat.sampling.sampling import Sampling, check_sampling
from hybridmem.memory import BatchError
from hybridmem.memory.blocks import is_integer

_OPTIONS = ("max_tokens", "stop", "choices")


@dataclass(frozen=True)
class Text:
    """Holds given text."""

    text: str

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise BatchError(f"Text({self.text!r}) has no words; give a string")


@dataclass(frozen=True)
class Hole:
    """Holds a place for text that the model generates, unless it is given when the template is filled.

    Attributes:
        name: an identifier. A second hole of the same name gets the words of the first.
        max_tokens: the most tokens to choose.
        stop: strings before which the words end. An end token of the model ends them too.
        choices: if there are any, the hole gets the one that the model finds most likely: the sum of the log
            probabilities of its tokens is the highest. The first wins a tie. A choice is never less likely than a
            longer one that begins with it.
        sampling: how tokens are chosen. None: by the `sampling` given to `fill`. A hole with choices is not sampled.
    Raises:
        BatchError: wrong options.
    """

    name: str
    max_tokens: int = 64
    stop: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    sampling: Sampling | None = None

    def __post_init__(self) -> None:
        for option in ("stop", "choices"):
            value = getattr(self, option)
            words = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Iterable) else (None,)
            if not all(isinstance(word, str) and word for word in words):
                raise BatchError(f"{option}={value!r} of hole {self.name!r}; give strings of at least one character")
            object.__setattr__(self, option, words)
        if not isinstance(self.name, str) or not self.name.isidentifier():
            raise BatchError(f"{self.name!r} names no hole; give letters, digits and underscores, a letter first")
        if not is_integer(self.max_tokens, 1):
            raise BatchError(
                f"max_tokens={self.max_tokens!r} of hole {self.name!r}; it must be an integer of at least 1"
            )
        if len(set(self.choices)) < len(self.choices):
            raise BatchError(f"choices={list(self.choices)} of hole {self.name!r} repeat themselves; name each once")
        if self.sampling is not None:
            check_sampling(self.sampling)


Part = Text | Hole


@dataclass(frozen=True)
class Template:
    """Holds texts and holes, from a list of them or a string; see above for how a string is written.

    Raises:
        BatchError: a string that cannot be read, something that is neither text nor hole, or two holes of one name with
        different options.
    """

    parts: tuple[Part, ...]

    def __init__(self, template: str | Iterable[Part]) -> None:
        if not isinstance(template, Iterable):
            raise BatchError(
                f"{template!r} is no template; give a string with {{holes}}, or a list of Text(...) and Hole(...)"
            )
        parts = tuple(parse(template) if isinstance(template, str) else template)
        holes: dict[str, Hole] = {}
        for part in parts:
            if not isinstance(part, Text | Hole):
                raise BatchError(f"{part!r} is no part of a template; give Text(...) and Hole(...)")
            if isinstance(part, Hole) and part not in (holes.setdefault(part.name, part), Hole(part.name)):
                raise BatchError(
                    f"hole {part.name!r} stands twice with other options; leave them out the second time, it says the "
                    "same"
                )
        object.__setattr__(self, "parts", parts)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the holes, without repetitions."""
        return tuple(dict.fromkeys(part.name for part in self.parts if isinstance(part, Hole)))


def parse(template: str) -> Iterator[Part]:
    """Parse a template that was written as a string.

    Raises BatchError; the message names the position in the string.
    """
    text, at = "", 0
    while at < len(template):
        if template[at : at + 2] in ("{{", "}}"):
            text += template[at]
            at += 2
        elif template[at] == "}":
            raise BatchError(f"a }} at character {at} of the template closes nothing; write }}}} for a brace")
        elif template[at] == "{":
            if text:
                yield Text(text)
                text = ""
            hole, at = _parse_hole(template, at)
            yield hole
        else:
            text += template[at]
            at += 1
    if text:
        yield Text(text)


def _parse_hole(template: str, start: int) -> tuple[Hole, int]:
    """Return the hole whose brace opens at `start`, and its end. Strings inside of it may contain braces, too."""
    reason, end = "it is not closed", template.find("}", start)
    while end >= 0:
        name, has_options, options = template[start + 1 : end].partition(":")
        try:
            return Hole(name.strip(), **(_read_options(options) if has_options else {})), end + 1
        except SyntaxError as error:
            reason = f"its options cannot be read: {error.msg}"
        end = template.find("}", end + 1)
    raise BatchError(
        f"the hole at character {start} of the template is none: {reason}; write {{name:max_tokens=20,stop='.'}} or "
        "{{"
    )


def _read_options(options: str) -> dict[str, Any]:
    """Read keyword arguments as Python writes them, literals only.

    Raises SyntaxError if they are not complete, and BatchError if they are wrong.
    """
    # In "{a:stop='\n'}", Python has already replaced \n by a line break. Turn it back, so that the literal can be read.
    call = ast.parse(f"f({options})".replace("\n", "\\n"), mode="eval").body
    if not isinstance(call, ast.Call) or call.args or isinstance(call.func, ast.Call):
        raise BatchError(f"options {options!r} of a hole; give {', '.join(f'{name}=...' for name in _OPTIONS)}")
    found: dict[str, Any] = {}
    for keyword in call.keywords:
        if keyword.arg not in _OPTIONS:
            raise BatchError(f"a hole has no option {keyword.arg!r}; it has {', '.join(_OPTIONS)}")
        try:
            found[keyword.arg] = ast.literal_eval(keyword.value)
        except ValueError as error:
            raise BatchError(
                f"{keyword.arg} in {options!r} is no literal; give a number, a string or a list of strings"
            ) from error
    return found
