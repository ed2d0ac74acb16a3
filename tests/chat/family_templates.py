"""Holds short chat templates of our own. They write calls and thoughts as the templates of model families do."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from hybridmem.chat.tools.families import Habits, find_habits
from tests.chat.byte_tokenizers import make_byte_tokenizer

TEMPLATE = (
    "{% if tools %}<|turn|>tools\n{{ tools | tojson }}<|end|>{% endif %}{% for m in messages %}<|turn|>{{ m.role }}\n"
    "{% if m.reasoning_content %}THINK{{ m.reasoning_content }}CLOSE{% endif %}{{ m.content }}"
    "{% if m.tool_calls %}CALLS{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
NAME, OBJECT = "{{ c.function.name }}", "{{ c.function.arguments | tojson }}"
CALL = "{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}"
NINE = "{% for c in m.tool_calls %}{% if c.id | length != 9 %}{{ raise_exception('nine!') }}{% endif %}{% endfor %}"
ONE = "{% if m.tool_calls | length != 1 %}{{ raise_exception('one call at once') }}{% endif %}"
GROWING = "{% set ids = [] %}{% for c in m.tool_calls %}{% set _ = ids.append(c.id) %}{% endfor %}"
SCALAR = "{{ v | tojson }}"
GEMMA_VALUE = (
    "{% macro value(v) %}{% if v is string %}<|\"|>{{ v }}<|\"|>{% elif v is mapping %}{{ '{' }}"
    "{% for k, i in v.items() %}{{ ',' if not loop.first }}{{ k }}:{{ value(i) }}{% endfor %}{{ '}' }}"
    f"{{% elif v is boolean or v is number %}}{SCALAR}{{% else %}}["
    "{% for i in v %}{{ ',' if not loop.first }}{{ value(i) }}{% endfor %}]{% endif %}{% endmacro %}"
)
ELEMENT = (
    "{% macro element(v) %}{% if v is mapping %}"
    "{% for k, i in v.items() %}]<]m[>[<{{ k }}>{{ element(i) }}]<]m[>[</{{ k }}>{% endfor %}"
    f"{{% elif v is string %}}{{{{ v }}}}{{% elif v is boolean or v is number %}}{SCALAR}{{% else %}}"
    "{% for i in v %}]<]m[>[<item>{{ element(i) }}]<]m[>[</item>{% endfor %}{% endif %}{% endmacro %}"
)
PYTHON_VALUE = (
    "{% macro value(v) %}{% if v is string %}'{{ v }}'{% elif v is boolean %}{{ 'True' if v else 'False' }}"
    "{% else %}{{ v }}{% endif %}{% endmacro %}"
)
PYTHON_CALL = (
    "({% for k, v in c.function.arguments.items() %}{{ ', ' if not loop.first }}{{ k }}={{ value(v) }}{% endfor %})"
)
TYPE = "\" string=\"{{ 'true' if v is string else 'false' }}\">"


def each(call: str, between: str = "") -> str:
    separator = f"{{{{ '{between}' if not loop.first }}}}" if between else ""
    return f"{{% for c in m.tool_calls %}}{separator}{call}{{% endfor %}}"


def lines(call: str) -> str:
    return each(call, "\\n")


def listed(call: str) -> str:
    return each(call, ", ")


def arguments(key: str, key_end: str, value_end: str) -> str:
    value = f"{{{{ k }}}}{key_end}{{{{ v if v is string else v | tojson }}}}{value_end}"
    return f"{{% for k, v in c.function.arguments.items() %}}{key}{value}{{% endfor %}}"


DSML_KEY, DSML_END = '<｜D｜parameter name="', "</｜D｜parameter>\n"
FUNCTION = f"<function={NAME}>\n"
KEYS = "<arg_key>", "</arg_key>\n<arg_value>"
FAMILIES = {
    "hermes": lines(f"<tool_call>\n{CALL}\n</tool_call>"),
    "jamba": f"<tool_calls>[{listed(CALL)}]</tool_calls>",
    "minimax-m1": f"<tool_calls>\n{each(CALL + chr(10))}</tool_calls>",
    "llama": ONE + each(f'{{"name": "{NAME}", "parameters": {OBJECT}}}') + "{# <|python_tag|> #}",
    "apertus": f"<|calls|>[{listed('{{ {c.function.name: c.function.arguments} | tojson }}')}]<|calls_end|>",
    "command": "<|ACTION|>["
    + listed(f'\n{{"tool_call_id": "{{{{ c.id }}}}", "tool_name": "{NAME}", "parameters": {OBJECT}}}')
    + "\n]<|END_ACTION|>",
    "mistral-nemo": NINE
    + "[TOOL_CALLS]["
    + listed(f'{{"name": "{NAME}", "arguments": {OBJECT}, "id": "{{{{ c.id }}}}"}}')
    + "]",
    "mistral": each(f"[TOOL_CALLS]{NAME}[ARGS]{OBJECT}"),
    "mistral-ids": NINE + each(f"[TOOL_CALLS]{NAME}[CALL_ID]{{{{ c.id }}}}[ARGS]{OBJECT}"),
    "deepseek": f"<｜calls｜>{each(f'<｜call｜>{NAME}<｜sep｜>{OBJECT}<｜call▁end｜>')}<｜calls▁end｜>",
    "deepseek-r1": "<｜calls｜>"
    + lines(f"<｜call｜>function<｜sep｜>{NAME}\n```json\n{OBJECT}\n```<｜call▁end｜>")
    + "<｜calls▁end｜>",
    "deepseek-v3.2": "\n\n<｜D｜calls>\n"
    + each(f'<｜D｜invoke name="{NAME}">\n{arguments(DSML_KEY, TYPE, DSML_END)}</｜D｜invoke>\n')
    + "</｜D｜calls>",
    "kimi": GROWING
    + "<|calls|>"
    + each(f"<|call|>functions.{NAME}:{{{{ loop.index0 }}}}<|arguments|>{OBJECT}<|call_end|>")
    + "<|calls_end|>",
    "solar": "<|calls|>"
    + each(f"<|call|>{{{{ c.id }}}}<|name|>{NAME}<|args|>{OBJECT}<|call:end|>")
    + "<|calls:end|>",
    "functionary": each(f"<function={NAME}>{OBJECT}</function>"),
    "qwen": lines(
        f"<tool_call>\n{FUNCTION}{arguments('<parameter=', '>' + chr(10), chr(10) + '</parameter>' + chr(10))}"
        "</function>\n</tool_call>"
    ),
    "seed": lines(
        f"<seed:call>\n{FUNCTION}{arguments('<parameter=', '>', '</parameter>' + chr(10))}</function>\n</seed:call>"
    ),
    "glm": lines(f"<tool_call>{NAME}\n{arguments(*KEYS, '</arg_value>' + chr(10))}</tool_call>"),
    "laguna": each(f"<tool_call>{NAME}{arguments('<arg_key>', '</arg_key><arg_value>', '</arg_value>')}</tool_call>"),
    "ling": lines(f"<tool_call>{NAME}\n{arguments(*KEYS, '</arg_value>')}\n</tool_call>"),
    "minimax-m2": "\n<m:tool_call>\n"
    + each(f'<invoke name="{NAME}">\n{arguments("<parameter name=" + chr(34), chr(34) + ">", "</parameter>" + chr(10))}'
           "</invoke>\n")
    + "</m:tool_call>",
    "minimax-m3": ELEMENT
    + "]<]m[>[<tool_call>\n"
    + each(f']<]m[>[<invoke name="{NAME}">{{{{ element(c.function.arguments) }}}}]<]m[>[</invoke>\n')
    + "]<]m[>[</tool_call>",
    "lfm": f"{PYTHON_VALUE}<|call_start|>[{listed(NAME + PYTHON_CALL)}]<|call_end|>",
    "gemma": GEMMA_VALUE + each(f"<|tool_call>call:{NAME}{{{{ value(c.function.arguments) }}}}<tool_call|>"),
}  # fmt: skip
"""Name -> how the family's template writes calls."""
HARMONY = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{% if m.tool_calls %}"
    "{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "{% set c = m.tool_calls[0] %}"
    "<|start|>assistant to=functions.{{ c.function.name }}<|channel|>commentary json<|message|>"
    "{{ c.function.arguments | tojson }}<|call|>{% elif m.role == 'assistant' %}{% if m.thinking and loop.last %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}{{ '<|return|>' if loop.last else '<|end|>' }}"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}{# <|constrain|> #}"
)
ALL = [*FAMILIES, "gpt-oss"]
THOUGHTS = {
    "gemma": ("<|channel>thought\n", "<channel|>"),
    "seed": ("<seed:think>", "</seed:think>"),
    "mistral": ("[THINK]", "[/THINK]"),
}
_SPECIAL = re.compile(
    r"<[|｜][^<>{}\s]*>|<tool_call\|>|</?(?:tool_call|seed:call|m:tool_call|arg_\w+)>|\[[A-Z_]+\]|｜D｜|]<]m\[>\["
)


@cache
def model(family: str, *, are_special: bool = True) -> tuple[Any, Habits]:
    """Return a tokenizer with the template of a family, and the habits that are found in the template.

    Args:
        are_special: whether the marks around calls are special tokens. Otherwise they are ordinary text.
    """
    begin, end = THOUGHTS.get(family, ("<think>", "</think>"))
    template = TEMPLATE.replace("THINK", begin).replace("CLOSE", end).replace("CALLS", FAMILIES.get(family, ""))
    template = HARMONY if family == "gpt-oss" else template
    marks = set(_SPECIAL.findall(template.replace("<｜D｜", "｜D｜")) if are_special else ())
    turns = {"<|turn|>", "<|end|>"} if family != "gpt-oss" else set()
    tokenizer = make_byte_tokenizer(template, sorted(marks | turns))
    return tokenizer, find_habits(tokenizer)
