"""If the config ties head and embedding, the tensors that files hold are used as in transformers."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForSeq2SeqLM, BartConfig, T5Config
from typer.testing import CliRunner

from hybridmem.chat.cli import app
from hybridmem.chat.commands.inspection import inspect_path
from hybridmem.memory import FormatError, HybridMemory
from hybridmem.models import LanguageModel, attach, from_transformers, load_model, weight_bytes
from hybridmem.models.loading.folders import read_config
from hybridmem.models.loading.load import dry_model
from hybridmem.models.products import choice
from tests.extent import few_cases, one_in, only_in_long
from tests.models.checkpoints import CONFIGS, Peer, draw_tokens, randomise_, write_checkpoint
from tests.models.families.llama import llama_config
from tests.models.gguf_files import write_gguf
from tests.models.hf_models import hf_model
from tests.tolerances import assert_logits_close

TOKENS = draw_tokens(9)
WEIGHTS = "model.safetensors"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
CAN_TIE = (
    "bamba", "deepseek-v2", "deepseek-v3", "falcon-h1", "falcon-mamba", "gemma2", "gemma3", "gpt-oss",
    "granite-moe-hybrid", "jamba", "lfm2", "lara-mini", "lfm2-moe", "lfm3", "minimax", "olmo-hybrid", "olmo3", "llama",
    "mamba", "mamba2", "mistral", "qwen2", "qwen3", "qwen3-next", "qwen3.5", "qwen3.5-moe", "qwen4-exp",
    "recurrent-gemma", "rwkv", "rwkv7", "zamba", "zamba2", "zaya",
)  # fmt: skip
BART = {
    "vocab_size": 53, "d_model": 24, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_position_embeddings": 40,
}  # fmt: skip
T5 = {"vocab_size": 53, "d_model": 24, "d_kv": 6, "d_ff": 32, "num_layers": 1, "num_heads": 4}
ENCODERS = {"bart": ("model.", lambda: BartConfig(**BART)), "t5": ("", lambda: T5Config(**T5))}
SHARED = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")


def run(model: LanguageModel) -> Tensor:
    memory = HybridMemory(model.memory_spec, "2MiB", poison=True)
    with memory.step({memory.open(): TOKENS}, outputs="all") as step:
        return model(step)


def edit(folder: Path, change: Callable[[dict[str, Tensor]], Any], **config: Any) -> Path:
    """Change the tensors of a folder, and fields of its config.json."""
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder


def drawn(like: Tensor, seed: int = 3) -> Tensor:
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(seed)).to(like.dtype) * 0.5


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """Write a checkpoint whose head differs from the embedding, although its config ties them."""
    return edit(write_checkpoint(tmp_path / "own", llama_config()), lambda t: None, tie_word_embeddings=True)


@pytest.fixture
def tied(tmp_path: Path) -> Path:
    """Write a checkpoint without a head."""
    return write_checkpoint(tmp_path / "tied", llama_config(tie_word_embeddings=True))


@contextmanager
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def warning_of(name: str) -> Any:
    return pytest.warns(UserWarning, match=f"{name} of .* differs from .* tie_word_embeddings=True; {name} is used")


# The tests below are about models with a head of their own.


@few_cases
@pytest.mark.parametrize("name", one_in(3, CAN_TIE))
def test_a_head_that_the_file_holds_is_used_although_the_config_ties_it(name: str, tmp_path: Path) -> None:
    source = hf_model(name)
    source.save_pretrained(tmp_path)
    head = "head.weight" if name == "rwkv" else HEAD
    edit(tmp_path, lambda t: t.update({head: drawn(source.get_output_embeddings().weight)}), tie_word_embeddings=True)
    peer = Peer.load(tmp_path)
    expected = peer.logits(TOKENS)
    assert expected.std() >= 1
    with warning_of(head):
        model = load_model(tmp_path)
    assert_logits_close(run(model), expected)
    with warning_of(head):
        bridged = from_transformers(peer.model)
    assert_logits_close(run(bridged), expected)
    assert bridged.memory_spec.weights == model.memory_spec.weights


def test_it_is_used_where_it_lies_in_another_shard(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, llama_config(), max_shard_size="8KB")
    index = json.loads((folder / f"{WEIGHTS}.index.json").read_text())["weight_map"]
    assert index[HEAD] != index[EMBEDDING]
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": True}))
    with warning_of(HEAD):
        assert_logits_close(run(load_model(folder)), Peer.load(folder).logits(TOKENS))


def test_in_bfloat16(own: Path) -> None:
    with warning_of(HEAD):
        model = load_model(own, dtype="bfloat16")
    assert_logits_close(run(model), Peer.load(own).logits(TOKENS), torch.bfloat16)


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_rounded_to_integers_it_is_the_head_of_a_config_that_says_so(own: Path, weights: Any) -> None:
    with warning_of(HEAD):
        found = load_model(own, weights=weights)
    edit(own, lambda t: None, tie_word_embeddings=False)
    with no_warnings():
        wanted = load_model(own, weights=weights)
    assert torch.equal(run(found), run(wanted)) and weight_bytes(found) == weight_bytes(wanted)


def test_a_head_that_is_stored_quantised(own: Path) -> None:
    quantised = {"quant_method": "fp8", "weight_block_size": [8, 8]}
    codes = drawn(load_file(own / WEIGHTS)[HEAD]).to(torch.float8_e4m3fn)
    scales = torch.full((-(-codes.shape[0] // 8), codes.shape[1] // 8), 0.5)
    edit(own, lambda t: t.update({HEAD: codes, f"{HEAD}_scale_inv": scales}), quantization_config=quantised)
    with warning_of(HEAD):
        found = run(load_model(own, dtype="float32"))
    path = own / "config.json"
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "quantization_config"}))
    edit(own, lambda t: t.update({HEAD: 0.5 * codes.float()}) or t.pop(f"{HEAD}_scale_inv"))
    with warning_of(HEAD):
        assert torch.equal(found, run(load_model(own, dtype="float32")))


def test_a_gguf_file_has_no_field_for_it(own: Path) -> None:
    expected = Peer.load(own).logits(TOKENS)
    path = write_gguf(edit(own, lambda t: None, tie_word_embeddings=False), own / "model.gguf")
    with no_warnings():
        assert_logits_close(run(load_model(path)), expected)


def test_attached_models_are_told_of_nothing(own: Path) -> None:
    """They compute with transformers' own head, and transformers has already warned."""
    peer = Peer.load(own).model
    with no_warnings(), attach(peer) as bridge:
        spec = bridge.memory_spec
    with warning_of(HEAD):
        assert spec.weights == load_model(own).memory_spec.weights


# The tests below are about the same head, or one of both names.


def test_a_head_in_another_dtype_is_compared_in_the_models(tied: Path) -> None:
    """Differences that bfloat16 does not show do not count."""
    edit(tied, lambda t: t.update({EMBEDDING: t[EMBEDDING].bfloat16()}))
    edit(tied, lambda t: t.update({HEAD: t[EMBEDDING].float() * (1 + 1e-4)}))
    with no_warnings():
        load_model(tied, dtype="bfloat16")
    with warning_of(HEAD):
        load_model(tied, dtype="float32")


def test_a_head_that_equals_the_embedding_is_one_matrix_with_it(
    own: Path, tied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "packed_dtype", lambda weight: None)
    with warning_of(HEAD):
        n_own = weight_bytes(load_model(own))
    with no_warnings():
        n_tied, expected = weight_bytes(load_model(tied)), run(load_model(tied))
        assert n_own == n_tied + load_file(own / WEIGHTS)[HEAD].nbytes
        for is_tied in (True, False):
            edit(tied, lambda t: t.update({HEAD: t[EMBEDDING].clone()}), tie_word_embeddings=is_tied)
            model = load_model(tied)
            assert weight_bytes(model) == n_tied and torch.equal(run(model), expected)
        path = write_gguf(tied, tied / "model.gguf")
        assert weight_bytes(load_model(path)) == n_tied


def test_the_one_of_both_names_that_is_stored_stands_for_both(tied: Path) -> None:
    expected, spec = Peer.load(tied).logits(TOKENS), load_model(tied).memory_spec
    edit(tied, lambda t: t.update({HEAD: t.pop(EMBEDDING)}))
    assert torch.equal(Peer.load(tied).logits(TOKENS), expected)
    with no_warnings():
        model = load_model(tied)
    assert_logits_close(run(model), expected)
    assert model.memory_spec.weights == spec.weights


def test_a_model_of_two_parts_may_hold_the_head_alone(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CONFIGS["qwen3.5-biases"]())
    expected = run(load_model(tmp_path))

    def renamed(tensors: dict[str, Tensor]) -> None:
        tensors[HEAD] = tensors.pop(EMBEDDING)
        for name in [name for name in tensors if name != HEAD]:
            tensors[name.replace("model.", "model.language_model.")] = tensors.pop(name)

    edit(tmp_path, renamed)
    assert torch.equal(run(load_model(tmp_path)), expected)


def test_a_head_that_neither_the_file_nor_the_config_has_is_named(tied: Path) -> None:
    """Transformers would draw such a head at random."""
    edit(tied, lambda t: None, tie_word_embeddings=False)
    with pytest.raises(FormatError, match=r"no tensor 'lm_head.weight', and its config says tie_word_embeddings=False"):
        load_model(tied)


# The tests below are about encoders and decoders.


def write_seq2seq(folder: Path, name: str) -> None:
    _, make = ENCODERS[name]
    torch.manual_seed(5)
    source = AutoModelForSeq2SeqLM.from_config(make()).eval()
    randomise_(source)
    source.save_pretrained(folder)


def check_seq2seq(folder: Path) -> None:
    peer = AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    with torch.no_grad():
        expected = peer(torch.tensor([[5, 6, 7]]), decoder_input_ids=torch.tensor([TOKENS])).logits[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Each test checks warnings itself, if it needs to.
        models: list[Any] = [load_model(folder), from_transformers(peer)]
    for model in models:
        memory = HybridMemory(model.memory_spec, "2MiB")
        (encoded,) = model.encode([[5, 6, 7]])
        with memory.step({memory.open(encoder=encoded): TOKENS}, outputs="all") as step:
            assert_logits_close(model(step), expected)


def of(name: str, *tensors: str) -> list[str]:
    return [tensor if tensor == HEAD else ENCODERS[name][0] + tensor for tensor in tensors]


@only_in_long
@pytest.mark.parametrize("differing", [(HEAD,), SHARED[1:2], SHARED[2:], (HEAD, *SHARED[1:])])
@pytest.mark.parametrize("name", one_in(2, ENCODERS))
def test_embeddings_and_heads_of_encoders_and_decoders(name: str, differing: tuple[str, ...], tmp_path: Path) -> None:
    write_seq2seq(tmp_path, name)
    shared, names = of(name, SHARED[0])[0], of(name, *differing)
    edit(tmp_path, lambda t: t.update({n: 8 * drawn(t[shared], i) for i, n in enumerate(names)}))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load_model(tmp_path)
    said = [str(warning.message).split(" ")[0] for warning in caught if "differs from" in str(warning.message)]
    assert sorted(said) == sorted(names)
    check_seq2seq(tmp_path)


@few_cases
@pytest.mark.parametrize("left", [(HEAD,), SHARED[1:2], SHARED[2:]])
@pytest.mark.parametrize("name", ENCODERS)
def test_any_one_of_their_names_stands_for_all(name: str, left: tuple[str, ...], tmp_path: Path) -> None:
    write_seq2seq(tmp_path, name)
    (shared,), (only,) = of(name, SHARED[0]), of(name, *left)
    edit(tmp_path, lambda t: t.update({only: 8 * t.pop(shared)}))
    with no_warnings():
        load_model(tmp_path)
    check_seq2seq(tmp_path)


def test_a_bart_that_ties_nothing(tmp_path: Path) -> None:
    write_seq2seq(tmp_path, "bart")
    shared, *names = of("bart", *SHARED, HEAD)
    edit(
        tmp_path, lambda t: t.update({n: 8 * drawn(t[shared], i) for i, n in enumerate(names)}),
        tie_word_embeddings=False,
    )  # fmt: skip
    check_seq2seq(tmp_path)
    edit(tmp_path, lambda t: t.pop(names[0]))
    with pytest.raises(FormatError, match=f"no tensor '{names[0]}'"):
        load_model(tmp_path)


@only_in_long
def test_a_t5_whose_config_says_that_its_head_is_its_own_warns_of_nothing(tmp_path: Path) -> None:
    """Later versions of T5 have a head of their own.

    Transformers' config forgets this, apart from the scale of the decoder's outputs.
    """
    write_seq2seq(tmp_path, "t5")
    path = tmp_path / "config.json"
    said = {k: v for k, v in json.loads(path.read_text()).items() if k != "scale_decoder_outputs"}
    path.write_text(json.dumps(said))
    edit(tmp_path, lambda t: t.update({HEAD: drawn(t["shared.weight"])}), tie_word_embeddings=False)
    with no_warnings():
        load_model(tmp_path)
    check_seq2seq(tmp_path)


# The tests below are about blocks that layers share.


@only_in_long
def test_blocks_that_layers_share_are_held_once_and_one_that_differs_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zamba2's layers 0 and 2 use one block. Files hold it under the names of the first layer."""
    monkeypatch.setattr(choice, "packed_dtype", lambda weight: None)
    folder = write_checkpoint(tmp_path, CONFIGS["zamba2"]())
    expected, n_bytes = Peer.load(folder).logits(TOKENS), weight_bytes(load_model(folder))
    config, _ = read_config(folder)
    assert weight_bytes(dry_model(config, config.architectures[0])) == n_bytes

    def later(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        first, last = (f"model.layers.{i}.shared_transformer." for i in (0, 2))
        return {last + n.removeprefix(first): t.clone() for n, t in tensors.items() if n.startswith(first)}

    edit(folder, lambda t: t.update(later(t)))
    with no_warnings():
        for model in (load_model(folder), from_transformers(Peer.load(folder).model)):
            assert_logits_close(run(model), expected)
            assert weight_bytes(model) == n_bytes
    edit(folder, lambda t: [t.pop(name.replace("layers.2", "layers.0")) for name in later(t)])
    with no_warnings():
        assert_logits_close(run(load_model(folder)), expected)
    name = "model.layers.2.shared_transformer.feed_forward.down_proj.weight"
    edit(folder, lambda t: t.update({n.replace("layers.2", "layers.0"): t[n].clone() for n in t if "layers.2.sh" in n}))
    edit(folder, lambda t: t.update({name: drawn(t[name]) / 4}))
    with warnings.catch_warnings(record=True) as caught:  # Each block also has adapters of the other block's layers.
        warnings.simplefilter("always")
        model = load_model(folder)
    assert any(str(warning.message).startswith("model.layers.2.shared_transformer.* of ") for warning in caught)
    assert_logits_close(run(model), Peer.load(folder).logits(TOKENS))
    assert weight_bytes(model) > n_bytes


# The tests below are about models that are not read.


@only_in_long
def test_what_commands_say_of_bytes_is_of_the_files(own: Path) -> None:
    for is_equal in (False, True):
        if is_equal:
            edit(own, lambda t: t.update({HEAD: t[EMBEDDING].clone()}))
        with no_warnings() if is_equal else warning_of(HEAD):
            wanted = weight_bytes(load_model(own, weights="int8"))
        found = inspect_path(own).facts
        assert found["bytes of weights when loaded"]["int8"] == wanted
        assert found.get("tensors of their own, although the config ties them") == (None if is_equal else [HEAD])
        result = CliRunner().invoke(app, ["plan", "--model", str(own), "--json", "--weights", "int8"])
        assert json.loads(result.stdout)["weight_bytes"] == wanted
