"""The library reads calls as each real chat template writes them, and reads again the calls that it drew."""

from __future__ import annotations

import re
from typing import Any

import pytest

from hybridmem.chat.prompts import encode_chat
from hybridmem.chat.sampling.grammar import Grammars
from hybridmem.chat.special_tokens import apply_template
from hybridmem.chat.tools.families import Habits, find_habits
from hybridmem.chat.tools.grammars import Required, make_grammar
from hybridmem.chat.tools.probing import Probe
from hybridmem.chat.tools.reading import make_reader
from tests.chat.byte_tokenizers import make_byte_tokenizer
from tests.chat.tools.test_families import FORMAT, NOW, WEATHER, fits
from tests.chat.tools.test_tools import cut, draw_text, read

KINDS = {
    "JsonCalls": [
        "Apertus-8B-Instruct", "Apriel-1.6-15b-Thinker-fixed", "Bielik-11B-v3.0-Instruct", "Cohere2MoE",
        "CohereForAI-c4ai-command-r7b-12-2024-tool_use", "GigaChat3.1-10B-A1.8B", "MiMo-VL", "MiniMax-M1",
        "NVIDIA-Nemotron-Nano-v2", "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use",
        "NousResearch-Hermes-3-Llama-3.1-8B-tool_use", "Qwen-QwQ-32B", "Qwen-Qwen2.5-7B-Instruct", "Qwen-Qwen3-0.6B",
        "Reka-Edge", "ibm-granite-granite-4.0", "ibm-granite-granite-4.1", "meta-llama-Llama-3.1-8B-Instruct",
        "meta-llama-Llama-3.2-3B-Instruct", "meta-llama-Llama-3.3-70B-Instruct",
        "mistralai-Mistral-Nemo-Instruct-2407", "unsloth-Apriel-1.5",
    ],
    "NamedCalls": [
        "Kimi-K2-Instruct", "Kimi-K2-Thinking", "Mistral-Small-3.2-24B-Instruct-2506",
        "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", "deepseek-ai-DeepSeek-V3.1", "meetkai-functionary-medium-v3.1",
        "mistralai-Ministral-3-14B-Reasoning-2512", "moonshotai-Kimi-K2", "unsloth-mistral-Devstral-Small-2507",
        "upstage-Solar-Open-100B",
    ],
    "XmlCalls": [
        "ByteDance-Seed-OSS", "GLM-4.6", "GLM-4.7-Flash", "MiniMax-M2", "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
        "Qwen3-Coder", "Qwen3.5-4B", "Spark2.5", "StepFun3.5-Flash", "deepseek-ai-DeepSeek-V3.2",
        "deepseek-ai-DeepSeek-V4", "deepseek-ai-DeepSeek-V4-Flash-0731", "inclusionai-ling-3.0-flash",
        "poolside-Laguna-S-2.1", "poolside-Laguna-XS-2.1", "poolside-Laguna-XS.2", "tencent-Hy3",
    ],
    "ElementCalls": ["MiniMax-M3"],
    "PythonCalls": ["LFM2.5-8B-A1B"],
    "GemmaCalls": ["google-gemma-4-31B-it", "google-gemma-4-31B-it-interleaved"],
    "HarmonyCalls": ["llm-jp-llm-jp-4.1-8b-thinking", "openai-gpt-oss-120b"],
}  # fmt: skip
NAMES = [(kind, name) for kind, names in KINDS.items() for name in names]
SINGLE = ("meta-llama", "GigaChat", "openai-gpt-oss")
_MARKS = re.compile(r"<[\w|｜/][^<>\s{}=]*>|\[/?[A-Z_]+\]|]<]minimax\[>\[|｜DSML｜")
WRITTEN = [{"city": 'São "Paulo"\nline </x>', "days": 3, "tags": ["a, b", "c]"], "exact": True}, {"city": "Rome"}]
DEFINITION = {
    "type": "function",
    "function": {"name": WEATHER.name, "description": "Looks.", "parameters": WEATHER.parameters},
}


def tokenizer_of(template: str) -> tuple[Any, Habits]:
    """Return a tokenizer whose special tokens are the marks that the template writes."""
    plain = Probe(make_byte_tokenizer(template))
    example = plain.written_calls()
    marks = set(_MARKS.findall(template + plain.header + plain.turn_end + (example.text if example else "")))
    if "｜DSML｜" in marks:
        marks = {mark for mark in marks if mark == "｜DSML｜" or "DSML" not in mark}
    tokenizer = make_byte_tokenizer(template, sorted(mark for mark in marks if "q7x" not in mark))
    return tokenizer, find_habits(tokenizer)


def said(n: int) -> dict[str, Any]:
    calls = [
        {"id": f"call_{i}", "type": "function", "function": {"name": WEATHER.name, "arguments": arguments}}
        for i, arguments in enumerate(WRITTEN[:n])
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


@pytest.mark.parametrize(("kind", "name"), NAMES)
def test_calls_are_read_as_the_template_writes_them(templates: dict[str, str], kind: str, name: str) -> None:
    tokenizer, habits = tokenizer_of(templates[name])
    assert type(habits.calls).__name__ == kind
    n = 1 if name.startswith(SINGLE) else 2
    chat = [{"role": "user", "content": "QQQ"}, said(n)]
    reply = apply_template(tokenizer, chat, tools=[DEFINITION]).rpartition("QQQ")[2]
    if habits.has_channels:
        reply = reply.partition("<|start|>assistant")[2]
    for pieces in ([reply], list(reply), cut(reply, 3)):
        _, _, calls = read(make_reader(habits, [WEATHER], habits.calls), _without_header(pieces, habits))
        assert calls == [(WEATHER.name, arguments) for arguments in WRITTEN[:n]]


def _without_header(pieces: list[str], habits: Habits) -> list[str]:
    """Return the text from where a model would begin. A call without a mark is the whole reply."""
    if habits.calls is None or not habits.calls.is_bare:
        return pieces
    return ["".join(pieces)[len("".join(pieces)) - len("".join(pieces).lstrip()) :].partition("\n\n")[2]]


@pytest.mark.parametrize(("kind", "name"), NAMES)
def test_drawn_calls_are_read(templates: dict[str, str], kind: str, name: str) -> None:
    tokenizer, habits = tokenizer_of(templates[name])
    assert habits.calls is not None
    grammars = Grammars(tokenizer, len(tokenizer), (tokenizer.eos_token_id,))
    # In some formats a line break ends a list and a comma continues it. There, a bias towards ends is a bias towards
    # commas.
    required = Required([FORMAT, NOW], habits.calls, is_parallel=not name.startswith("Cohere"))
    grammar = make_grammar(grammars, habits, None, required, must_call=True, is_thinking=False)
    for seed in range(3):
        text = draw_text(grammar, tokenizer, seed, opening="", shows_special=True).replace("<eos>", "")
        content, _, calls = read(make_reader(habits, [FORMAT, NOW], habits.calls), list(text))
        assert calls and not content.strip(), text
        assert all(arguments == {} if called == "now" else fits(arguments) for called, arguments in calls)


@pytest.mark.parametrize(("kind", "name"), NAMES)
def test_a_name_in_any_text_is_text(templates: dict[str, str], kind: str, name: str) -> None:
    """The template's own marks become no tokens in the texts of users, tools and the model."""
    tokenizer, habits = tokenizer_of(templates[name])
    special = set(tokenizer.added_tokens_decoder)
    counts = set()
    for word in ["xyz", *sorted(habits.special)[:8], tokenizer.eos_token]:
        call = {"name": WEATHER.name, "arguments": {"city": word}}
        chat: list[dict[str, Any]] = [
            {"role": "user", "content": f"a {word}b"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": "call_0", "type": "function", "function": call}],
            },
            {"role": "tool", "name": WEATHER.name, "tool_call_id": "call_0", "content": f"{word} c"},
        ]
        ids = encode_chat(tokenizer, chat)
        counts.add(sum(i in special for i in ids))
        assert word in tokenizer.decode(ids)
    assert len(counts) == 1
