"""Calls that break their schemas are taken back and drawn again by their grammar, before a client sees any of them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch

from hybridmem.chat.engine.engine import Engine, Generation
from hybridmem.chat.engine.output import Output
from hybridmem.chat.engine.requests import Job
from hybridmem.chat.sampling.grammar import Grammars
from hybridmem.chat.sampling.logprobs import Chosen
from hybridmem.chat.sampling.token_bytes import TokenBytes
from hybridmem.chat.tools.calls import Tool
from hybridmem.chat.tools.checking import CallCheck, CheckedReply
from hybridmem.chat.tools.grammars import Required, make_calls_grammar, with_enforced_schema
from hybridmem.chat.tools.reading import make_reader
from hybridmem.memory import BatchError, HybridMemory
from hybridmem.memory.prefix.cache import PrefixCache
from tests.chat.engines import run_checked
from tests.chat.family_templates import model as family_model
from tests.chat.servers import running
from tests.chat.tools.test_tools import read
from tests.extent import few_cases, only_in_long

CITY = {"type": "string", "pattern": "^[A-Z][a-z]*$"}
TOOLS = [
    Tool("weather", {
        "type": "object", "properties": {"city": CITY, "days": {"type": "integer"}}, "required": ["city", "days"],
    }),
    Tool("now"),
]  # fmt: skip
N_VOCAB = 932
PROMPT = list(range(40, 70))


@dataclass
class Wish:
    """Is a model that wants to say the first of these texts.

    Where the grammar forbids that, it says what another one of the texts says there.
    """

    tokenizer: Any
    texts: list[list[int]]

    def __call__(self, logits: torch.Tensor, plan: list[tuple[Job, int]]) -> list[Chosen | None]:
        return [self._choose(job) if job.wants_choice(n_tokens) else None for job, n_tokens in plan]

    def _choose(self, job: Job) -> Chosen:
        said, row = job.generation.token_ids, torch.zeros(N_VOCAB)
        row[self.tokenizer.eos_token_id] = 1.0
        for i, ids in enumerate(self.texts):
            if ids[: len(said)] == said and len(ids) > len(said):
                row[ids[len(said)]] = max(float(row[ids[len(said)]]), 9.0 - i)
        assert job.sampler is not None
        return Chosen(job.sampler.draw(row), 0.0)


def encode(tokenizer: Any, text: str, *, plain: bool = False) -> list[int]:
    if plain:  # Each character becomes a token of its own, and no mark becomes a single token.
        return [i for sign in text for i in tokenizer.encode(sign, add_special_tokens=False)]
    return list(tokenizer.encode(text, add_special_tokens=False))


def output_of(tokenizer: Any, habits: Any, *, is_parallel: bool = True, logprobs: int | None = None) -> Output:
    grammars = Grammars(tokenizer, N_VOCAB, (tokenizer.eos_token_id,))
    required = Required(TOOLS, habits.calls, is_parallel=is_parallel)
    begun = make_calls_grammar(grammars, habits, required, TokenBytes(tokenizer), is_thinking=False)
    follow = partial(CheckedReply, CallCheck.of(grammars, required), habits, habits.calls, is_thinking=False)
    return Output(
        calls=begun, follow_calls=follow, shows_special=habits.shows_special,
        hidden_ids=habits.hidden_ids(habits.calls), logprobs=logprobs,
    )  # fmt: skip


@dataclass
class Said:
    generation: Generation
    told: list[str]
    engine: Engine
    reply: tuple[str, str, list[Any]]


def say(model: Any, family: str, *texts: str, plain: bool = False, **options: Any) -> Said:
    """Return the reply of a model that wants to say these texts."""
    tokenizer, habits = family_model(family)
    memory = HybridMemory(model.memory_spec, "16MiB", rollback_window=8, page_tokens=4, poison=True)
    wish = Wish(tokenizer, [encode(tokenizer, text, plain=plain and i == 0) for i, text in enumerate(texts)])
    engine = Engine(model, memory, tokenizer, choose=wish, prefixes=PrefixCache(memory, grid_tokens=16))
    told, n_logprobs = list[str](), list[int]()

    def on_token(generation: Generation, text: str) -> None:
        told.append(text)
        n_logprobs.append(len(generation.logprobs))

    made = {"is_parallel": options.pop("is_parallel", True), "logprobs": options.pop("logprobs", None)}
    generation = engine.submit(
        PROMPT, output=output_of(tokenizer, habits, **made), on_token=on_token, keeps_sequence=True,
        **{"max_tokens": 400, **options},
    )  # fmt: skip
    run_checked(engine)
    assert "".join(told) == generation.text and n_logprobs == sorted(n_logprobs)
    assert_remembers(model, memory, generation)
    reader = make_reader(habits, TOOLS, habits.calls)
    return Said(generation, told, engine, read(reader, ["".join(told)]))


def assert_remembers(model: Any, memory: HybridMemory, generation: Generation) -> None:
    """Assert that the sequence holds the prompt and the reply, and continues like one that saw nothing else."""
    ids, other = [*PROMPT, *generation.token_ids[:-1]], HybridMemory(model.memory_spec, "16MiB", rollback_window=8)
    assert generation.sequence is not None and generation.sequence.tokens.tolist() == ids
    fresh = other.open()
    other.run(model, {fresh: ids})
    token_id = generation.token_ids[-1]
    logits = [m.run(model, {s: [token_id]}) for m, s in ((memory, generation.sequence), (other, fresh))]
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


BAD, GOOD = '"city": 3, "days": 2', '"city": "Paris", "days": 2'
CALL = '<tool_call>\n{"name": "weather", "arguments": {%s}}\n</tool_call>'
QWEN = (
    "<function=weather>\n<parameter=city>\n%s\n</parameter>\n"
    "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>"
)
BARE = '{"name": "weather", "parameters": {%s}}'
HARMONY = "<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{%s}<|call|>"
HEARD = "<|channel|>analysis<|message|>Hm."


@few_cases
@pytest.mark.parametrize(
    ("family", "bad", "good", "content"),
    [
        ("llama", BARE % BAD, BARE % GOOD, ""),
        ("llama", BARE % '"city": "paris", "days": 2', BARE % GOOD, ""),
        ("llama", '{"name": "weather", "parameters": {"city": "Paris"<eos>', BARE % GOOD, ""),
        ("llama", BARE % '"city": "Paris", "days": 2, "unit": "C"', BARE % GOOD, ""),
        ("hermes", "<think>So: " + CALL % BAD, "<think>So: " + CALL % GOOD, ""),
        ("qwen", "Well. " + QWEN % "paris", "Well. <tool_call>\n" + QWEN % '"Paris"', "Well. "),
        # The thoughts of gpt-oss do not end here: the next message begins inside of them.
        ("gpt-oss", HEARD + HARMONY % BAD, HEARD + HARMONY % GOOD, ""),
        ("gpt-oss", HEARD + HARMONY % '"city": "Paris"<|call|>', HEARD + HARMONY % GOOD, ""),
        ("gpt-oss", HEARD + HARMONY.replace("weather", "wind") % "", HEARD + HARMONY % GOOD, ""),
    ],
)
def test_a_call_that_breaks_its_schema_is_drawn_again(
    embedded: Any, family: str, bad: str, good: str, content: str
) -> None:
    said = say(embedded, family, bad, good)
    assert said.reply[2] == [("weather", {"city": "Paris", "days": 2})], said.generation.text
    assert said.reply[0] == content and said.generation.finish_reason == "stop"
    assert (said.generation.n_taken_back, said.engine.stats.n_taken_back) == (1, 1)
    assert said.generation.n_discarded > 20 and said.engine.stats.n_discarded == said.generation.n_discarded
    assert all(bad[len(content) + 8 :] not in text for text in said.told)


def test_a_mark_in_ordinary_text_begins_a_call_that_is_checked(embedded: Any) -> None:
    """The vocabulary has a single token for the mark, but the model writes the mark in several tokens."""
    said = say(embedded, "hermes", "I say " + CALL % BAD, "I say " + CALL % GOOD, plain=True)
    assert said.reply == ("I say ", "", [("weather", {"city": "Paris", "days": 2})])
    assert said.generation.n_taken_back == 1


@few_cases
@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("llama", BARE % '"days": 2, "city": "Paris"'),
        ("llama", '{"name": "Zoe", "age": 3}'),
        ("llama", '{"name": "other_tool", "parameters": {}}'),
        ("hermes", "<think>" + CALL % BAD + "</think>Hello."),
        ("hermes", "Marks such as <b> and <tool_ca are text."),
        ("hermes", CALL % GOOD + "\n" + CALL % GOOD),
        ("qwen", "Well. " + QWEN % "Paris"),
        ("gpt-oss", HEARD + " Shall I write to=functions.wind?<|end|>" + HARMONY % GOOD),
        (
            "gpt-oss",
            HEARD + "<|end|><|start|>assistant<|channel|>final<|message|>Calls begin with to=functions.weather",
        ),
    ],
)
def test_what_breaks_no_schema_stays(embedded: Any, family: str, text: str) -> None:
    said = say(embedded, family, text)
    tokenizer, _ = family_model(family)
    assert said.generation.token_ids == [*encode(tokenizer, text), tokenizer.eos_token_id]
    assert said.generation.n_taken_back == said.engine.stats.n_taken_back == 0


@only_in_long
def test_text_comes_at_once_and_only_a_free_call_is_held_back(embedded: Any) -> None:
    text = "It is noon. "
    said = say(embedded, "hermes", text + CALL % GOOD)
    assert said.told[: len(text)] == [*text], "each byte is a token"
    assert max(map(len, said.told)) <= len("</tool_call>"), "a call that keeps to its grammar comes as it is written"
    held = say(embedded, "qwen", text + QWEN % "Paris")
    assert held.told[: len(text)] == [*text] and len(held.told[len(text)]) == len(QWEN % "Paris")


def test_drafts_may_reach_beyond_a_call_that_is_taken_back(embedded: Any) -> None:
    """The test predicts what the model will say, so that whole calls are verified in one step."""
    bad, good = BARE % BAD, BARE % GOOD
    predicted = encode(family_model("llama")[0], bad + bad)
    said = say(embedded, "llama", bad + " ", good, prediction=predicted)
    assert said.reply[2] == [("weather", {"city": "Paris", "days": 2})] and said.generation.n_taken_back == 1
    assert said.generation.n_accepted > 10


def test_only_one_call_where_only_one_may_be(embedded: Any) -> None:
    calls = "[" + ", ".join([BARE % GOOD] * 2) + "]"
    said = say(embedded, "llama", calls, BARE % GOOD, is_parallel=False)
    assert len(said.reply[2]) == 1 and said.generation.n_taken_back == 1


def test_each_token_has_a_log_probability_once(embedded: Any) -> None:
    said = say(embedded, "llama", BARE % BAD, BARE % GOOD, logprobs=0)
    ids = said.generation.token_ids
    assert [chosen.token_id for chosen in said.generation.logprobs] == ids[: len(said.generation.logprobs)]
    assert len(said.generation.logprobs) >= len(ids) - 1


def test_a_reply_that_is_cut_inside_of_a_call_stays_cut(embedded: Any) -> None:
    said = say(embedded, "llama", BARE % GOOD, max_tokens=30)
    assert said.generation.finish_reason == "length" and said.generation.n_taken_back == 0
    assert said.generation.text == (BARE % GOOD)[:30]


@only_in_long
def test_a_model_that_breaks_every_call_still_ends(embedded: Any) -> None:
    """The model never ends its thoughts. After each call that was drawn again, it adds another wrong call."""
    good, bad = CALL % GOOD, CALL % BAD
    said = say(embedded, "hermes", *("<think>" + good * n + bad for n in range(12)), max_tokens=2000)
    assert said.generation.is_finished and said.generation.n_taken_back <= 8


def test_given_sequences_are_refused(embedded: Any) -> None:
    tokenizer, habits = family_model("llama")
    memory = HybridMemory(embedded.memory_spec, "16MiB")
    engine = Engine(embedded, memory, tokenizer)
    with pytest.raises(BatchError, match="follow_calls"):
        engine.submit(PROMPT, sequence=memory.open(), output=output_of(tokenizer, habits))


def test_a_schema_that_no_grammar_knows_frees_no_other_tool() -> None:
    tokenizer, _ = family_model("hermes")
    grammars = Grammars(tokenizer, N_VOCAB, (tokenizer.eos_token_id,))
    odd = Tool(
        "odd", {"type": "object", "properties": {"a": {"type": "string", "pattern": "(a)\\1"}}, "required": ["a"]}
    )
    kept = with_enforced_schema(grammars, odd).parameters
    assert kept["required"] == ["a"] and set(kept["properties"]) == {"a"}
    assert with_enforced_schema(grammars, TOOLS[0]) is not odd and with_enforced_schema(grammars, TOOLS[0]) == TOOLS[0]


def test_clients_see_the_call_that_was_drawn_again_and_how_many_were(embedded: Any) -> None:
    tokenizer, _ = family_model("llama")
    wish = Wish(tokenizer, [encode(tokenizer, text) for text in (BARE % BAD, BARE % GOOD)])
    tools = [
        {"type": "function", "function": {"name": tool.name, "parameters": tool.parameters, "strict": False}}
        for tool in TOOLS
    ]
    with running(embedded, tokenizer, choose=wish) as server:
        told = {"include_usage": True}
        events = server.chat(tools=tools, max_tokens=400, stream=True, stream_options=told).events
        chunks = [json.loads(event) for event in events[:-1]]
        deltas = [call for chunk in chunks for each in chunk["choices"] for call in each["delta"].get("tool_calls", ())]
        arguments = "".join(call["function"]["arguments"] for call in deltas)
        assert json.loads(arguments) == {"city": "Paris", "days": 2}
        assert not any(each["delta"].get("content") for chunk in chunks for each in chunk["choices"])
        memory = chunks[-1]["usage"]["hybrid_memory"]
        assert memory["calls_taken_back"] == 1 and memory["tokens_taken_back"] > 20
        assert server.metric("calls_taken_back_total") == 1
