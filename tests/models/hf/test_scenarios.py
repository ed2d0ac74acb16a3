"""What people do with transformers' models, tried through `attach` on hybrids: outputs are transformers' own.

A scenario is an option of `generate`, or a way to call the model and its cache. Each is tried with each of `HYBRIDS` in
the long form, and by default a few of them with one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation import BaseStreamer, MaxLengthCriteria, WatermarkingConfig

from hybridmem.memory import HybridMemory
from hybridmem.models import HybridCache, from_transformers
from tests.extent import IS_LONG
from tests.models.hf_models import attached, generate, given, hf_model, ids, logits, padded, stacked
from tests.tolerances import assert_logits_close

HYBRIDS = ("jamba", "qwen3.5", "granite-moe-hybrid")
"""Mamba-1, a gated delta rule and Mamba-2, each beside attention."""
N_ASKED = 49
"""How many scenarios there are at least."""


# The scenarios below are options of `generate`.


@dataclass(frozen=True)
class Generation:
    """A call of `generate`.

    Attributes:
        lengths: tokens of each prompt; shorter ones have padding on their left.
        options: of both calls.
        ours: further options of the call with a `HybridCache`, which change no text. Transformers refuses them for
            these models with its own cache, or computes other outputs.
        n_each: sequences of the cache for each prompt.
    """

    lengths: tuple[int, ...] = (9,)
    options: dict[str, Any] = field(default_factory=dict)
    ours: dict[str, Any] = field(default_factory=dict)
    n_each: int = 1


def drawn(n_each: int = 1, **options: Any) -> Generation:
    options = {"do_sample": True, "temperature": 1.3, "num_return_sequences": n_each} | options
    return Generation((4, 9), options, n_each=n_each)


def beams(n: int = 3, **options: Any) -> Generation:
    return Generation((6, 9), {"num_beams": n, "eos_token_id": list(range(9))} | options, n_each=n)


def discouraged(input_ids: Tensor, scores: Tensor) -> Tensor:
    """Make the tokens that were said last less likely, as a processor of the caller's."""
    return scores.scatter_add(1, input_ids[:, -3:], torch.full((len(scores), 3), -4.0))


GENERATIONS = {
    "one prompt": Generation(),
    "prompts of one length": Generation((9, 9)),
    "prompts with padding": Generation((3, 12, 7)),
    "a prompt of one token": Generation((1,)),
    "a long prompt": Generation((90,), {"max_new_tokens": 3}),
    "one new token": Generation(options={"max_new_tokens": 1}),
    "a total length": Generation((3, 9), {"max_new_tokens": None, "max_length": 15}),
    "rows that end at different times": Generation((3, 12, 7), {"eos_token_id": list(range(12))}),
    "a least number of tokens": Generation((3, 9), {"eos_token_id": list(range(40)), "min_new_tokens": 5}),
    "a criterion to stop": Generation((3, 9), {"stopping_criteria": [MaxLengthCriteria(12)]}),
    "a processor of logits": Generation((3, 9), {"logits_processor": [discouraged]}),
    "repetition penalty": Generation((3, 9), {"repetition_penalty": 1.7}),
    "no repeated tokens": Generation((3, 9), {"no_repeat_ngram_size": 1, "max_new_tokens": 20}),
    "forbidden words": Generation((3, 9), {"bad_words_ids": [[n] for n in range(20)] + [[30, 31]]}),
    "suppressed tokens": Generation((3, 9), {"suppress_tokens": list(range(25))}),
    "tokens suppressed at the start": Generation((3, 9), {"begin_suppress_tokens": list(range(40))}),
    "biases of sequences": Generation((3, 9), {"sequence_bias": {(5,): 9.0, (6, 7): 4.0}}),
    "a forced end": Generation((3, 9), {"forced_eos_token_id": 3}),
    "a penalty that grows with length": Generation(
        (3, 9), {"exponential_decay_length_penalty": (2, 1.5), "eos_token_id": [3, 4]}
    ),
    "guidance by a second prompt": Generation(options={"guidance_scale": 1.5}),
    "a watermark": Generation((3, 9), {"watermarking_config": WatermarkingConfig(bias=4.0)}),
    "scores and hidden states": Generation((3, 9), {"output_scores": True, "output_hidden_states": True}),
    "drawn by temperature": drawn(),
    "drawn from the first k": drawn(top_k=5),
    "drawn from a nucleus": drawn(top_p=0.7, top_k=0),
    "drawn above a share of the best": drawn(min_p=0.1, top_k=0),
    "drawn by typicality": drawn(typical_p=0.6, top_k=0),
    "drawn above a threshold": drawn(epsilon_cutoff=0.01, eta_cutoff=0.01, top_k=0),
    "several drawn texts of a prompt": drawn(3),
    "beams": beams(),
    "several beams returned": beams(4, num_return_sequences=3),
    "beams that stop early": beams(early_stopping=True, length_penalty=0.3),
    "beams that never stop early": beams(early_stopping="never", length_penalty=2.0),
    "beams without repetition": beams(no_repeat_ngram_size=1),
    "drawn beams": beams(do_sample=True, top_k=8),
    "a prompt in chunks": Generation((3, 14), ours={"prefill_chunk_size": 5}),
    "drafts found in the prompt": Generation((12,), {"max_new_tokens": 20}, {"prompt_lookup_num_tokens": 4}),
    "long drafts that follow a single token": Generation(
        (12,), {"max_new_tokens": 20}, {"prompt_lookup_num_tokens": 8, "max_matching_ngram_size": 1}
    ),
    "drafts of another model": Generation((12,), {"max_new_tokens": 20}, {"assistant_model": "llama"}),
}  # fmt: skip


def called(model: PreTrainedModel, scenario: Generation, cache: HybridCache | None = None) -> Any:
    tokens, mask = padded(*scenario.lengths)
    options = scenario.options | (scenario.ours | given(cache) if cache is not None else {})
    if "assistant_model" in options:
        options["assistant_model"] = hf_model(options["assistant_model"])
    torch.manual_seed(7)
    return generate(model, tokens, mask, **options)


@pytest.mark.parametrize("name", HYBRIDS if IS_LONG else HYBRIDS[:1])
@pytest.mark.parametrize("what", GENERATIONS if IS_LONG else ["guidance by a second prompt", "drawn beams"])
def test_generate_gives_what_it_gives_with_transformers_own_cache(name: str, what: str) -> None:
    scenario = GENERATIONS[what]
    expected = called(hf_model(name), scenario)
    with attached(name, len(scenario.lengths) * scenario.n_each) as (model, cache):
        actual = called(model, scenario, cache)
    assert torch.equal(actual.sequences, expected.sequences)
    assert_logits_close(stacked(actual), stacked(expected))
    for part in ("scores", "hidden_states") if "output_scores" in scenario.options else ():
        for found, wanted in zip(flat(actual[part]), flat(expected[part]), strict=True):
            assert_logits_close(found, wanted)


def flat(outputs: Any) -> list[Tensor]:
    """Return all tensors in outputs of a model, in order."""
    if isinstance(outputs, dict):
        outputs = tuple(outputs.values())
    if isinstance(outputs, tuple | list):
        return [tensor for each in outputs for tensor in flat(each)]
    return [outputs] if isinstance(outputs, Tensor) else []


# The scenarios below call the model and its cache.

Call = Callable[[PreTrainedModel, HybridCache], None]
CALLS: dict[str, tuple[int, Call]] = {}
"""What is done -> for how many rows, and how."""
PROMPT, WRONG, NEXT = ids(14), ids(5, seed=1), ids(6, seed=2)


def rows(n_rows: int) -> Callable[[Call], Call]:
    def add(call: Call) -> Call:
        CALLS[call.__name__.replace("_", " ")] = n_rows, call
        return call

    return add


def assert_goes_on(model: PreTrainedModel, cache: HybridCache, *before: Tensor) -> None:
    """The cache holds these tokens in its only row: what follows has the logits of transformers without a cache."""
    expected = logits(model, torch.cat([*before, NEXT], 1))[:, -NEXT.shape[1] :]
    assert_logits_close(logits(model, NEXT, **given(cache)), expected)


def assert_rows_go_on(model: PreTrainedModel, cache: HybridCache, mask: Tensor, *before: Tensor) -> None:
    """As `assert_goes_on`, of a cache with a row for each of these texts, under the mask of what it holds."""
    mask = torch.cat([mask, torch.ones(len(before), NEXT.shape[1], dtype=mask.dtype)], 1)
    actual = logits(model, NEXT.expand(len(before), -1), attention_mask=mask, **given(cache))
    for row, text in zip(actual, before, strict=True):
        assert_logits_close(row, logits(model, torch.cat([text, NEXT], 1))[0, -NEXT.shape[1] :])


def filled(model: PreTrainedModel, cache: HybridCache, *lengths: int) -> tuple[Tensor, list[Tensor]]:
    """Feed a batch, and return its mask and the text of each row."""
    tokens, mask = padded(*lengths)
    logits(model, tokens, attention_mask=mask, **given(cache))
    return mask, [row[None, -n:] for row, n in zip(tokens, lengths, strict=True)]


def assert_same_outputs(model: PreTrainedModel, cache: HybridCache, **options: Any) -> None:
    with torch.no_grad():
        actual, expected = (model(PROMPT, **cached, **options) for cached in (given(cache), {"use_cache": False}))
    for found, wanted in zip(flat(actual), flat(expected), strict=True):
        assert_logits_close(found, wanted)


@rows(1)
def token_by_token(model: PreTrainedModel, cache: HybridCache) -> None:
    parts = [logits(model, PROMPT[:, i : i + 1], **given(cache)) for i in range(14)]
    assert_logits_close(torch.cat(parts, 1), logits(model, PROMPT))


@rows(1)
def in_chunks(model: PreTrainedModel, cache: HybridCache) -> None:
    parts = [logits(model, part, **given(cache)) for part in PROMPT.split([5, 1, 6, 2], 1)]
    assert_logits_close(torch.cat(parts, 1), logits(model, PROMPT))


@rows(2)
def padded_rows_in_chunks(model: PreTrainedModel, cache: HybridCache) -> None:
    """In the first chunk, one row is nothing but padding."""
    tokens, mask = padded(3, 14)
    for begin, end in ((0, 6), (6, 12), (12, 14)):
        logits(model, tokens[:, begin:end], attention_mask=mask[:, :end], **given(cache))
    assert_rows_go_on(model, cache, mask, tokens[:1, -3:], tokens[1:])


@rows(1)
def the_last_logits_alone(model: PreTrainedModel, cache: HybridCache) -> None:
    assert_same_outputs(model, cache, logits_to_keep=3)


@rows(1)
def hidden_states_of_each_layer(model: PreTrainedModel, cache: HybridCache) -> None:
    assert_same_outputs(model, cache, output_hidden_states=True)


@rows(1)
def positions_that_are_given(model: PreTrainedModel, cache: HybridCache) -> None:
    logits(model, PROMPT, position_ids=torch.arange(14)[None], **given(cache))
    actual = logits(model, NEXT, position_ids=torch.arange(14, 20)[None], **given(cache))
    assert_logits_close(actual, logits(model, torch.cat([PROMPT, NEXT], 1))[:, 14:])


@rows(1)
def outputs_as_a_tuple(model: PreTrainedModel, cache: HybridCache) -> None:
    with torch.no_grad():
        first, *_ = model(PROMPT, **given(cache), return_dict=False)
    assert_logits_close(first, logits(model, PROMPT))


@rows(1)
def in_inference_mode(model: PreTrainedModel, cache: HybridCache) -> None:
    with torch.inference_mode():
        model(PROMPT, **given(cache))
    assert_goes_on(model, cache, PROMPT)


@rows(1)
def a_loss(model: PreTrainedModel, cache: HybridCache) -> None:
    with torch.no_grad():
        actual, expected = (model(PROMPT, labels=PROMPT, **cached).loss for cached in (given(cache), {}))
    assert torch.isclose(actual, expected, rtol=1e-4)


@rows(1)
def a_conversation(model: PreTrainedModel, cache: HybridCache) -> None:
    said = PROMPT
    for turn in range(3):
        said = torch.cat([said, ids(4, seed=turn + 3)], 1)
        expected = generate(model, said).sequences
        said = generate(model, said, **given(cache)).sequences
        assert torch.equal(said, expected)


@rows(1)
def a_crop_of_what_was_wrong(model: PreTrainedModel, cache: HybridCache) -> None:
    for tokens in (PROMPT, WRONG):
        logits(model, tokens, **given(cache))
    cache.crop(-5)
    assert_goes_on(model, cache, PROMPT)


@rows(1)
def a_crop_to_a_length(model: PreTrainedModel, cache: HybridCache) -> None:
    logits(model, PROMPT, **given(cache))
    cache.crop(6)
    assert_goes_on(model, cache, PROMPT[:, :6])


@rows(2)
def a_crop_of_rows_with_padding(model: PreTrainedModel, cache: HybridCache) -> None:
    mask, (short, long) = filled(model, cache, 6, 14)
    cache.crop(-4)
    assert_rows_go_on(model, cache, mask[:, :-4], short[:, :-4], long[:, :-4])


@rows(1)
def an_edit_and_another_reply(model: PreTrainedModel, cache: HybridCache) -> None:
    generate(model, PROMPT, **given(cache))
    cache.crop(9)
    edited = torch.cat([PROMPT[:, :9], WRONG], 1)
    actual = generate(model, edited, **given(cache))
    assert torch.equal(actual.sequences, generate(model, edited).sequences)


@rows(1)
def another_reply_to_the_same_prompt(model: PreTrainedModel, cache: HybridCache) -> None:
    expected = generate(model, PROMPT).sequences
    for _ in range(2):
        assert torch.equal(generate(model, PROMPT, **given(cache)).sequences, expected)
        cache.crop(13)


@rows(1)
def a_reset(model: PreTrainedModel, cache: HybridCache) -> None:
    logits(model, WRONG, **given(cache))
    cache.reset()
    logits(model, PROMPT, **given(cache))
    assert_goes_on(model, cache, PROMPT)


@rows(1)
def a_fork(model: PreTrainedModel, cache: HybridCache) -> None:
    logits(model, PROMPT, **given(cache))
    other = cache.fork()
    logits(model, WRONG, **given(other))
    assert_goes_on(model, cache, PROMPT)
    assert_goes_on(model, other, PROMPT, WRONG)
    other.close()


@rows(1)
def a_copy_by_deepcopy(model: PreTrainedModel, cache: HybridCache) -> None:
    logits(model, PROMPT, **given(cache))
    for text in (WRONG, ids(3, seed=8)):
        other = copy.deepcopy(cache)
        logits(model, text, **given(other))
        assert_goes_on(model, other, PROMPT, text)
        other.close()


@rows(3)
def rows_in_another_order(model: PreTrainedModel, cache: HybridCache) -> None:
    mask, texts = filled(model, cache, 6, 14, 9)
    order = [2, 0, 0]
    cache.reorder_cache(torch.tensor(order))
    assert_rows_go_on(model, cache, mask[order], *(texts[i] for i in order))


@rows(3)
def some_of_the_rows(model: PreTrainedModel, cache: HybridCache) -> None:
    mask, texts = filled(model, cache, 6, 14, 9)
    dropped = cache.sequences[0]
    cache.batch_select_indices(torch.tensor([False, True, True]))
    assert_rows_go_on(model, cache, mask[1:], *texts[1:])
    cache.memory.close(dropped)


@rows(2)
def each_row_several_times(model: PreTrainedModel, cache: HybridCache) -> None:
    mask, texts = filled(model, cache, 6, 14)
    cache.batch_repeat_interleave(2)
    assert_rows_go_on(model, cache, mask[[0, 0, 1, 1]], *(texts[i] for i in (0, 0, 1, 1)))


@rows(1)
def texts_drawn_from_a_cached_prompt(model: PreTrainedModel, cache: HybridCache) -> None:
    options = {"do_sample": True, "num_return_sequences": 3}
    torch.manual_seed(3)
    expected = generate(model, PROMPT, **options).sequences
    logits(model, PROMPT[:, :-1], **given(cache))
    cache.batch_repeat_interleave(3)
    torch.manual_seed(3)
    assert torch.equal(generate(model, PROMPT, **given(cache), **options).sequences, expected)


@rows(1)
def a_checkpoint_from_far_away(model: PreTrainedModel, cache: HybridCache) -> None:
    (sequence,), memory = cache.sequences, cache.memory
    logits(model, PROMPT, **given(cache))
    checkpoint = memory.checkpoint(sequence)
    logits(model, ids(40), **given(cache))
    memory.rollback(sequence, to=checkpoint)
    assert_goes_on(model, cache, PROMPT)
    memory.close(checkpoint)


@rows(2)
def one_row_taken_back_alone(model: PreTrainedModel, cache: HybridCache) -> None:
    mask, (short, long) = filled(model, cache, 6, 14)
    cache.memory.rollback(cache.sequences[0], to=4)
    mask[0, 8:10] = 0  # The row is shorter by two, so it has more padding.
    assert_rows_go_on(model, cache, mask, short[:, :4], long)


@rows(1)
def a_file_of_what_is_cached(model: PreTrainedModel, cache: HybridCache) -> None:
    logits(model, PROMPT, **given(cache))
    with TemporaryDirectory() as folder:
        cache.memory.save(cache.sequences[0], Path(folder) / "it.safetensors")
        loaded = HybridCache(cache.memory, [cache.memory.load(Path(folder) / "it.safetensors")])
    assert_goes_on(model, loaded, PROMPT)
    loaded.close()


@rows(1)
def swapped_out_and_in(model: PreTrainedModel, cache: HybridCache) -> None:
    logits(model, PROMPT, **given(cache))
    cache.memory.swap_out(cache.sequences[0])
    cache.memory.swap_in(cache.sequences[0])
    assert_goes_on(model, cache, PROMPT)


@rows(1)
def two_caches_that_take_turns(model: PreTrainedModel, cache: HybridCache) -> None:
    other = HybridCache(cache.memory, [cache.memory.open()])
    for begin, end in ((0, 5), (5, 9), (9, 14)):
        for each, tokens in ((cache, PROMPT), (other, ids(14, seed=6))):
            logits(model, tokens[:, begin:end], **given(each))
    assert_goes_on(model, cache, PROMPT)
    assert_goes_on(model, other, ids(14, seed=6))
    other.close()


@rows(1)
def several_threads(model: PreTrainedModel, cache: HybridCache) -> None:
    """Each thread has a memory of its own: transformers' modules are shared, and a step is one thread's."""
    said: dict[int, Tensor] = {}

    def talk(number: int) -> None:
        memory = HybridMemory(cache.memory.spec, "2MiB", rollback_window=16, page_tokens=4)
        own = HybridCache(memory, [memory.open()])
        said[number] = generate(model, ids(9, seed=number), **given(own)).sequences

    threads = [Thread(target=talk, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(3):
        assert torch.equal(said[number], generate(model, ids(9, seed=number)).sequences)


@rows(1)
def our_own_model_and_back(model: PreTrainedModel, cache: HybridCache) -> None:
    own, (sequence,) = from_transformers(model), cache.sequences
    logits(model, PROMPT, **given(cache))
    with cache.memory.step({sequence: WRONG[0].tolist()}, outputs="all") as step:
        assert_logits_close(own(step), logits(model, torch.cat([PROMPT, WRONG], 1))[0, 14:])
    assert_goes_on(model, cache, PROMPT, WRONG)


@rows(1)
def a_text_that_is_heard_while_it_is_said(model: PreTrainedModel, cache: HybridCache) -> None:
    """A streamer gets the prompt, then each token."""
    heard: list[int] = []

    class Ear(BaseStreamer):
        def put(self, value: Tensor) -> None:
            heard.extend(value.flatten().tolist())

        def end(self) -> None:
            heard.append(-1)

    generate(model, PROMPT, **given(cache), streamer=Ear())
    assert heard == [*generate(model, PROMPT).sequences[0].tolist(), -1]


@pytest.mark.parametrize("name", HYBRIDS if IS_LONG else HYBRIDS[1:2])
@pytest.mark.parametrize("what", CALLS if IS_LONG else ["one row taken back alone"])
def test_a_call_gives_what_transformers_gives_without_a_cache(name: str, what: str) -> None:
    n_rows, call = CALLS[what]
    with attached(name, n_rows) as (model, cache):
        call(model, cache)


def test_there_are_as_many_scenarios_as_were_asked_for() -> None:
    assert len(GENERATIONS) + len(CALLS) >= N_ASKED
