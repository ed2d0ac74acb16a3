"""The signature of weights does not depend on where they come from.

Other weights have another one, and their files are refused.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hybridmem.memory import FormatError, HybridMemory, MismatchError
from hybridmem.memory.prefix import PrefixCache
from hybridmem.models import attach, from_transformers, load_model
from hybridmem.models.hf.classes import ATTACHABLE
from hybridmem.models.loading.load import plan_memory
from hybridmem.models.weights.signature import sample_of
from tests.extent import few_cases, one_in, only_in_long
from tests.models.hf_models import hf_model
from tests.models.test_from_transformers import ONE_OF_EACH


@few_cases
@pytest.mark.parametrize("name", one_in(4, ONE_OF_EACH))
def test_weights_have_one_signature_wherever_they_come_from(name: str, tmp_path: Path) -> None:
    hf_model(name).save_pretrained(tmp_path)
    expected = load_model(tmp_path).memory_spec.weights
    assert expected is not None and expected.startswith("float32:")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    for source in (loaded, hf_model(name)):
        assert from_transformers(source).memory_spec.weights == expected
        if type(source).__name__ in ATTACHABLE:
            with attach(source) as attached:
                assert attached.memory_spec.weights == expected
    assert load_model(tmp_path, dtype="bfloat16").memory_spec.weights != expected
    assert plan_memory(loaded.config, type(loaded).__name__).weights is None


@only_in_long
def test_it_is_the_same_in_every_process_and_however_weights_are_packed(tmp_path: Path) -> None:
    code = "from hybridmem.models import load_model; print(load_model('embedded').memory_spec.weights)"
    found = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        check=True,
    )
    own = load_model("embedded").memory_spec.weights
    assert found.stdout.strip() == own
    assert own is not None
    digests = {weights: load_model("embedded", weights=weights).memory_spec.weights for weights in ("int8", "int4")}  # type: ignore[arg-type]
    assert digests == {bits: f"{bits}:{own.partition(':')[2]}" for bits in ("int8", "int4")}


def test_a_change_of_any_tensor_or_of_the_config_shows(tmp_path: Path) -> None:
    model = hf_model("jamba")
    model.save_pretrained(tmp_path)
    seen = {load_model(tmp_path).memory_spec.weights}
    tensors = load_file(tmp_path / "model.safetensors")
    names = [name for name in sorted(tensors) if "lm_head" not in name][::5]
    for name in names:
        save_file(tensors | {name: tensors[name] * 1.01 + 0.01}, tmp_path / "model.safetensors", {"format": "pt"})
        seen.add(load_model(tmp_path).memory_spec.weights)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))
    seen.add(load_model(tmp_path).memory_spec.weights)
    assert len(seen) == len(names) + 2


def test_samples_do_not_depend_on_how_a_tensor_is_stored() -> None:
    tensor = torch.randn(64, 48)
    expected = sample_of(tensor, torch.float32)
    assert sample_of(tensor.T.contiguous().T, torch.float32) == expected
    assert sample_of(tensor * 4, torch.float32, 0.25) == expected
    rows = 2.0 ** torch.arange(64)
    assert sample_of(tensor * rows[:, None], torch.float32, 1 / rows) == expected
    assert sample_of(tensor.view(48, 64), torch.float32) != expected, "the shape counts"
    half = tensor.bfloat16()
    assert sample_of(half.float(), torch.bfloat16) == sample_of(half, torch.bfloat16)
    assert sample_of(torch.zeros(0), torch.float32) and not sample_of(tensor.to("meta"), torch.float32)


def test_a_file_of_other_weights_is_refused(tmp_path: Path) -> None:
    model = load_model("embedded")
    spec, path = model.memory_spec, tmp_path / "saved"
    memory = HybridMemory(spec, "1MiB")
    sequence = memory.open()
    memory.run(model, {sequence: [1, 2, 3]})
    for options in ({}, {"checkpoints": True}):
        memory.save(sequence, path, **options)  # type: ignore[arg-type]
        assert HybridMemory(replace(spec, weights=None), "1MiB").load(path).is_checkpoint is False
        for weights, message in (
            ("float32:other", "by other weights"),
            ("int8:" + str(spec.weights)[8:], "not in int8"),
        ):
            other = HybridMemory(replace(spec, weights=weights), "1MiB")
            for family in (False, True):
                with pytest.raises(FormatError, match=message):
                    other.load(path, family=family)  # type: ignore[call-overload]
            assert other.usage().used_bytes == 0
    cache = PrefixCache(memory)
    cache.insert(sequence)
    cache.save(tmp_path / "prefixes")
    assert PrefixCache(HybridMemory(spec, "1MiB")).load(tmp_path / "prefixes") == 1
    other = HybridMemory(replace(spec, weights="float32:other"), "1MiB")
    with pytest.raises(MismatchError, match="by other weights"):
        PrefixCache(other).load(tmp_path / "prefixes")
    before = HybridMemory(replace(spec, weights=None), "1MiB")
    older = before.load(path)
    before.save(older, path)
    assert memory.load(path).length == 3, "of a file that says nothing, nothing is known"
