"""Weights keep the few bits in which GGUF files store them: blocks, products, rows, and whole models."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from transformers import PreTrainedConfig

from hybridmem.memory import HybridMemory, Step
from hybridmem.memory.recorded import RecordedModel
from hybridmem.models import LanguageModel, load_model, weight_bytes
from hybridmem.models.layers.linear import Linear
from hybridmem.models.layers.vocabulary import Vocabulary
from hybridmem.models.loading.dry import find_files
from hybridmem.models.loading.folders import read_config
from hybridmem.models.loading.gguf import GgufFile
from hybridmem.models.loading.load import dry_model
from hybridmem.models.products import kernels
from hybridmem.models.products.choice import Kind, noting_kinds, numbers_by_name
from hybridmem.models.products.kernels import KERNELS, choose
from hybridmem.models.products.quantised import QuantisedWeight
from hybridmem.models.weights.checkpoint import Checkpoint
from hybridmem.models.weights.coded import CodedTensor, plain_form
from hybridmem.models.weights.formats import weights_in
from hybridmem.models.weights.gguf_forms import FORMS
from hybridmem.models.weights.layouts import Layout
from tests.extent import IS_LONG, one_in, only_in_long
from tests.models.checkpoints import CONFIGS, write_checkpoint
from tests.models.families.falcon_h1 import falcon_h1_config
from tests.models.families.granite_moe_hybrid import granite_config
from tests.models.families.jamba import jamba_config
from tests.models.families.lfm2 import lfm2_moe_config
from tests.models.families.llama import llama_config
from tests.models.families.mamba import mamba2_config
from tests.models.families.qwen3_5 import qwen3_5_config, qwen3_5_moe_config
from tests.models.families.qwen3_next import qwen3_next_config
from tests.models.families.rwkv7 import rwkv7_config
from tests.models.gguf_files import write_gguf
from tests.models.loading.test_gguf import logits
from tests.subjects import IS_FULL
from tests.tolerances import assert_kernel_close

BY_INTEGERS = [name for name, kernel in KERNELS.items() if kernel.layouts is not None and "pieces" not in name]
ROWS = (1, 2, 3, 4, 5, 8, 9, 12, 13, 16, 17, 31, 67)


PLAIN = {
    "4 bits with zero points": Layout(4, "float16", 128, minimum="zero"),
    "4 bits by 64": Layout(4, "bfloat16", 64, zero=8),
    "8 bits with zero points": Layout(8, "float32", 32, minimum="zero"),
    "8 bits by channel": Layout(8, "float32", 256),
    "8 bits by 16": Layout(8, "bfloat16", 16),
    "e4m3": Layout(8, "float32", 128, float8="float8_e4m3fn"),
    "e5m2": Layout(8, "bfloat16", 32, float8="float8_e5m2"),
}
"""How other checkpoints store weights: codes and scales are tensors of their own, and rows have any length."""


def drawn_plain(name: str, n_out: int, n_in: int, dtype: torch.dtype) -> CodedTensor:
    layout, n_whole = PLAIN[name], -(-n_in // 32) * 32
    codes = torch.randint(0, 1 << layout.n_bits, (n_out, n_whole), dtype=torch.uint8)
    if layout.float8 is not None:  # These numbers are smaller than those that are infinite or NaN.
        codes = codes & (0xFF ^ (0x40 if layout.float8 == "float8_e5m2" else 0x04))
    n_groups = -(-n_whole // layout.group)
    floats = ((torch.rand(n_out, n_groups) + 0.5) / 1000).to(getattr(torch, layout.scale))
    zeros = torch.randint(-8, 8, (n_out, n_groups), dtype=torch.int8)
    parts = (codes, floats, *([zeros] if layout.n_factors else []))
    return CodedTensor(plain_form(name, layout), parts, n_in, dtype)


def drawn(name: str, n_out: int, n_blocks: int, dtype: torch.dtype = torch.bfloat16) -> CodedTensor:
    """Return a weight of random blocks, whose floats are numbers of a usual size."""
    if name in PLAIN:
        return drawn_plain(name, n_out, (7, 150, 320)[n_blocks - 1], dtype)
    form, random = FORMS[name], np.random.default_rng(n_out + 100 * n_blocks)
    blocks = random.integers(0, 256, (n_out, n_blocks, form.block_bytes), dtype=np.uint8)
    for at in form.floats:
        if form.is_exponent:
            blocks[:, :, at] = random.integers(118, 124, (n_out, n_blocks))
        else:
            sizes = random.uniform(0.5, 2.0, (n_out, n_blocks)) * random.choice([-1, 1], (n_out, n_blocks)) / 1000
            blocks[:, :, at : at + 2] = sizes.astype(np.float16)[..., None].view(np.uint8)
    return CodedTensor(form, [torch.from_numpy(blocks).flatten(1)], n_blocks * form.n_block, dtype)


def kept(weight: CodedTensor) -> QuantisedWeight:
    found = QuantisedWeight.kept(weight)
    assert found is not None
    return found


@pytest.mark.parametrize("name", FORMS)
def test_blocks_stand_for_the_numbers_of_the_gguf_package(name: str) -> None:
    """All bytes are tried, also those of scales that are denormal, infinite or NaN."""
    form, kind = FORMS[name], GGMLQuantizationType[name]
    raw = np.random.default_rng(1).integers(0, 256, (64, 3 * form.block_bytes), dtype=np.uint8)
    found = CodedTensor(form, [torch.from_numpy(raw)], 3 * form.n_block, torch.float32).dense()
    with np.errstate(all="ignore"):
        assert np.array_equal(found.numpy(), dequantize(raw, kind), equal_nan=True)


FEW = ["Q5_K"]
"""Compiling takes more than ten seconds for each form. This one has minima, and codes in two parts;
`test_quantised_checkpoints.py` multiplies by codes with zeros.
"""

OTHERS = ["IQ4_XS", "Q8_0", "e4m3", "Q2_K", "Q3_K", "Q4_1", "Q6_K", "4 bits with zero points"]


@pytest.mark.parametrize("name", [*FORMS, *PLAIN] if IS_LONG else FEW)
def test_they_are_laid_out_one_for_one(name: str) -> None:
    """Rows are read back from the new layout. If no kernel reads the form itself, the layout has 8 bits."""
    for n_out, n_blocks in ((1, 1), (17, 2), (48, 3)):
        weight = drawn(name, n_out, n_blocks)
        expected, rows = weight.dense(torch.float32), torch.tensor([n_out - 1, 0, n_out // 2, 0])
        layouts = [layout for layout in weight.form.layouts if choose(layout, weight.dtype) is not None]
        assert layouts, "each form has a layout for every processor"
        for layout in layouts:
            held = QuantisedWeight.laid_out(weight, layout)
            assert torch.equal(held.dense(), expected)
            assert torch.equal(held.rows(rows), expected[rows])


@only_in_long
def test_rows_that_do_not_exist_are_refused() -> None:
    held = kept(drawn("Q4_1", 20, 2))
    for index in (-1, 20):
        with pytest.raises(IndexError):
            held.rows(torch.tensor([3, index]))


MANY = [*FORMS, *PLAIN] if IS_FULL else [*FEW, *(OTHERS if IS_LONG else [])]


EVERY_KERNEL = ("e4m3", "Q6_K")
"""Forms that every kernel multiplies here, because `test_quantised.py` has no other whose codes are small floats."""


def cases() -> list[tuple[str, str]]:
    """List the fastest kernel of each form, and for some forms all others."""
    able, found = [name for name in BY_INTEGERS if KERNELS[name].applies()], []
    for name in MANY:
        layout = FORMS[name].layout if name in FORMS else PLAIN[name]
        own = [kernel for kernel in able if (takes := KERNELS[kernel].layouts) is not None and takes(layout)]
        found += [(name, kernel) for kernel in (own if IS_FULL or name in EVERY_KERNEL else own[:1])]
    return found


@pytest.mark.parametrize(("name", "kernel"), cases())
def test_a_product_is_that_of_the_floats(name: str, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes are awkward and rows have any number. A row has the same bits in any batch."""
    monkeypatch.setattr(kernels, "KERNELS", {kernel: KERNELS[kernel]} | {"": KERNELS["integers as float32"]})
    reads = KERNELS[kernel].rows
    for n_out, n_blocks in ((1, 1), (17, 2), (50, 3)):
        weight = drawn(name, n_out, n_blocks, reads)
        held, expected = kept(weight), weight.dense(torch.float32).double()
        x, bias = torch.randn(67, weight.shape[1]).to(reads), torch.randn(n_out)
        whole = held.multiply(x, bias)
        assert_kernel_close(whole, x.double() @ expected.T + bias, reads)
        assert held.multiply(x[:0], bias).shape == (0, n_out)
        for n in ROWS:
            assert torch.equal(held.multiply(x[:n], bias), whole[:n])
            assert torch.equal(held.multiply(x[-n:], bias), whole[-n:])


def test_rows_change_place_in_their_own_bits() -> None:
    weight = drawn("Q4_K", 24, 1)
    dense = weight.dense()

    def same(function: Any, *, is_coded: bool = True) -> None:
        found, expected = function(weight), function(dense)
        assert isinstance(found, CodedTensor) is is_coded and found.shape == expected.shape
        assert torch.equal(found.dense() if is_coded else found, expected)

    same(lambda x: x[3:20:2])
    same(lambda x: x.chunk(2)[1])
    same(lambda x: x.split([4, 20])[1])
    same(lambda x: x[torch.tensor([5, 5, 0])])
    same(lambda x: x[7])
    same(lambda x: x.reshape(4, 3, 2, -1).transpose(1, 2).reshape(24, 256))
    same(lambda x: x.view(6, 4, 256).permute(1, 0, 2)[2])
    same(lambda x: torch.cat((x[5:], x[:5])))
    same(lambda x: list(x.view(2, 12, 256))[1])
    same(lambda x: x[:, :64], is_coded=False)
    same(lambda x: x.T, is_coded=False)
    same(lambda x: x * 2, is_coded=False)
    same(lambda x: torch.cat((x, dense)), is_coded=False)
    same(lambda x: x.reshape(-1), is_coded=False)
    assert torch.equal(weight.to(torch.float32).dense(), weight.dense(torch.float32))


@only_in_long
@pytest.mark.parametrize(("name", "width"), [("Q8_0", 32), ("Q8_0", 64), ("Q4_K", 128), ("Q6_K", 32), ("Q4_K", 512)])
def test_inputs_change_place_with_their_scales(name: str, width: int) -> None:
    weight = drawn(name, 20, 16 if name == "Q8_0" else 4)
    n_in = weight.shape[1]
    order = torch.randperm(n_in // width).tolist()
    moved = weight.with_inputs(order, width)
    assert moved is not None
    expected = weight.dense().view(20, -1, width)[:, order].view(20, -1)
    assert torch.equal(moved.dense(), expected)
    assert torch.equal(kept(moved).dense(), moved.dense(torch.float32))
    places = torch.randint(0, 20 * n_in, (50,))
    assert torch.equal(moved.take_at(places), expected.flatten()[places])
    assert torch.equal(torch.cat((moved[:7], moved[7:])).dense(), expected)
    assert torch.equal(torch.cat((moved[:7], weight[7:])), torch.cat((expected[:7], weight.dense()[7:])))
    # Such inputs share a scale, or are read at once.
    assert weight.with_inputs(torch.randperm(n_in // 16).tolist(), 16) is None


@only_in_long
@pytest.mark.parametrize("cuts", [(16, 48), (20, 30)])
def test_rows_that_are_joined_are_laid_out_where_they_are(cuts: tuple[int, ...]) -> None:
    """If the first rows of each chunk begin a block of the layout, nothing is copied."""
    weight = drawn("Q4_K", 55, 2, torch.float32)
    pieces = [weight[i:j] for i, j in pairwise((0, *cuts, 55))]
    whole = torch.cat((pieces[1], pieces[0], pieces[2]))
    assert isinstance(whole, CodedTensor) and len(whole.chunks) == 3
    assert {chunk[0].untyped_storage().data_ptr() for chunk in whole.chunks} == {
        weight.parts[0].untyped_storage().data_ptr()
    }
    expected = torch.cat([pieces[i].dense() for i in (1, 0, 2)])
    assert torch.equal(whole.dense(), expected) and torch.equal(whole[7:40].dense(), expected[7:40])
    assert torch.equal(whole.reshape(55, -1).float().dense(), expected)
    assert torch.equal(kept(whole).dense(), whole.dense(torch.float32))
    assert torch.equal(kept(whole.to(torch.bfloat16)).dense(), whole.dense(torch.float32))
    places = torch.randint(0, whole.numel(), (60,))
    assert torch.equal(whole.take_at(places), expected.flatten()[places])
    assert torch.equal(whole.take_at(places[:1]), expected.flatten()[places[:1]])


@only_in_long
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_of_several_forms_are_one_product(dtype: torch.dtype) -> None:
    parts = [drawn("Q8_0", 20, 8, dtype), drawn("Q8_0", 7, 8, dtype), drawn("Q6_K", 33, 1, dtype)]
    whole, bias = torch.cat([part.dense(torch.float32) for part in parts]).double(), torch.randn(60)
    for others in ((), (torch.randn(5, 256).to(dtype) / 16,)):
        own = torch.cat((whole, *(other.double() for other in others)))
        own_bias = torch.cat((bias, torch.randn(5)))[: len(own)]
        linear = Linear(*parts, *others, bias=own_bias, activation="silu")
        for n_rows in (0, 1, 4, 40):
            x = torch.randn(n_rows, 256).to(dtype)
            y = linear(x)
            assert y.shape == (n_rows, len(own)) and y.dtype == dtype
            if n_rows:
                expected = torch.nn.functional.silu(x.double() @ own.T + own_bias)
                assert_kernel_close(y, expected, dtype)


@only_in_long
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the processors named here are x86")
def test_weights_of_several_forms_on_processors_without_avx512(tmp_path: Path) -> None:
    """Without AVX-512, some kernels read rows of bfloat16 as float32.

    Most GGUF files mix forms, for example those of type Q4_K_M.
    """
    test = f"{__file__}::{test_weights_of_several_forms_are_one_product.__name__}"
    names = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "", "HYBRID_MEMORY_CACHE": str(tmp_path)}
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-p", "no:cacheprovider", test]
    done = subprocess.run(command, env=os.environ | names, capture_output=True, text=True)
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout + done.stderr


WIDE: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: llama_config(hidden_size=96, tie_word_embeddings=True),
    # The converter multiplies Falcon-H1's weights by all of its factors.
    "falcon-h1": lambda: falcon_h1_config(
        hidden_size=64, mamba_d_ssm=64, mamba_n_heads=8, mamba_norm_before_gate=False
    ),
    "granite": lambda: granite_config(
        hidden_size=64, intermediate_size=32, num_local_experts=4, num_experts_per_tok=2, mamba_n_heads=8
    ),
    "jamba": lambda: jamba_config(hidden_size=64, num_experts=4, num_experts_per_tok=2, mamba_d_state=8),
    "lfm2-moe": lambda: lfm2_moe_config(hidden_size=64, moe_intermediate_size=32, routed_scaling_factor=1.0),
    "mamba2": lambda: mamba2_config(hidden_size=64, num_heads=8, head_dim=16),
    "qwen3.5": lambda: qwen3_5_config(hidden_size=64, linear_value_head_dim=32),
    "qwen3.5-moe": lambda: qwen3_5_moe_config(hidden_size=64, moe_intermediate_size=32, linear_value_head_dim=32),
    "qwen3-next": lambda: qwen3_next_config(hidden_size=64, linear_value_head_dim=32),
    "rwkv7": lambda: rwkv7_config(hidden_size=64),
}
"""Families whose rows are changed for GGUF, with rows of whole blocks."""


@only_in_long
@pytest.mark.parametrize("name", one_in(2, WIDE))
def test_models_keep_the_bits_of_their_files(name: str, tmp_path: Path) -> None:
    """The logits are those of a model with floats.

    Weights that are in no product are floats, and no bits are held twice.
    """
    config = WIDE[name]()
    if hasattr(config, "time_step_limit"):
        config.time_step_limit = (0.0, float("inf"))
    path = write_gguf(write_checkpoint(tmp_path, config), tmp_path / "model.gguf", "Q8_0")
    own, dense = (load_model(path, dtype="float32", weights=weights) for weights in ("auto", "dense"))
    assert coded_of(own) == []
    expected = logits(dense)
    assert (logits(own) - expected).abs().max() < 2e-4 * expected.abs().max()
    with noting_kinds(kinds := Counter[Kind]()):
        read = read_config(path)[0]
        dry_model(read, read.architectures[0], dtype="float32", files=find_files(path, read))
    file = GgufFile(path)
    n_stored = sum(
        prod(file.shape(name)) for name in file if file.stored_dtype(name) == "Q8_0" and "0.time_mix_v1" not in name
    )
    assert n_stored == sum(n for kind, n in kinds.items() if str(kind) == "Q8_0, as stored") > 0


def coded_of(thing: object, seen: set[int] | None = None) -> list[str]:
    """Return the tensors in few bits that a model holds outside its products."""
    seen = set() if seen is None else seen
    if id(thing) in seen:
        return []
    seen.add(id(thing))
    if isinstance(thing, CodedTensor):
        return [repr(thing)]
    if isinstance(thing, list | tuple):
        return [name for each in thing for name in coded_of(each, seen)]
    if type(thing).__module__.startswith("hybridmem.models."):
        return [name for each in vars(thing).values() for name in coded_of(each, seen)]
    return []


class Counted:
    """Counts how often a model runs. A replay does not run it."""

    is_recordable = True

    def __init__(self, model: LanguageModel) -> None:
        self.memory_spec, self.model, self.n_runs = model.memory_spec, model, 0

    def __call__(self, step: Step) -> torch.Tensor:
        self.n_runs += 1
        return self.model(step)


@only_in_long
@pytest.mark.parametrize("is_tied", [True, False])
def test_steps_that_read_rows_of_packed_weights_are_replayed(is_tied: bool, tmp_path: Path) -> None:
    """The embedding is also the head, or has a form of its own. Other weights have several forms."""
    config = llama_config(hidden_size=96, intermediate_size=64, tie_word_embeddings=is_tied)
    kind, other = ("Q4_1", "Q8_0") if IS_LONG else ("Q8_0", "F16")  # Then there is one layout less to compile.
    path = write_gguf(write_checkpoint(tmp_path, config), tmp_path / "model.gguf", kind, others={"attn_v": other})
    counted, found = Counted(load_model(path)), []
    for each in (counted.model, RecordedModel(counted)):
        memory = HybridMemory(counted.memory_spec, "4MiB")
        sequence = memory.open()
        for token in range(20):
            with memory.step({sequence: [token]}) as step:
                found.append(each(step).clone())
    assert torch.equal(torch.cat(found[:20]), torch.cat(found[20:])) and counted.n_runs < 10


def test_few_bits_of_our_own_leave_eight_to_the_vocabulary(tmp_path: Path) -> None:
    """A tied head is held once. Weights that have few bits in the file are not rounded a second time."""
    folder, name = write_checkpoint(tmp_path, CONFIGS["llama-biases-tied"]()), "model.embed_tokens.weight"
    config, cpu = read_config(folder)[0], torch.device("cpu")
    floats = Vocabulary.load(Checkpoint(folder, cpu, torch.float32), config, name)
    with weights_in("int4", cpu):
        rounded = Vocabulary.load(Checkpoint(folder, cpu, torch.float32), config, name)
    n_out, n_in = config.vocab_size, config.hidden_size
    assert weight_bytes(rounded) == -(-n_out // 16) * 16 * -(-n_in // 32) * 34
    x, ids = torch.randn(5, n_in), torch.arange(n_out)
    for own, expected in ((rounded.logits(x), floats.logits(x)), (rounded.embed(ids), floats.embed(ids))):
        assert 0 < (own - expected).norm() < 0.01 * expected.norm()


@only_in_long
def test_plans_know_the_bytes_of_the_files_bits(tmp_path: Path) -> None:
    """Weights that have few bits in the file are not rounded a second time."""
    config = llama_config(hidden_size=96, intermediate_size=64, tie_word_embeddings=True)
    folder = write_checkpoint(tmp_path, config)
    for kind, bits in (("Q4_1", 5), ("Q8_0", 8.5)):
        path = write_gguf(folder, tmp_path / "model.gguf", kind)
        read = read_config(path)[0]
        for format in ("auto", "int4"):
            with noting_kinds(kinds := Counter[Kind]()):
                dry = dry_model(read, read.architectures[0], weights=format, files=find_files(path, read))  # type: ignore[arg-type]
            assert weight_bytes(dry) == weight_bytes(load_model(path, weights=format))  # type: ignore[arg-type]
            told = numbers_by_name(kinds)
            if format == "auto" or kind == "Q4_1":
                assert list(told) == [f"{kind}, as stored"]
                assert sum(told.values()) * bits / 8 < weight_bytes(dry) < sum(told.values()) * bits / 8 + 20000
            else:
                assert set(told) == {"Q8_0, as stored", "Q8_0 as integers of 4 bits"}
