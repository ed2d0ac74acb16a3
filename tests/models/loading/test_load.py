"""Every layout of a good checkpoint gives the same model. A bad checkpoint gives an error that names what is wrong."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from hybridmem.memory import FormatError, HybridMemory, HybridMemoryError, SpecError, StepError
from hybridmem.models import ARCHITECTURES, LanguageModel, UnsupportedModelError, families, load_model
from hybridmem.models.loading import architectures
from tests.extent import IS_LONG
from tests.models.checkpoints import Peer, draw_tokens, write_checkpoint
from tests.models.families.jamba import jamba_config
from tests.models.families.mamba import mamba_config
from tests.tolerances import assert_logits_close

TOKENS = draw_tokens(11)
WEIGHTS = "model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write a good checkpoint, which tests then spoil."""
    return write_checkpoint(tmp_path / "good", jamba_config())


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "sharded", jamba_config(), max_shard_size="20KB")


def run(model: LanguageModel) -> Tensor:
    memory = HybridMemory(model.memory_spec, "2MiB", poison=True)
    with memory.step({memory.open(): TOKENS}, outputs="all") as step:
        return model(step)


def edit_config(folder: Path, **changes: Any) -> None:
    """Change entries of config.json. None removes an entry."""
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(
        json.dumps({name: value for name, value in config.items() if value is not None})
    )


def edit_weights(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


# The tests below load good checkpoints.


def test_shards_are_one_checkpoint(folder: Path, sharded: Path) -> None:
    assert len(list(sharded.glob("*.safetensors"))) > 2 and not (sharded / WEIGHTS).exists()
    assert torch.equal(run(load_model(sharded)), run(load_model(folder)))


@pytest.mark.parametrize("config", [jamba_config, mamba_config])
def test_tied_weights_are_the_embedding(tmp_path: Path, config: Callable[..., Any]) -> None:
    folder = write_checkpoint(tmp_path / "tied", config(tie_word_embeddings=True))
    assert "lm_head.weight" not in load_file(folder / WEIGHTS)
    assert_logits_close(run(load_model(folder)), Peer.load(folder).logits(TOKENS))


def test_a_tied_head_that_was_written_all_the_same_is_no_surprise(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "tied", mamba_config(tie_word_embeddings=True))
    expected = run(load_model(folder))
    edit_weights(folder, lambda t: t.update({"lm_head.weight": t["backbone.embeddings.weight"].clone()}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(run(load_model(folder)), expected)


@pytest.mark.parametrize("as_str", [True, False])
def test_a_folder_may_be_text_or_a_path(folder: Path, as_str: bool) -> None:
    assert load_model(str(folder) if as_str else folder).config.model_type == "jamba"


def test_the_embedded_model_is_there() -> None:
    model = load_model("embedded")
    memory = HybridMemory(model.memory_spec, "64MiB")
    with memory.step({memory.open(): [1, 2, 3]}) as step:
        assert torch.isfinite(model(step)).all()


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_auto_is_the_dtype_that_was_stored(tmp_path: Path, stored: torch.dtype) -> None:
    folder = write_checkpoint(tmp_path / "stored", jamba_config(), dtype=stored)
    model = load_model(folder)
    assert model.memory_spec.dtype == stored
    assert run(model).dtype == torch.float32, "logits are the head's sums"


@pytest.mark.parametrize(
    "dtype", ["float32", torch.float32, "bfloat16", torch.bfloat16, *(["float16"] if IS_LONG else [])]
)
def test_a_checkpoint_is_cast_to_the_dtype_asked_for(folder: Path, dtype: str | torch.dtype) -> None:
    wanted = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    model = load_model(folder, dtype=dtype)
    logits = run(model)
    assert (model.memory_spec.dtype, logits.dtype) == (wanted, torch.float32)
    assert_logits_close(logits, Peer.load(folder).logits(TOKENS), torch.bfloat16)


def test_files_are_mapped_anew_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new mapping lets memory drop what was read. Tensors used in place, such as the embedding, stay valid."""
    folder = write_checkpoint(tmp_path / "model", jamba_config())
    expected = run(load_model(folder))
    opened = list[Path]()

    def counted(path: Path, **options: Any) -> Any:
        opened.append(path)
        return safe_open(path, **options)

    monkeypatch.setattr("hybridmem.models.weights.checkpoint.MOST_MAPPED_BYTES", 4096)
    monkeypatch.setattr("hybridmem.models.weights.checkpoint.safe_open", counted)
    model = load_model(folder)
    assert 3 < len(opened) < 40 and torch.equal(run(model), expected)


def test_bfloat16_weights_run_in_float32(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "stored", jamba_config(), dtype=torch.bfloat16)
    assert_logits_close(run(load_model(folder, dtype="float32")), Peer.load(folder, torch.float32).logits(TOKENS))


def test_a_config_may_leave_its_dtype_out(folder: Path) -> None:
    edit_config(folder, dtype=None, torch_dtype=None)
    assert load_model(folder).memory_spec.dtype == torch.float32


# The tests below are about progress and warnings.


def test_a_bar_is_shown_when_asked_for(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load_model(folder, progress=True)
    captured = capsys.readouterr()
    assert "loading good" in captured.err and "100%" in captured.err and captured.out == ""


@pytest.mark.parametrize("progress", [False, None])
def test_no_bar_is_shown_otherwise(folder: Path, capsys: pytest.CaptureFixture[str], progress: bool | None) -> None:
    capsys.readouterr()
    load_model(folder, progress=progress)
    assert capsys.readouterr().err.strip() == ""


def test_tensors_that_nobody_takes_are_named(folder: Path) -> None:
    edit_weights(folder, lambda t: t.update({"model.surplus.weight": torch.ones(2)}))
    with pytest.warns(UserWarning, match=r"1 tensors of .* are not used: \['model.surplus.weight'\]"):
        load_model(folder)


# The tests below load bad files.


def test_a_missing_tensor_is_named(folder: Path) -> None:
    edit_weights(folder, lambda t: t.pop("model.layers.0.mamba.x_proj.weight"))
    with pytest.raises(FormatError, match=r"no tensor 'model.layers.0.mamba.x_proj.weight' of shape \[35, 48\]"):
        load_model(folder)


def test_a_missing_head_is_named(folder: Path) -> None:
    edit_weights(folder, lambda t: t.pop("lm_head.weight"))
    with pytest.raises(FormatError, match="tensor 'lm_head"):
        load_model(folder)


def test_a_wrong_shape_is_named(folder: Path) -> None:
    edit_weights(folder, lambda t: t.update({"model.layers.1.self_attn.k_proj.weight": torch.ones(9, 24)}))
    with pytest.raises(FormatError, match=r"model.layers.1.self_attn.k_proj.weight .* shape \[9, 24\], .* \[8, 24\]"):
        load_model(folder)


def test_a_missing_shard_is_named(sharded: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(FormatError, match=f"{shard.name} is missing"):
        load_model(sharded)


@pytest.mark.parametrize("n_bytes", [0, 4, 100, -1])
def test_a_truncated_file_is_named(folder: Path, n_bytes: int) -> None:
    path = folder / WEIGHTS
    path.write_bytes(path.read_bytes()[:n_bytes])
    with pytest.raises(FormatError, match=f"{WEIGHTS} is damaged"):
        load_model(folder)


def test_a_truncated_shard_is_named(sharded: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:200])
    with pytest.raises(FormatError, match=f"{shard.name} is damaged"):
        load_model(sharded)


@pytest.mark.parametrize(
    "index",
    ["", "{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', '{"weight_map": {"a": null}}', "\xff"],
)
def test_a_bad_index_is_named(sharded: Path, index: str) -> None:
    path = sharded / "model.safetensors.index.json"
    path.write_bytes(index.encode("latin-1"))
    with pytest.raises(FormatError, match=r"model.safetensors.index.json"):
        load_model(sharded)


def test_a_folder_without_weights_is_refused(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    with pytest.raises(FormatError, match=r"neither .* nor"):
        load_model(folder)


def test_a_folder_without_a_config_is_refused(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(FormatError, match=r"no config\.json"):
        load_model(folder)


@pytest.mark.parametrize("text", ["", "{", "no json", "[]", "7", "null", "\xff"])
def test_a_config_that_is_no_json_object_is_refused(folder: Path, text: str) -> None:
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(FormatError, match=r"config\.json is no JSON object"):
        load_model(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": "wide"},
        {"attn_layer_period": 2, "attn_layer_offset": 5},
        {"num_attention_heads": 5},
        {"num_attention_heads": 0},
        {"num_key_value_heads": 4},
        {"model_type": "mamba"},
        {"model_type": "nothing-known"},
        {"model_type": None},
        {"num_experts_per_tok": 7},
        {"hidden_act": "no-such-activation"},
    ],
    ids=str,
)
def test_a_config_that_contradicts_itself_is_refused(folder: Path, changes: dict[str, Any]) -> None:
    edit_config(folder, **changes)
    with pytest.raises(HybridMemoryError):
        load_model(folder)


# The tests below are about models that are not implemented.


@pytest.mark.parametrize("architectures", [["GPT2LMHeadModel"], ["JambaForSequenceClassification"], [], None])
def test_other_architectures_are_refused_with_a_list_of_those_there_are(
    folder: Path, architectures: list[str] | None
) -> None:
    edit_config(folder, architectures=architectures)
    with pytest.raises(UnsupportedModelError) as caught:
        load_model(folder)
    assert all(name in str(caught.value) for name in ARCHITECTURES)
    assert (architectures or ["jamba"])[0] in str(caught.value)


@pytest.mark.parametrize("config", [jamba_config, mamba_config])
def test_another_activation_is_right_or_refused(tmp_path: Path, config: Callable[..., Any]) -> None:
    folder = write_checkpoint(tmp_path / "gelu", config(hidden_act="gelu"))
    try:
        model = load_model(folder)
    except UnsupportedModelError:
        return
    assert_logits_close(run(model), Peer.load(folder).logits(TOKENS))


# The tests below are about places, devices and dtypes.


def test_a_file_is_no_folder(folder: Path) -> None:
    with pytest.raises(FormatError, match="is a file; give the folder"):
        load_model(folder / WEIGHTS)


@pytest.mark.parametrize("hub_id", ["nobody-at-all/no-such-model", "nobody", "no/such/place/at/all", ""])
def test_a_model_that_cannot_be_fetched_is_refused_at_once(monkeypatch: pytest.MonkeyPatch, hub_id: str) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    # The library reads this from the environment only at import.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    waits = list[str]()
    for name in ("time.sleep", "socket.getaddrinfo", "socket.socket.connect"):
        monkeypatch.setattr(name, lambda *_, name=name, **__: waits.append(name))
    with pytest.raises(FormatError):
        load_model(hub_id)
    assert waits == [], "nobody is asked for it, and nothing is tried again"


@pytest.mark.parametrize("device", ["nonsense", "cuda:99", "cpu:x"])
def test_a_device_that_is_not_there_is_refused(folder: Path, device: str) -> None:
    with pytest.raises(SpecError, match=f"device='{device}'"):
        load_model(folder, device=device)


@pytest.mark.parametrize("dtype", ["float31", "int8", "nn", "", None, 32, torch.int64, "bool"])
def test_a_dtype_that_is_none_is_refused(folder: Path, dtype: Any) -> None:
    with pytest.raises(SpecError, match=f"dtype={dtype!r}"):
        load_model(folder, dtype=dtype)


# The tests below combine a model with the memory of another.


def test_the_memory_of_another_model_is_refused(folder: Path, tmp_path: Path) -> None:
    other = load_model(write_checkpoint(tmp_path / "other", mamba_config()))
    memory = HybridMemory(load_model(folder).memory_spec, "2MiB")
    sequence = memory.open()
    with (
        pytest.raises(StepError, match="made for Jamba good, not for Mamba other"),
        memory.step({sequence: TOKENS}) as step,
    ):
        other(step)
    assert sequence.length == 0
    memory.check()


def test_a_memory_of_another_dtype_is_refused(folder: Path) -> None:
    memory = HybridMemory(load_model(folder).memory_spec, "2MiB")
    sequence = memory.open()
    with (
        pytest.raises(StepError, match=r"holds torch.float32 .* runs in torch.bfloat16"),
        memory.step({sequence: TOKENS}) as step,
    ):
        load_model(folder, dtype="bfloat16")(step)
    assert sequence.length == 0
    memory.check()


def test_a_memory_of_the_same_architecture_serves_another_checkpoint(folder: Path, tmp_path: Path) -> None:
    twin = load_model(write_checkpoint(tmp_path / "twin", jamba_config()))
    memory = HybridMemory(load_model(folder).memory_spec, "2MiB")
    with memory.step({memory.open(): TOKENS}, outputs="all") as step:
        assert torch.equal(twin(step), run(twin))


def test_errors_of_loading_are_errors_of_this_library() -> None:
    assert issubclass(UnsupportedModelError, HybridMemoryError) and issubclass(FormatError, ValueError)


def test_every_architecture_is_listed_with_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a module registered an architecture that is not listed, nothing would import the module for it."""
    for module in iter_modules(families.__path__):
        import_module(f"hybridmem.models.families.{module.name}")
    listed, classes = architectures.Architectures(), dict(ARCHITECTURES)
    for name, model_class in classes.items():
        monkeypatch.setattr(architectures, "import_module", partial(listed.add, name))
        assert listed[name] == model_class.__module__
