"""Quantised checkpoints load as the dense weights that their format describes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from hybridmem.chat.commands.inspection import inspect_path
from hybridmem.memory import FormatError, HybridMemory
from hybridmem.models import LanguageModel, UnsupportedModelError, load_model
from hybridmem.models.loading import stored_codes
from hybridmem.models.loading.folders import read_config
from hybridmem.models.loading.quantised_checkpoints import find_coding
from hybridmem.models.weights.checkpoint import Checkpoint, UnreadCheckpoint
from hybridmem.models.weights.coded import as_floats
from tests.extent import IS_LONG, few_cases, only_in_long
from tests.models.checkpoints import CONFIGS, draw_tokens, write_checkpoint

WEIGHTS = "model.safetensors"
TOKENS = draw_tokens(11)
Coded = tuple[dict[str, Tensor], Tensor]
"""Tensors by the ends of their names, and the dense weight that they stand for."""
Coder = Callable[[Tensor], Coded]


def run(model: LanguageModel) -> Tensor:
    memory = HybridMemory(model.memory_spec, "2MiB", poison=True)
    with memory.step({memory.open(): TOKENS}, outputs="all") as step:
        return model(step)


def is_linear(name: str, tensor: Tensor, unit: int) -> bool:
    return name.endswith(("proj.weight", "linear.weight")) and not any(n % unit for n in tensor.shape[-2:])


def write_quantised(
    folder: Path, name: str, config: dict[str, Any], code: Coder, dtype: torch.dtype = torch.float32, unit: int = 8
) -> tuple[Path, Path]:
    """Write a checkpoint with coded weights of products, and one with the dense weights that the codes stand for.

    Weights whose rows or columns are no multiple of `unit` stay dense.
    """
    dense_folder = write_checkpoint(folder / "dense", CONFIGS[name](), dtype=dtype)
    coded_folder = folder / "coded"
    shutil.copytree(dense_folder, coded_folder)
    dense = load_file(dense_folder / WEIGHTS)
    coded = dict(dense)
    linear = [n for n, t in dense.items() if is_linear(n, t, unit)]
    assert len(linear) >= 8
    for n in linear:
        parts, dense[n] = code(coded.pop(n))
        coded |= {n.removesuffix("weight") + end: part.contiguous() for end, part in parts.items()}
        dense[n] = dense[n].contiguous()
    save_file(dense, dense_folder / WEIGHTS, metadata={"format": "pt"})
    save_file(coded, coded_folder / WEIGHTS, metadata={"format": "pt"})
    edit_config(coded_folder, quantization_config=config)
    return coded_folder, dense_folder


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))


def edit_weights(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def open_coded(folder: Path, dtype: torch.dtype = torch.float32) -> Checkpoint:
    checkpoint = Checkpoint(folder, torch.device("cpu"), dtype)
    return decoded(checkpoint)


def decoded(checkpoint: Checkpoint) -> Checkpoint:
    coding = find_coding(read_config(checkpoint.folder)[0])
    assert coding is not None
    checkpoint.decode_with(coding)
    return checkpoint


def check_equal(coded: Path, dense: Path, dtype: torch.dtype = torch.float32, *, in_own_bits: bool = IS_LONG) -> None:
    """Check that every weight is the dense one, bit by bit, and that the logits are equal.

    Without numbers, all names and shapes fit. Products in the file's own bits round only sums differently. They are
    computed in the long form, and by default in one case: compiling a kernel for each layout takes seconds, and
    `test_gguf_forms.py` tests the products.
    """
    checkpoint, unread = open_coded(coded, dtype), decoded(UnreadCheckpoint(coded, torch.float32))
    expected = load_file(dense / WEIGHTS)
    assert len(checkpoint) == len(unread) == len(expected)
    for name, tensor in expected.items():
        assert torch.equal(as_floats(checkpoint.take(name, *tensor.shape)), tensor.to(dtype)), name
        assert unread.take(name, *tensor.shape).is_meta
    assert not checkpoint.leftovers() and not unread.leftovers()
    wanted = run(load_model(dense, dtype=dtype))
    assert torch.equal(run(load_model(coded, dtype=dtype, weights="dense")), wanted)
    if in_own_bits:
        error = (run(load_model(coded, dtype=dtype)) - wanted).float().square().mean().sqrt() / wanted.float().std()
        assert error < (1e-5 if dtype is torch.float32 else 4e-2)


# The tests below read compressed-tensors, as its own library writes it.


def extremes(weight: Tensor, args: QuantizationArgs) -> tuple[Tensor, Tensor]:
    """Return the least and the largest number of each group that shares a scale."""
    if args.strategy == "tensor":
        return weight.min()[None], weight.max()[None]
    if args.strategy == "block":
        rows, columns = args.block_structure
        padded = F.pad(weight, (0, -weight.shape[1] % columns, 0, -weight.shape[0] % rows))
        blocks = padded.unflatten(0, (-1, rows)).unflatten(2, (-1, columns)).transpose(1, 2).flatten(2)
        return blocks.amin(-1), blocks.amax(-1)
    size = args.group_size if args.strategy == "group" else weight.shape[1]
    groups = weight.unflatten(1, (-1, size))
    return groups.amin(-1), groups.amax(-1)


def compressed(format: str, scale_dtype: torch.dtype = torch.float32, **weights: Any) -> tuple[dict[str, Any], Coder]:
    """Return a config and a coder of compressed-tensors."""
    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    compressor = BaseCompressor.get_value_from_registry(format)

    def code(weight: Tensor) -> Coded:
        scale, zero = calculate_qparams(*extremes(weight, args), args)
        scale = scale.to(scale_dtype)
        tensors = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
        return compressor.compress(tensors, scheme), fake_quantize(weight, scale, zero, args)

    group = {"targets": ["Linear"], "weights": json.loads(args.model_dump_json()), "input_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": group},
        "ignore": ["lm_head"], "kv_cache_scheme": None, "quantization_status": "compressed",
    }, code  # fmt: skip


INT4 = {"num_bits": 4, "type": "int"}
INT8 = {"num_bits": 8, "type": "int"}
FP8 = {"num_bits": 8, "type": "float"}
COMPRESSED: dict[str, tuple[str, dict[str, Any]]] = {
    "int4 in groups": ("pack-quantized", INT4 | {"strategy": "group", "group_size": 8}),
    "int4 in groups, asymmetric": (
        "pack-quantized", INT4 | {"strategy": "group", "group_size": 8, "symmetric": False}
    ),
    "int4 by channel, asymmetric": ("pack-quantized", INT4 | {"strategy": "channel", "symmetric": False}),
    "int8 packed by channel": ("pack-quantized", INT8 | {"strategy": "channel"}),
    "int8 packed by tensor": ("pack-quantized", INT8 | {"strategy": "tensor"}),
    "int8 by channel": ("int-quantized", INT8 | {"strategy": "channel"}),
    "int8 in groups, asymmetric": (
        "int-quantized", INT8 | {"strategy": "group", "group_size": 4, "symmetric": False}
    ),
    "fp8 by tensor": ("float-quantized", FP8 | {"strategy": "tensor"}),
    "fp8 by channel": ("float-quantized", FP8 | {"strategy": "channel"}),
    "fp8 in blocks": ("float-quantized", FP8 | {"strategy": "block", "block_structure": [16, 16]}),
    "fp8 naive": ("naive-quantized", FP8 | {"strategy": "group", "group_size": 8}),
}  # fmt: skip


@few_cases
@pytest.mark.parametrize("case", COMPRESSED)
def test_compressed_tensors(case: str, tmp_path: Path) -> None:
    format, weights = COMPRESSED[case]
    in_own_bits = IS_LONG or case == "int4 by channel, asymmetric"
    check_equal(*write_quantised(tmp_path, "jamba", *compressed(format, **weights)), in_own_bits=in_own_bits)


@pytest.mark.parametrize("name", ["llama", "qwen3-next"])
def test_compressed_tensors_in_16_bits(name: str, tmp_path: Path) -> None:
    """Weights are rounded once. For scales of 16 bits, the library's own arithmetic in 16 bits gives the same."""
    weights = COMPRESSED["int4 in groups, asymmetric"][1] | {"group_size": 4}
    config, code = compressed("pack-quantized", torch.bfloat16, **weights)
    coded, dense = write_quantised(tmp_path, name, config, code, torch.bfloat16, unit=4)
    check_equal(coded, dense, torch.bfloat16)
    named = run(load_model(coded, weights="dense"))  # The weights are in the dtype that the config names.
    assert torch.equal(named, run(load_model(dense)))


def test_large_tensors_become_dense_in_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_codes, "_MOST_ELEMENTS", 100)
    config, code = compressed("pack-quantized", **COMPRESSED["int4 in groups, asymmetric"][1])
    check_equal(*write_quantised(tmp_path, "llama", config, code))


@pytest.mark.parametrize("is_ordered", [True, False])
def test_columns_whose_groups_are_listed(is_ordered: bool, tmp_path: Path) -> None:
    """Columns of a group need not be neighbours. Where they are, older files list -1."""
    config, code_in_order = compressed("int-quantized", **COMPRESSED["int8 in groups, asymmetric"][1])

    def code(weight: Tensor) -> Coded:
        n_columns = weight.shape[1]
        order = torch.randperm(n_columns) if is_ordered else torch.arange(n_columns)
        parts, dense = code_in_order(weight[:, order])
        back = order.argsort()
        group_of = back.to(torch.int32) // 4 if is_ordered else torch.full((n_columns,), -1)
        return parts | {"weight": parts["weight"][:, back], "weight_g_idx": group_of}, dense[:, back]

    check_equal(*write_quantised(tmp_path, "llama", config, code))


def test_groups_of_modules_have_schemes_of_their_own(tmp_path: Path) -> None:
    coarse, coarse_code = compressed("int-quantized", **INT8, strategy="channel")
    fine, fine_code = compressed("pack-quantized", **COMPRESSED["int4 in groups"][1])
    coded, dense = write_quantised(tmp_path, "llama", coarse, coarse_code)
    name = "model.layers.1.mlp.up_proj."
    parts, weight = fine_code(load_file(dense / WEIGHTS)[f"{name}weight"])

    def change(tensors: dict[str, Tensor]) -> None:
        del tensors[f"{name}weight"]
        tensors.update({name + end: part for end, part in parts.items()})

    edit_weights(coded, change)
    edit_weights(dense, lambda tensors: tensors.update({f"{name}weight": weight}))
    groups = {
        "a": coarse["config_groups"]["group_0"] | {"format": "int-quantized"},
        "b": fine["config_groups"]["group_0"] | {"format": "pack-quantized", "targets": [r"re:.*layers\.1\..*up_proj"]},
    }
    edit_config(coded, quantization_config=coarse | {"format": "mixed-precision", "config_groups": groups})
    check_equal(coded, dense)


# The tests below read GPTQ and AWQ, packed here from the formats' descriptions.


def pack(codes: Tensor, bits: int, order: list[int]) -> Tensor:
    """Pack (n, m) codes into int32 words (n, m * bits / 32). The lowest bits hold the code that `order` names first."""
    in_words = codes.long().unflatten(-1, (-1, 32 // bits))
    words = sum(in_words[..., place] << bits * i for i, place in enumerate(order))
    assert isinstance(words, Tensor)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def draw_codes(weight: Tensor, bits: int, n_groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """Draw codes (rows, columns), and zero points and scales (rows, groups)."""
    most = 1 << bits
    codes = torch.randint(0, most, weight.shape)
    return codes, torch.randint(0, most, (len(codes), n_groups)), torch.rand(len(codes), n_groups) * 0.1 + 0.01


def weight_of(codes: Tensor, zero: Tensor, scale: Tensor, group_of: list[int]) -> Tensor:
    return (codes - zero[:, group_of]).float() * scale.float()[:, group_of]


def gptq(bits: int, one: int, size: int, *, act_order: bool) -> Coder:
    def code(weight: Tensor) -> Coded:
        n_columns = weight.shape[1]
        n_groups = 1 if size == -1 else n_columns // size
        group_of = [column * n_groups // n_columns for column in range(n_columns)]
        if act_order:
            group_of = [group_of[i] for i in torch.randperm(n_columns)]
        codes, zero, scale = draw_codes(weight, bits, n_groups)
        order = list(range(32 // bits))
        parts = {
            "qweight": pack(codes, bits, order).t(),
            "qzeros": pack((zero.t() - one) % (1 << bits), bits, order),
            "scales": scale.half().t(),
        }
        if act_order:
            parts["g_idx"] = torch.tensor(group_of, dtype=torch.int32)
        return parts, weight_of(codes, zero, scale.half(), group_of)

    return code


@pytest.mark.parametrize(
    "bits, version, size, act_order", [(4, "gptq", 8, False), (4, "gptq_v2", 8, True), (8, None, -1, False)]
)
def test_gptq(bits: int, version: str | None, size: int, act_order: bool, tmp_path: Path) -> None:
    config = {"quant_method": "gptq", "bits": bits, "group_size": size, "desc_act": act_order, "sym": False}
    config |= {} if version is None else {"checkpoint_format": version}
    code = gptq(bits, int(version != "gptq_v2"), size, act_order=act_order)
    check_equal(*write_quantised(tmp_path, "jamba", config, code))


def test_awq(tmp_path: Path) -> None:
    def code(weight: Tensor) -> Coded:
        codes, zero, scale = draw_codes(weight, 4, weight.shape[1] // 8)
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        parts = {"qweight": pack(codes.t(), 4, order), "qzeros": pack(zero.t(), 4, order), "scales": scale.half().t()}
        return parts, weight_of(codes, zero, scale.half(), [i // 8 for i in range(weight.shape[1])])

    config = {"quant_method": "awq", "bits": 4, "group_size": 8, "version": "gemm", "zero_point": True}
    check_equal(*write_quantised(tmp_path, "jamba", config, code))


# The tests below read FP8.


def float8(size: int | None, end: str = "weight_scale_inv") -> Coder:
    """Draw codes and scales of blocks. Blocks at the edges may be smaller."""

    def code(weight: Tensor) -> Coded:
        codes = weight.to(torch.float8_e4m3fn)
        if size is None:
            scale = torch.rand(()) + 0.5
            return {"weight": codes, end: scale, "input_scale": torch.ones(())}, codes.float() * scale
        grid = [-(-n // size) for n in weight.shape[-2:]]
        scale = torch.rand(*weight.shape[:-2], *grid) + 0.5
        dense = codes.float()
        for i in range(grid[0]):
            for j in range(grid[1]):
                block = (..., slice(i * size, (i + 1) * size), slice(j * size, (j + 1) * size))
                dense[block] *= scale[..., i, j, None, None]
        return {"weight": codes, end: scale}, dense

    return code


@pytest.mark.parametrize("name", ["qwen3-next", "granite-moe-hybrid"])
@pytest.mark.parametrize("size", [8, 16])
def test_fp8_in_blocks(name: str, size: int, tmp_path: Path) -> None:
    """A file holds experts one by one, or stacked with three axes."""
    config = {"quant_method": "fp8", "weight_block_size": [size, size], "modules_to_not_convert": ["lm_head"]}
    check_equal(*write_quantised(tmp_path, name, config, float8(size), unit=1))


@pytest.mark.parametrize(
    "config, end",
    [
        ({"quant_method": "fp8", "weight_block_size": None}, "weight_scale_inv"),
        ({"quant_method": "fp8", "activation_scheme": "static"}, "weight_scale"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "weight_scale"),
    ],
)
def test_fp8_by_tensor(config: dict[str, Any], end: str, tmp_path: Path) -> None:
    check_equal(*write_quantised(tmp_path, "llama", config, float8(None, end)))


@only_in_long
def test_dense_weights_may_be_rounded_again(tmp_path: Path) -> None:
    config = {"quant_method": "fp8", "weight_block_size": [8, 8]}
    coded, dense = write_quantised(tmp_path, "llama", config, float8(8))
    assert torch.equal(run(load_model(coded, weights="int8")), run(load_model(dense, weights="int8")))


def test_fp8_is_what_transformers_makes_of_it(tmp_path: Path) -> None:
    config = {"quant_method": "fp8", "weight_block_size": [8, 8]}
    coded, _ = write_quantised(tmp_path, "llama", config, float8(8))
    stored, checkpoint = load_file(coded / WEIGHTS), open_coded(coded)
    coded_names = [name for name, tensor in stored.items() if tensor.dtype is torch.float8_e4m3fn]
    for name in coded_names:
        theirs = Fp8Dequantize(None)._dequantize_one(stored[name], stored[f"{name}_scale_inv"], torch.float32)
        assert torch.equal(checkpoint.take(name, *theirs.shape), theirs)
    assert coded_names


# The tests below are about what is damaged, and what is not read.

NAME = "model.layers.1.mlp.up_proj."


def pop(end: str) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: tensors.pop(NAME + end)


def put(end: str, *shape: int, dtype: torch.dtype = torch.float32) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: tensors.update({NAME + end: torch.full(shape, 99).to(dtype)})


PACKED = compressed("pack-quantized", **COMPRESSED["int4 in groups"][1])
ASYMMETRIC = compressed("pack-quantized", **COMPRESSED["int4 in groups, asymmetric"][1])
PLAIN = compressed("int-quantized", **COMPRESSED["int8 by channel"][1])
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 8, "desc_act": True}, gptq(4, 1, 8, act_order=True)


@few_cases
@pytest.mark.parametrize(
    "coded, change, said",
    [
        (PACKED, pop("weight_scale"), "up_proj.weight is quantised, but has no scale"),
        (PACKED, pop("weight_shape"), "up_proj.weight is quantised, but has no shape"),
        (PACKED, pop("weight_packed"), "up_proj.weight is quantised, but has no codes"),
        (ASYMMETRIC, pop("weight_zero_point"), "up_proj.weight is quantised, but has no zero_point"),
        (ASYMMETRIC, put("weight_zero_point", 4, 2, dtype=torch.int32), r"zero point of shape \[32, 2\]"),
        (PACKED, put("weight_packed", 32, 2, dtype=torch.int32), r"cannot be \[32, 2\] words of 8 codes"),
        (PACKED, put("weight_packed", 32, 3), "has its packed in torch.float32; they are read in torch.int32"),
        (PACKED, put("weight_scale", 32, 2), r"scale of shape \[32, 2\], but its quantization_config says \[32, 3\]"),
        (PLAIN, pop("weight_scale"), "up_proj.weight in .* is stored as int8 without a scale"),
        (PLAIN, put("weight", 32, 24), "has its codes in torch.float32"),
        (PLAIN, put("weight", 32, 16, dtype=torch.int8), r"has shape \[32, 16\], its config.json says \[32, 24\]"),
        (PLAIN, put("weight", 32, dtype=torch.int8), "has no rows and columns"),
        (GPTQ, pop("qzeros"), "has no qzeros"),
        (GPTQ, pop("g_idx"), "has no g_idx"),
        (GPTQ, put("scales", 3, 8), r"scale of shape \[8, 3\]"),
        (GPTQ, put("g_idx", 24, dtype=torch.int32), "groups .g_idx. up to 99, but scales of 3"),
        (GPTQ, put("g_idx", 3, dtype=torch.int32), r"g_idx. of \[3\] for 24 columns"),
    ],
)
def test_damaged_files_are_named(
    coded: tuple[dict[str, Any], Coder], change: Callable[[dict[str, Tensor]], Any], said: str, tmp_path: Path
) -> None:
    folder, _ = write_quantised(tmp_path, "llama", *coded)
    edit_weights(folder, change)
    with pytest.raises(FormatError, match=said):
        load_model(folder)


def test_inspect_sees_what_loads_and_what_does_not(tmp_path: Path) -> None:
    folder, _ = write_quantised(tmp_path, "llama", *PACKED)
    assert inspect_path(folder).facts["loads"] == "yes"
    edit_weights(folder, put("weight_scale", 32, 2))
    assert "quantization_config says [32, 3]" in inspect_path(folder).facts["loads"]
    edit_config(folder, quantization_config={"quant_method": "mxfp4"})
    assert "quant_method='mxfp4'" in inspect_path(folder).facts["loads"]


@pytest.mark.parametrize(
    "groups",
    [[1], {"g": 1}, {"g": {"weights": 4}}, {"g": PACKED[0]["config_groups"]["group_0"] | {"targets": ["re:("]}}],
)
def test_a_config_that_contradicts_itself(groups: dict[str, Any], tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, CONFIGS["llama"]())
    edit_config(folder, quantization_config=PACKED[0] | {"config_groups": groups})
    with pytest.raises(FormatError, match=r"quantization_config=.* contradicts itself"):
        load_model(folder)


def test_a_config_of_weights_that_are_not_quantised(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, CONFIGS["llama"]())
    edit_config(folder, quantization_config={"quant_method": "fp8"})
    with pytest.raises(FormatError, match=r"no tensor beside it is quantised so; .*remove the quantization_config"):
        load_model(folder)


def group(**changes: Any) -> dict[str, Any]:
    return {"config_groups": {"g": PACKED[0]["config_groups"]["group_0"] | changes}}


def weights(**changes: Any) -> dict[str, Any]:
    return group(weights=PACKED[0]["config_groups"]["group_0"]["weights"] | changes)


COMPRESSED_CONFIG = PACKED[0]


@pytest.mark.parametrize(
    "config, said",
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quant_method='bitsandbytes'"),
        ({"quant_method": "mxfp4"}, "quant_method='mxfp4'"),
        ({"quant_method": "aqlm"}, "quant_method='aqlm'"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo='NVFP4'"),
        ({"quant_method": "fp8", "kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme="),
        ({"quant_method": "fp8", "weight_block_size": 128}, "weight_block_size="),
        ({"bits": 4}, "quant_method=None"),
        ({"quant_method": "gptq", "bits": 3, "group_size": 8}, "bits=3"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size="),
        ({"quant_method": "gptq", "bits": 4, "group_size": 8, "checkpoint_format": "marlin"}, "'marlin'"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 8, "dynamic": {"+:.*": {"bits": 8}}}, "dynamic="),
        ({"quant_method": "awq", "bits": 4, "group_size": 8, "version": "gemv"}, "version='gemv'"),
        (COMPRESSED_CONFIG | {"format": "nvfp4-pack-quantized"}, "format='nvfp4-pack-quantized'"),
        (COMPRESSED_CONFIG | {"format": "marlin-24"}, "format='marlin-24'"),
        (COMPRESSED_CONFIG | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config="),
        (COMPRESSED_CONFIG | {"transform_config": {"config_groups": {"R1": {}}}}, "transform_config="),
        (COMPRESSED_CONFIG | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme="),
        (COMPRESSED_CONFIG | weights(num_bits=2), "num_bits=2"),
        (COMPRESSED_CONFIG | weights(strategy="tensor_group"), "strategy='tensor_group'"),
        (COMPRESSED_CONFIG | weights(type="float"), "type='float'"),
        (COMPRESSED_CONFIG | weights(group_size="8"), "group_size="),
    ],
)
def test_other_formats_are_refused_by_name(config: dict[str, Any], said: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, CONFIGS["llama"]())
    edit_config(folder, quantization_config=config)
    with pytest.raises(UnsupportedModelError, match=f"quantization_config.*{said}.*; give a checkpoint quantised with"):
        load_model(folder)
