"""`generate` of transformers' own models runs through `HybridCache`, and is compared with their own caches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from hybridmem.memory import HybridMemory, StepError
from hybridmem.memory.eviction import H2O
from hybridmem.models import ATTACHABLE, HybridCache, attach, from_transformers
from tests.extent import IS_LONG, few_cases, one_in
from tests.models.checkpoints import CACHE_NAME, CONFIGS, IS_RENAMED
from tests.models.hf_models import HYBRIDS, N_NEW, attached, generate, given, hf_model, ids, logits, padded, stacked
from tests.tolerances import assert_logits_close

ONE_OF_EACH = (
    "bailing-hybrid", "bamba", "deepseek-v2", "deepseek-v3", "deepseek-v3.2", "falcon-h1", "falcon-mamba", "gemma2",
    "gemma3", "glm-moe-dsa", "glm5-next", "gpt-oss", "granite-moe-hybrid", "inkling-two-of-four-experts", "inkling2",
    "inkling2-loop", "jamba", "kimi-linear", "lara-mini", "lfm2", "lfm2-moe", "lfm3", "llama", "mamba2", "mamba",
    "minimax", "mistral", "nemotron-h", "olmo-hybrid", "olmo3", "qwen2", "qwen3", "qwen3-next", "qwen3.5",
    "qwen3.5-moe", "qwen4-exp", "recurrent-gemma", "rwkv", "xlstm", "zamba", "zamba2", "zaya",
)  # fmt: skip
IN_NEWER = () if IS_RENAMED else ("inkling2",)
"""Models that are attached with newer versions of transformers alone."""
# Transformers 5.23 lacks one of them.
ONE_OF_EACH = tuple(name for name in ONE_OF_EACH if name in CONFIGS and name not in IN_NEWER)
WITH_BIASES = (
    "bailing-hybrid-two-of-eight-experts-in-groups",
    "bamba-biases",
    "deepseek-v2-three-of-eight-experts-in-groups",
    "deepseek-v3-three-of-eight-experts-in-groups",
    "kimi-linear-two-of-eight-experts-in-groups",
    "falcon-h1-biases",
    "gemma3-capped",
    "glm5-next-two-of-eight-experts-in-groups",
    "inkling2-loop-blocks-of-two",
    "qwen4-exp-two-of-four-experts",
    "rwkv-rescaled-tied",
    "lfm3-biases-untied",
    "minimax-two-of-four-experts",
    "olmo-hybrid-rope",
    "olmo3-biases-tied",
    "zamba-one-head",
    "zamba2-more-blocks-than-layers",
    "jamba-two-of-four-experts",
    "mamba-bias-untied",
    "qwen3.5-biases",
    "xlstm-biases",
    "zaya-biases-windows-untied",
    "gpt-oss-two-of-four-experts",
    "granite-moe-hybrid-rope-two-of-four-experts",
)
WITH_BIASES = tuple(name for name in WITH_BIASES if name in CONFIGS)

WITHOUT_MASKS = ("xlstm",)
"""Classes of which `generate` takes no mask, and so no padding."""


def test_each_class_that_can_be_attached_is_tested() -> None:
    assert {type(hf_model(name)).__name__ for name in (*ONE_OF_EACH, *IN_NEWER)} == {
        name for name in ATTACHABLE if hasattr(transformers, name)
    }


@few_cases
@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.parametrize("lengths", [(13,), (13, 13), (5, 13, 1)])
def test_greedy_generation_is_that_of_transformers_own_cache(name: str, lengths: tuple[int, ...]) -> None:
    tokens, mask = padded(*lengths)
    expected = generate(hf_model(name), tokens, mask)
    with attached(name, len(lengths)) as (model, cache):
        actual = generate(model, tokens, mask, **given(cache))
        assert [sequence.length for sequence in cache.sequences] == [n + N_NEW - 1 for n in lengths]
        for row, sequence in enumerate(cache.sequences):  # The newest token has not been fed, so no sequence has it.
            assert sequence.tokens.tolist() == actual.sequences[row, -sequence.length - 1 : -1].tolist()
    assert stacked(expected).std() >= 1
    assert torch.equal(actual.sequences, expected.sequences)
    assert_logits_close(stacked(actual), stacked(expected))


@few_cases
@pytest.mark.parametrize("name", [*ONE_OF_EACH, *WITH_BIASES] if IS_LONG else one_in(2, ONE_OF_EACH))
def test_each_row_is_generated_as_if_it_were_alone(name: str) -> None:
    """If a projection has a bias, transformers is no oracle for padded rows: its convolutions see the padding."""
    lengths = (11, 11) if name.startswith(WITHOUT_MASKS) else (3, 11)
    tokens, mask = padded(*lengths)
    mask = None if name.startswith(WITHOUT_MASKS) else mask
    with attached(name, len(lengths)) as (model, cache):
        actual = generate(model, tokens, mask, **given(cache))
    for row, length in enumerate(lengths):
        alone = generate(hf_model(name), tokens[row : row + 1, -length:])
        assert actual.sequences[row, -N_NEW:].tolist() == alone.sequences[0, -N_NEW:].tolist()
        assert_logits_close(stacked(actual)[row], stacked(alone)[0])


@pytest.mark.parametrize("name", ["falcon-h1-gate-only", "zamba2-no-adapters"])
def test_prompts_of_models_whose_single_steps_are_wrong_in_transformers(name: str) -> None:
    """In single steps, transformers does not clamp dt for these models."""
    with attached(name, 1) as (model, cache):
        actual = logits(model, ids(13), **given(cache))
    assert_logits_close(actual, logits(hf_model(name), ids(13)))


@pytest.mark.parametrize("name", HYBRIDS)
def test_sampling_with_the_same_seed_gives_the_same_text(name: str) -> None:
    options = {"do_sample": True, "temperature": 0.8, "top_k": 20}
    tokens, mask = padded(4, 9)
    plain = hf_model(name)  # Making it takes random numbers.
    torch.manual_seed(7)
    expected = generate(plain, tokens, mask, **options).sequences
    with attached(name, 2) as (model, cache):
        torch.manual_seed(7)
        assert torch.equal(generate(model, tokens, mask, **given(cache), **options).sequences, expected)


@pytest.mark.parametrize("name", HYBRIDS)
def test_beam_search_is_that_of_transformers_own_cache(name: str) -> None:
    options = {
        "num_beams": 3,
        "num_return_sequences": 2,
        "eos_token_id": 3,
        "return_dict_in_generate": False,
        "output_logits": False,
    }
    tokens, mask = padded(6, 9)
    expected = generate(hf_model(name), tokens, mask, **options)
    with attached(name, 2 * 3) as (model, cache):
        assert torch.equal(generate(model, tokens, mask, **given(cache), **options), expected)


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_conversation_goes_on_from_what_is_cached(name: str) -> None:
    """A cached prompt is not fed again. With transformers' own cache, Mamba would feed it again."""
    first, more = ids(9), ids(4, seed=3)
    with attached(name, 1) as (model, cache):
        said = generate(model, first, **given(cache)).sequences
        assert cache.get_seq_length() == 9 + N_NEW - 1
        history = torch.cat([said, more], 1)
        actual = generate(model, history, **given(cache))
        assert cache.sequences[0].tokens.tolist() == actual.sequences[0, :-1].tolist()
    expected = generate(hf_model(name), history)
    assert torch.equal(actual.sequences, expected.sequences)
    assert_logits_close(stacked(actual), stacked(expected))


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_prompt_may_be_fed_in_chunks(name: str) -> None:
    """Transformers forgets the state of Mamba-1 between chunks. The first chunks of row 0 have nothing but padding."""
    tokens, mask = padded(3, 14)
    expected = generate(hf_model(name), tokens, mask)
    # Its outputs have no past_key_values, which `generate` needs.
    options = {} if name == "mamba" else {"prefill_chunk_size": 5}
    with attached(name, 2) as (model, cache):
        actual = generate(model, tokens, mask, **given(cache), **options)
    assert torch.equal(actual.sequences, expected.sequences)
    with attached(name, 1) as (model, cache):
        parts = [logits(model, part, **given(cache)) for part in tokens[1:].split([5, 1, 8], 1)]
    assert_logits_close(torch.cat(parts, 1), logits(hf_model(name), tokens[1:]))


# The tests below are about drafts.


@few_cases
@pytest.mark.parametrize("name", ["jamba", "bamba", "qwen3.5"])
@pytest.mark.parametrize("with_model", [False, True], ids=["prompt lookup", "assistant"])
def test_assisted_generation_gives_the_same_text(name: str, with_model: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some drafts are wrong. Transformers refuses these models, since its caches cannot take recurrent states back."""
    prompt = ids(6).repeat(1, 3)
    cropped: list[int] = []
    crop = HybridCache.crop
    monkeypatch.setattr(HybridCache, "crop", lambda self, n: (cropped.append(n), crop(self, n)))
    helper: dict[str, Any] = {"assistant_model": hf_model("llama")} if with_model else {"prompt_lookup_num_tokens": 4}
    options = helper | {"max_new_tokens": 24}
    expected = generate(hf_model(name), prompt, max_new_tokens=24).sequences
    with pytest.raises(ValueError, match="assisted generation is not supported with stateful models"):
        generate(hf_model(name), prompt, **options)
    with attached(name, 1) as (model, cache):
        assert torch.equal(generate(model, prompt, **given(cache), **options).sequences, expected)
    assert min(cropped) < 0, "no draft was wrong: the test shows nothing"


def test_assisted_generation_with_another_cache_stays_refused() -> None:
    with attached("jamba", 1) as (model, _), pytest.raises(StepError, match=f"needs {CACHE_NAME}=HybridCache"):
        generate(model, ids(6).repeat(1, 3), prompt_lookup_num_tokens=4)


def test_a_refused_early_exit_leaves_the_model_as_it_was() -> None:
    """Transformers removes layers while it drafts, and does not put them back after an error."""
    with attached("jamba", 1) as (model, cache):
        with pytest.raises(StepError, match=f"needs {CACHE_NAME}=HybridCache"):
            generate(model, ids(6), **given(cache), assistant_early_exit=2)
        assert model.config.num_hidden_layers == len(cache.memory.spec.layers)
        assert cache.get_seq_length() == 0


@pytest.mark.skipif(IS_RENAMED, reason="its outputs have the cache by the usual name")
def test_assisted_generation_of_mamba_is_refused_by_transformers() -> None:
    with (
        attached("mamba", 1) as (model, cache),
        pytest.raises(ValueError, match="not supported with stateful models, such as Mamba"),
    ):
        generate(model, ids(6), **given(cache), prompt_lookup_num_tokens=4)


# The tests below use the cache together with the rest of the library.


@few_cases
@pytest.mark.parametrize("name", [*HYBRIDS, "bailing-hybrid", "deepseek-v2", "deepseek-v3", "kimi-linear"])
def test_our_own_model_of_the_same_weights_takes_over(name: str) -> None:
    """A sequence goes from transformers' model to ours and back, over one memory."""
    expected = generate(hf_model(name), ids(9), max_new_tokens=3)
    with attached(name, 1) as (model, cache):
        own, (sequence,) = from_transformers(model), cache.sequences
        tokens, found = expected.sequences, []
        found.append(logits(model, tokens[:, :9], **given(cache))[:, -1])
        with cache.memory.step({sequence: int(tokens[0, 9])}) as step:
            found.append(own(step))
        found.append(logits(model, tokens[:, 10:11], **given(cache))[:, -1])
    assert_logits_close(torch.stack(found, 1), stacked(expected))


def test_attention_may_keep_a_budget_of_rows() -> None:
    used = {}
    with attach(hf_model("bamba")) as bridge:
        for policy in (None, H2O(8, recent=4, every=4)):
            memory = HybridMemory(bridge.memory_spec.with_policy(policy), "8MiB", rollback_window=4, page_tokens=4)
            cache = HybridCache(memory, [memory.open()])
            generate(hf_model("bamba"), ids(60), **given(cache))
            assert cache.get_seq_length() == 60 + N_NEW - 1
            used[policy] = memory.usage().used_bytes
    assert used[policy] < used[None]


def test_all_configs_of_these_tests_exist() -> None:
    assert {*ONE_OF_EACH, *WITH_BIASES, *HYBRIDS} <= set(CONFIGS)
