"""Calls of tools and thoughts are read in pieces of any length, as each family writes them.

Grammars allow such calls.
"""

from __future__ import annotations

import json
import random
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybridmem.chat.prompts import Tokenizer
from hybridmem.chat.sampling.grammar import Grammars
from hybridmem.chat.sampling.sampler import Sampler
from hybridmem.chat.sampling.sampling import Sampling
from hybridmem.chat.sampling.token_bytes import TokenBytes
from hybridmem.chat.server.chat_format import ChatFormat
from hybridmem.chat.server.replies import Piece
from hybridmem.chat.tools.calls import CallFormat, Tool, parse_json
from hybridmem.chat.tools.families import BARE, GRANITE, HERMES, JAMBA, LFM, NEMOTRON, QWEN, Habits, find_habits
from hybridmem.chat.tools.grammars import Required, make_grammar
from hybridmem.chat.tools.reading import ReplyReader
from tests.extent import few_cases

WEATHER = Tool(
    "get_weather",
    {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "exact": {"type": "boolean"}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
)
TIME = Tool("time", {"type": "object", "properties": {}, "additionalProperties": False})
TOOLS = (WEATHER, TIME)
CALLS = [("get_weather", {"city": 'São "Paulo"\n</x>', "days": 3}), ("time", {})]
WEATHER_JSON = json.dumps({"name": "get_weather", "arguments": CALLS[0][1]})
TIME_JSON = json.dumps({"name": "time", "arguments": {}})
WRITTEN: list[tuple[CallFormat, str]] = [
    (HERMES, f"<tool_call>\n{WEATHER_JSON}\n</tool_call>\n<tool_call>\n{TIME_JSON}\n</tool_call>"),
    (JAMBA, f"<tool_calls>[\n    {WEATHER_JSON},\n    {TIME_JSON}\n]</tool_calls>"),
    (NEMOTRON, f"<TOOLCALL>[{WEATHER_JSON}, {TIME_JSON}]</TOOLCALL>"),
    (
        QWEN,
        '<tool_call>\n<function=get_weather>\n<parameter=city>\nSão "Paulo"\n</x>\n</parameter>\n<parameter=days>\n3\n'
        "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=time>\n</function>\n</tool_call>",
    ),
    (LFM, "<|tool_call_start|>[get_weather(city='São \"Paulo\"\\n</x>', days=3), time()]<|tool_call_end|>"),
]
NAMES = ["hermes", "jamba", "nemotron", "qwen", "lfm"]


def habits(calls: CallFormat | None, **options: Any) -> Habits:
    given = {"calls": calls, "thinks": False, "shows_special": False} | options
    return Habits(**given, template="", special=frozenset())


def read(reader: ReplyReader, pieces: list[str]) -> tuple[str, str, list[tuple[str, Any]]]:
    """Return content, thoughts, and calls with their arguments."""
    parts = [part for piece in pieces for part in reader.feed(piece)] + reader.close()
    calls: dict[int, list[str]] = {}
    for call in (part.call for part in parts if part.call is not None):
        name, arguments = calls.get(call.index, ["", ""])
        calls[call.index] = [name + call.name, arguments + call.arguments]
    found = [(name, json.loads(arguments)) for _, (name, arguments) in sorted(calls.items())]
    return "".join(part.content for part in parts), "".join(part.reasoning for part in parts), found


def cut(text: str, seed: int) -> list[str]:
    generator, pieces = random.Random(seed), []
    while text:
        n = generator.randint(1, 7)
        pieces.append(text[:n])
        text = text[n:]
    return pieces


@pytest.mark.parametrize(("calls", "written"), WRITTEN, ids=NAMES)
def test_calls_are_read_in_pieces_of_any_length(calls: CallFormat, written: str) -> None:
    text = f"Let me look.\n{written}"
    for pieces in ([text], list(text), *(cut(text, seed) for seed in range(5))):
        content, thoughts, found = read(ReplyReader(habits(calls), TOOLS, calls), pieces)
        assert (content.strip(), thoughts, found) == ("Let me look.", "", CALLS)


@pytest.mark.parametrize(("calls", "written"), WRITTEN, ids=NAMES)
def test_what_is_no_call_stays_text(calls: Any, written: str) -> None:
    for text in ("a < b <tool <TOOL <|tool", f"{calls.frame.mark}no call{calls.frame.stop}", "plain"):
        content, _, found = read(ReplyReader(habits(calls), TOOLS, calls), list(text))
        assert (content, found) == (text, [])


@pytest.mark.parametrize(
    "text", ["[" * 5000, '{"a":' * 300 + "1" + "}" * 300, '{"a": 1e999}', "[NaN]", "1" * 5000, '{"\\ud800": 1}']
)
def test_json_that_could_not_be_written_again_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_json(text)


def test_json_that_can_be_written_again_is_read() -> None:
    text = '{"a": [1, 2.5, 1e300, null, "\\ud83c\\udf38 é"], "b": ' + "[" * 190 + "]" * 190 + "}"
    assert parse_json(text) == json.loads(text)


def test_a_name_with_an_escape_that_there_is_not_is_read_as_it_stands() -> None:
    reader = ReplyReader(habits(HERMES), TOOLS, HERMES)
    parts = reader.feed('<tool_call>\n{"name": "get\\qweather", "arguments": {}}\n</tool_call>')
    assert [part.call.name for part in parts if part.call and part.call.name] == ["get\\qweather"]


def test_arguments_are_told_while_they_are_written() -> None:
    reader = ReplyReader(habits(HERMES), TOOLS, HERMES)
    parts = reader.feed('<tool_call>\n{"name": "get_weather", "arguments": {"city": "Pa')
    assert [part.call.name or part.call.arguments for part in parts if part.call] == ["get_weather", '{"city": "Pa']


@pytest.mark.parametrize(
    ("pieces", "is_thinking", "n"),
    [
        (["<think>", "Hm", "</think>", "Yes"], False, 3),
        (["\n", "<th", "ink>", "Hm</th", "ink>Yes", "."], False, 5),
        (["Hm", "</think>", "Yes"], True, 2),
        (["Hm", "Hm"], True, 2),
        (["<think>", "Hm"], False, 2),
        (["<thin", "g", "<think>", "</think>"], False, 0),
        (["Yes", "."], False, 0),
        ([], True, 0),
    ],
)
def test_tokens_of_thoughts_are_counted(pieces: list[str], is_thinking: bool, n: int) -> None:
    reader = ReplyReader(habits(None, thinks=True), is_thinking=is_thinking)
    assert reader.count_thoughts(lambda i: pieces[i].encode(), range(len(pieces))) == n


def test_thoughts_are_split_off() -> None:
    for text, is_thinking in (("<think>\nHm.</think>\n\nYes.", False), ("Hm.\n</think>\n\nYes.", True)):
        for pieces in ([text], list(text)):
            reader = ReplyReader(habits(None, thinks=True), is_thinking=is_thinking)
            content, thoughts, _ = read(reader, pieces)
            assert (content, thoughts.strip()) == ("Yes.", "Hm.")
    content, thoughts, _ = read(ReplyReader(habits(None, thinks=True)), list("No <think>ing"))
    assert (content, thoughts) == ("No <think>ing", "")


@pytest.mark.parametrize("has_reasoning", [True, False])
def test_thoughts_are_left_out_if_a_request_says_so(tokenizer: Tokenizer, has_reasoning: bool) -> None:
    generation: Any = SimpleNamespace(text="<think>\nHm.</think>\n\nYes.", finish_reason="stop", logprobs=[])
    new_reader = partial(ReplyReader, habits(None, thinks=True))
    style = ChatFormat("m", TokenBytes(tokenizer), new_reader, has_reasoning=has_reasoning)
    message = style.whole([generation], {})["choices"][0]["message"]
    assert (message["content"], "reasoning" in message) == ("Yes.", has_reasoning)
    chunks = style.pieces(Piece(0, generation.text, generation, is_last=True, heard_at=0.0))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert [delta.get("content") for delta in deltas if "reasoning" not in delta] == ["Yes.", None]
    assert any("reasoning" in delta for delta in deltas) == has_reasoning


@few_cases
@pytest.mark.parametrize("calls", [HERMES, JAMBA, NEMOTRON, QWEN, LFM, BARE], ids=[*NAMES, "bare"])
@pytest.mark.parametrize("is_thinking", [False, True])
def test_a_required_call_is_readable_whatever_is_drawn(
    calls: CallFormat, is_thinking: bool, tokenizer: Tokenizer
) -> None:
    """Tokens are drawn from what the grammar allows. In the end, characters that close something are preferred."""
    grammars = Grammars(tokenizer, len(tokenizer), (tokenizer.eos_token_id,))
    thinking = habits(calls, thinks=is_thinking)
    properties = WEATHER.parameters["properties"] | {"city": {"type": "string", "enum": ["Paris", "Rome"]}}
    weather = Tool("get_weather", WEATHER.parameters | {"properties": properties})
    required = Required([weather, TIME], calls, is_parallel=True)
    grammar = make_grammar(grammars, thinking, None, required, must_call=True, is_thinking=is_thinking)
    assert grammar is not None
    for seed in range(3):
        text = draw_text(grammar, tokenizer, seed, opening="Hm.\n</think>" if is_thinking else "")
        _, thoughts, found = read(ReplyReader(thinking, required.tools, calls, is_thinking=is_thinking), [text])
        assert found and (thoughts != "") == is_thinking
        for name, arguments in found:
            if name == "get_weather":
                assert arguments["city"] in ("Paris", "Rome") and isinstance(arguments["days"], int)
            else:
                assert (name, arguments) == ("time", {})


def draw_text(
    grammar: Any, tokenizer: Tokenizer, seed: int, opening: str, *, shows_special: bool = False
) -> str:  # fmt: skip
    sampler = Sampler(
        Sampling(temperature=1.0, seed=seed, length_decay=(20, 1.5)), stop_ids=(tokenizer.eos_token_id,),
        matcher=grammar.matcher(),
    )  # fmt: skip
    ids = tokenizer.encode(opening)
    for token_id in ids:
        sampler.add(token_id)
    generator = torch.Generator().manual_seed(seed)
    while not sampler.is_stopped:
        ids.append(sampler.choose(torch.randn(len(tokenizer), generator=generator)))
        assert len(ids) < 8000
    return str(tokenizer.decode(ids, skip_special_tokens=not shows_special))


def test_a_family_is_known_by_its_template_or_its_tokens(tokenizer: Tokenizer) -> None:
    class Other:
        added_tokens_decoder: dict[int, Any] = {}  # noqa: RUF012

        def __init__(self, chat_template: str) -> None:
            self.chat_template = chat_template

    signs = {
        "{{ '<tool_calls>' }}": JAMBA, "<TOOLCALL>[": NEMOTRON, "<|tool_list_start|>": LFM,
        "<tool_call>\\n<function=": QWEN, "<tool_call></tool_call>": HERMES,
    }  # fmt: skip
    assert {sign: find_habits(Other(sign)).calls for sign in signs} == signs
    assert find_habits(Other("</think>")).thinks
    assert find_habits(tokenizer).calls is None and not find_habits(tokenizer).thinks


@pytest.mark.parametrize(
    ("calls", "text"),
    [
        (GRANITE, '<|tool_call|>[{"name": "now", "arguments": {}city": 3}]'),
        (HERMES, '<tool_call>\n{"name": "now", "arguments": {}city": 3}}\n</tool_call> b'),
        (JAMBA, '<tool_calls>[{"name": "now", "arguments": {} {"name": "now", "arguments": {}}]</tool_calls> b'),
        (JAMBA, '<tool_calls>[{"name": "now", "arguments": {}}, x]</tool_calls> b'),
    ],
)
def test_what_stands_behind_the_arguments_of_a_call_is_read_alike_in_pieces(calls: CallFormat, text: str) -> None:
    found = [read(ReplyReader(habits(calls), TOOLS, calls), pieces) for pieces in ([text], [*text])]
    assert found[0] == found[1] and found[0][2] and all(call == ("now", {}) for call in found[0][2])
