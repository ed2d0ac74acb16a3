"""Weights in 8 and 4 bits: the tests check their products, their rounding, their bytes and their refusals."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F

from hybridmem.memory import HybridMemory, SpecError
from hybridmem.models import from_transformers, load_model, weight_bytes
from hybridmem.models.layers.linear import Linear
from hybridmem.models.products import amx, integer_vectors, kernels, quantised
from hybridmem.models.products.kernels import KERNELS, Kernel
from hybridmem.models.products.quantised import LAYOUTS, QuantisedWeight
from hybridmem.models.weights.formats import IntegerFormat, weights_in
from tests.extent import IS_LONG, one_in, only_in_long
from tests.models.checkpoints import CONFIGS, write_checkpoint
from tests.models.hf_models import hf_model
from tests.models.routing import alike, with_choices
from tests.subjects import IS_FULL
from tests.tolerances import assert_kernel_close

FORMATS = get_args(IntegerFormat)
DTYPES = (torch.float32, torch.bfloat16, *((torch.float16,) if IS_FULL else ()))
SHAPES = (1, 1), (16, 32), (17, 33), (100, 70), (50, 640)


BY_INTEGERS = [name for name, kernel in KERNELS.items() if kernel.layouts is not None]


def cases() -> list[tuple[IntegerFormat, torch.dtype, str]]:
    """List the fastest kernel of each format and dtype on this processor, and for 4 bits every other kernel too.

    Kernels read integers of other bits by the same code, and compiling each takes seconds. So by default, each format
    is tested with one dtype.
    """
    found: list[tuple[IntegerFormat, torch.dtype, str]] = []
    for format, dtype in itertools.product(FORMATS, DTYPES):
        if not IS_LONG and (dtype == torch.float32) != (format == "int8"):
            continue
        able = [name for name in BY_INTEGERS if is_for(KERNELS[name], format, dtype)]
        found += [(format, dtype, name) for name in (able if IS_LONG or format == "int4" else able[:1])]
    return found


def is_for(kernel: Kernel, format: IntegerFormat, dtype: torch.dtype) -> bool:
    takes = kernel.layouts
    return takes is not None and takes(LAYOUTS[format]) and dtype in kernel.weights and kernel.applies()


with_kernels = pytest.mark.parametrize(("format", "dtype", "by"), cases(), indirect=["by"])


@pytest.fixture
def by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Make one kernel multiply by leaving out the faster ones."""
    left = BY_INTEGERS[BY_INTEGERS.index(request.param) :]
    monkeypatch.setattr(kernels, "KERNELS", {name: KERNELS[name] for name in left})
    return str(request.param)


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape).to(dtype)


@with_kernels
@pytest.mark.parametrize("shape", SHAPES)
def test_a_product_is_that_of_the_rounded_weights(
    format: IntegerFormat, dtype: torch.dtype, by: str, shape: tuple[int, int]
) -> None:
    """This holds with and without a bias, in float32 too, and for numbers of rows near those of the kernel's tiles."""
    n_out, n_in = shape
    weight = QuantisedWeight.rounded(drawn(*shape, dtype=dtype) / n_in**0.5, format)
    for n_rows in (0, 1, 2, 4, 5, 8, 9, 16, 31, 67):
        for x, bias in ((drawn(n_rows, n_in, dtype=dtype), None), (drawn(n_rows, n_in), drawn(n_out))):
            y = weight.multiply(x, bias)
            assert y.dtype == x.dtype and y.shape == (n_rows, n_out)
            if n_rows:
                assert_kernel_close(y, F.linear(x.float(), weight.dense(), bias), coarser(dtype))


def coarser(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype whose tolerance holds for results in this dtype."""
    return torch.float32 if dtype == torch.float32 else torch.bfloat16


@with_kernels
def test_a_row_has_the_same_bits_in_any_company(format: IntegerFormat, dtype: torch.dtype, by: str) -> None:
    linear = made(format, drawn(50, 700, dtype=dtype), bias=drawn(50), activation="silu")
    x = drawn(37, 700, dtype=dtype)
    x[0, ::7] = x[-1, ::3] = 1e-39  # These are denormal in bfloat16, and tiles ignore them.
    whole = linear(x)
    for n_rows in (1, 2, 3, 4, 5, 7, 8, 13, 16, 17, 32, 36):
        assert torch.equal(linear(x[:n_rows]), whole[:n_rows]) and torch.equal(linear(x[-n_rows:]), whole[-n_rows:])


def made(format: IntegerFormat, *weights: torch.Tensor, **options: Any) -> Linear:
    with weights_in(format, torch.device("cpu")):
        return Linear(*weights, **options)


has_exact_sums = pytest.mark.skipif(
    not (amx.multiplies_tiles() or integer_vectors.adds_integers()),
    reason="this processor multiplies neither tiles nor integers",
)


@has_exact_sums
@pytest.mark.parametrize("format", ["int8", "int4"])
@pytest.mark.parametrize("n_out", [5, 64, 100])
def test_sums_of_groups_are_exact(format: IntegerFormat, n_out: int) -> None:
    """Rows keep twelve bits below the largest number of a group. The sum of a group is rounded once."""
    weight = QuantisedWeight.rounded(drawn(n_out, 330, dtype=torch.bfloat16), format)
    x = (torch.randn(19, 330) * torch.logspace(-4, 4, 330)[torch.randperm(330)]).bfloat16()
    x[7] = 255.0  # All numbers have the largest significand, so the sums of a group just fit.
    groups, weights = F.pad(x.double(), (0, 22)).view(19, 11, 32), F.pad(weight.dense().double(), (0, 22))
    unit = 2.0 ** (groups.abs().amax(-1, keepdim=True).log2().floor() - 11)
    groups, total = (groups / unit).round() * unit, torch.zeros(19, n_out, dtype=torch.float64)
    assert (groups.bfloat16() == groups).all() and (groups != F.pad(x, (0, 22)).view_as(groups)).any()
    for g in range(11):
        total = (total + groups[:, g] @ weights[:, 32 * g : 32 * (g + 1)].T).float().double()
    for n_rows in (1, 2, 3, 4, 5, 19):
        for rows in (slice(n_rows), slice(-n_rows, None)):
            assert torch.equal(weight.multiply(x[rows], None), total[rows].bfloat16())


@has_exact_sums
@pytest.mark.parametrize("format", ["int8", "int4"])
def test_numbers_at_the_ends_of_their_range_spoil_no_other_row_or_group(format: IntegerFormat) -> None:
    """A group's sum that is too small beside its row becomes zero.

    A row with NaN or infinity gives NaN in its own output.
    """
    weight = QuantisedWeight.rounded(drawn(20, 96, dtype=torch.bfloat16), format)
    x = drawn(20, 96, dtype=torch.bfloat16)
    plain = weight.multiply(x, None)
    x[0, 40], x[1, 40], x[2, 40], x[3, :32] = float("nan"), float("inf"), -float("inf"), 2.0**-116
    for rows in (range(4), range(20)):
        y = weight.multiply(x[list(rows)], None)
        assert y[:3].isnan().all() and torch.equal(y[4:], plain[4 : len(rows)])
        assert torch.equal(y[3:4], weight.multiply(F.pad(x[3:4, 32:], (32, 0)), None))
    for size in 2.0**114, 2.0**-115, 2.0**120, 2.0**-118:
        x = torch.full((1, 96), size, dtype=torch.bfloat16)
        ones = weight.multiply(torch.ones(1, 96, dtype=torch.bfloat16), None)
        assert torch.equal(weight.multiply(x, None), (ones.double() * size).bfloat16())


@pytest.mark.parametrize(
    ("format", "dtype", "by"), [case for case in cases() if case[1] != torch.float16], indirect=["by"]
)
def test_rows_of_any_size_have_their_products(format: IntegerFormat, dtype: torch.dtype, by: str) -> None:
    """Rows reach up to the largest number, beside rows of zeros. Sums are finite wherever the product is."""
    weight, largest = QuantisedWeight.rounded(drawn(20, 96, dtype=dtype) / 30, format), torch.finfo(dtype).max
    for n_rows in (1, 3, 9, 40):
        x = (torch.rand(n_rows, 96) + 1) / 2 * torch.randn(n_rows, 96).sign()
        sizes = torch.tensor([largest, 1e37, 1e36, 1e-36, 0.0, 1.0, 1e30, 3e38])[torch.arange(n_rows) % 8, None]
        y, expected = (
            weight.multiply((x * sizes).to(dtype), None),
            (x * sizes).to(dtype).double() @ weight.dense().double().T,
        )
        assert expected.abs().max() < largest and y.isfinite().all()
        units = sizes.double() + (sizes == 0)
        assert_kernel_close((y.double() / units).to(dtype), (expected / units).float(), coarser(dtype))
    tiny = torch.full((2, 96), 1e-40)
    expected = tiny.double() @ weight.dense().double().T
    if dtype == torch.float32:
        assert_kernel_close(weight.multiply(tiny, None).double().mul(1e40).float(), expected.mul(1e40).float())


@pytest.mark.parametrize("format", FORMATS)
def test_weights_are_rounded_to_the_nearest_integer_of_their_group(format: IntegerFormat) -> None:
    """Groups of zeros or of equal numbers stay exact. In others, the largest weight bounds the error."""
    weight = torch.randn(48, 96) * torch.logspace(-34, 36, 48)[:, None]
    weight[3, 32:64], weight[4, :32] = 0.0, 0.25
    rounded = QuantisedWeight.rounded(weight, format).dense()
    n_groups = 1 if format == "int8-row" else 3
    groups, errors = (x.double().view(48, n_groups, -1) for x in (weight, rounded - weight))
    largest = groups.abs().amax(-1, keepdim=True)
    assert (errors.abs() <= largest * {"int4": 1 / 8}.get(format, 1 / 250)).all()
    most = {"int8": 0.0055, "int8-row": 0.007, "int4": 0.085}[format]
    units = largest.clamp(min=1e-38)
    assert (errors / units).square().sum() <= (groups / units).square().sum() * most**2
    assert QuantisedWeight.rounded(torch.full((3, 40), 1e-38), format).dense().eq(0).all()
    if n_groups == 1:
        return
    assert rounded[3, 32:64].eq(0).all() and (rounded[4, :32] - 0.25).abs().max() < 0.25 / 200


def test_four_bits_are_no_worse_than_any_one_scale_from_the_largest_weight() -> None:
    weight = torch.randn(64, 256)
    groups = weight.view(64, 8, 32)
    signed = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    ours = (QuantisedWeight.rounded(weight, "int4").dense() - weight).view_as(groups).square().sum(-1)
    for divisor in (7.0, 8.0, 9.0):
        scale = -signed / divisor
        theirs = ((groups / scale).round().clamp(-8, 7) * scale - groups).square().sum(-1)
        assert ours.sum() < theirs.sum() and (ours <= theirs * 1.03 + 1e-4).all()


@only_in_long
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("spoilt", [float("nan"), float("inf")])
def test_a_weight_that_is_no_number_reaches_its_output(format: IntegerFormat, spoilt: float) -> None:
    weight = torch.randn(40, 64)
    weight[19, 5] = spoilt
    y = QuantisedWeight.rounded(weight, format).multiply(torch.ones(2, 64), None)
    assert y[:, 19].isnan().all() and y[:, torch.arange(40) != 19].isfinite().all()


@only_in_long
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("activation", ["silu", "swish", "relu", "sigmoid", "tanh", "gelu", "relu2"])
def test_an_activation_is_applied(format: IntegerFormat, activation: str) -> None:
    weight, x = 3 * torch.randn(24, 64), torch.randn(5, 64)
    plain = Linear(QuantisedWeight.rounded(weight, format).dense(), activation=activation)
    assert_kernel_close(made(format, weight, activation=activation)(x), plain(x))


def test_several_weights_and_slices_are_read_in_place() -> None:
    first, second, x = torch.randn(10, 128)[:, ::2], torch.randn(60, 64)[::2], torch.randn(5, 128)[:, ::2]
    both = made("int8", first, second)
    assert_kernel_close(both(x), torch.cat([made("int8", w)(x) for w in (first, second)], 1))


@only_in_long
@pytest.mark.parametrize(
    ("format", "dtype"),
    [("int8", "float32"), ("int4", "bfloat16"), *([("int4", "float32"), ("int8", "bfloat16")] if IS_LONG else [])],
)
@pytest.mark.parametrize("name", one_in(2, ["jamba-two-of-four-experts", "mamba2", "qwen3-next", "rwkv7"]))
def test_a_model_computes_with_the_rounded_weights(
    name: str, dtype: str, format: IntegerFormat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model equals one with the products of the dense twin, and differs from the model with unrounded weights."""
    folder = write_checkpoint(tmp_path, CONFIGS[name]())
    models = [load_model(folder, dtype=dtype, weights=format), load_model(folder, dtype=dtype)]
    tokens = list(range(1, 40))
    (rounded, experts), (whole, _) = (
        with_choices(model, HybridMemory(model.memory_spec, "16MiB"), [tokens], monkeypatch) for model in models
    )

    def by_twin(
        own: QuantisedWeight, x: torch.Tensor, bias: torch.Tensor | None, activation: str | None, *, keeps_sums: bool
    ) -> Any:
        y = F.linear(x.float(), own.dense(), bias)
        y = y if activation is None else Linear(torch.eye(y.shape[1]), activation=activation)(y)
        return y if keeps_sums else y.to(x.dtype)

    monkeypatch.setattr(quantised.QuantisedWeight, "multiply", by_twin)
    expected, expected_experts = with_choices(
        models[0], HybridMemory(models[0].memory_spec, "16MiB"), [tokens], monkeypatch
    )
    assert expected.std() > 0.5 and (rounded - whole).abs().max() > 1e-3
    same = alike(experts, expected_experts)  # Where two experts score alike, rounding chooses.
    delta = (rounded - expected)[same].square().mean().sqrt() / expected.std()
    assert delta < {"float32": 1e-5, "bfloat16": 4e-2}[dtype]


def test_it_takes_the_bytes_of_its_bits_and_a_dry_model_knows_them(tmp_path: Path) -> None:
    for format, bits in (("int8", 8.5), ("int8-row", 8 + 16 / 512), ("int4", 4.5)):
        linear = made(format, torch.randn(512, 512))  # type: ignore[arg-type]
        assert weight_bytes(linear) == 512 * 512 * bits / 8  # type: ignore[arg-type]
        on_meta = QuantisedWeight.rounded(torch.empty(512, 512, device="meta"), format)  # type: ignore[arg-type]
        assert weight_bytes(on_meta) == weight_bytes(linear)  # type: ignore[arg-type]


def test_a_loaded_model_of_transformers_can_be_rounded() -> None:
    hf = hf_model("jamba")
    assert weight_bytes(from_transformers(hf, weights="int8")) < weight_bytes(from_transformers(hf)) / 2


@pytest.mark.parametrize("weights", ["int5", None, 8, ""])
def test_other_formats_are_refused(weights: Any) -> None:
    with pytest.raises(SpecError, match=r"weights=.*'auto', 'dense', 'int8', 'int8-row', 'int4'"):
        load_model("embedded", weights=weights)


def test_they_are_for_the_cpu() -> None:
    with pytest.raises(SpecError, match=r"int8.*CPU.*cuda.*auto"), weights_in("int8", torch.device("cuda")):
        pass
