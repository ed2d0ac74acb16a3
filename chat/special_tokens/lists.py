"""Renders templates that change their own lists, as that of Kimi-K2 does. transformers does not allow that."""

from __future__ import annotations

import json
from copy import deepcopy
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template
from jinja2.exceptions import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

_CHANGES = ("append", "extend", "insert", "pop")


class _Environment(ImmutableSandboxedEnvironment):
    """Extends the environment of transformers' templates so that lists may grow. A template gets copies of all data."""

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, list) and attr in _CHANGES:
            return True
        return super().is_safe_attribute(obj, attr, value)


def render_with_lists(tokenizer: Any, messages: list[dict[str, Any]], options: dict[str, Any]) -> str:
    """Return messages as text, as `apply_chat_template` does. Raises whatever the template raises."""
    name, options = options.get("chat_template"), {**options}
    template = tokenizer.get_chat_template(name, options.get("tools"))
    options.pop("chat_template", None)
    given = {"tools": None, "documents": None, "add_generation_prompt": False} | tokenizer.special_tokens_map | options
    return str(_compiled(template).render(messages=deepcopy(messages), **deepcopy(given)))


@lru_cache(maxsize=16)
def _compiled(template: str) -> Template:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise, "strftime_now": _now}
    return environment.from_string(template)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Write JSON. Jinja's own filter would escape HTML characters."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)
