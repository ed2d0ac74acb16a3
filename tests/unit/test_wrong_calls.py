"""What a beginner does wrong with a memory: every call is refused by an error that names the value and the way out, or
meant.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import memory.eviction as eviction
import memory.quantization as quantization
from memory import AttentionSpec, CrossAttentionSpec, HybridMemory, MemorySpec, RecurrentSpec, StateTensor
from memory.capacity import plan_sequence
from memory.pictures import arena_map, fork_tree, layer_map
from memory.prefix.cache import PrefixCache
from tests.toy import VOCAB, Toy
from tests.wrong_calls import Row, assert_refused

GIB = 1 << 30


@pytest.fixture
def names(tmp_path: Path) -> Iterator[dict[str, Any]]:
    model = Toy()
    spec, half = model.memory_spec, Toy(dtype=torch.float16)
    memory = HybridMemory(spec, "1MiB", rollback_window=4, page_tokens=4, poison=True)
    other = HybridMemory(spec, "1MiB", rollback_window=4, page_tokens=4)
    alice, bob, closed, away, foreign = (memory.open(), memory.open(), memory.open(), memory.open(), other.open())
    memory.close(closed)
    for owner, requests in ((memory, {alice: list(range(12)), bob: [1, 2], away: [3]}), (other, {foreign: [1]})):
        with owner.step(requests) as step:
            model(step)
    mark, old = memory.checkpoint(alice), memory.checkpoint(bob)
    memory.close(old)
    memory.swap_out(away)
    (tmp_path / "text.safetensors").write_text("no sequence")
    yield {
        "np": np, "torch": torch, "replace": replace, "GIB": GIB, "VOCAB": VOCAB, "Toy": Toy, "half": half,
        "model": model, "spec": spec, "memory": memory, "other": other, "alice": alice, "bob": bob, "closed": closed,
        "away": away, "foreign": foreign, "mark": mark, "old": old, "folder": tmp_path, "HybridMemory": HybridMemory,
        "AttentionSpec": AttentionSpec, "MemorySpec": MemorySpec, "CrossAttentionSpec": CrossAttentionSpec,
        "RecurrentSpec": RecurrentSpec, "StateTensor": StateTensor, "PrefixCache": PrefixCache,
        "plan_sequence": plan_sequence, "arena_map": arena_map, "fork_tree": fork_tree, "layer_map": layer_map,
        "attention": AttentionSpec(6, 2, 4), **vars(eviction), **vars(quantization),
    }  # fmt: skip


MEMORIES: list[Row] = [
    ("HybridMemory(model)", "Toy", "model.memory_spec"),
    ("HybridMemory('embedded')", "'embedded'", "model.memory_spec"),
    ("HybridMemory(None)", "None", "model.memory_spec"),
    ("HybridMemory(spec.layers)", "AttentionSpec", "model.memory_spec"),
    ("HybridMemory(spec, 0)", "budget=0", "positive number of bytes"),
    ("HybridMemory(spec, -1)", "budget=-1", "positive number of bytes"),
    ("HybridMemory(spec, True)", "budget=True", "positive number of bytes"),
    ("HybridMemory(spec, None)", "budget=None", "positive number of bytes"),
    ("HybridMemory(spec, [GIB])", "[1073741824]", "positive number of bytes"),
    ("HybridMemory(spec, 2.5)", "budget=2.5", "whole number"),
    ("HybridMemory(spec, float('nan'))", "budget=nan", "positive number of bytes"),
    ("HybridMemory(spec, float('inf'))", "budget=inf", "positive number of bytes"),
    ("HybridMemory(spec, 2**70)", str(2**70), "at most"),
    ("HybridMemory(spec, '')", "budget=''", "'512MiB'"),
    ("HybridMemory(spec, 'lots')", "'lots'", "'512MiB'"),
    ("HybridMemory(spec, '64')", "64 bytes", "or more"),
    ("HybridMemory(spec, '-1MiB')", "'-1MiB'", "'512MiB'"),
    ("HybridMemory(spec, '0MiB')", "'0MiB'", "positive"),
    ("HybridMemory(spec, '50%')", "'50%'", "'512MiB'"),
    ("HybridMemory(spec, 64)", "64 bytes", "or more"),
    ("HybridMemory(spec, '4000TiB')", "4,398,046,511,104,000", "smaller"),
    ("HybridMemory(spec, rollback_window=-1)", "rollback_window=-1", "integer of at least 0"),
    ("HybridMemory(spec, rollback_window=1.5)", "rollback_window=1.5", "integer of at least 0"),
    ("HybridMemory(spec, rollback_window='8')", "rollback_window='8'", "integer of at least 0"),
    ("HybridMemory(spec, rollback_window=None)", "rollback_window=None", "integer of at least 0"),
    ("HybridMemory(spec, rollback_window=True)", "rollback_window=True", "integer of at least 0"),
    ("HybridMemory(spec, page_tokens=0)", "page_tokens=0", "integer of at least 1"),
    ("HybridMemory(spec, page_tokens='16')", "page_tokens='16'", "integer of at least 1"),
    ("HybridMemory(spec, fold='kept')", "'kept'", "'replay'"),
    ("HybridMemory(spec, fold=3)", "fold=3", "'replay'"),
    ("HybridMemory(spec, fold=['keep'])", "['keep']", "'replay'"),
    ("HybridMemory(spec, device='gpu')", "'gpu'", "'cuda'"),
    ("HybridMemory(spec, device='cuda')", "'cuda'", "device='cpu'"),
    ("HybridMemory(spec, device='mps')", "'mps'", "device='cpu'"),
    ("HybridMemory(spec, device=1.5)", "device=1.5", "'cpu'"),
    ("HybridMemory(spec, dtype='float8')", "'float8'", "'bfloat16'"),
    ("HybridMemory(spec, dtype='int8')", "'int8'", "'bfloat16'"),
    ("HybridMemory(spec, dtype=torch.int64)", "torch.int64", "'bfloat16'"),
    ("HybridMemory(spec, dtype=float)", "<class 'float'>", "'bfloat16'"),
    ("HybridMemory(spec, dtype=16)", "dtype=16", "'bfloat16'"),
    ("HybridMemory(spec, state_dtype='int8')", "'int8'", "'bfloat16'"),
    ("HybridMemory(spec, state_dtype=torch.int8)", "torch.int8", "'bfloat16'"),
    ("HybridMemory(spec, host_pages='lots')", "host_pages='lots'", "'512MiB'"),
    ("HybridMemory(spec, host_pages=0)", "host_pages=0", "positive number of bytes"),
    ("HybridMemory(spec, host_attention='gpu')", "'gpu'", "'stream'"),
    ("HybridMemory(spec, host_attention='compute')", "'compute'", "host_pages="),
    ("HybridMemory(spec, host_budget=-1)", "host_budget=-1", "positive number of bytes"),
    ("HybridMemory(spec, host_budget='lots')", "host_budget='lots'", "'512MiB'"),
    ("HybridMemory(spec, swap_dir=3)", "swap_dir=3", "folder"),
]  # fmt: skip

SPECS: list[Row] = [
    ("AttentionSpec(0, 1, 4)", "0", "at least 1"),
    ("AttentionSpec('4', 1, 4)", "'4'", "at least 1"),
    ("AttentionSpec(3, 2, 4)", "3 query heads", "evenly"),
    ("AttentionSpec(4, 2, 4.0)", "4.0", "at least 1"),
    ("AttentionSpec(4, 2, 4, window=0)", "window=0", "at least 1"),
    ("AttentionSpec(4, 2, 4, window='all')", "'all'", "at least 1"),
    ("AttentionSpec(4, 2, 4, value_dim=9)", "9", "at most"),
    ("AttentionSpec(4, 2, 4, window=8, policy=Recent(8))", "Recent", "without"),
    ("AttentionSpec(4, 2, 4, rotation=3)", "3", "Rotation"),
    ("AttentionSpec(4, 2, 4, has_bias=True, policy=Recent(8))", "Recent", "without"),
    ("CrossAttentionSpec(3, 2, 4)", "3 query heads", "evenly"),
    ("RecurrentSpec('x', (5,), ())", "'x'", "no memory"),
    ("RecurrentSpec('x', 5, (StateTensor('a', (5,)),))", "5", "tuple"),
    ("RecurrentSpec('x', (5,), (StateTensor('a', 5),))", "5", "tuple"),
    ("RecurrentSpec('x', (5,), ('a',))", "'a'", "StateTensor"),
    ("RecurrentSpec('x', (0,), (StateTensor('a', (5,)),))", "0", "at least 1"),
    ("RecurrentSpec('x', (5,), (StateTensor('a', (5,)), StateTensor('a', (5,))))", "'a'", "name"),
    ("MemorySpec(attention, 10)", "AttentionSpec", "tuple"),
    ("MemorySpec((attention,), 10)", "AttentionSpec", "tuple"),
    ("MemorySpec((('attention',),), 10)", "'attention'", "AttentionSpec"),
    ("MemorySpec(((attention, attention),), 10)", "'attention'", "its own"),
    ("MemorySpec(((attention,),), 0)", "vocab_size=0", "at least 1"),
    ("MemorySpec(((attention,),), '10')", "'10'", "at least 1"),
    ("MemorySpec(((attention,),), 10, dtype='int8')", "'int8'", "'bfloat16'"),
    ("MemorySpec(((attention,),), 10, device='gpu')", "'gpu'", "'cuda'"),
    ("HybridMemory(spec.with_policy('H2O'))", "'H2O'", "H2O(1024)"),
    ("HybridMemory(spec.with_policy(H2O))", "H2O", "H2O(1024)"),
    ("spec.with_policy(H2O(32), layers=3)", "3", "layers=["),
    ("spec.with_policy(H2O(32), layers=[99])", "99", "choose from"),
    ("spec.with_policy(H2O(32), layers=['0'])", "'0'", "choose from"),
    ("HybridMemory(spec.with_storage('int8'))", "'int8'", "Quantized(4)"),
    ("HybridMemory(spec.with_storage(4))", "4", "Quantized(4)"),
    ("HybridMemory(spec.with_policy(Quantized(4)))", "Quantized", "H2O(1024)"),
    ("spec.with_state_dtype('int8')", "'int8'", "'bfloat16'"),
    ("H2O(0)", "0", "at least 1"),
    ("H2O('64')", "'64'", "at least 1"),
    ("H2O(0.2)", "0.2", "of_ratio"),
    ("H2O(64, decay=2)", "2", "(0, 1]"),
    ("H2O(64, decay='x')", "'x'", "(0, 1]"),
    ("ExpectedAttention(64, decay=None)", "None", "[0, 1)"),
    ("Recent(4, sinks=9)", "9", "raise the budget"),
    ("SnapKV(64, kernel=2)", "2", "odd"),
    ("PyramidKV(64, steepness=0)", "0", "at least 1"),
    ("H2O.of_ratio(2, max_tokens=10)", "2", "H2O(n)"),
    ("H2O.of_ratio('20%', max_tokens=10)", "'20%'", "(0, 1]"),
    ("H2O.of_ratio(0.5, max_tokens=0)", "0", "at least 1"),
    ("Quest(64, recent=0)", "0", "at least 1"),
    ("Quantized(3)", "3", "8, 4 or 2"),
    ("Quantized('4')", "'4'", "8, 4 or 2"),
    ("Quantized([4])", "[4]", "8, 4 or 2"),
    ("Quantized(4, group=0)", "0", "at least 1"),
    ("plan_sequence(spec, 0)", "n_tokens=0", "at least 1"),
    ("plan_sequence(spec, '32k')", "'32k'", "integer"),
    ("plan_sequence(model, 32)", "Toy", "model.memory_spec"),
    ("plan_sequence(spec, 32, encoder_tokens=4)", "4", "no encoder"),
]  # fmt: skip

SEQUENCES: list[Row] = [
    ("memory.open(encoder=3)", "no encoder", "without encoder="),
    ("memory.fork(None)", "None", "memory.open()"),
    ("memory.fork('alice')", "'alice'", "memory.open()"),
    ("memory.fork(alice.id)", str(0), "memory.open()"),
    ("memory.fork(closed)", "closed", "another one"),
    ("memory.fork(foreign)", "another memory", "memory that made them"),
    ("memory.fork(away)", "swapped out", "swap_in"),
    ("memory.checkpoint(closed)", "closed", "another one"),
    ("memory.checkpoint([alice])", "[<sequence", "memory.open()"),
    ("memory.reorder([alice, bob])", "[<sequence", "{target: source}"),
    ("memory.reorder(None)", "None", "{target: source}"),
    ("memory.reorder({alice: 3})", "3", "memory.open()"),
    ("memory.reorder({0: alice})", "0", "memory.open()"),
    ("memory.reorder({alice: closed})", "closed", "another one"),
    ("memory.reorder({mark: alice})", "checkpoint", "fork"),
    ("memory.rollback(alice, to=-1)", "to=-1", "0 <= to <= 12"),
    ("memory.rollback(alice, to=3.0)", "to=3.0", "0 <= to <= 12"),
    ("memory.rollback(alice, to='5')", "to='5'", "0 <= to <= 12"),
    ("memory.rollback(alice, to=None)", "to=None", "0 <= to <= 12"),
    ("memory.rollback(alice, to=True)", "to=True", "0 <= to <= 12"),
    ("memory.rollback(alice, to=[3])", "to=[3]", "0 <= to <= 12"),
    ("memory.rollback(alice, to=100)", "100", "only 12 tokens"),
    ("memory.rollback(bob, to=3)", "3", "only 2 tokens"),
    ("memory.rollback(alice, to=bob)", "checkpoint", "fork"),
    ("memory.rollback(alice, to=old)", "closed", "another one"),
    ("memory.rollback(bob, to=mark)", "family", "fork"),
    ("memory.rollback(mark, to=0)", "checkpoint", "fork"),
    ("memory.rollback(3, to=0)", "3", "memory.open()"),
    ("memory.can_rollback('alice', to=0)", "'alice'", "memory.open()"),
    ("memory.resume_point(alice, to='x')", "'x'", "0 <= to <= 12"),
    ("memory.drop(alice, 3, 2)", "start=3, end=2", "start <= end"),
    ("memory.drop(alice, 'a', 3)", "'a'", "start <= end"),
    ("memory.drop(alice, 0, 100)", "100", "12"),
    ("memory.drop(alice, 0, 1.5)", "1.5", "start <= end"),
    ("memory.close(None)", "None", "memory.open()"),
    ("memory.close(closed)", "closed", "another one"),
    ("memory.close(foreign)", "another memory", "memory that made them"),
    ("memory.save(alice, folder)", "is a folder", "alice.safetensors"),
    ("memory.save(alice, folder / 'no' / 'alice.safetensors')", "no folder", "make it"),
    ("memory.save(alice, None)", "None", "path of a file"),
    ("memory.save(alice, 3)", "3", "path of a file"),
    ("memory.save(alice, '')", "''", "path of a file"),
    ("memory.save('a.safetensors', alice)", "'a.safetensors'", "memory.open()"),
    ("memory.save(closed, folder / 'a')", "closed", "another one"),
    ("memory.load(None)", "None", "path of a saved sequence"),
    ("memory.load(3)", "3", "path of a saved sequence"),
    ("memory.load('')", "''", "path of a saved sequence"),
    ("memory.load(folder)", "is a folder", "path of a saved sequence"),
    ("memory.load(folder / 'nobody.safetensors')", "nobody.safetensors", "path of a saved sequence"),
    ("memory.load(folder / 'text.safetensors')", "text.safetensors", "save the sequence again"),
    ("memory.load(alice)", "<sequence", "path of a saved sequence"),
    ("memory.swap_out(closed)", "closed", "another one"),
    ("memory.swap_out(away)", "swapped out", "swap_in"),
    ("memory.swap_in(alice)", "not swapped out", "as it is"),
    ("memory.to_host(alice)", "no place", "host_pages="),
    ("memory.counters.held_bytes(3)", "3", "memory.open()"),
    ("memory.private_bytes(closed)", "closed", "another one"),
    ("closed.length", "closed", "another one"),
    ("PrefixCache(model)", "Toy", "HybridMemory"),
    ("PrefixCache(None)", "None", "HybridMemory"),
    ("PrefixCache(memory, grid_tokens=-1)", "grid_tokens=-1", "0 for no grid"),
    ("PrefixCache(memory, grid_tokens='512')", "'512'", "0 for no grid"),
    ("PrefixCache(other).find('hello')", "'hello'", "tokenizer"),
    ("PrefixCache(other).find(None)", "None", "list or array"),
    ("PrefixCache(other).open([])", "empty prompt", "at least one token"),
    ("PrefixCache(other).open([1.5])", "[1.5]", "integer"),
    ("PrefixCache(other).open([[1, 2]])", "(1, 2)", "one axis"),
    ("PrefixCache(other).insert(alice)", "another memory", "memory that made them"),
    ("PrefixCache(other).insert(3)", "3", "memory.open()"),
    ("PrefixCache(other).cuts([1, 2], 0, [9])", "9", "0 <= mark <= 2"),
    ("PrefixCache(other).cuts([1, 2], 0, 1)", "1", "list"),
    ("layer_map(memory, 3)", "3", "memory.open()"),
    ("layer_map(memory, closed)", "closed", "another one"),
    ("layer_map(alice, memory)", "<sequence", "HybridMemory"),
    ("arena_map(model)", "Toy", "HybridMemory"),
    ("fork_tree(alice)", "<sequence", "HybridMemory"),
]  # fmt: skip

STEPS: list[Row] = [
    ("memory.step(None)", "None", "{sequence: tokens}"), ("memory.step(3)", "3", "{sequence: tokens}"),
    ("memory.step('hi')", "'h'", "{sequence: tokens}"), ("memory.step([])", "no requests", "at least one"),
    ("memory.step({})", "no requests", "at least one"), ("memory.step(alice)", "<sequence", "{sequence: tokens}"),
    ("memory.step([alice, 1])", "<sequence", "{sequence: tokens}"), ("memory.step([1, 2])", "1", "{sequence: tokens}"),
    ("memory.step(torch.tensor([1, 2]))", "tensor", "{sequence: tokens}"),
    ("memory.step({'alice': [1]})", "'alice'", "{sequence: tokens}"),
    ("memory.step({0: [1]})", "0", "{sequence: tokens}"),
    ("memory.step([(alice, 1), (alice, 2)])", "more than one request", "join"),
    ("memory.step({mark: 1})", "checkpoint", "fork"), ("memory.step({closed: 1})", "closed", "another one"),
    ("memory.step({foreign: 1})", "another memory", "memory that made them"),
    ("memory.step({away: 1})", "swapped out", "swap_in"), ("memory.step({alice: 'hello'})", "'hello'", "tokenizer"),
    ("memory.step({alice: ['hello']})", "'hello'", "tokenizer"),
    ("memory.step({alice: b'hello'})", "b'hello'", "tokenizer"),
    ("memory.step({alice: []})", "no tokens", "leave it out"),
    ("memory.step({alice: None})", "None", "give integer token ids"),
    ("memory.step({alice: 1.5})", "1.5", "give integer token ids"),
    ("memory.step({alice: [1.0, 2.0]})", "[1.0, 2.0]", "give integer token ids"),
    ("memory.step({alice: torch.tensor([1.0])})", "tensor([1.])", "give integer token ids"),
    ("memory.step({alice: torch.tensor([1.0], dtype=torch.bfloat16)})", "bfloat16", "give integer token ids"),
    ("memory.step({alice: {1, 2}})", "{1, 2}", "order"),
    ("memory.step({alice: True})", "True", "give integer token ids"),
    ("memory.step({alice: [True, False]})", "True", "give integer token ids"),
    ("memory.step({alice: torch.tensor([True])})", "True", "give integer token ids"),
    ("memory.step({alice: 2**70})", str(2**70), "0 <= id < 19"),
    ("memory.step({alice: [1, 2**70]})", str(2**70), "0 <= id < 19"),
    ("memory.step({alice: -1})", "-1", "0 <= id < 19"), ("memory.step({alice: [1, VOCAB]})", "19", "0 <= id < 19"),
    ("memory.step({alice: [1, None]})", "None", "give integer token ids"),
    ("memory.step({alice: [1, 'a']})", "'a'", "tokenizer"),
    ("memory.step({alice: [1, 1.5]})", "1.5", "give integer token ids"),
    ("memory.step({alice: [[1, 2]]})", "(1, 2)", "one axis"),
    ("memory.step({alice: [[1], [2, 3]]})", "[[1], [2, 3]]", "flat list"),
    ("memory.step({alice: torch.zeros(2, 3, dtype=torch.int64)})", "(2, 3)", "one axis"),
    ("memory.step({alice: {'input_ids': [1, 2]}})", "input_ids", "['input_ids']"),
    ("memory.step({alice: iter([1, 2])})", "iterator", "list"),
    ("memory.step({alice: bob})", "<sequence", "give integer token ids"),
    ("memory.step({alice: torch.ones(2, dtype=torch.int64, device='meta')})", "meta", "real token ids"),
    ("memory.step({alice: np.array(['a'])})", "'a'", "tokenizer"),
    ("memory.step({alice: 1j})", "1j", "give integer token ids"),
    ("memory.step({alice: 1}, outputs='first')", "'first'", "'last'"),
    ("memory.step({alice: 1}, outputs=None)", "None", "'last'"),
    ("memory.step({alice: 1}, outputs=['last'])", "['last']", "'last'"),
    ("with memory.step({alice: 1}): pass", "used", "whole model"),
    ("model(memory.step({alice: 1}))", "not open", "with memory.step"),
    ("with memory.step({alice: 1}) as step: model(step); model(step)", "twice", "another step"),
    ("with memory.step({alice: 1}) as step: model(step); step.__enter__()", "entered before", "make a new one"),
    ("with memory.step({alice: 1}) as a:\n  with memory.step({alice: 2}) as b: pass", "open step", "leave the step"),
    ("with memory.step({alice: 1}): memory.rollback(alice, to=0)", "open step", "leave the step"),
    ("with memory.step({alice: 1}): memory.close(alice)", "open step", "leave the step"),
    ("memory.step({alice: 1}).attend(0, None, None, None)", "not open", "with memory.step"),
    ("memory.step({alice: 1}).accept({alice: 1})", "not open", "with memory.step"),
    ("memory.step({alice: 1}).token_ids", "not open", "with memory.step"),
    ("memory.step({alice: 1}).positions", "not open", "with memory.step"),
    ("memory.step({alice: 1}).cu_seqlens", "not open", "with memory.step"),
    ("memory.step({alice: 1}).select(torch.zeros(1, 3))", "not open", "with memory.step"),
    ("memory.step({alice: 1}).split(None)", "None", "1 rows"),
    ("memory.step({alice: 1}).split(torch.zeros(3, 4))", "3 rows", "1 rows"),
    ("memory.step({alice: 1}).split(torch.tensor(3.0))", "tensor", "1 rows"),
    ("with memory.step({alice: 1}) as step: step.accept(3)", "3", "{sequence: number"),
    ("with memory.step({alice: 1}) as step: step.accept({bob: 1})", "not in this step", "what was fed"),
    ("with memory.step({alice: 1}) as step: step.accept({'alice': 1})", "'alice'", "what was fed"),
    ("with memory.step({alice: 1}) as step: step.accept({alice: 5})", "5", "0 to 1"),
    ("with memory.step({alice: 1}) as step: step.accept({alice: 0.5})", "0.5", "0 to 1"),
    ("with memory.step({alice: 1}) as step: step.accept({alice: -1})", "-1", "0 to 1"),
    ("with memory.step({alice: 1}) as step: step.attend(9, None, None)", "layer 9", "0 ... 3"),
    ("with memory.step({alice: 1}) as step: step.attend('0', None, None)", "'0'", "0 ... 3"),
    ("with memory.step({alice: 1}) as step: step.attend([0], None, None)", "[0]", "0 ... 3"),
    ("with memory.step({alice: 1}) as step: step.attend(3, None, None)", "layer 3", "0 attention memories"),
    ("with memory.step({alice: 1}) as step: step.attend(0, None, None)", "None", "one row a token"),
    ("with memory.step({alice: 1}) as step: step.attend(0, *[torch.zeros(2, 3)] * 3)", "(2, 3)", "(1, 6, 4)"),
    ("with memory.step({alice: 1}) as step: step.attend(0, torch.zeros(1, 6, 4), torch.zeros(1, 2, 4))",
     "v is missing", "value_dim"),
    ("with memory.step({alice: 1}) as step: step.recur(1, torch.zeros(1, 5), None)", "name=None", "'slow'"),
    ("with memory.step({alice: 1}) as step: step.recur(1, torch.zeros(2, 5), print, name='slow')", "(2, 5)", "(1, 5)"),
    (
        "with memory.step({alice: 1}) as step: step.recur(1, torch.zeros(1, 5), None, name='slow')",
        "None",
        "(states, rows)",
    ),
    ("with memory.step({alice: 1}) as step: Toy(recurrent=False)(step)", "toy", "model.memory_spec"),
    ("with memory.step({alice: 1}) as step: half(step)", "torch.float16", "dtype="),
    ("memory.run(None, {alice: 1})", "model=None", "pass the model"),
    ("memory.run({alice: 1}, model)", "{<sequence", "run(model, requests)"),
    ("memory.run('embedded', {alice: 1})", "'embedded'", "load_model"),
    ("memory.run(model, None)", "None", "{sequence: tokens}"),
    ("memory.run(model, {alice: 'hello'})", "'hello'", "tokenizer"),
    ("memory.run(model, {alice: 1}, max_tokens=0)", "max_tokens=0", "at least 1"),
    ("memory.run(model, {alice: 1}, max_tokens='8')", "'8'", "at least 1"),
    ("memory.run(model, {alice: 1}, outputs='first')", "'first'", "'last'"),
    ("memory.run(lambda step: None, {alice: 1})", "None", "rows"),
]  # fmt: skip

MEANT = [
    "assert HybridMemory(spec, np.int64(2**20)).usage().budget_bytes == 2**20",
    "assert HybridMemory(spec, 1.5e6).usage().budget_bytes <= 1_500_000",
    "assert HybridMemory(spec, np.float64(2**20)).usage().budget_bytes == 2**20",
    "assert HybridMemory(spec, str(10**6)).usage().budget_bytes <= 10**6",
    "assert HybridMemory(spec, '1M').usage().budget_bytes <= 10**6",
    "assert HybridMemory(spec, '1mb').usage().budget_bytes <= 10**6",
    "assert HybridMemory(spec, '1mib').usage().budget_bytes == 2**20",
    "assert HybridMemory(spec, ' 1 MiB ').usage().budget_bytes == 2**20",
    "assert HybridMemory(spec, rollback_window=np.int64(4)).rollback_window == 4",
    "assert HybridMemory(spec, dtype='bfloat16').spec.dtype == torch.bfloat16",
    "assert HybridMemory(spec, state_dtype='bfloat16').spec.layers[1][0].states[0].dtype == torch.bfloat16",
    "assert HybridMemory(MemorySpec([[attention]], 10)).spec.layers == ((attention,),)",
    "assert MemorySpec(((attention,),), 10, dtype='bfloat16', device='cpu').dtype == torch.bfloat16",
    "memory.step({alice: range(3)}), memory.step({alice: (1, 2)}), memory.step({alice: np.uint8(3)})",
    "memory.step(zip([alice, bob], torch.tensor([1, 2])))",
    "memory.rollback(alice, to=np.int64(12))",
]


@pytest.mark.parametrize("rows", [MEMORIES, SPECS, SEQUENCES, STEPS], ids=["memories", "specs", "sequences", "steps"])
def test_a_wrong_call_names_the_value_and_the_way_out(rows: list[Row], names: dict[str, Any]) -> None:
    assert_refused(rows, names, (names["memory"], names["other"]))


def test_what_can_be_meant_is_taken(names: dict[str, Any]) -> None:
    for code in MEANT:
        exec(code, dict(names))
    names["memory"].check()
