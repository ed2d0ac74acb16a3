"""With `reproducible=True`, logits are a function of the text, bit for bit. What cannot keep this is refused."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from benchmarks.workloads import CONFIGS as WIDE
from benchmarks.workloads import MODELS, save_random
from hybridmem.chat.engine.drafting import Speculation
from hybridmem.chat.engine.engine import Engine
from hybridmem.chat.sampling.sampling import Sampling
from hybridmem.memory import DropError, HybridMemory, SpecError, StepError
from hybridmem.memory.eviction import H2O, Quest
from hybridmem.memory.kernels import multiply_by_row, steady, wants_reproducible
from hybridmem.memory.prefix import PrefixCache
from hybridmem.memory.quantization import Quantized
from hybridmem.models import LanguageModel, UnsupportedModelError, load_model
from hybridmem.models.loading.reproducible import reproducible_rows
from hybridmem.models.products import kernels
from hybridmem.models.products.blocked import BlockedWeight
from hybridmem.models.products.choice import hold
from tests.extent import one_in, only_in_long, pick
from tests.models.checkpoints import CONFIGS, draw_tokens, write_checkpoint
from tests.reproducible import ways
from tests.subjects import IS_FULL

BY_DEFAULT = {
    "jamba-two-of-four-experts": "float32 auto", "gemma3-capped": "float32 auto", "glm5-next": "float32 auto",
    "recurrent-gemma": "float32 auto", "inkling2-loop": "float32 auto",
}  # fmt: skip
"""Families that together have dense, windowed, latent and indexed attention, attention with biases and over depth,
experts, and recurrences of all kinds of products.
"""
KINDS = ("float32 auto", "bfloat16 auto", "float32 int8", "bfloat16 int4")
N_HISTORIES, N_TOKENS = 10_000, 80


@cache
def _model(name: str, kind: str, folder: Path) -> LanguageModel:
    dtype, weights = kind.split()
    written = write_checkpoint(folder / name / dtype, CONFIGS[name](), dtype=getattr(torch, dtype))
    return load_model(written, weights=weights, progress=False, reproducible=True)  # type: ignore[arg-type]


def _steps(model: LanguageModel) -> dict[str, Any]:
    """Return the steps that a walk of such a model can take. There are no draft trees if an index chooses rows."""
    return {name: step for name, step in ways.ALL.items() if name != "tree" or not model.memory_spec.of_kind("index")}


@pytest.mark.parametrize("name", one_in(5, BY_DEFAULT))
def test_a_text_has_the_same_bits_however_it_was_reached(name: str, tmp_path: Path) -> None:
    model, tokens = _model(name, BY_DEFAULT[name], tmp_path), draw_tokens(N_TOKENS)
    expected = ways.singly(model, tokens)
    for seed in range(2):
        assert ways.n_differing(ways.by(model, tokens, seed, _steps(model)), expected) == 0


@pytest.mark.skipif(not IS_FULL, reason="takes hours; CONFORMANCE=full runs it")
@pytest.mark.parametrize("kind", KINDS)
def test_no_history_of_any_family_changes_a_bit(kind: str, tmp_path: Path) -> None:
    """All parameters together give 10,000 histories over all families, fold modes and threads."""
    n_each, found = N_HISTORIES // (len(KINDS) * len(CONFIGS)) + 1, Counter[str]()
    for name in CONFIGS:
        model, random = _model(name, kind, tmp_path), Random(name)
        folds = ["keep", "replay"]
        for seed in range(n_each):
            tokens = random.choices(range(model.memory_spec.vocab_size), k=random.randint(20, 150))
            fold = random.choice(folds)
            torch.set_num_threads(random.choice((1, 2, 3)))
            differing = ways.n_differing(
                ways.by(model, tokens, seed, _steps(model), fold=fold), ways.singly(model, tokens, fold="keep")
            )
            if differing:
                found[f"{name} {fold} {seed}"] = differing
    assert not found


@pytest.mark.skipif(not IS_FULL, reason="takes minutes; CONFORMANCE=full runs it")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_models_of_real_widths_have_the_same_bits_with_any_threads(name: str, kind: str, tmp_path: Path) -> None:
    """Steps of these models have more numbers than torch leaves to one thread."""
    dtype, weights = kind.split()
    save_random(WIDE[name](), tmp_path)
    model = load_model(tmp_path, dtype=dtype, weights=weights, progress=False, reproducible=True)  # type: ignore[arg-type]
    tokens = draw_tokens(330)
    torch.set_num_threads(1)
    expected = ways.singly(model, tokens, budget="1GiB")
    for n_threads, chunks in ((3, (130, 171, 29)), (2, (330,)), (5, (257, 1, 72))):
        torch.set_num_threads(n_threads)
        assert ways.n_differing(ways.in_chunks(model, tokens, chunks, budget="1GiB"), expected) == 0


@only_in_long
def test_without_the_option_chunks_change_bits(tmp_path: Path) -> None:
    """Otherwise the tests above would show nothing. A small Llama keeps its bits on some processors, a scan nowhere."""
    written = write_checkpoint(tmp_path, CONFIGS["jamba-two-of-four-experts"]())
    model, tokens = load_model(written, progress=False), draw_tokens(60)
    assert ways.n_differing(ways.by(model, tokens, 1, {"chunk": ways.chunk}), ways.singly(model, tokens)) > 0


def test_what_cannot_be_reproducible_is_refused(tmp_path: Path) -> None:
    model = _model("jamba-two-of-four-experts", "float32 auto", tmp_path)
    spec = model.memory_spec
    with pytest.raises(SpecError, match="split into steps"):
        HybridMemory(spec.with_policy(H2O(64)))
    with pytest.raises(SpecError, match="Quest"):
        HybridMemory(spec.with_policy(Quest(64)))
    with pytest.raises(SpecError, match="Quantized"):
        HybridMemory(spec.with_storage(Quantized(8)))
    with pytest.raises(SpecError, match="rounds the state"):
        HybridMemory(spec, state_dtype="bfloat16")
    with pytest.raises(SpecError, match=r"reproducible='yes'"):
        HybridMemory(spec, reproducible="yes")  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="load it with"):
        HybridMemory(replace(spec, reproducible=False), reproducible=True)
    assert HybridMemory(spec.with_policy(H2O(64)), reproducible=False).spec.reproducible is False
    with pytest.raises(SpecError, match="is for the CPU"):
        reproducible_rows(True, torch.device("cuda"))


def test_kernels_of_plain_torch_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spec = _model("gemma3-capped", "float32 auto", tmp_path).memory_spec
    monkeypatch.setenv("HYBRID_MEMORY_KERNELS", "reference")
    with pytest.raises(SpecError, match="compute prompts and single tokens in different ways"):
        HybridMemory(spec)


def test_models_with_an_encoder_are_refused(tmp_path: Path) -> None:
    from transformers import BartConfig

    config = BartConfig(
        vocab_size=60, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, max_position_embeddings=64,
    )  # fmt: skip
    from transformers import BartForConditionalGeneration

    BartForConditionalGeneration(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="its encoder"):
        load_model(tmp_path, reproducible=True, progress=False)


@only_in_long
def test_a_reproducible_memory_takes_no_other_model_and_no_other_file(tmp_path: Path) -> None:
    name = "gemma3-capped"
    model = _model(name, "float32 auto", tmp_path)
    other = load_model(tmp_path / name / "float32", progress=False)
    memory, theirs = HybridMemory(model.memory_spec, "4MiB"), HybridMemory(other.memory_spec, "4MiB")
    with pytest.raises(StepError, match="reproducible"):
        memory.run(other, {memory.open(): [1, 2]})
    sequence = theirs.open()
    theirs.run(other, {sequence: [1, 2]})
    theirs.save(sequence, tmp_path / "saved")
    with pytest.raises(Exception, match="reproducible"):
        memory.load(tmp_path / "saved")


@only_in_long
def test_dropping_from_the_middle_is_refused(tmp_path: Path) -> None:
    model = _model("gemma3-capped", "float32 auto", tmp_path)
    memory = HybridMemory(model.memory_spec, "4MiB")
    sequence = memory.open()
    memory.run(model, {sequence: draw_tokens(12)})
    with pytest.raises(DropError, match="reproducible"):
        memory.drop(sequence, 2, 5)
    memory.drop(sequence, 10, 12)  # The end can be taken back.
    assert sequence.length == 10


@pytest.mark.parametrize("function", [torch.sigmoid, torch.nn.functional.silu, torch.nn.functional.gelu])
def test_a_steady_function_gives_a_number_the_same_bits_anywhere(function: Any) -> None:
    x, random = torch.randn(100_000) * 4, Random(1)
    with wants_reproducible.set_to(True):
        same = steady(function)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)  # A third of the numbers does not fill whole vectors.
        whole, differing = same(x), 0
        assert torch.allclose(whole, function(x))
        for _ in range(200):
            begin, n = random.randrange(90_000), random.choice((1, 3, 7, 17, 33, 100))
            differing += not torch.equal(same(x[begin : begin + n]), whole[begin : begin + n])
    finally:
        torch.set_num_threads(before)
    assert not differing
    assert steady(function) is function


def test_products_of_heads_give_a_row_the_same_bits_in_any_batch() -> None:
    x, weight, bias = torch.randn(23, 3, 37), torch.randn(3, 37, 75), torch.randn(3, 75)
    whole = multiply_by_row(x, weight, bias)
    torch.testing.assert_close(whole, torch.einsum("thn,hnl->thl", x, weight) + bias, rtol=1e-4, atol=1e-4)
    for begin, end in ((0, 1), (3, 9), (20, 23)):
        assert torch.equal(multiply_by_row(x[begin:end], weight, bias), whole[begin:end])


def test_products_do_without_onednn_where_that_would_be_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN chooses the order of its sums by the number of rows.

    It would be the fastest on processors without AVX-512.
    """
    without = {name: replace(kernel, applies=lambda: False) for name, kernel in kernels.KERNELS.items()}
    monkeypatch.setattr(kernels, "KERNELS", without)
    weight = torch.randn(70, 33)
    assert not isinstance(hold(weight, "dense"), BlockedWeight)
    with wants_reproducible.set_to(True):
        held = hold(weight, "dense")
    assert isinstance(held, BlockedWeight)


@only_in_long
def test_the_engine_gives_a_request_the_same_text_in_any_company() -> None:
    """Replies are greedy or drawn. They run alone, in company, with kept prefixes or drafts, and in another memory."""
    model = load_model("embedded", progress=False, reproducible=True)
    random = Random(3)
    prompts = [random.choices(range(3, 200), k=random.randint(5, 60)) for _ in range(pick(6, 31))]
    samplings = [Sampling(), Sampling(temperature=1.5, seed=7)]

    def replies(together: int, *, looks_up: bool = False, step_tokens: int = 512) -> list[list[int]]:
        memory = HybridMemory(model.memory_spec, "32MiB", page_tokens=4, rollback_window=8)
        speculation = Speculation(looks_up=looks_up)
        engine = Engine(
            model, memory, None, stop_ids=(), prefixes=PrefixCache(memory), speculation=speculation,
            step_tokens=step_tokens, max_running=64,
        )  # fmt: skip
        found = []
        for begin in range(0, len(prompts), together):
            asked = [
                engine.submit(prompt, sampling=sampling, max_tokens=24)
                for prompt in prompts[begin : begin + together]
                for sampling in samplings
            ]
            engine.run()
            found += [list(generation.token_ids) for generation in asked]
        return found

    alone = replies(1)
    assert len({tuple(reply) for reply in alone}) > len(prompts)
    assert replies(len(prompts)) == alone
    assert replies(len(prompts), looks_up=True, step_tokens=70) == alone
