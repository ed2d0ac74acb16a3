"""`HybridCache` can do more than transformers' caches, and refuses some calls.

The tests of `generate` are in `test_hf_generate.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from threading import Event, Thread, current_thread
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from hybridmem.memory import BatchError, CapacityError, HybridMemory, RollbackError, SequenceError, SpecError, StepError
from hybridmem.models import ATTACHABLE, HybridCache, UnsupportedModelError, attach
from hybridmem.models.hf.mixers import MIXERS
from tests.extent import few_cases, one_in, only_in_long
from tests.interrupts import HANDLERS, Outcome, try_places
from tests.models.checkpoints import CACHE_NAME, IS_RENAMED, MAMBA_CACHE_NAME
from tests.models.hf_models import HYBRIDS, attached, generate, given, hf_model, ids, logits, padded
from tests.tolerances import TOLERANCE, assert_logits_close

PROMPT, DRAFTS, NEXT = ids(14), ids(4, seed=1), ids(3, seed=2)
MATTERS = 0.1
"""A logit that is off by this much shows that something was forgotten, or not forgotten."""


def off_by(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).abs().max())


# The tests below go back.


def own_cache(model: PreTrainedModel) -> tuple[DynamicCache, dict[str, Any]]:
    """Return transformers' own cache, and how the model takes it."""
    cache = DynamicCache(config=model.config)
    return cache, {MAMBA_CACHE_NAME: cache} if model.config.model_type == "mamba" else given(cache)


@pytest.mark.parametrize("name", HYBRIDS)
def test_crop_is_exact_where_transformers_is_silently_wrong(name: str) -> None:
    """Transformers' crop cuts the convolution's window and K/V.

    It leaves the recurrent state where the drafts brought it.
    """
    with attached(name, 1) as (model, cache):
        logits(model, PROMPT, **given(cache))
        logits(model, DRAFTS, **given(cache))
        cache.crop(-4)
        assert cache.get_seq_length() == 14 and cache.sequences[0].tokens.tolist() == PROMPT[0].tolist()
        after_crop = logits(model, NEXT[:, :1], **given(cache))
    with attached(name, 1) as (model, cache):
        logits(model, PROMPT, **given(cache))
        fresh = logits(model, NEXT[:, :1], **given(cache))
    if name in ("bamba", "qwen3.5"):  # A replay of Mamba-1 contains matrix products.
        assert torch.equal(after_crop, fresh)
    assert off_by(after_crop, fresh) <= TOLERANCE[torch.float32].replay * float(fresh.max() - fresh.min())

    model = hf_model(name)
    at_once = logits(model, torch.cat([PROMPT, NEXT[:, :1]], 1))[:, -1:]
    assert_logits_close(fresh, at_once)
    own, argument = own_cache(model)
    logits(model, PROMPT, **argument)
    own.activate_past_recording()
    positions = {} if name == "mamba" else {"position_ids": torch.arange(14, 18)[None]}
    for i in range(4):  # Tokens are fed one by one, because several at once are wrong even before a crop.
        logits(
            model, DRAFTS[:, i : i + 1], **argument, **{key: value[:, i : i + 1] for key, value in positions.items()}
        )
    own.crop(-4)  # This raises no error.
    positions = {} if name == "mamba" else {"position_ids": torch.tensor([[14]])}
    assert off_by(logits(model, NEXT[:, :1], **argument, **positions), at_once) > MATTERS


def test_crop_by_columns_of_rows_with_padding() -> None:
    tokens, mask = padded(2, 9)
    with attached("jamba", 2) as (model, cache):
        logits(model, tokens, attention_mask=mask, **given(cache))
        lengths = lambda: [sequence.length for sequence in cache.sequences]  # noqa: E731
        cache.crop(0)
        cache.crop(20)
        assert lengths() == [2, 9]
        cache.crop(-1)
        assert lengths() == [1, 8] and cache.get_seq_length() == 8
        cache.crop(4)
        assert lengths() == [0, 4] and cache.get_seq_length() == 4
        more = torch.ones(2, 3, dtype=torch.long)
        logits(model, more, attention_mask=torch.tensor([[0, 0, 0, 0, 0, 1, 1], [1] * 7]), **given(cache))
        assert lengths() == [2, 7]
        cache.reset()
        assert lengths() == [0, 0] and cache.get_seq_length() == 0


def test_columns_in_which_every_row_has_padding_are_counted() -> None:
    """A tokenizer that pads to a multiple of 8 leaves such columns."""
    tokens, mask = padded(8, 5, 3)
    with attached("bamba", 2) as (model, cache):
        actual = generate(model, tokens[1:], mask[1:], **given(cache)).sequences
        assert cache.get_seq_length() == actual.shape[1] - 1
        assert [sequence.length for sequence in cache.sequences] == [actual.shape[1] - 4, actual.shape[1] - 6]
        cache.crop(-actual.shape[1] + 8)
        assert [sequence.length for sequence in cache.sequences] == [4, 2]
    assert torch.equal(actual, generate(hf_model("bamba"), tokens[1:], mask[1:]).sequences)


def test_a_crop_out_of_reach_changes_no_row() -> None:
    """Row 0 could go back that far, but row 1 could not."""
    tokens, mask = padded(1, 30)
    with attached("jamba", 2, rollback_window=8) as (model, cache):
        logits(model, tokens, attention_mask=mask, **given(cache))
        for n in (-25, 1):
            with pytest.raises(RollbackError, match="cannot return to position"):
                cache.crop(n)
        with pytest.raises(RollbackError, match="take back 30 at most"):
            cache.crop(-31)
        assert [sequence.length for sequence in cache.sequences] == [1, 30] and cache.get_seq_length() == 30


# The tests below are about rows.


def test_a_fork_goes_its_own_way() -> None:
    with attached("jamba", 1) as (model, cache):
        logits(model, PROMPT, **given(cache))
        other, third = cache.fork(), copy.deepcopy(cache)
        paths = [logits(model, tokens, **given(c))[0] for c, tokens in ((other, DRAFTS), (cache, NEXT), (third, NEXT))]
        assert cache.sequences[0].length == 17 and other.sequences[0].length == 18
        other.close()
        third.close()
    for path, tokens in zip(paths, (DRAFTS, NEXT, NEXT), strict=True):
        assert_logits_close(path, logits(hf_model("jamba"), torch.cat([PROMPT, tokens], 1))[0, 14:])


@pytest.mark.parametrize("name", HYBRIDS)
def test_rows_are_chosen_repeated_and_reordered(name: str) -> None:
    rows = [ids(n, seed=n) for n in (7, 12, 9)]
    tokens, mask = padded(7, 12, 9)
    for i, row in enumerate(rows):
        tokens[i, -row.shape[1] :] = row
    with attached(name, 3) as (model, cache):
        logits(model, tokens, attention_mask=mask, **given(cache))
        first = cache.sequences
        cache.reorder_cache(torch.tensor([2, 0, 0]))
        order = [2, 0, 0]
        cache.batch_select_indices(torch.tensor([1, 2, 0, 1]))
        order = [0, 0, 2, 0]
        assert cache.sequences[:3] == (first[1], first[2], first[0]) and cache.sequences[3] not in first
        cache.batch_select_indices(torch.tensor([True, False, True, True]))
        order = [0, 2, 0]
        cache.batch_repeat_interleave(2)
        order = [0, 0, 2, 2, 0, 0]
        width = cache.get_seq_length()
        assert width == 12  # The longest row is gone. Its columns stay, because the mask still has them.
        following = torch.arange(6)[:, None] + 5
        longer = torch.stack([torch.arange(width + 1) >= width - rows[i].shape[1] for i in order])
        actual = logits(model, following, attention_mask=longer, **given(cache))[:, 0]
        cache.memory.close(first[2])  # This sequence belongs to no row any more, and is still open.
    for row, i in enumerate(order):
        assert_logits_close(
            actual[row], logits(hf_model(name), torch.cat([rows[i], following[row : row + 1]], 1))[0, -1]
        )


def test_a_cached_prompt_is_continued_several_times() -> None:
    with attached("jamba", 1) as (model, cache):
        logits(model, PROMPT[:, :-1], **given(cache))
        cache.batch_repeat_interleave(2)
        torch.manual_seed(3)
        options = {"do_sample": True, "num_return_sequences": 2}
        actual = generate(model, PROMPT, **given(cache), **options).sequences
    torch.manual_seed(3)
    assert torch.equal(actual, generate(hf_model("jamba"), PROMPT, **options).sequences)
    assert not torch.equal(actual[0], actual[1])


def test_a_sequence_may_move_between_forwards() -> None:
    """Its handle belongs to the caller, who marks, saves and rolls it back. The cache only reads its length."""
    with attached("bamba", 1) as (model, cache):
        (sequence,), memory = cache.sequences, cache.memory
        logits(model, PROMPT, **given(cache))
        mark = memory.checkpoint(sequence)
        logits(model, ids(40), **given(cache))
        memory.rollback(sequence, to=mark)
        assert cache.get_seq_length() == 14
        actual = logits(model, NEXT, **given(cache))
        memory.close(mark)
    assert_logits_close(actual[0], logits(hf_model("bamba"), torch.cat([PROMPT, NEXT], 1))[0, 14:])


# The tests below are about calls that change everything or nothing.


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["a layer", "the head"])
@pytest.mark.parametrize("name", one_in(2, HYBRIDS))
def test_an_exception_leaves_every_row_as_it_was(name: str, where: str, kind: type[BaseException]) -> None:
    def fail(*args: object) -> None:
        raise kind("on purpose")

    with attached(name, 2) as (model, cache):
        tokens, mask = padded(14, 5)
        logits(model, tokens, attention_mask=mask, **given(cache))
        usage, implementation = str(cache.memory.usage()), model.config._attn_implementation
        module = model.lm_head if where == "the head" else model.base_model.layers[-1]
        handle = module.register_forward_pre_hook(fail)
        with pytest.raises(kind, match="on purpose"):
            logits(model, DRAFTS[:, :2].repeat(2, 1), **given(cache))
        handle.remove()
        cache.memory.check()
        assert (
            str(cache.memory.usage()) == usage
            and [s.length for s in cache.sequences] == [14, 5]
            and cache.get_seq_length() == 14
        )
        assert model.config._attn_implementation == implementation and torch.is_grad_enabled()
        actual = logits(model, NEXT.repeat(2, 1), **given(cache))
    for row, length in enumerate((14, 5)):
        alone = torch.cat([tokens[row : row + 1, -length:], NEXT], 1)
        assert_logits_close(actual[row], logits(hf_model(name), alone)[0, length:])


def test_a_full_budget_refuses_before_the_model_runs() -> None:
    with attached("jamba", 2) as (model, cache):
        small = HybridMemory(cache.memory.spec, "70KiB", rollback_window=4)
        rows = HybridCache(small, [small.open(), small.open()])
        with pytest.raises(CapacityError):
            logits(model, ids(2000).repeat(2, 1), **given(rows))
        assert rows.get_seq_length() == 0 and small.usage().used_bytes == 0


def test_nothing_carries_gradients() -> None:
    with attached("jamba", 1) as (model, cache):
        assert not model(PROMPT, **given(cache)).logits.requires_grad
        assert model(PROMPT).logits.requires_grad  # Without a HybridCache, gradients are computed as before.


# The tests below are about attaching.


@pytest.mark.parametrize("name", HYBRIDS)
def test_detached_a_model_is_as_before(name: str) -> None:
    model = hf_model(name)
    before, plain = [dict(vars(module)) for module in model.modules()], generate(model, PROMPT)
    with attach(model):
        within = generate(model, PROMPT)
        own, argument = own_cache(model)
        by_hand = logits(model, PROMPT, **argument)
    assert [vars(module).keys() for module in model.modules()] == [names.keys() for names in before]
    assert type(model)._is_stateful and model._is_stateful
    for actual, expected in zip(within.logits, plain.logits, strict=True):
        assert torch.equal(actual, expected)
    assert torch.equal(by_hand, logits(model, PROMPT, **own_cache(model)[1])) and own.layers


def test_attach_keeps_a_forward_that_others_replaced() -> None:
    """accelerate replaces it, for example."""
    model = copy.deepcopy(hf_model("jamba"))
    theirs = model.forward
    model.forward = lambda *args, **kwargs: theirs(*args, **kwargs)  # type: ignore[method-assign]
    ours = vars(model)["forward"]
    bridge = attach(model)
    wrapped = vars(model)["forward"]
    model.forward = lambda *args, **kwargs: wrapped(*args, **kwargs)  # type: ignore[method-assign]
    with pytest.raises(StepError, match="forward of JambaForCausalLM was replaced after attach"):
        bridge.detach()
    model.forward = wrapped  # type: ignore[method-assign]
    bridge.detach()
    bridge.detach()  # A second call does nothing.
    assert vars(model)["forward"] is ours


def test_every_method_of_a_transformers_cache_is_answered() -> None:
    """A method that a later version adds must not reach layers that do not exist."""
    inherited = {"get_query_offset", "is_sliding", "is_dummy"}  # These belong to overridden methods, or need no layers.
    public = {name for name in vars(Cache) if not name.startswith("_")}
    assert public - vars(HybridCache).keys() == inherited


REFUSED: dict[str, tuple[type[Exception], str, Callable[[PreTrainedModel, HybridCache], object]]] = {
    "training": (StepError, "training mode", lambda m, c: (m.train(), m(PROMPT, **given(c)))),
    "output_attentions": (
        StepError, "keeps no weights", lambda m, c: m(PROMPT, **given(c), output_attentions=True)
    ),
    "use_cache": (BatchError, "use_cache=False", lambda m, c: m(PROMPT, **given(c), use_cache=False)),
    "inputs_embeds": (
        BatchError, "give input_ids", lambda m, c: m(inputs_embeds=torch.zeros(1, 3, 24), **given(c))
    ),
    "rows": (BatchError, "a batch of 2 rows for a cache of 1", lambda m, c: m(PROMPT.repeat(2, 1), **given(c))),
    "beams": (BatchError, "num_beams", lambda m, c: generate(m, PROMPT, **given(c), num_beams=3)),
    "vocabulary": (BatchError, "outside the vocabulary", lambda m, c: m(PROMPT + 10_000, **given(c))),
    "right padding": (
        BatchError, "padding behind its first token",
        lambda m, c: m(PROMPT[:, :3], attention_mask=torch.tensor([[1, 1, 0]]), **given(c)),
    ),
    "a mask of new columns": (
        BatchError, r"an attention_mask \(1, 4\); give .* \(1, 18\)",
        lambda m, c: (m(PROMPT, **given(c)), m(DRAFTS, attention_mask=torch.ones(1, 4), **given(c))),
    ),
    "a mask of four dimensions": (
        BatchError, r"an attention_mask \(1, 1, 4, 4\)", lambda m,
        c: m(DRAFTS, attention_mask=torch.ones(1, 1, 4, 4), **given(c))
    ),
    "a mask that hides what is cached": (
        BatchError, "row 0 has 11 tokens before these 4 columns, its sequence holds 14",
        lambda m, c: (m(PROMPT, **given(c)), m(DRAFTS, attention_mask=mask_of(15, 18)[:1], **given(c))),
    ),
    "positions from zero": (
        BatchError, "position_ids put row 0 at 0 where its sequence is at 14",
        lambda m, c: (m(PROMPT, **given(c)), m(DRAFTS, position_ids=torch.arange(4)[None], **given(c))),
    ),
    "positions of another shape": (
        BatchError, r"position_ids \(1, 3\) for tokens \(1, 4\)",
        lambda m, c: m(DRAFTS, position_ids=torch.arange(3)[None], **given(c)),
    ),
    "a prompt that is cached already": (
        BatchError, "give the whole dialogue", lambda m,
        c: (m(PROMPT, **given(c)), generate(m, PROMPT, **given(c)))
    ),
    "a part of the model": (StepError, "call models.attach", lambda m, c: m.base_model(PROMPT, **given(c))),
    "another spec": (
        StepError, "made for BambaForCausalLM, not for JambaForCausalLM", lambda m,
        c: m(PROMPT, **given(cache_of_another_model()))
    ),
    "another dtype": (StepError, "holds torch.bfloat16", lambda m, c: m(PROMPT, **given(cache_in_bfloat16(c)))),
    "twice": (StepError, "attached already", lambda m, c: attach(m)),
    "a copy": (StepError, "detach it, copy", lambda m, c: copy.deepcopy(m)),
    "no rows": (BatchError, "without rows", lambda m, c: HybridCache(c.memory, [])),
    "a row twice": (BatchError, "cannot be two rows", lambda m, c: HybridCache(c.memory, c.sequences * 2)),
    "no sequence": (SequenceError, "is no sequence", lambda m, c: HybridCache(c.memory, [3])),
    # type: ignore[list-item]
    "another memory's": (
        SequenceError, "memory", lambda m, c: HybridCache(cache_of_another_model().memory, c.sequences)
    ),
    "closed": (SequenceError, "closed", lambda m, c: (c.close(), m(PROMPT, **given(c)))),
    "more beams": (BatchError, "batch_select_indices", lambda m, c: c.reorder_cache(torch.tensor([0, 0]))),
    "no such row": (BatchError, "row 1 of a cache of 1", lambda m, c: c.reorder_cache(torch.tensor([1]))),
    "no row": (BatchError, "no row is chosen", lambda m, c: c.batch_select_indices(torch.tensor([False]))),
    "offload": (SpecError, "swap_out", lambda m, c: c.offload(0)),
    "early_initialization": (
        SpecError, "swap_out", lambda m, c: c.early_initialization(1, 1, 1, torch.float32, torch.device("cpu"))
    ),
}  # fmt: skip


def mask_of(*lengths: int) -> Tensor:
    return padded(*lengths)[1]


def cache_of_another_model() -> HybridCache:
    with attach(hf_model("bamba")) as bridge:
        memory = HybridMemory(bridge.memory_spec)
    return HybridCache(memory, [memory.open()])


def cache_in_bfloat16(cache: HybridCache) -> HybridCache:
    memory = HybridMemory(cache.memory.spec, dtype=torch.bfloat16)
    return HybridCache(memory, [memory.open()])


@few_cases
@pytest.mark.parametrize("what", REFUSED)
@torch.no_grad()
def test_it_is_refused_by_name(what: str) -> None:
    kind, named, call = REFUSED[what]
    with attached("jamba", 1) as (model, cache):
        try:
            with pytest.raises(kind, match=named):
                call(model, cache)
        finally:
            model.eval()


def test_a_model_that_is_not_attached_is_refused() -> None:
    for name in ("jamba", "mamba", "llama"):
        with attach(hf_model(name)) as bridge:
            memory = HybridMemory(bridge.memory_spec)
        argument = MAMBA_CACHE_NAME if name == "mamba" else CACHE_NAME
        with pytest.raises(StepError, match=r"call models\.attach"):
            logits(hf_model(name), PROMPT, **{argument: HybridCache(memory, [memory.open()])})


@pytest.mark.skipif(IS_RENAMED, reason="all models take caches by one name")
def test_mamba_takes_a_hybrid_cache_by_the_usual_name() -> None:
    with attached("mamba", 1) as (model, cache):
        with pytest.raises(BatchError, match="give a HybridCache as past_key_values="):
            generate(model, PROMPT, cache_params=cache)
        with pytest.raises(BatchError, match="takes caches that are no HybridCache as cache_params="):
            logits(model, PROMPT, **given(DynamicCache(config=model.config)))
        _, argument = own_cache(model)
        logits(model, PROMPT, **argument)
        with pytest.raises(BatchError, match="two caches that both remember"):
            logits(model, NEXT, **given(cache), **argument)


def test_a_model_that_cannot_be_attached_is_refused() -> None:
    with pytest.raises(
        UnsupportedModelError, match=f"because transformers has no such class; these are: {ATTACHABLE[0]}"
    ):
        attach(hf_model("rwkv7"))
    with pytest.raises(UnsupportedModelError, match="JambaModel cannot be attached"):
        attach(hf_model("jamba").base_model)
    with pytest.raises(UnsupportedModelError, match="weights on meta"):
        attach(copy.deepcopy(hf_model("jamba")).to("meta"))
    quantised = copy.deepcopy(hf_model("jamba"))
    quantised.config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(UnsupportedModelError, match="quant_method"):
        attach(quantised)


def test_modules_of_another_transformers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """If they ran unchanged, their layers would be left out of the memory."""
    monkeypatch.delitem(MIXERS, "JambaMambaMixer")
    with pytest.raises(
        UnsupportedModelError, match="2 recurrent layers of JambaForCausalLM, of which 0 have a module that is known"
    ):
        attach(hf_model("jamba"))


def test_attach_goes_by_what_a_module_does_not_by_its_name() -> None:
    """A subclass runs like its base. Another formula under the same name does not."""
    model = copy.deepcopy(hf_model("jamba"))
    model.__class__ = type("MyJamba", (type(model),), {})
    mixer = next(module for module in model.modules() if type(module).__name__ == "JambaMambaMixer")
    kind = type(mixer)
    mixer.__class__ = type("MyMixer", (kind,), {})
    with attach(model) as bridge:
        memory = HybridMemory(bridge.memory_spec, "2MiB")
        actual = logits(model, PROMPT, **given(HybridCache(memory, [memory.open()])))
        assert_logits_close(actual, logits(hf_model("jamba"), PROMPT))

    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        return 0.8 * kind.forward(self, *args, **kwargs)

    mixer.__class__ = type("JambaMambaMixer", (kind,), {"forward": forward})
    with pytest.raises(
        UnsupportedModelError, match="JambaMambaMixer of layer 0 is not what this library knows by that name"
    ):
        attach(model)


def test_what_attention_asks_for_and_a_memory_cannot_do_is_refused() -> None:
    with attached("llama", 1) as (model, cache):
        for options, named in (({"s_aux": 3.0}, "s_aux=3.0"), ({"sliding_window": 7}, "attends to 7 tokens")):
            with pytest.raises(StepError, match=named):
                logits(model, PROMPT, **given(cache), **options)
        assert cache.get_seq_length() == 0


def test_two_threads_may_run_one_attached_model_on_caches_of_their_own() -> None:
    """The second thread begins while the first is inside, and ends after it."""
    model, inside, others = hf_model("llama"), Event(), Event()
    with attach(model) as bridge:
        caches = []
        for _ in range(2):
            memory = HybridMemory(bridge.memory_spec, "2MiB", page_tokens=4)
            caches.append(HybridCache(memory, [memory.open()]))
        expected, found = logits(model, PROMPT), []

        def wait(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
            if current_thread() is second:
                inside.set()
                others.wait(120)

        second = Thread(target=lambda: found.append(logits(model, PROMPT, **given(caches[1]))))
        hook = model.model.layers[0].register_forward_pre_hook(wait)
        before = model.config._attn_implementation

        def first(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
            if current_thread() is not second and not second.is_alive():
                second.start()
                inside.wait(120)

        started = model.model.layers[0].register_forward_pre_hook(first)
        found.append(logits(model, PROMPT, **given(caches[0])))
        others.set()
        second.join()
        hook.remove()
        started.remove()
        assert model.config._attn_implementation == before
        for actual in found:
            assert_logits_close(actual, expected)


@only_in_long
# Torch warns of this when it is asked to compile.
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
def test_a_compiled_model_is_refused() -> None:
    with pytest.raises(
        UnsupportedModelError, match="OptimizedModule cannot be attached; give the model that was compiled"
    ):
        attach(torch.compile(hf_model("jamba"), backend="eager"))  # type: ignore[arg-type]
    with attached("jamba", 1) as (model, cache):
        compiled = torch.compile(model, backend="eager")
        with pytest.raises(StepError, match=r"inside torch\.compile"):
            compiled(PROMPT, **given(cache))
        assert cache.get_seq_length() == 0


# The tests below are about exceptions from outside.


@pytest.mark.parametrize("number", HANDLERS)
def test_an_interrupted_forward_leaves_the_model_as_it_was(number: int) -> None:
    """Afterwards the model runs with transformers' own cache, and with a HybridCache.

    Both work as if nothing had happened.
    """
    with attached("jamba", 1) as (model, cache):
        expected, own = logits(model, PROMPT, **given(cache)), logits(model, PROMPT, use_cache=False)

        def attempt() -> tuple[Callable[[], Any], Callable[[Outcome], None]]:
            cache.reset()

            def verify(outcome: Outcome) -> None:
                assert torch.equal(logits(model, PROMPT, use_cache=False), own) and torch.is_grad_enabled()
                cache.reset()
                assert torch.equal(logits(model, PROMPT, **given(cache)), expected)

            return lambda: logits(model, PROMPT, **given(cache)), verify

        edges = ("models/hf/attach.py", "models/hf/passes.py", "memory/blocks/scoped.py")
        try_places(attempt, 20, edges, number)
