"""What runs beside llama.cpp has the source's model in its files. No speed of anything else is reported."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import JambaConfig, Mamba2Config, MambaConfig, PreTrainedConfig
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.llamacpp import (
    FORMATS,
    MODELS,
    TOLERANCE,
    agree,
    differ_in_batch,
    in_turns,
    load_in,
    require_same,
    require_whole_batch,
    write_model,
)
from benchmarks.llamacpp_peer import start_llamacpp, time_calls
from benchmarks.ours import Ours
from hybridmem.models import LanguageModel, load_model
from hybridmem.models.loading.load import weight_bytes
from tests.extent import one_in, only_in_long
from tests.models.checkpoints import write_checkpoint

VOCAB = 160
_COMMON = {"vocab_size": VOCAB, "hidden_size": 64, "tie_word_embeddings": True}
SMALL: dict[str, PreTrainedConfig] = {
    "jamba": JambaConfig(
        **_COMMON, num_hidden_layers=4, attn_layer_period=4, attn_layer_offset=2, num_experts=1, num_experts_per_tok=1,
        intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, mamba_dt_rank=32,
    ),
    "mamba": MambaConfig(**_COMMON, num_hidden_layers=3, state_size=16),
    "mamba2": Mamba2Config(
        **_COMMON, num_hidden_layers=3, state_size=32, num_heads=4, head_dim=32, n_groups=1, expand=2, chunk_size=16
    ),
}  # fmt: skip
"""Models as those that are measured, with rows that are whole blocks of 32."""


class Loaded:
    """Stands in for llama.cpp: it is one of our models, greedy."""

    def __init__(self, model: LanguageModel) -> None:
        self.model = model

    def prefill(self, tokens: np.ndarray) -> np.ndarray:
        self.ours = Ours(self.model, len(tokens), budget="16MiB")
        return self.feed(tokens)

    def decode(self) -> np.ndarray:
        return self.feed(np.array(self.ours.next)[:, None])

    def feed(self, tokens: np.ndarray) -> np.ndarray:
        with self.ours.memory.step(zip(self.ours.sequences, tokens.tolist(), strict=True)) as step:
            logits = self.model(step)
        self.ours.next = logits.argmax(-1).tolist()
        return logits.float().numpy()


def draw(n_sequences: int, n_tokens: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (n_sequences, n_tokens), generator=torch.Generator().manual_seed(2))


@only_in_long
@pytest.mark.parametrize("name", one_in(3, MODELS))
def test_files_hold_the_model_that_they_were_written_from(name: str, tmp_path: Path) -> None:
    """In 32 bits, files give the same greedy tokens.

    In fewer bits, they have the dtype and bytes that the tables say.
    """
    source = Loaded(load_model(write_checkpoint(tmp_path, SMALL[name])))
    models = {kind: load_in(write_model(tmp_path, kind), kind) for kind in FORMATS}
    found = agree(models["F32"], source, draw(3, 12), 8)
    assert found.same == 1 and found.typical <= found.largest < 1e-3
    require_same(found, name)
    assert [str(model.memory_spec.dtype) for model in models.values()] == ["torch.float32", *3 * ["torch.bfloat16"]]
    assert sorted(map(weight_bytes, models.values()), reverse=True) == [weight_bytes(m) for m in models.values()]
    for kind, most in (("BF16", 0.1), ("Q8_0", 0.1), ("Q4_0", 1.0)):
        assert 0 < agree(models[kind], source, draw(3, 12), 0).typical < most


@only_in_long
def test_different_models_have_no_speed(tmp_path: Path) -> None:
    source = load_model(write_checkpoint(tmp_path, SMALL["mamba"]))
    found = agree(load_in(write_model(tmp_path, "Q4_0"), "Q4_0"), Loaded(source), draw(2, 12), 4)
    assert found.largest > TOLERANCE and found.same < 1
    with pytest.raises(RuntimeError, match=r"mamba: logits .* differ by .* more than 0\.01.*no speed"):
        require_same(found, "mamba")


def test_a_peer_that_confuses_the_sequences_of_a_batch_has_no_speed(tmp_path: Path) -> None:
    """In llama.cpp's products for AMX, only the first sequence is what it would be alone."""
    model = load_model(write_checkpoint(tmp_path, SMALL["jamba"]))
    require_whole_batch(differ_in_batch(Loaded(model), draw(3, 12)), "jamba")

    class Confused(Loaded):
        def prefill(self, tokens: np.ndarray) -> np.ndarray:
            return super().prefill(tokens[[0] * len(tokens)])

    with pytest.raises(RuntimeError, match=r"jamba: .* in one batch and alone differ by .*no speed.*AMX"):
        require_whole_batch(differ_in_batch(Confused(model), draw(3, 12)), "jamba")


def test_sides_alternate_and_each_turn_begins_with_calls_that_are_not_timed() -> None:
    calls: list[str] = []
    sides = {side: lambda *n, side=side: time_calls(lambda: calls.append(side), *n) for side in "ab"}  # type: ignore[misc]
    times = in_turns(sides, 2, 3, n_untimed=1)
    assert "".join(calls) == 2 * ("aaaa" + "bbbb")
    assert [len(samples.seconds) for samples in times.values()] == [6, 6]


def test_without_the_package_nothing_is_measured_and_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    result = CliRunner().invoke(app, ["llamacpp", "--quick"])
    assert result.exit_code == 1
    assert "llama-cpp-python, which is not installed" in result.output and ".[dev,llamacpp]" in result.output


@pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is None, reason="llama-cpp-python is not installed")
@pytest.mark.parametrize("name", MODELS)
def test_llamacpp_runs_the_same_model(name: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, SMALL[name])
    for kind, most in (("F32", TOLERANCE), ("BF16", 0.1), ("Q8_0", 0.1)):
        path = write_model(tmp_path, kind)
        with start_llamacpp(path, 3, 32, keys=FORMATS[kind].keys, n_threads=1) as theirs:
            found = agree(load_in(path, kind), theirs, draw(3, 12), 8)
            assert (found.largest if kind == "F32" else found.typical) < most
            assert differ_in_batch(theirs, draw(3, 12)) < TOLERANCE
            assert len(theirs.time("decode", 1, 2)) == 2
    with (
        pytest.raises(RuntimeError, match=r"llama\.cpp does not load .*none\.gguf"),
        start_llamacpp(tmp_path / "none.gguf", 1, 32, keys="F32", n_threads=1),
    ):
        pass
