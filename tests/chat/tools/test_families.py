"""Calls are read and constrained as the chat template of each family of models writes them.

The templates are short ones of our own.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest

from hybridmem.chat.prompts import encode_chat, render
from hybridmem.chat.sampling.grammar import Grammars
from hybridmem.chat.special_tokens import PromptContext, WrappedTokenizer, find_turn_begin, find_turn_end
from hybridmem.chat.tools.calls import Tool
from hybridmem.chat.tools.families import find_habits
from hybridmem.chat.tools.grammars import Required, Shape, make_grammar
from hybridmem.chat.tools.reading import make_reader
from tests.chat.byte_tokenizers import make_byte_tokenizer
from tests.chat.family_templates import ALL, FAMILIES, OBJECT, model
from tests.chat.tools.test_tools import cut, draw_text, read
from tests.extent import few_cases

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


def said(*arguments: dict[str, Any], **more: Any) -> dict[str, Any]:
    calls = [
        {"id": f"call_{i}", "type": "function", "function": {"name": WEATHER.name, "arguments": each}}
        for i, each in enumerate(arguments)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls, **more}


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


@few_cases
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
    """If a template wants that, ids become nine letters. Lists may grow in a template."""
    tokenizer, habits = model(family)
    result = {"role": "tool", "name": WEATHER.name, "tool_call_id": "call_0", "content": "RESULT"}
    chat = [{"role": "user", "content": "QQQ"}, said(WRITTEN[1]), result]
    assert "RESULT" in tokenizer.decode(encode_chat(tokenizer, chat))
    assert habits.lacks <= {"reasoning_content"}


def test_a_reply_in_channels_has_thoughts_content_and_calls() -> None:
    tokenizer, habits = model("gpt-oss")
    reply = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        '{"city": "<|call|>"}'
    )
    for pieces in ([reply], list(reply), cut(reply, 3)):
        content, thoughts, calls = read(make_reader(habits, [WEATHER], habits.calls), pieces)
        assert (content, thoughts, calls) == ("I look.", "Hm.", [("get_weather", {"city": "<|call|>"})])
        content, thoughts, calls = read(make_reader(habits), pieces)
        assert (thoughts, calls) == ("Hm.", []), "without tools there are no calls"
    ids = tokenizer.encode(reply)
    n_thoughts = ids.index(tokenizer.convert_tokens_to_ids("<|end|>")) + 1
    names = tokenizer.convert_ids_to_tokens(ids)
    reader = make_reader(habits)
    assert reader.count_thoughts(lambda i: tokenizer.convert_ids_to_tokens(i).encode(), ids) == n_thoughts, names
    # <|end|> stands behind thoughts as well, so a reply does not end there.
    assert find_turn_end(tokenizer) == tokenizer.convert_tokens_to_ids("<|return|>")
    assert find_turn_end(model("hermes")[0]) == model("hermes")[0].convert_tokens_to_ids("<|end|>")
    assert tokenizer.decode(list(find_turn_begin(tokenizer))) == "<|start|>user<|message|>"


@pytest.mark.parametrize("family", ALL)
def test_turns_of_users_begin_with_a_mark(family: str) -> None:
    tokenizer, _ = model(family)
    begin, ids = list(find_turn_begin(tokenizer)), [1, 2]
    for content in ("\n", "user", "<|turn|>user\n"):
        chat = [{"role": "user", "content": content}]
        ids = encode_chat(tokenizer, [*chat, {"role": "assistant", "content": "Yes."}, *chat])
        places = [i for i in range(len(ids)) if ids[i : i + len(begin)] == begin]
        assert begin[0] in tokenizer.added_tokens_decoder and len(places) == 2, tokenizer.decode(ids)


def test_a_template_without_marks_has_none_where_turns_begin() -> None:
    tokenizer, _ = model("hermes")
    tokenizer = type(tokenizer)(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<eos>")
    for template in (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
        "{{ raise_exception('no') }}",
    ):
        tokenizer.chat_template = template
        assert find_turn_begin(tokenizer) == ()


def test_the_content_of_a_reply_in_channels_has_the_form_that_is_asked_for() -> None:
    tokenizer, habits = model("gpt-oss")
    grammars = Grammars(tokenizer, len(tokenizer), (tokenizer.eos_token_id,))
    grammar = make_grammar(grammars, habits, Shape("choice", ["yes"]), None, must_call=False, is_thinking=False)
    text = draw_text(grammar, tokenizer, 0, opening="<|channel|>final", shows_special=True).replace("<eos>", "")
    assert read(make_reader(habits), [text])[0] == "yes"


def with_template(family: str, old: str, new: str) -> Any:
    tokenizer = copy.deepcopy(model(family)[0])
    assert old in tokenizer.chat_template
    tokenizer.chat_template = tokenizer.chat_template.replace(old, new)
    return tokenizer


@pytest.mark.parametrize("written", ["{{ c.function.arguments }}", "{{ '' + c.function.arguments }}"])
def test_a_template_that_wants_arguments_as_text_gets_text(written: str) -> None:
    tokenizer = with_template("functionary", OBJECT, written)
    text = render(tokenizer, [{"role": "user", "content": "a"}, said({"city": "é"})], awaits_reply=False)
    assert text.endswith('<function=get_weather>{"city": "é"}</function><|end|>')
    assert find_habits(tokenizer).calls == model("functionary")[1].calls


def test_a_template_that_wants_contents_in_parts_gets_parts() -> None:
    tokenizer = with_template("hermes", "{{ m.content }}", "{% for p in m.content %}{{ p.text }}{% endfor %}")
    assert render(tokenizer, [{"role": "user", "content": "QQQ"}]) == "<|turn|>user\nQQQ<|end|><|turn|>assistant\n"


def test_a_template_that_is_only_for_tools_is_rendered_without_them() -> None:
    tokenizer = with_template("hermes", "{% if tools %}", "{% for t in tools %}{{ t.name }}{% endfor %}{% if tools %}")
    assert render(tokenizer, [{"role": "user", "content": "QQQ"}]) == "<|turn|>user\nQQQ<|end|><|turn|>assistant\n"


def test_what_a_template_drops_is_noticed() -> None:
    plain = "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}<|end|>{% endfor %}"
    assert find_habits(make_byte_tokenizer(plain)).lacks == {"tools", "tool_calls", "reasoning_content"}
    silent = find_habits(make_byte_tokenizer(plain, ["<|tool_call_start|>", "<|tool_call_end|>"]))
    assert silent.calls is not None and silent.calls.marks == ("<|tool_call_start|>",), "the vocabulary tells"
    assert model("qwen")[1].lacks == frozenset()


def test_calls_that_a_template_leaves_out_are_written_into_contents() -> None:
    plain = "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}<|end|>{% endfor %}"
    tokenizer = make_byte_tokenizer(plain, ["<|turn|>", "<|end|>", "<|tool_call_start|>", "<|tool_call_end|>"])
    habits = find_habits(tokenizer)
    assert habits.write_calls is not None and model("lfm")[1].write_calls is None
    texts = WrappedTokenizer(tokenizer, PromptContext(write_calls=habits.write_calls))
    arguments = {"city": "<|tool_call_end|>", "days": 3}
    ids = encode_chat(texts, [{"role": "user", "content": "a"}, said(arguments)])
    start, end = tokenizer.convert_tokens_to_ids(["<|tool_call_start|>", "<|tool_call_end|>"])
    assert ids.count(start) == ids.count(end) == 1, "the marks are tokens, and their names in arguments are text"
    reply = tokenizer.decode(ids[ids.index(start) : -1])
    assert read(make_reader(habits, [WEATHER], habits.calls), [reply])[2] == [(WEATHER.name, arguments)]


THINKING = ["hermes", "qwen", "glm", "deepseek", "lfm", "gemma"]


@pytest.mark.parametrize("family", THINKING)
def test_a_call_inside_of_thoughts_counts_if_they_do_not_end(family: str) -> None:
    tokenizer, habits = model(family)
    chat = [{"role": "user", "content": "QQQ"}, said(WRITTEN[1])]
    opening = render(tokenizer, chat[:1])
    call = render(tokenizer, chat, awaits_reply=False).removeprefix(opening).removesuffix("<|end|>")
    end = habits.thoughts.end

    def split(text: str) -> tuple[str, str, list[Any]]:
        found = [
            read(make_reader(habits, [WEATHER], habits.calls, is_thinking=True), pieces)
            for pieces in ([text], list(text), cut(text, 4))
        ]
        assert found[0] == found[1] == found[2]
        return found[0]

    assert split(f"Hm.\n{call}") == ("", "Hm.\n", [(WEATHER.name, WRITTEN[1])])
    content, thoughts, calls = split(f"I could say {call}, or not. {end}\nYes.")
    assert (content, calls) == ("Yes.", []) and call in thoughts, "it was only thought of"
    content, thoughts, calls = split(f"I could say {call}\n{end}{call}")
    assert (content, calls) == ("", [(WEATHER.name, WRITTEN[1])]) and call in thoughts
    assert split("Hm <tool_call> hm")[1:] == ("Hm <tool_call> hm", [])
