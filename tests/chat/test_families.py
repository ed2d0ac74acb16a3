"""Families of models: calls are read and constrained as the chat template of each writes them.

The templates here are short ones of our own that write calls and thoughts as those of the families do.
"""

from __future__ import annotations

import copy
import json
from functools import cache
from typing import Any

import pytest

from hybridmem.chat.prompts import encode_chat, render
from hybridmem.chat.sampling.grammar import Grammars
from hybridmem.chat.special_tokens import find_turn_end
from hybridmem.chat.tools.calls import Tool
from hybridmem.chat.tools.families import Habits, find_habits
from hybridmem.chat.tools.grammars import Required, Shape, make_grammar
from hybridmem.chat.tools.reading import make_reader
from tests.chat.byte_tokenizers import make_byte_tokenizer
from tests.chat.test_tools import cut, draw_text, read

TEMPLATE = (
    "{% if tools %}<|turn|>tools\n{{ tools | tojson }}<|end|>{% endif %}{% for m in messages %}<|turn|>{{ m.role }}\n"
    "{% if m.reasoning_content %}THINK{{ m.reasoning_content }}CLOSE{% endif %}{{ m.content }}"
    "{% if m.tool_calls %}CALLS{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
EACH = "{% for c in m.tool_calls %}CALL{% endfor %}"
LINES = "{% for c in m.tool_calls %}{{ '\n' if not loop.first }}CALL{% endfor %}"
LIST = "{% for c in m.tool_calls %}{{ ', ' if not loop.first }}CALL{% endfor %}"
ARGUMENTS = "{% for k, v in c.function.arguments.items() %}ARGUMENT{% endfor %}"
VALUE = "{{ v if v is string else v | tojson }}"
NAME, OBJECT = "{{ c.function.name }}", "{{ c.function.arguments | tojson }}"
CALL = "{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}"
GEMMA_VALUE = (
    "{% macro value(v) %}{% if v is string %}<|\"|>{{ v }}<|\"|>{% elif v is mapping %}{{ '{' }}"
    "{% for k, i in v.items() %}{{ ',' if not loop.first }}{{ k }}:{{ value(i) }}{% endfor %}{{ '}' }}"
    "{% elif v is boolean or v is number %}{{ v | tojson }}{% else %}["
    "{% for i in v %}{{ ',' if not loop.first }}{{ value(i) }}{% endfor %}]{% endif %}{% endmacro %}"
)
ELEMENT = (
    "{% macro element(v) %}{% if v is mapping %}{% for k, i in v.items() %}]<]m[>[<{{ k }}>{{ element(i) }}]<]m[>[</{{ k }}>"
    "{% endfor %}{% elif v is string %}{{ v }}{% elif v is boolean or v is number %}{{ v | tojson }}{% else %}"
    "{% for i in v %}]<]m[>[<item>{{ element(i) }}]<]m[>[</item>{% endfor %}{% endif %}{% endmacro %}"
)
PYTHON_VALUE = (
    "{% macro value(v) %}{% if v is string %}'{{ v }}'{% elif v is boolean %}{{ 'True' if v else 'False' }}"
    "{% else %}{{ v }}{% endif %}{% endmacro %}"
)
KIMI_QUEUE = "{% set ids = [] %}{% for c in m.tool_calls %}{% set _ = ids.append(c.id) %}{% endfor %}"


def tagged(begin: str, key: str, key_end: str, value_end: str) -> str:
    return begin + ARGUMENTS.replace("ARGUMENT", key + "{{ k }}" + key_end + VALUE + value_end)


SHORT_IDS = (
    "{% for c in m.tool_calls %}{% if c.id | length != 9 %}{{ raise_exception('nine!') }}{% endif %}{% endfor %}"
)
FAMILIES: dict[str, tuple[str, list[str]]] = {
    "hermes": (LINES.replace("CALL", f"<tool_call>\n{CALL}\n</tool_call>"), ["<tool_call>", "</tool_call>"]),
    "jamba": (f"<tool_calls>[{LIST.replace('CALL', CALL)}]</tool_calls>", ["<tool_calls>", "</tool_calls>"]),
    "minimax-m1": ("<tool_calls>\n" + EACH.replace("CALL", f"{CALL}\n") + "</tool_calls>", []),
    "llama": (
        "{% if m.tool_calls | length != 1 %}{{ raise_exception('one call at once') }}{% endif %}"
        + EACH.replace("CALL", f'{{"name": "{NAME}", "parameters": {OBJECT}}}') + "{# <|python_tag|> #}",
        ["<|python_tag|>"],
    ),
    "apertus": (f"<|tools_prefix|>[{LIST.replace('CALL', '{{ {c.function.name: c.function.arguments} | tojson }}')}]<|tools_suffix|>", ["<|tools_prefix|>", "<|tools_suffix|>"]),
    "command": (
        "<|START_ACTION|>[" + LIST.replace("CALL", f'\n{{"tool_call_id": "{{{{ c.id }}}}", "tool_name": "{NAME}", "parameters": {OBJECT}}}')
        + "\n]<|END_ACTION|>",
        ["<|START_ACTION|>", "<|END_ACTION|>"],
    ),
    "mistral-nemo": (
        SHORT_IDS + "[TOOL_CALLS][" + LIST.replace("CALL", f'{{"name": "{NAME}", "arguments": {OBJECT}, "id": "{{{{ c.id }}}}"}}') + "]",
        ["[TOOL_CALLS]"],
    ),
    "mistral": (EACH.replace("CALL", f"[TOOL_CALLS]{NAME}[ARGS]{OBJECT}"), ["[TOOL_CALLS]", "[ARGS]"]),
    "mistral-ids": (
        SHORT_IDS + EACH.replace("CALL", f"[TOOL_CALLS]{NAME}[CALL_ID]{{{{ c.id }}}}[ARGS]{OBJECT}"),
        ["[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"],
    ),
    "deepseek": (
        "<｜calls▁begin｜>" + EACH.replace("CALL", f"<｜call▁begin｜>{NAME}<｜sep｜>{OBJECT}<｜call▁end｜>") + "<｜calls▁end｜>",
        ["<｜calls▁begin｜>", "<｜call▁begin｜>", "<｜sep｜>", "<｜call▁end｜>", "<｜calls▁end｜>"],
    ),
    "deepseek-r1": (
        "<｜calls▁begin｜>" + LINES.replace("CALL", f"<｜call▁begin｜>function<｜sep｜>{NAME}\n```json\n{OBJECT}\n```<｜call▁end｜>") + "<｜calls▁end｜>",
        ["<｜calls▁begin｜>", "<｜call▁begin｜>", "<｜sep｜>", "<｜call▁end｜>", "<｜calls▁end｜>"],
    ),
    "deepseek-v3.2": (
        "\n\n<｜D｜calls>\n" + EACH.replace("CALL", f'<｜D｜invoke name="{NAME}">\n' + ARGUMENTS.replace(
            "ARGUMENT", '<｜D｜parameter name="{{ k }}" string="{{ \'true\' if v is string else \'false\' }}">' + VALUE + "</｜D｜parameter>\n"
        ) + "</｜D｜invoke>\n") + "</｜D｜calls>",
        ["｜D｜"],
    ),
    "kimi": (
        KIMI_QUEUE + "<|calls_begin|>" + EACH.replace("CALL", f"<|call_begin|>functions.{NAME}:{{{{ loop.index0 }}}}<|arguments|>{OBJECT}<|call_end|>") + "<|calls_end|>",
        ["<|calls_begin|>", "<|call_begin|>", "<|arguments|>", "<|call_end|>", "<|calls_end|>"],
    ),
    "solar": (
        "<|calls|>" + EACH.replace("CALL", f"<|call:begin|>{{{{ c.id }}}}<|call:name|>{NAME}<|call:args|>{OBJECT}<|call:end|>") + "<|calls:end|>",
        ["<|calls|>", "<|call:begin|>", "<|call:name|>", "<|call:args|>", "<|call:end|>", "<|calls:end|>"],
    ),
    "functionary": (EACH.replace("CALL", f"<function={NAME}>{OBJECT}</function>"), []),
    "qwen": (
        LINES.replace("CALL", tagged(f"<tool_call>\n<function={NAME}>\n", "<parameter=", ">\n", "\n</parameter>\n") + "</function>\n</tool_call>"),
        ["<tool_call>", "</tool_call>"],
    ),
    "seed": (
        LINES.replace("CALL", tagged(f"<seed:call>\n<function={NAME}>\n", "<parameter=", ">", "</parameter>\n") + "</function>\n</seed:call>"),
        ["<seed:call>", "</seed:call>"],
    ),
    "glm": (
        LINES.replace("CALL", tagged(f"<tool_call>{NAME}\n", "<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n") + "</tool_call>"),
        ["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"],
    ),
    "laguna": (EACH.replace("CALL", tagged(f"<tool_call>{NAME}", "<arg_key>", "</arg_key><arg_value>", "</arg_value>") + "</tool_call>"), []),
    "ling": (LINES.replace("CALL", tagged(f"<tool_call>{NAME}\n", "<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>") + "\n</tool_call>"), ["<tool_call>", "</tool_call>"]),
    "minimax-m2": (
        "\n<m:tool_call>\n" + EACH.replace("CALL", tagged(f'<invoke name="{NAME}">\n', '<parameter name="', '">', "</parameter>\n") + "</invoke>\n") + "</m:tool_call>",
        ["<m:tool_call>", "</m:tool_call>"],
    ),
    "minimax-m3": (
        ELEMENT + "]<]m[>[<tool_call>\n" + EACH.replace("CALL", f']<]m[>[<invoke name="{NAME}">{{{{ element(c.function.arguments) }}}}]<]m[>[</invoke>\n') + "]<]m[>[</tool_call>",
        ["]<]m[>["],
    ),
    "lfm": (
        PYTHON_VALUE + "<|call_start|>[" + LIST.replace("CALL", NAME + "({% for k, v in c.function.arguments.items() %}{{ ', ' if not loop.first }}{{ k }}={{ value(v) }}{% endfor %})") + "]<|call_end|>",
        ["<|call_start|>", "<|call_end|>"],
    ),
    "gemma": (
        GEMMA_VALUE + EACH.replace("CALL", f"<|tool_call>call:{NAME}" + "{{ value(c.function.arguments) }}<tool_call|>"),
        ["<|tool_call>", "<tool_call|>", '<|"|>'],
    ),
}  # fmt: skip
"""Name -> how the family's template writes calls, and which marks in it are special tokens."""
HARMONY = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{% if m.tool_calls %}"
    "{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "{% set c = m.tool_calls[0] %}"
    "<|start|>assistant to=functions.{{ c.function.name }}<|channel|>commentary json<|message|>"
    "{{ c.function.arguments | tojson }}<|call|>{% elif m.role == 'assistant' %}"
    "{% if m.thinking and loop.last %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}{{ '<|return|>' if loop.last else '<|end|>' }}"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
CHANNELS = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>"]
THOUGHTS = {
    "gemma": ("<|channel>thought\n", "<channel|>"),
    "seed": ("<seed:think>", "</seed:think>"),
    "mistral": ("[THINK]", "[/THINK]"),
}

SHORT = {"type": "string", "maxLength": 6}
WEATHER = Tool("get_weather", {
    "type": "object",
    "properties": {
        "city": {"type": "string"}, "days": {"type": "integer"}, "tags": {"type": "array", "items": {"type": "string"}},
        "exact": {"type": "boolean"}, "more": {"type": "object", "properties": {"a": {"type": "string"}}},
    },
    "required": ["city"],
})  # fmt: skip
WRITTEN = [
    {"city": 'São "P" </x>', "days": 3, "tags": ["a, b", "c]"], "exact": True, "more": {"a": "x"}},
    {"city": "1"},
]
FORMAT = Tool("mcp.git__create-issue", {
    "type": "object",
    "properties": {
        "from": SHORT, "kind": {"enum": ["a", "b c"]}, "n": {"type": "integer", "minimum": 0, "maximum": 9},
        "maybe": {"anyOf": [{"enum": ["null", "x"]}, {"type": "null"}]}, "yes": {"$ref": "#/$defs/Yes"},
        "tags": {"type": "array", "items": SHORT, "maxItems": 2},
        "more": {"type": "object", "properties": {"a": SHORT, "b": {"type": "boolean"}}, "required": ["a"]},
    },
    "required": ["from", "kind", "n", "yes", "more"], "$defs": {"Yes": {"type": "boolean"}},
})  # fmt: skip
NOW = Tool("now")


@cache
def model(family: str, *, are_special: bool = True) -> tuple[Any, Habits]:
    """A tokenizer with the template of a family, and what is found out of it."""
    if family == "gpt-oss":
        tokenizer = make_byte_tokenizer(HARMONY, CHANNELS if are_special else ())
    else:
        calls, marks = FAMILIES[family]
        begin, end = THOUGHTS.get(family, ("<think>", "</think>"))
        template = TEMPLATE.replace("THINK", begin).replace("CLOSE", end).replace("CALLS", calls)
        tokenizer = make_byte_tokenizer(template, ["<|turn|>", "<|end|>", *(marks if are_special else ())])
    return tokenizer, find_habits(tokenizer)


def said(*arguments: dict[str, Any], **more: Any) -> dict[str, Any]:
    calls = [
        {"id": f"call_{i}", "type": "function", "function": {"name": WEATHER.name, "arguments": each}}
        for i, each in enumerate(arguments)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls, **more}


ALL = [*FAMILIES, "gpt-oss"]


@pytest.mark.parametrize("family", ALL)
def test_calls_are_read_as_the_template_writes_them(family: str) -> None:
    tokenizer, habits = model(family)
    n = 1 if family in ("llama", "gpt-oss") else 2
    chat = [{"role": "user", "content": "QQQ"}, said(*WRITTEN[:n], reasoning_content="Hm." if n == 2 else None)]
    opening = render(tokenizer, chat[:1])
    reply = render(tokenizer, chat, awaits_reply=False).removeprefix(opening).partition("<|end|>")[0]
    for pieces in ([reply], list(reply), cut(reply, 1), cut(reply, 2)):
        content, thoughts, calls = read(make_reader(habits, [WEATHER], habits.calls), pieces)
        assert calls == [(WEATHER.name, arguments) for arguments in WRITTEN[:n]]
        assert (content.strip(), thoughts.strip()) == ("", "Hm." if n == 2 else "")


@pytest.mark.parametrize(
    ("family", "are_special"), [*((family, True) for family in ALL), *((family, False) for family in FAMILIES)]
)
def test_required_calls_fit_whatever_is_drawn(family: str, are_special: bool) -> None:
    tokenizer, habits = model(family, are_special=are_special)
    assert habits.calls is not None
    grammars = Grammars(tokenizer, len(tokenizer), (tokenizer.eos_token_id,))
    required = Required([FORMAT, NOW], habits.calls, is_parallel=True)
    grammar = make_grammar(grammars, habits, None, required, must_call=True, is_thinking=False)
    assert grammar is not None
    for seed in range(3):
        text = draw_text(grammar, tokenizer, seed, opening="", shows_special=True).replace("<eos>", "")
        content, _, calls = read(make_reader(habits, [FORMAT, NOW], habits.calls), list(text))
        assert calls and not content.strip(), text
        for name, arguments in calls:
            assert (name, arguments) == ("now", {}) if name == "now" else fits(arguments), text


def fits(arguments: dict[str, Any]) -> bool:
    required = {"from", "kind", "n", "yes", "more"}
    assert required <= arguments.keys() <= {*required, "maybe", "tags"}
    assert isinstance(arguments["from"], str) and arguments["kind"] in ("a", "b c") and 0 <= arguments["n"] <= 9
    assert type(arguments["n"]) is int and type(arguments["yes"]) is bool
    assert arguments.get("maybe") in ("null", "x", None) and all(
        isinstance(tag, str) for tag in arguments.get("tags", [])
    )
    return {"a"} <= arguments["more"].keys() <= {"a", "b"}


@pytest.mark.parametrize("family", ALL)
def test_earlier_calls_are_rendered_for_every_template(family: str) -> None:
    """Ids become nine letters where a template wants that, and lists may grow in a template."""
    tokenizer, habits = model(family)
    result = {"role": "tool", "name": WEATHER.name, "tool_call_id": "call_0", "content": "RESULT"}
    chat = [{"role": "user", "content": "QQQ"}, said(WRITTEN[1]), result]
    assert "RESULT" in tokenizer.decode(encode_chat(tokenizer, chat))
    assert habits.lacks <= {"reasoning_content"}
