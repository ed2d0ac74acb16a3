"""A beginner makes wrong calls of models and chats.

Each is refused by an error that names the value and the remedy, unless the call has a meaning.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from hybridmem import models
from hybridmem.chat.cli import app
from hybridmem.chat.decoding import beams, drafts, speculative
from hybridmem.chat.engine.engine import Engine, Sampling
from hybridmem.chat.prompts import Tokenizer, load_tokenizer
from hybridmem.chat.session.history import Utterance
from hybridmem.chat.session.session import ChatSession
from hybridmem.chat.session.template import Hole, Template, Text, fill
from hybridmem.memory import HybridMemory
from hybridmem.memory.prefix.cache import PrefixCache
from hybridmem.models import EMBEDDED, LanguageModel
from hybridmem.models.hf.cache import HybridCache
from tests.wrong_calls import Row, assert_refused


@pytest.fixture(scope="module")
def names(
    tmp_path_factory: pytest.TempPathFactory, embedded: LanguageModel, tokenizer: Tokenizer
) -> Iterator[dict[str, Any]]:
    folder, model = tmp_path_factory.mktemp("wrong"), embedded
    (folder / "file.txt").write_text("no session")
    (folder / "empty").mkdir()
    memory, other = (HybridMemory(model.memory_spec, "16MiB", rollback_window=8, page_tokens=4) for _ in range(2))
    engine = Engine(model, memory, tokenizer)
    session = ChatSession(engine, messages=[Utterance("user", "Hello."), Utterance("assistant", "Hello.")])
    ended = ChatSession(engine)
    ended.close()
    alice, closed, foreign = memory.open(), memory.open(), other.open()
    memory.close(closed)
    with memory.step({alice: [1, 2, 3]}) as step:
        model(step)
    yield {
        "np": np, "torch": torch, "folder": folder, "model": model, "memory": memory, "other": other,
        "tokenizer": tokenizer, "engine": engine, "mute": Engine(model, memory, None), "session": session,
        "ended": ended, "alice": alice, "closed": closed, "foreign": foreign, "mark": memory.checkpoint(alice),
        "HybridMemory": HybridMemory, "Engine": Engine, "Sampling": Sampling, "ChatSession": ChatSession,
        "Utterance": Utterance, "Template": Template, "Hole": Hole, "Text": Text, "fill": fill,
        "PrefixCache": PrefixCache, "EMBEDDED": EMBEDDED, "HybridCache": HybridCache, "load_tokenizer": load_tokenizer,
        "text": Template("<|bos|>My {pet:max_tokens=2}"),
        **{name: getattr(models, name) for name in models.__all__},
        **vars(beams), **vars(speculative),
        **vars(drafts),
    }  # fmt: skip


MODELS: list[Row] = [
    ("model(memory.step({alice: 1}))", "not open", "with memory.step"),
    ("model([1, 2])", "[1, 2]", "with memory.step"),
    ("model(torch.tensor([[1, 2]]))", "tensor([[1, 2]])", "with memory.step"),
    ("model('hello')", "'hello'", "with memory.step"),
    ("model(None)", "None", "with memory.step"),
    ("model({alice: 1})", "<sequence", "with memory.step"),
    ("model(memory)", "HybridMemory", "with memory.step"),
    ("model()", "nothing", "with memory.step"),
    ("model(input_ids=torch.tensor([[1]]))", "input_ids", "with memory.step"),
    ("model(**tokenizer('hello', return_tensors='pt'))", "input_ids", "with memory.step"),
    ("with memory.step({alice: 1}) as step: model(step, 3)", "3", "with memory.step"),
    ("with memory.step({alice: 1}) as step: model(step); model(step)", "twice", "once"),
    ("memory.run(memory, {alice: 1})", "HybridMemory", "load_model"),
    ("memory.step({alice: tokenizer('hello')})", "input_ids", "['input_ids']"),
    ("memory.step({alice: tokenizer('hello', return_tensors='pt')['input_ids']})", "(1, 3)", "one axis"),
    ("load_model('nobody')", "nobody", "'embedded'"),
    ("load_model('./nobody/here')", "nobody", "'embedded'"),
    ("load_model('')", "''", "'embedded'"),
    ("load_model(None)", "None", "'embedded'"),
    ("load_model(3)", "3", "'embedded'"),
    ("load_model(folder / 'file.txt')", "file.txt", "the folder that holds"),
    ("load_model(folder / 'empty')", "empty", "Hugging Face layout"),
    ("load_model('embedded', device='gpu')", "'gpu'", "'cuda'"),
    ("load_model('embedded', device='cuda')", "'cuda'", "device='cpu'"),
    ("load_model('embedded', device=None)", "None", "'cpu'"),
    ("load_model('embedded', dtype='int8')", "'int8'", "'bfloat16'"),
    ("load_model('embedded', dtype='half precision')", "'half precision'", "'bfloat16'"),
    ("load_model('embedded', dtype=16)", "16", "'bfloat16'"),
    ("load_model('embedded', dtype=None)", "None", "'auto'"),
    ("from_transformers('embedded')", "'embedded'", "load_model"),
    ("from_transformers(None)", "None", "load_model"),
    ("from_transformers(model)", "Jamba", "load_model"),
    ("from_transformers(torch.nn.Linear(2, 2))", "Linear", "these are"),
    ("attach('embedded')", "'embedded'", "from_pretrained"),
    ("attach(model)", "Jamba", "from_pretrained"),
    ("plan_memory({}, 'JambaForCausalLM')", "{}", "AutoConfig"),
    ("plan_memory(model.config, 'Nobody')", "Nobody", "these are"),
    ("plan_memory(model.config, model)", "Jamba", "these are"),
    ("plan_memory(model.config, 'LlamaForCausalLM')", "JambaConfig", "contradicts itself"),
    ("load_tokenizer('nobody')", "nobody", "'embedded'"),
    ("load_tokenizer(tokenizer)", "okenizer", "'embedded'"),
    ("load_tokenizer(folder)", "no tokenizer", "tokenizer.json"),
    ("HybridCache(memory, [])", "without rows", "memory.open()"),
    ("HybridCache(memory, 3)", "3", "sequence"),
    ("HybridCache(memory, alice)", "<sequence", "list"),
    ("HybridCache(memory, [alice, alice])", "<sequence", "fork"),
    ("HybridCache(memory, [closed])", "closed", "another one"),
    ("HybridCache(model, [alice])", "jamba", "HybridMemory(model.memory_spec"),
]  # fmt: skip

ENGINES: list[Row] = [
    ("Engine(memory, model, tokenizer)", "HybridMemory", "Engine(model, memory, tokenizer)"),
    ("Engine(model, tokenizer, memory)", "okenizer", "Engine(model, memory, tokenizer)"),
    ("Engine(model, model.memory_spec, tokenizer)", "MemorySpec", "HybridMemory(model.memory_spec"),
    ("Engine('embedded', memory, tokenizer)", "'embedded'", "load_model"),
    ("Engine(None, memory, tokenizer)", "None", "load_model"),
    ("Engine(model, None, tokenizer)", "None", "HybridMemory"),
    ("Engine(model, memory, 'embedded')", "'embedded'", "load_tokenizer"),
    ("Engine(model, memory, EMBEDDED)", "embedded", "load_tokenizer"),
    ("Engine(model, memory, 3)", "3", "load_tokenizer"),
    ("Engine(model, memory, tokenizer, stop_ids='</s>')", "'</s>'", "token ids"),
    ("Engine(model, memory, tokenizer, stop_ids=2)", "2", "[2]"),
    ("Engine(model, memory, tokenizer, stop_ids=['</s>'])", "'</s>'", "token ids"),
    ("Engine(model, memory, tokenizer, stop_ids=[10**9])", "1000000000", "0 <= id < 932"),
    ("Engine(model, memory, tokenizer, step_tokens=0)", "step_tokens=0", "at least 1"),
    ("Engine(model, memory, tokenizer, max_running='4')", "'4'", "at least 1"),
    ("Engine(model, memory, tokenizer, step_tokens=8, max_running=8)", "8", "give more"),
    ("engine.submit('hello')", "'hello'", "tokenizer"),
    ("engine.submit(['hello'])", "'hello'", "tokenizer"),
    ("engine.submit(b'hello')", "b'hello'", "tokenizer"),
    ("engine.submit(None)", "None", "list of token ids"),
    ("engine.submit(3)", "3", "list of token ids"),
    ("engine.submit([])", "empty", "a token to go on from"),
    ("engine.submit([1.5])", "1.5", "integer token ids"),
    ("engine.submit([True])", "True", "integer token ids"),
    ("engine.submit([1, None])", "None", "integer token ids"),
    ("engine.submit({1, 2})", "{1, 2}", "order"),
    ("engine.submit([10**9])", "1000000000", "0 <= id < 932"),
    ("engine.submit([2**70])", str(2**70), "0 <= id < 932"),
    ("engine.submit([-1])", "-1", "0 <= id < 932"),
    ("engine.submit(torch.tensor([[1, 2]]))", "(1, 2)", "one axis"),
    ("engine.submit([[1, 2]])", "[1, 2]", "one axis"),
    ("engine.submit(torch.tensor(3))", "3", "list of token ids"),
    ("engine.submit(tokenizer('hello'))", "input_ids", "['input_ids']"),
    ("engine.submit({alice: [1]})", "<sequence", "integer token ids"),
    ("engine.submit([1], sequence=3)", "3", "memory.open()"),
    ("engine.submit([1], sequence=closed)", "closed", "another one"),
    ("engine.submit([1], sequence=foreign)", "another memory", "memory that made them"),
    ("engine.submit([1], sequence=mark)", "checkpoint", "fork"),
    ("engine.submit([1], max_tokens=-1)", "max_tokens=-1", "at least 0"),
    ("engine.submit([1], max_tokens='5')", "'5'", "at least 0"),
    ("engine.submit([1], max_tokens=None)", "None", "at least 0"),
    ("engine.submit([1], sampling=0.7)", "0.7", "Sampling(temperature=0.7)"),
    ("engine.submit([1], sampling={'temperature': 1})", "'temperature': 1", "Sampling(**"),
    ("engine.submit([1], sampling=None)", "None", "Sampling"),
    ("engine.submit([1], stop=3)", "stop=3", "a string"),
    ("engine.submit([1], stop=[3])", "3", "at least one character"),
    ("engine.submit([1], stop='')", "''", "at least one character"),
    ("engine.submit([1], deadline_s=-1)", "deadline_s=-1", "seconds from now"),
    ("engine.submit([1], deadline_s='5')", "'5'", "seconds from now"),
    ("engine.submit([1], marks=1)", "marks=1", "positions"),
    ("engine.submit([1], marks=[2])", "2", "1 ... 1"),
    ("engine.submit([1], marks='a')", "'a'", "positions"),
    ("engine.submit([1], on_token=3)", "on_token=3", "function"),
    ("engine.submit([1], priority='high')", "'high'", "larger for more important"),
    ("mute.submit([1], stop='x')", "'x'", "stop_ids"),
    ("engine.cancel(None)", "None", "engine.submit"),
    ("engine.cancel(0)", "0", "engine.submit"),
    ("Sampling(temperature=-1)", "temperature=-1", "0 for greedy"),
    ("Sampling(temperature='hot')", "'hot'", "0 for greedy"),
    ("Sampling(temperature=None)", "None", "0 for greedy"),
    ("Sampling(temperature=float('nan'))", "nan", "0 for greedy"),
    ("Sampling(temperature=True)", "True", "0 for greedy"),
    ("Sampling(top_k=0)", "top_k=0", "None for all"),
    ("Sampling(top_k=1.5)", "1.5", "None for all"),
    ("Sampling(top_p=0)", "top_p=0", "None for all"),
    ("Sampling(top_p=95)", "95", "0 < p <= 1"),
    ("Sampling(repetition_penalty=0)", "repetition_penalty=0", "above 0"),
    ("Sampling(seed='x')", "'x'", "an integer"),
]  # fmt: skip

CHATS: list[Row] = [
    ("ChatSession(model)", "Jamba", "Engine(model, memory, tokenizer)"),
    ("ChatSession(memory)", "HybridMemory", "Engine(model, memory, tokenizer)"),
    ("ChatSession(None)", "None", "Engine(model, memory, tokenizer)"),
    ("ChatSession('embedded')", "'embedded'", "Engine(model, memory, tokenizer)"),
    ("ChatSession(mute)", "no tokenizer", "make it with one"),
    ("ChatSession(engine, messages='hello')", "'hello'", "'role'"),
    ("ChatSession(engine, messages=3)", "3", "'role'"),
    ("ChatSession(engine, messages=['hello'])", "'hello'", "'role'"),
    ("ChatSession(engine, messages=[3])", "3", "'role'"),
    ("ChatSession(engine, messages=[{'role': 'user'}])", "{'role': 'user'}", "'content'"),
    ("ChatSession(engine, messages=[{'content': 'hi'}])", "{'content': 'hi'}", "'role'"),
    ("ChatSession(engine, messages={'role': 'user', 'content': 'hi'})", "'role'", "list"),
    ("ChatSession(engine, messages=[{'role': 'user', 'content': None}])", "None", "string"),
    ("ChatSession(engine, messages=[{'role': 'user', 'content': [{'type': 'image_url'}]}])", "image_url", "string"),
    ("ChatSession(engine, messages=[{'role': 'assistant', 'content': 'x', 'tool_calls': []}])", "tool_calls", "'role'"),
    ("ChatSession(engine, messages=[{'role': 3, 'content': 'hi'}])", "3", "'user'"),
    ("ChatSession(engine, messages=[Utterance('user', 3)])", "3", "string"),
    ("ChatSession(engine, messages=[Utterance(3, 'hi')])", "3", "'user'"),
    ("ChatSession(engine, messages=[('user', 'hi')])", "('user', 'hi')", "'role'"),
    ("ChatSession(engine, system=3)", "3", "string"),
    ("ChatSession(engine, system=['x'])", "['x']", "string"),
    ("ChatSession(engine, max_tokens=-1)", "max_tokens=-1", "at least 0"),
    ("ChatSession(engine, max_tokens='10')", "'10'", "at least 0"),
    ("ChatSession(engine, sampling=0.7)", "0.7", "Sampling(temperature=0.7)"),
    ("ChatSession(engine, stop=3)", "stop=3", "a string"),
    ("ChatSession(engine, stop=[''])", "''", "at least one character"),
    ("ChatSession.resume(engine, folder / 'nobody')", "nobody", "folder of a saved session"),
    ("ChatSession.resume(engine, 3)", "3", "folder"),
    ("ChatSession.resume(engine, folder / 'file.txt')", "file.txt", "folder"),
    ("ChatSession.resume(folder, engine)", "engine", "Engine(model, memory, tokenizer)"),
    ("session.say(None)", "None", "say a string"),
    ("session.say(3)", "3", "say a string"),
    ("session.say(['hi'])", "['hi']", "say a string"),
    ("session.say({'role': 'user', 'content': 'hi'})", "'hi'", "say a string"),
    ("session.say('hi', max_tokens='x')", "'x'", "at least 0"),
    ("session.say('hi', max_tokens=-5)", "-5", "at least 0"),
    ("session.say('hi', sampling=0.7)", "0.7", "Sampling(temperature=0.7)"),
    ("session.say('hi', on_text=3)", "on_text=3", "function"),
    ("session.edit('0', 'x')", "'0'", "edit one of 0"),
    ("session.edit(1, 'x')", "1", "edit one of 0"),
    ("session.edit(-1, 'x')", "-1", "edit one of 0"),
    ("session.edit(0.5, 'x')", "0.5", "edit one of 0"),
    ("session.edit([0], 'x')", "[0]", "edit one of 0"),
    ("session.edit(0, None)", "None", "say a string"),
    ("ChatSession(engine).undo()", "undo", "say something first"),
    ("ChatSession(engine).regenerate()", "regenerate", "say something first"),
    ("session.save(folder / 'file.txt')", "file.txt", "folder"),
    ("session.save(3)", "3", "folder"),
    ("session.save(None)", "None", "folder"),
    ("ended.say('hi')", "closed", "begin another"),
    ("ended.branch()", "closed", "begin another"),
    ("ended.save(folder)", "closed", "begin another"),
    ("Template('{a')", "character 0", "{{"),
    ("Template('a}')", "character 1", "}}"),
    ("Template('{}')", "''", "letters"),
    ("Template('{1a}')", "'1a'", "letters"),
    ("Template(3)", "3", "Text"),
    ("Template(['x'])", "'x'", "Text"),
    ("Template('{x:max_tokens=0}')", "max_tokens=0", "at least 1"),
    ("Template('{x:max_tokens=ten}')", "ten", "literal"),
    ("Template('{x:size=3}')", "'size'", "max_tokens"),
    ("Template('{x:20}')", "'20'", "max_tokens="),
    ("Template(\"{x:choices=['a','a']}\")", "['a', 'a']", "once"),
    ("Template('{x:choices=3}')", "3", "strings"),
    ("Template('{x:max_tokens=3} {x:max_tokens=4}')", "'x'", "leave them out"),
    ("Hole(3)", "3", "letters"),
    ("Hole('x', sampling=0.7)", "0.7", "Sampling(temperature=0.7)"),
    ("Text(3)", "3", "string"),
    ("fill(model, text)", "Jamba", "Engine(model, memory, tokenizer)"),
    ("fill(engine, 'My {pet}')", "'My {pet}'", "Template('My {pet}')"),
    ("fill(engine, 3)", "3", "Template"),
    ("fill(engine, [3])", "3", "Template"),
    ("fill(engine, text, {'pet': 3})", "3", "string"),
    ("fill(engine, text, {'cat': 'x'})", "'cat'", "pet"),
    ("fill(engine, text, ['x'])", "'x'", "{hole: words}"),
    ("fill(engine, text, 3)", "3", "{hole: words}"),
    ("fill(engine, [text, text], [{}])", "2 templates", "one template"),
    ("fill(engine, text, sampling=0.7)", "0.7", "Sampling(temperature=0.7)"),
    ("fill(mute, text)", "no tokenizer", "make it with one"),
]  # fmt: skip

SEARCHES: list[Row] = [
    ("SpeculativeBatch(memory, model, (2,), PromptLookup())", "HybridMemory", "SpeculativeBatch(model, memory"),
    ("SpeculativeBatch(model, memory, (2,), None)", "None", "PromptLookup()"),
    ("SpeculativeBatch(model, memory, (2,), 'lookup')", "'lookup'", "PromptLookup()"),
    ("SpeculativeBatch(model, memory, (2,), PromptLookup)", "PromptLookup", "PromptLookup()"),
    ("SpeculativeBatch(model, memory, (2,), model)", "Jamba", "PromptLookup()"),
    ("SpeculativeBatch(model, memory, 2, PromptLookup())", "2", "[2]"),
    ("SpeculativeBatch(model, memory, ('</s>',), PromptLookup())", "'</s>'", "token ids"),
    ("SpeculativeBatch(model, memory, (2,), PromptLookup(), step_tokens=0)", "step_tokens=0", "at least 1"),
    ("SpeculativeBatch(model, memory, (2,), PromptLookup(3, 9))", "9", "rollback_window"),
    ("PromptLookup(0)", "n_gram=0", "at least 1"), ("PromptLookup(3, '8')", "'8'", "at least 1"),
    ("DraftModel(memory, model)", "HybridMemory", "DraftModel(model, memory)"),
    ("DraftModel(model, memory, 0)", "n_draft=0", "at least 1"),
    ("DraftModel(model, memory, 99)", "99", "rollback_window"),
    ("SpeculativeBatch(model, memory, (2,), PromptLookup()).add(3, [1], 4)", "3", "{sequence: tokens}"),
    ("SpeculativeBatch(model, memory, (2,), PromptLookup()).add(closed, [1], 4)", "closed", "another one"),
    (
        "SpeculativeBatch(model, memory, (2,), PromptLookup()).add(foreign, [1], 4)",
        "another memory",
        "memory that made them",
    ),
    ("SpeculativeBatch(model, memory, (2,), PromptLookup()).add(mark, [1], 4)", "checkpoint", "fork"),
    ("SpeculativeBatch(model, memory, (2,), PromptLookup()).add(alice, 'hello', 4)", "'hello'", "tokenizer"),
    ("SpeculativeBatch(model, memory, (2,), PromptLookup()).add(alice, [], 4)", "empty", "a token"),
    ("SpeculativeBatch(model, memory, (2,), PromptLookup()).add(alice, [1.5], 4)", "1.5", "integer token ids"),
    ("SpeculativeBatch(model, memory, (2,), PromptLookup()).add(alice, [10**9], 4)", "1000000000", "0 <= id < 932"),
    ("SpeculativeBatch(model, memory, (2,), PromptLookup()).add(alice, [1], -4)", "max_tokens=-4", "at least 0"),
    ("SpeculativeBatch(model, memory, (2,), PromptLookup()).add(alice, [1], '4')", "'4'", "at least 0"),
    ("SpeculativeBatch(model, memory, (2,), PromptLookup()).add(alice, [1], 4, sampling=0.7)",
     "0.7", "Sampling(temperature=0.7)"),
    ("beam_search(memory, model, [1], 2, 4)", "HybridMemory", "beam_search(model, memory"),
    ("beam_search('embedded', memory, [1], 2, 4)", "'embedded'", "load_model"),
    ("beam_search(model, memory, 'hello', 2, 4)", "'hello'", "tokenizer"),
    ("beam_search(model, memory, [], 2, 4)", "no tokens", "leave it out"),
    ("beam_search(model, memory, None, 2, 4)", "None", "integer token ids"),
    ("beam_search(model, memory, [10**9], 2, 4)", "1000000000", "0 <= id < 932"),
    ("beam_search(model, memory, [1], 0, 4)", "n_beams=0", "at least 1"),
    ("beam_search(model, memory, [1], '2', 4)", "'2'", "at least 1"),
    ("beam_search(model, memory, [1], 2, 0)", "max_tokens=0", "at least 1"),
    ("beam_search(model, memory, [1], 2, 4, length_penalty='x')", "'x'", "a number"),
    ("beam_search(model, memory, [1], 2, 4, early_stopping='maybe')", "'maybe'", "'never'"),
    ("beam_search(model, memory, [1], 2, 4, stop_ids=2)", "2", "[2]"),
    ("beam_search(model, memory, [1], 2, 4, stop_ids=('</s>',))", "'</s>'", "token ids"),
    ("beam_searches(model, memory, [1, 2], 3)", "3", "BeamOptions"),
    ("beam_searches(model, memory, [], BeamOptions(2, 4))", "[]", "at least one"),
    ("beam_searches(model, memory, 3, BeamOptions(2, 4))", "3", "list"),
    ("n_best(model, memory, [1], 0, 4, sampling=Sampling())", "n=0", "at least 1"),
    ("n_best(model, memory, [1], 2, 4, sampling=0.7)", "0.7", "Sampling(temperature=0.7)"),
    ("n_best(model, memory, 'hello', 2, 4, sampling=Sampling())", "'hello'", "tokenizer"),
    ("n_best(memory, model, [1], 2, 4, sampling=Sampling())", "HybridMemory", "n_best(model, memory"),
    ("n_best(model, memory, [1], 2, 4, sampling=Sampling(), stop_ids=2)", "2", "[2]"),
]  # fmt: skip

COMMANDS: list[tuple[str, int, str, str]] = [
    ("generate --prompt hi --budget lots", 1, "'lots'", "'512MiB'"),
    ("generate --prompt hi --device cuda", 1, "'cuda'", "device='cpu'"),
    ("generate --prompt hi --device gpu", 1, "'gpu'", "'cuda'"),
    ("generate --prompt hi --dtype int8", 1, "'int8'", "'bfloat16'"),
    ("generate --prompt hi --model nobody", 1, "nobody", "'embedded'"),
    ("generate --prompt hi --max-tokens 0", 2, "--max-tokens", "Invalid value"),
    ("generate", 2, "--prompt", "Missing"),
    ("generate hi", 2, "--prompt", "Missing"),
    ("chat --resume /nobody", 1, "/nobody", "folder of a saved session"),
    ("chat --temperature hot", 2, "--temperature", "Invalid value"),
    ("chat --budget 0", 1, "budget='0'", "positive"),
    ("demo --users 1", 2, "--users", "Invalid value"),
    ("serve --host 0.0.0.0", 1, "0.0.0.0", "key"),
    ("serve --max-body lots", 1, "--max-body='lots'", "512KiB"),
    ("serve --port 99999", 2, "--port", "Invalid value"),
    ("plan --budget lots", 1, "'lots'", "'512MiB'"),
    ("plan --context lots", 1, "'lots'", "32k"),
    ("plan --context 0", 1, "'0'", "32k"),
    ("plan --keep 200%", 1, "'200%'", "20%"),
    ("plan --device gpu", 1, "gpu", "cuda"),
    ("plan --dtype int8", 1, "'int8'", "'bfloat16'"),
    ("plan --state-dtype int3", 1, "int3", "bfloat16"),
    ("plan --model nobody", 1, "nobody", "'embedded'"),
    ("plan --encoder lots", 1, "lots", "32k"),
    ("plan --weights int5", 1, "int5", "int8-row"),
    ("inspect /nobody", 1, "/nobody", "saved"),
    ("simulate --rate 0", 1, "rate", "above 0"),
    ("simulate --weights int5", 1, "int5", "'int8-row'"),
    ("simulate --dry --weights int8", 1, "int8", "no weights"),
    ("simulate --edits 2", 1, "edits", "1"),
    ("simulate --speed fast", 1, "fast", "max"),
    ("simulate --alone maybe", 1, "maybe", "none"),
    ("simulate --trace /nobody", 1, "/nobody", "JSONL"),
    ("simulate --budget lots --dry", 1, "'lots'", "'512MiB'"),
    ("simulate --device gpu --dry", 1, "gpu", "cuda"),
    ("fly", 2, "fly", "No such command"),
]
"""A command line, its exit status, and two words of what it prints."""

MEANT = [
    "assert load_tokenizer('embedded').encode('hi') == tokenizer.encode('hi')",
    "ChatSession(engine, messages=[{'role': 'user', 'content': 'hi'}, {'role': 'assistant', 'content': 'hi'}])",
    "assert ChatSession(engine, messages=[{'role': 'user', 'content': [{'type': 'text', 'text': "
    "'hi'}]}]).messages[0].content == 'hi'",
    "assert engine.submit(np.array([1, 2]), max_tokens=0).n_prompt == 2; engine.run()",
    "engine.submit((1, 2), max_tokens=np.int64(0)); engine.run()",
    "Engine(model, memory, tokenizer, stop_ids=np.array([2])).stop_ids",
    "HybridMemory(model.memory_spec, '1G'), HybridMemory(model.memory_spec, '1gb')",
]


@pytest.mark.parametrize("rows", [MODELS, ENGINES, CHATS, SEARCHES], ids=["models", "engines", "chats", "searches"])
def test_a_wrong_call_names_the_value_and_the_way_out(rows: list[Row], names: dict[str, Any]) -> None:
    assert_refused(rows, names, (names["memory"], names["other"]))
    assert names["engine"].is_idle and len(names["session"].messages) == 2


def test_what_can_be_meant_is_taken(names: dict[str, Any]) -> None:
    for code in MEANT:
        exec(code, dict(names))
    names["memory"].check()


def test_a_wrong_command_is_one_line_that_says_what_to_give() -> None:
    found: list[str] = []
    for line, status, value, remedy in COMMANDS:
        result = CliRunner().invoke(app, line.split(), env={"COLUMNS": "200"})
        if result.exit_code != status or any(word not in result.stderr for word in (value, remedy)):
            found.append(f"{line}\n    {result.exit_code}: {result.stderr or result.exception!r}")
    assert not found, "\n".join([f"{len(found)} wrong commands are not told well", *found])
