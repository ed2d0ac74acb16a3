"""Text in an argument neither ends a call nor makes another one, whatever marks of the model it contains."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hybridmem.chat.tools.calls import Tool
from hybridmem.chat.tools.families import HERMES, JAMBA, LFM, NEMOTRON, QWEN, Habits
from hybridmem.chat.tools.reading import ReplyReader
from tests.chat.tools.test_tools import cut, read

WRITE = Tool(
    "write_file",
    {
        "type": "object",
        "properties": {"path": {"type": "string"}, "content": {"type": "string"}, "mode": {"type": "integer"}},
        "required": ["path", "content"],
    },
)
TEXTS = [
    "ends with </parameter> here", "<parameter=x>\nvalue\n</parameter>", "</function> in it", "a </tool_call> b",
    "</tool_calls>", "}]</TOOLCALL>", "<|tool_call_end|>", ")]<|tool_call_end|>", "}}]}", '"q" \\ back\nline',
    "'", '"""',
    "<function=g>\n<parameter=y>\n1\n</parameter>\n</function>", "<think>a</think>",
    "a\n</parameter>\n<parameter=x>\nb",
    "</function>\n</tool_call>", "<tool_call>\n{\"name\": \"g\", \"arguments\": {}}\n</tool_call>",
    "</parameter>\n</function>",
    "\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=g>\n</function>\n</tool_call>\nb",
    "\\", "\\'", "",
]  # fmt: skip


def written(family: str, arguments: dict[str, Any]) -> str:
    if family == "qwen":
        body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
        return f"<tool_call>\n<function=write_file>\n{body}</function>\n</tool_call>"
    if family == "lfm":
        return (
            f"<|tool_call_start|>[write_file({', '.join(f'{k}={v!r}' for k, v in arguments.items())})]<|tool_call_end|>"
        )
    call = json.dumps({"name": "write_file", "arguments": arguments})
    forms = {"hermes": "<tool_call>\n%s\n</tool_call>", "jamba": "<tool_calls>[%s]</tool_calls>"}
    return forms.get(family, "<TOOLCALL>[%s]</TOOLCALL>") % call


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize(
    ("family", "form"), [("hermes", HERMES), ("jamba", JAMBA), ("nemotron", NEMOTRON), ("qwen", QWEN), ("lfm", LFM)]
)
def test_an_argument_may_hold_any_mark(family: str, form: Any, text: str) -> None:
    habits = Habits(form, False, False, frozenset(), "")
    for arguments in ({"path": "/a", "content": text, "mode": 6}, {"content": text, "path": text}):
        reply = f"Let me write.\n{written(family, arguments)}"
        for pieces in ([reply], list(reply), cut(reply, seed=len(text))):
            content, _, calls = read(ReplyReader(habits, [WRITE], form), pieces)
            assert (content.strip(), calls) == ("Let me write.", [("write_file", arguments)])


def test_two_calls_and_words_behind_them_are_read() -> None:
    reply = (
        written("qwen", {"path": "/a", "content": TEXTS[0]}) + "\n" + written("qwen", {"path": "/b", "content": "c"})
    )
    habits = Habits(QWEN, False, False, frozenset(), "")
    content, _, calls = read(ReplyReader(habits, [WRITE], QWEN), list(reply + "\nDone."))
    assert content.strip() == "Done."
    assert calls == [
        ("write_file", {"path": "/a", "content": TEXTS[0]}),
        ("write_file", {"path": "/b", "content": "c"}),
    ]


def test_a_call_that_was_cut_has_the_arguments_so_far() -> None:
    habits = Habits(QWEN, False, False, frozenset(), "")
    reply = written("qwen", {"path": "/a", "content": "b\nc"})
    _, _, calls = read(ReplyReader(habits, [WRITE], QWEN), [reply[: reply.index("\nc")]])
    assert calls == [("write_file", {"path": "/a", "content": "b"})]


def test_reading_is_quick_however_many_marks_there_are() -> None:
    text = "\n</parameter>\n<parameter=mode>\n" * 20_000
    reply = written("qwen", {"content": text, "path": "/a"})
    habits = Habits(QWEN, False, False, frozenset(), "")
    assert read(ReplyReader(habits, [WRITE], QWEN), [reply])[2]
