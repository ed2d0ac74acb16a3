"""Kernels of recurrences return what their twins return, and leave every byte of the arena as they do.

Blocks of other segments, and unwritten bytes, are NaN. So a wrong read shows in the output, and a wrong write in the
arena.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from hybridmem.memory import StepError
from hybridmem.memory.blocks.staging import place
from hybridmem.memory.kernels import Erase, cuda, reference
from hybridmem.memory.kernels.cuda.channel_states import SelectiveScan
from hybridmem.memory.kernels.cuda.choices import TUNABLES
from hybridmem.memory.kernels.cuda.matrix_inputs import part_of
from tests.memory.kernels.tails import behind_tails, flats_of, forget_folded, matrix_rows, moved, rows_of, table
from tests.memory.kernels.test_checks import GIVEN
from tests.memory.kernels.test_kernels import Slots
from tests.tolerances import assert_kernel_close

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHORT = (1, 2, 3, 1)
CHUNKED = (1, 2, 63, 64, 65)


def assert_as_twin(
    name: str, *args: Any, device: torch.device, dtype: torch.dtype = torch.float32, **options: Any
) -> None:
    ours, theirs = moved(args, device), moved(args, torch.device("cpu"))
    expected = getattr(reference, name)(*theirs, **options)
    actual = getattr(cuda, name)(*ours, **moved_options(options, device))
    assert_kernel_close(actual.cpu(), expected, dtype)
    forget_folded(ours)
    forget_folded(theirs)
    for flat, twin in zip(flats_of(ours), flats_of(theirs), strict=True):
        flat = flat.cpu()
        assert torch.equal(flat.isnan(), twin.isnan()), "another part of the arena was written"
        assert_kernel_close(flat.nan_to_num().float(), twin.nan_to_num().float(), dtype)


def moved_options(options: dict[str, Any], device: torch.device) -> dict[str, Any]:
    return {name: moved(value, device) for name, value in options.items()}


@pytest.mark.parametrize(
    ("n_channels", "n_taps", "lengths"), [(7, 2, SHORT), (130, 4, (1, 1, 1)), (24, 4, (1, 2, 15, 16, 17, 65))]
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_convolution(
    device: torch.device, dtype: torch.dtype, n_channels: int, n_taps: int, lengths: tuple[int, ...]
) -> None:
    slots = Slots((n_taps - 1, n_channels), lengths, dtype, initial=0.5).fresh()
    rows, weight, bias = (
        torch.randn(sum(lengths), n_channels + 3),
        torch.randn(n_taps, n_channels),
        torch.randn(n_channels),
    )
    inputs = [x.to(dtype) for x in (rows, weight, bias)]
    assert_as_twin("causal_conv", *inputs, slots, device=device, dtype=table(dtype))
    assert_as_twin("causal_conv", *inputs[:2], None, slots, device=device, dtype=table(dtype), activation=False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norm(device: torch.device, dtype: torch.dtype) -> None:
    for n_elements, n_groups in ((1, 1), (60, 3), (60, 1), (1030, 1), (14, 7)):
        x, gate = rows_of(5, n_elements, n_elements, dtype=dtype)
        weight = torch.randn(n_elements).to(dtype)
        for options in ({"n_groups": n_groups, "gate_TE": gate}, {"n_groups": n_groups}):
            assert_as_twin("rms_norm", x, weight, 1e-6, device=device, dtype=table(dtype), **options)
        assert_as_twin("rms_norm", x, None, 1e-6, device=device, dtype=table(dtype))
    alone = cuda.rms_norm(x[2:3].to(device), weight.to(device), 1e-6, n_groups=7)
    assert torch.equal(alone, cuda.rms_norm(x.to(device), weight.to(device), 1e-6, n_groups=7)[2:3]), (
        "a row's bits depend on others"
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_softplus(device: torch.device, dtype: torch.dtype) -> None:
    for n_rows, n_columns in ((1, 1), (3, 80), (2, 1100)):
        assert_as_twin(
            "softplus", rows_of(n_rows, n_columns, dtype=dtype)[0] * 8, torch.randn(n_columns), device=device
        )
    tiny = cuda.softplus(torch.full((1, 1), -15.0, device=device), torch.zeros(1, device=device))
    assert abs(tiny.item() / np.log1p(np.exp(-15.0)) - 1) < 1e-5, "small time steps keep their digits"


@pytest.mark.parametrize(("n_channels", "n_states"), [(1, 1), (40, 5), (70, 16)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_selective_scan(device: torch.device, dtype: torch.dtype, n_channels: int, n_states: int) -> None:
    slots, n = Slots((n_states, n_channels), SHORT).fresh(), sum(SHORT)
    x, dt, b, c = rows_of(n, n_channels, n_channels, n_states, n_states, dtype=dtype)
    a, bias, d = (
        -torch.rand(n_states, n_channels).mul(3).exp() / 4,
        torch.randn(n_channels) - 1,
        torch.randn(n_channels),
    )
    assert_as_twin("selective_scan", x, dt, bias, b, c, a, d, slots, device=device, dtype=table(dtype))


@pytest.mark.parametrize(("lengths", "chunk"), [((1, 8, 20), 8), (CHUNKED, 64)], ids=str)
def test_selective_scan_in_chunks(device: torch.device, lengths: tuple[int, ...], chunk: int) -> None:
    """Segments have less than one chunk, exactly one, or several with a last one that is not full."""
    n, n_channels = sum(lengths), 20
    x, dt, b, c = rows_of(n, n_channels, n_channels, 5, 5)
    a, bias, d = -torch.rand(5, n_channels).mul(3).exp() / 4, torch.randn(n_channels) - 1, torch.randn(n_channels)
    with TUNABLES["selective_scan"].instead(lambda *_: SelectiveScan(16, chunk, 1)):
        assert_as_twin(
            "selective_scan", x, dt, bias, b, c, a, d, Slots((5, n_channels), lengths).fresh(), device=device
        )


def test_a_run_in_chunks_has_the_same_bits_alone(device: torch.device) -> None:
    lengths = (1, 8, 20)
    slots, n = Slots((5, 40), lengths), sum(lengths)
    x, dt, b, c = rows_of(n, 40, 40, 5, 5)
    a, bias, d = -torch.rand(5, 40).mul(3).exp() / 4, torch.randn(40) - 1, torch.randn(40)
    with TUNABLES["selective_scan"].instead(lambda *_: SelectiveScan(32, 8, 1)):
        weights = moved((bias, a, d), device)
        together = moved(slots.fresh(), device)
        y = cuda.selective_scan(*moved((x, dt), device), weights[0], *moved((b, c), device), *weights[1:], together)
        for i, (begin, end) in enumerate(itertools.pairwise(together.cu_rows.host.tolist())):
            alone = part_of(moved(slots.fresh(), device), i, i + 1)
            alone = alone._replace(cu_rows=place(np.array([0, end - begin]), device))
            rows = moved(tuple(part[begin:end] for part in (x, dt, b, c)), device)
            found = cuda.selective_scan(rows[0], rows[1], weights[0], rows[2], rows[3], *weights[1:], alone)
            assert torch.equal(found, y[begin:end])
            size, at = 5 * 40, int(alone.targets[0])
            assert torch.equal(alone.flat[at : at + size], together.flat[at : at + size])


@pytest.mark.parametrize("n_channels", [1, 130])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linear_scan(device: torch.device, dtype: torch.dtype, n_channels: int) -> None:
    x, decay = rows_of(sum(SHORT), n_channels, n_channels, dtype=dtype)
    assert_as_twin(
        "linear_scan", x, decay.sigmoid(), Slots((n_channels,), SHORT).fresh(), device=device, dtype=table(dtype)
    )


@pytest.mark.parametrize("n_channels", [1, 130])
def test_wkv4(device: torch.device, n_channels: int) -> None:
    states = tuple(Slots((n_channels,), SHORT, initial=initial).fresh() for initial in (0.0, 0.0, -1e38))
    states[1].flat.abs_()
    k, v = rows_of(sum(SHORT), n_channels, n_channels)
    assert_as_twin("wkv4", 40 * k, v, -torch.rand(n_channels) * 3, torch.randn(n_channels), states, device=device)


def test_stabilise(device: torch.device) -> None:
    gate, log_decay = rows_of(sum(SHORT), 5, 5)
    assert_as_twin("stabilise", 9 * gate, -log_decay.abs(), Slots((5,), SHORT, initial=0.5).fresh(), device=device)


def test_stabilise_behind_a_tail(device: torch.device) -> None:
    """Tails are empty or full.

    Bodies end among old rows, between old and new ones, among new ones, or there is none.
    """
    counts, lengths, folds = (0, 1, 2, 9, 9, 3), (1, 1, 2, 1, 20, 1), (1, 0, 3, 4, 21, 0)
    slots = behind_tails((5,), ((5,),), counts, lengths, folds, initial=0.5)
    gate, log_decay = rows_of(sum(lengths), 5, 5)
    assert_as_twin("stabilise", 9 * gate, -log_decay.abs(), slots, device=device)


TOKEN_MODES = {
    "by column": (True, False, False),
    "erases": (False, True, False),
    "erases decayed, by column": (True, True, True),
}


@pytest.mark.parametrize("mode", TOKEN_MODES)
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (3, 1, 5, 48), (4, 2, 9, 7)], ids=str)
def test_matrix_scan_token_by_token(device: torch.device, shape: tuple[int, int, int, int], mode: str) -> None:
    """These kinds are taken by no other kernel."""
    (n_heads, n_groups, n_rows, n_columns), (by_column, erases, after_decay) = shape, TOKEN_MODES[mode]
    lengths = (1, 3)
    q, k, v = matrix_rows(sum(lengths), *shape)
    decay = -torch.rand(sum(lengths), n_heads, *([n_columns] if by_column else []))
    b = -torch.rand(sum(lengths), n_heads, 1) * k.repeat_interleave(n_heads // n_groups, dim=1)
    slots, erase = Slots((n_heads, n_rows, n_columns), lengths).fresh(), Erase(k, b, after_decay) if erases else None
    assert_as_twin("matrix_scan", q, k, v, decay, erase, slots, device=device)


@pytest.mark.parametrize("erases", [False, True], ids=["adds", "erases"])
@pytest.mark.parametrize(
    ("shape", "dtype", "strong"), [
        ((2, 1, 5, 17), torch.float32, False), ((1, 1, 20, 12), torch.float32, True),
        ((1, 1, 16, 16), torch.bfloat16, False),
    ], ids=str,
)  # fmt: skip
def test_matrix_scan_in_chunks(
    device: torch.device, shape: tuple[int, int, int, int], dtype: torch.dtype, strong: bool, erases: bool
) -> None:
    """Segments are about as long as a chunk, among others that are too short for one.

    With `strong`, keys are nearly equal and decays are far from one. Sometimes nothing of a state is left.
    """
    n, n_heads = sum(CHUNKED), shape[0]
    q, k, v = matrix_rows(n, *shape, dtype=dtype)
    if strong:
        k = F.normalize(torch.randn(1, *k.shape[1:]) + 0.1 * k, dim=-1)
    decay, strength, skip = (
        -torch.rand(n, n_heads) * (20 if strong else 1),
        torch.rand(n, n_heads),
        torch.randn(n_heads),
    )
    decay[:: 9 if strong else 40] = -torch.inf
    slots, erase = Slots((n_heads, *shape[2:]), CHUNKED).fresh(), Erase(k, None, after_decay=True) if erases else None
    options = {"strength_TH": strength, "skip_H": skip}
    assert_as_twin("matrix_scan", q, k, v, decay, erase, slots, device=device, dtype=table(dtype), **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_convolution_behind_a_tail(device: torch.device, dtype: torch.dtype) -> None:
    """Tails are empty, shorter than the window, or full.

    Bodies end among old rows, between old and new ones, among new ones, or there is none.
    """
    counts, lengths, folds = (0, 1, 2, 9, 9, 3), (1, 1, 2, 1, 20, 1), (1, 0, 3, 4, 21, 0)
    slots = behind_tails((3, 20), ((23,),), counts, lengths, folds, dtype, initial=0.5)
    rows, weight, bias = torch.randn(sum(lengths), 23), torch.randn(4, 20), torch.randn(20)
    assert_as_twin(
        "causal_conv", *(x.to(dtype) for x in (rows, weight, bias)), slots, device=device, dtype=table(dtype)
    )


@pytest.mark.parametrize("erases", [False, True], ids=["adds", "erases"])
@pytest.mark.parametrize(
    ("shape", "counts", "lengths", "folds", "dtype"), [
        ((3, 1, 5, 12), (0, 19, 16, 2), (1, 2, 1, 3), (1, 0, 9, 4), torch.float32),
        ((4, 2, 9, 16), (0, 7), (2, 1), (0, 8), torch.bfloat16),
        ((2, 1, 9, 12), (3, 0, 5, 20), (1, 40, 64, 17), (0, 30, 62, 15), torch.float32),
        ((1, 1, 16, 16), (2, 3), (20, 33), (0, 5), torch.bfloat16),
    ], ids=["a few", "a few, bf16", "chunks", "chunks, bf16"],
)  # fmt: skip
def test_matrix_scan_behind_a_tail(
    device: torch.device, shape: tuple[int, int, int, int], counts: tuple[int, ...], lengths: tuple[int, ...],
    folds: tuple[int, ...], dtype: torch.dtype, erases: bool,
) -> None:  # fmt: skip
    n_heads, n_groups, n_rows, n_columns = shape
    slots = behind_tails(
        (n_heads, n_rows, n_columns),
        ((n_groups, n_columns), (n_heads, n_rows), (n_heads,)),
        counts,
        lengths,
        folds,
        dtype,
    )
    n = sum(lengths)
    q, k, v = matrix_rows(n, *shape, dtype=dtype)
    erase = Erase(k, None, after_decay=True) if erases else None
    options = {"strength_TH": torch.rand(n, n_heads), "skip_H": torch.randn(n_heads)}
    assert_as_twin(
        "matrix_scan", q, k, v, -torch.rand(n, n_heads), erase, slots, device=device, dtype=table(dtype), **options
    )


FEW = ((0, 9, 6, 2), (1, 2, 1, 3), (1, 0, 5, 4))
MANY = ((3, 4), (1, 12), (0, 13))
LONG = ((3, 5), (17, 33), (2, 30))
"""Tokens of tails, of runs, and where tails fold: before the run, in it, nowhere.
Empty, full, and a run longer than its ring.
"""

TAILS = pytest.mark.parametrize(
    ("sizes", "dtype"), [(FEW, torch.float32), (MANY, torch.float32), (LONG, torch.float32), (FEW, torch.bfloat16)],
    ids=["a few", "many", "long", "bf16"],
)  # fmt: skip


LONG_MODES = TOKEN_MODES | {"the delta rule, by column": (True, True, True)}


@pytest.mark.parametrize("mode", LONG_MODES)
@pytest.mark.parametrize(
    ("shape", "lengths", "dtype", "strong"), [
        ((1, 1, 5, 17), CHUNKED, torch.float32, False), ((1, 1, 20, 12), (40,), torch.float32, True),
        ((2, 1, 16, 16), (2, 20), torch.bfloat16, False),
    ], ids=["around chunks", "strong", "bf16"],
)  # fmt: skip
def test_matrix_scan_in_chunks_by_column(
    device: torch.device,
    shape: tuple[int, int, int, int],
    lengths: tuple[int, ...],
    dtype: torch.dtype,
    strong: bool,
    mode: str,
) -> None:
    """With `strong`, keys are nearly equal, and one token's decay is 1e-9 beside others that are one."""
    (n_heads, _, n_rows, n_columns), (by_column, erases, after_decay), n = shape, LONG_MODES[mode], sum(lengths)
    q, k, v = matrix_rows(n, *shape, dtype=dtype)
    decay = -torch.rand(n, n_heads, *([n_columns] if by_column else []))
    if strong:
        k, decay = (
            F.normalize(torch.randn(1, *k.shape[1:]) + 0.1 * k, dim=-1),
            torch.where(decay > -0.5, 0.0, 20 * decay),
        )
    b = -torch.rand(n, n_heads, 1) * k.float().repeat_interleave(n_heads // shape[1], dim=1)
    options = {"strength_TH": torch.rand(n, n_heads), "skip_H": torch.randn(n_heads)}
    erase = Erase(k, None if mode not in TOKEN_MODES else b, after_decay) if erases else None
    slots = Slots((n_heads, n_rows, n_columns), lengths).fresh()
    assert_as_twin("matrix_scan", q, k, v, decay, erase, slots, device=device, dtype=table(dtype), **options)


@TAILS
@pytest.mark.parametrize("mode", TOKEN_MODES)
def test_matrix_scan_token_by_token_behind_a_tail(
    device: torch.device, sizes: tuple[tuple[int, ...], ...], dtype: torch.dtype, mode: str
) -> None:
    (n_heads, n_groups, n_rows, n_columns), (by_column, erases, after_decay), n = (
        (2, 1, 3, 7),
        TOKEN_MODES[mode],
        sum(sizes[1]),
    )
    decays = (n_heads, n_columns) if by_column else (n_heads,)
    rings = (
        (n_groups, n_columns),
        (n_heads, n_rows),
        decays,
        *(((n_heads, n_columns), (n_heads, n_rows)) if erases else ()),
    )
    slots = behind_tails((n_heads, n_rows, n_columns), rings, *sizes, dtype)
    q, k, v = matrix_rows(n, n_heads, n_groups, n_rows, n_columns, dtype=dtype)
    b = -torch.rand(n, n_heads, 1) * k.float().repeat_interleave(n_heads // n_groups, dim=1)
    erase = Erase(k, b, after_decay) if erases else None
    assert_as_twin("matrix_scan", q, k, v, -torch.rand(n, *decays), erase, slots, device=device, dtype=table(dtype))


@pytest.mark.parametrize("erases", [False, True], ids=["adds", "erases"])
@pytest.mark.parametrize("sizes", [FEW, LONG], ids=["a few", "long"])
def test_decays_by_column_erase_what_keys_find(
    device: torch.device, sizes: tuple[tuple[int, ...], ...], erases: bool
) -> None:
    """Kimi's delta rule has three rings, with decays as wide as keys. Sometimes a column forgets everything."""
    slots, n = behind_tails((2, 5, 7), ((1, 7), (2, 5), (2, 7)), *sizes), sum(sizes[1])
    q, k, v = matrix_rows(n, 2, 1, 5, 7)
    erase, options = Erase(k, None, after_decay=True) if erases else None, {"strength_TH": torch.rand(n, 2)}
    decay = -torch.rand(n, 2, 7)
    decay[::6, :, 2] = -torch.inf
    assert_as_twin("matrix_scan", q, k, v, decay, erase, slots, device=device, **options)


@TAILS
def test_selective_scan_behind_a_tail(
    device: torch.device, sizes: tuple[tuple[int, ...], ...], dtype: torch.dtype
) -> None:
    n_channels, n_states, n = 40, 5, sum(sizes[1])
    slots = behind_tails((n_states, n_channels), ((n_channels,), (n_channels,), (n_states,)), *sizes, dtype)
    x, dt, b, c = rows_of(n, n_channels, n_channels, n_states, n_states, dtype=dtype)
    a, bias, d = (
        -torch.rand(n_states, n_channels).mul(3).exp() / 4,
        torch.randn(n_channels) - 1,
        torch.randn(n_channels),
    )
    with TUNABLES["selective_scan"].instead(lambda *_: SelectiveScan(16, 8, 1)):
        assert_as_twin("selective_scan", x, dt, bias, b, c, a, d, slots, device=device, dtype=table(dtype))


@pytest.mark.parametrize("what", GIVEN)
def test_what_does_not_fit_is_refused(what: str) -> None:
    call, says = GIVEN[what]
    with pytest.raises(StepError, match=says):
        call(cuda)
