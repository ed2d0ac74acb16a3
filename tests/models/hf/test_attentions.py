"""Modules of attention run on a memory as a whole.

They have indexes, biases of queries, or layers that run several times.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridmem.memory import AttentionSpec, BatchError, HybridMemory, StepError
from hybridmem.models import HybridCache, UnsupportedModelError, attach, from_transformers
from hybridmem.models.hf.attentions import memory_layer
from tests.extent import few_cases
from tests.models.checkpoints import CACHE_NAME, CONFIGS
from tests.models.hf_models import attached, generate, given, hf_model, ids, logits, padded
from tests.tolerances import assert_logits_close

WHOLE = tuple(
    name for name in (
        "deepseek-v3.2", "glm-moe-dsa", "glm5-next-two-of-eight-experts-in-groups", "inkling-log-scale",
        "inkling2-three-of-four-experts", "inkling2-loop", "inkling2-loop-blocks-of-two", "qwen4-exp", "rwkv",
    ) if name in CONFIGS
)  # fmt: skip
NEXT = ids(5, seed=4)


@few_cases
@pytest.mark.parametrize("name", WHOLE)
def test_chunks_crops_and_copies_of_rows_are_exact(name: str) -> None:
    """Wrong drafts are taken back.

    Then each row continues as the other, and one of them twice.
    """
    tokens, mask = padded(9, 21)
    with attached(name, 2) as (model, cache):
        for begin, end in ((0, 5), (5, 14), (14, 21)):
            logits(model, tokens[:, begin:end], attention_mask=mask[:, :end], **given(cache))
        longer = torch.cat([mask, torch.ones(2, 5, dtype=mask.dtype)], 1)
        logits(model, ids(5, seed=9).expand(2, -1), attention_mask=longer, **given(cache))
        cache.crop(-5)
        cache.reorder_cache(torch.tensor([1, 0]))
        cache.batch_select_indices(torch.tensor([1, 0, 0]))
        rows = [0, 1, 1]
        actual = logits(model, NEXT.expand(3, -1), attention_mask=longer[rows], **given(cache))
    for row, i in enumerate(rows):
        alone = torch.cat([tokens[i : i + 1, 21 - (9, 21)[i] :], NEXT], 1)
        assert_logits_close(actual[row], logits(hf_model(name), alone)[0, -5:])


@pytest.mark.parametrize("name", [name for name in WHOLE if not name.startswith(("inkling", "rwkv"))])
def test_these_prompts_are_longer_than_what_an_index_chooses(name: str) -> None:
    with attach(hf_model(name)) as bridge:
        specs = bridge.memory_spec.layers
    chosen = [one.n_chosen for own in specs for one in own if isinstance(one, AttentionSpec) and one.n_chosen]
    assert chosen and max(chosen) < 21


@few_cases
@pytest.mark.parametrize("name", WHOLE)
def test_attach_leaves_nothing_behind_and_its_memory_serves_our_model_too(name: str) -> None:
    model = hf_model(name)
    plain, before = logits(model, NEXT), [vars(module).keys() for module in model.modules()]
    with attach(model) as bridge:
        assert torch.equal(logits(model, NEXT), plain)
        memory = HybridMemory(bridge.memory_spec, "2MiB")
        cache = HybridCache(memory, [memory.open()])
        logits(model, NEXT[:, :3], **given(cache))
        with memory.step({cache.sequences[0]: NEXT[0, 3:].tolist()}, outputs="all") as step:
            assert_logits_close(from_transformers(model)(step), plain[0, 3:])
    assert [vars(module).keys() for module in model.modules()] == before


@pytest.mark.parametrize("name, argument", [("glm5-next", "pixel_values"), ("rwkv", "state")])
def test_what_the_memory_would_not_know_of_is_refused(name: str, argument: str) -> None:
    if name not in CONFIGS:
        pytest.skip("this version of transformers lacks it")
    with attached(name, 1) as (model, cache), pytest.raises(BatchError, match=f"{argument}= with a HybridCache"):
        logits(model, NEXT, **given(cache), **{argument: torch.zeros(1)})


@few_cases
@pytest.mark.parametrize("name", [name for name in WHOLE if name != "rwkv"])
def test_an_option_of_attention_that_would_be_ignored_is_refused(name: str) -> None:
    """RWKV-4's modules take none of these options: transformers' own model does not pass them on."""
    with attached(name, 1) as (model, cache):
        for options, named in (
            ({"softcap": 2.0}, "softcap=2.0"),
            ({"s_aux": torch.ones(4)}, r"s_aux=a tensor of shape \[4\]"),
        ):
            with pytest.raises(StepError, match=f"of layer 0 wants {named}, which attach does not implement"):
                logits(model, NEXT, **given(cache), **options)
        assert cache.get_seq_length() == 0
        logits(model, NEXT, **given(cache), softcap=None, output_hidden_states=True)


def test_an_option_of_a_recurrent_module_that_would_be_ignored_is_refused() -> None:
    with attached("bamba", 1) as (model, cache):
        with pytest.raises(StepError, match=r"BambaMixer of layer 0 wants seq_idx=a tensor of shape \[1, 5\]"):
            logits(model, NEXT, **given(cache), seq_idx=torch.zeros_like(NEXT))
        assert cache.get_seq_length() == 0


@pytest.mark.parametrize("name, kind", [
    ("inkling-log-scale", "InklingAttention"), ("deepseek-v3.2", "DeepseekV32Attention"),
    ("qwen4-exp", "Qwen4ExpTextAttention"), ("glm-moe-dsa", "GlmMoeDsaAttention"),
])  # fmt: skip
def test_another_formula_by_a_known_name_is_refused(name: str, kind: str) -> None:
    if name not in CONFIGS:
        pytest.skip("this version of transformers lacks it")
    model = copy.deepcopy(hf_model(name))
    *_, module = (each for each in model.modules() if type(each).__name__ == kind)
    base = type(module)

    def forward(self: torch.nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return base.forward(self, 0.8 * hidden_states, *args, **kwargs)

    forward.__signature__ = inspect.signature(base.forward)  # type: ignore[attr-defined]
    module.__class__ = type(kind, (base,), {"forward": forward})
    with pytest.raises(UnsupportedModelError, match=f"{kind} of layer .* is not what this library knows by that name"):
        attach(model)


@pytest.mark.parametrize("name", [name for name in WHOLE if "loop" in name])
def test_each_pass_of_a_loop_has_layers_of_its_own(name: str) -> None:
    """Transformers numbers the layers of later passes after all others, as its first pass adds them."""
    config = hf_model(name).config
    begin, end, n = config.loop_layer_index_start, config.loop_layer_index_end, len(config.layer_types)
    n_all = n + (config.loop_num_passes - 1) * (end - begin)
    assert sorted(memory_layer(config, i) for i in range(n_all)) == list(range(n_all))
    assert memory_layer(config, n) == end


@pytest.mark.parametrize("name", ["rwkv", "xlstm"])
def test_generate_finds_what_an_attached_model_takes(name: str) -> None:
    """`generate` reads the signature of `forward`. RWKV-4's names no cache and ends in `**kwargs`."""
    with attached(name, 1) as (model, cache):
        parameters = inspect.signature(model.forward).parameters
        assert {CACHE_NAME, "position_ids", *inspect.signature(type(model).forward).parameters} - {"self"} == {
            *parameters
        }
        plain = generate(hf_model(name), NEXT, **given(cache))
        again = HybridCache(cache.memory, [cache.memory.open()])
        drafted = generate(model, NEXT, prompt_lookup_num_tokens=3, **given(again))
        assert torch.equal(plain.sequences, drafted.sequences)
        again.close()
        with pytest.raises(ValueError, match=r"not used by the model: .*no_such_option"):
            generate(model, NEXT, no_such_option=1)
