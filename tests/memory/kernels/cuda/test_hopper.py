"""Every kernel compiles for a Hopper GPU in the shapes of models, and fits on it. The interpreter cannot show this.

By default every third case is compiled, because each takes seconds.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from hybridmem.memory.blocks.staging import Placed
from hybridmem.memory.kernels import Erase, FoldedRows, PageChoice, PagedBatch, Scoring, StateSlots, Tail
from hybridmem.memory.kernels.eight_bits import EIGHT_BITS
from hybridmem.memory.quantization import Float8, Quantized, Storage
from tests.extent import one_in, only_in_long
from tests.hopper import SHARED_BYTES, Recorder

triton = pytest.importorskip("triton", reason="triton is not installed")

BF16, F32 = torch.bfloat16, torch.float32
MODULES = (
    "attention", "page_choice", "rows", "channel_states", "convolution", "eight_bits", "matrix_chunks",
    "matrix_columns", "matrix_tails", "matrix_tokens", "norms", "vectors",
)  # fmt: skip


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    recorder = Recorder()
    for name in MODULES:
        monkeypatch.setattr(importlib.import_module(f"hybridmem.memory.kernels.cuda.{name}"), "launch", recorder.launch)
    yield recorder
    assert recorder.compiled, "nothing was compiled"
    assert all(kernel.shared_bytes <= SHARED_BYTES for kernel in recorder.compiled), recorder.compiled


def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def attend(
    dtype: torch.dtype, heads: tuple[int, int, int], n_queries: int, scoring: Scoring, storage: Storage | None = None
) -> None:
    """Attend with so many queries after 2,000 rows, of which some are folded."""
    from hybridmem.memory.kernels import cuda

    n_heads, n_kv_heads, head_dim = heads
    n_rows = 2000 + n_queries
    n_pages = -(-n_rows // 16)
    batch = PagedBatch(np.array([0, n_queries]), np.array([n_rows]), zeros(n_pages), np.array([0, n_pages]), 16)
    keys, values = zeros(64, dtype=dtype), zeros(64, dtype=dtype)
    folded = None
    if storage is not None:
        parts = [
            part for is_key in (True, False) for part in storage.shapes(n_kv_heads, 64, head_dim, by_channel=is_key)
        ]
        flats = tuple(zeros(64, dtype=dtype) for _, dtype in parts)
        folded = FoldedRows(
            storage,
            tuple(s for s, _ in parts),
            flats,
            zeros(4),
            np.array([0, 4]),
            np.array([256]),
            head_dim,
        )
    q = zeros(n_queries, n_heads, head_dim, dtype=dtype)
    cuda.paged_attention(q, keys, keys if n_kv_heads == 1 else values, batch, n_kv_heads, scoring, folded)


PLAIN = Scoring(0.1)


def with_all(n_heads: int) -> Scoring:
    return Scoring(0.1, 1024, 30.0, zeros(n_heads, dtype=F32), zeros(n_heads, 32, dtype=F32))


@pytest.mark.parametrize(
    "dtype, heads, scoring, n_queries",
    one_in(
        3,
        [
            pytest.param(BF16, (32, 8, 128), PLAIN, 1, id="decode"),
            pytest.param(BF16, (32, 8, 128), PLAIN, 100, id="prompt"),
            pytest.param(F32, (32, 8, 128), PLAIN, 100, id="float32"),
            pytest.param(BF16, (32, 8, 96), with_all(32), 5, id="drafts"),
            pytest.param(BF16, (16, 8, 256), with_all(16), 100, id="wide"),
        ],
    ),
)
def test_attention(
    recorder: Recorder, dtype: torch.dtype, heads: tuple[int, int, int], scoring: Scoring, n_queries: int
) -> None:
    attend(dtype, heads, n_queries, scoring)
    assert all(kernel.spilled_bytes <= 64 for kernel in recorder.compiled), recorder.compiled


def test_latent_attention(recorder: Recorder) -> None:
    """In DeepSeek, 128 heads share keys of 576 elements, which are their values too."""
    attend(BF16, (128, 1, 576), 1, PLAIN)


def test_eight_warps_share_no_products_of_16_channels(recorder: Recorder) -> None:
    """A head of 144 channels is split into 128 and 16.

    With 64 queries and 8 warps, Triton 3.6 computed wrong numbers on an H100.
    """
    attend(F32, (20, 1, 144), 5, PLAIN)
    assert [kernel.n_warps for kernel in recorder.compiled if kernel.name == "_attend"] == [4]


@pytest.mark.parametrize("storage", one_in(2, [Quantized(4), Float8()]), ids=str)
def test_attention_over_folded_rows(recorder: Recorder, storage: Storage) -> None:
    attend(BF16, (32, 8, 128), 1, PLAIN, storage)


def test_choice_of_pages(recorder: Recorder) -> None:
    from hybridmem.memory.kernels import cuda

    choice = PageChoice(zeros(500), np.array([0, 500]), 1, np.array([2]), np.array([0, 32]))
    cuda.choose_pages(zeros(1, 32, 128, dtype=BF16), zeros(64, dtype=BF16), zeros(64, dtype=BF16), choice, 8)


def test_rows(recorder: Recorder) -> None:
    from hybridmem.memory.kernels import cuda

    cuda.write_rows_(zeros(64, dtype=BF16), zeros(64), zeros(64, 128, dtype=BF16))
    cuda.read_rows(zeros(64, dtype=F32), zeros(2), (128, 4096), 0.0)


def slots(
    lengths: list[int], shape: tuple[int, ...], rings: tuple[torch.dtype, ...] = (), dtype: torch.dtype = F32
) -> StateSlots:
    """Return slots for segments of these lengths, behind a tail if there are rings."""
    n = len(lengths)
    blocks = (zeros(n),) * len(rings)
    tail = (
        Tail(tuple(zeros(64, dtype=of) for of in rings), blocks, blocks, 48, zeros(n), zeros(n), zeros(n))
        if rings
        else None
    )
    return StateSlots(
        Placed(np.array([0, *np.cumsum(lengths)]), zeros(n + 1)),
        zeros(64, dtype=dtype),
        zeros(n),
        zeros(n),
        shape,
        0.0,
        tail,
    )


@pytest.mark.parametrize(
    "dtype, sizes, erases, lengths, has_tail",
    one_in(
        3,
        [
            pytest.param(BF16, (80, 1, 64, 128), False, [1] * 128, True, id="SSD, decode"),
            pytest.param(BF16, (32, 16, 128, 128), True, [1] * 128, True, id="delta, decode"),
            pytest.param(F32, (32, 16, 128, 128), True, [5] * 64, True, id="delta, drafts"),
            pytest.param(torch.float64, (2, 1, 16, 16), True, [5], True, id="delta, drafts, float64"),
            pytest.param(BF16, (32, 16, 128, 128), True, [1] * 128, False, id="delta, decode in place"),
            pytest.param(BF16, (32, 16, 128, 128), True, [4096], True, id="delta, prompt"),
            pytest.param(F32, (80, 1, 64, 128), False, [1000, 24], False, id="SSD, prompts, float32"),
        ],
    ),
)
def test_matrix_states(
    recorder: Recorder,
    dtype: torch.dtype,
    sizes: tuple[int, int, int, int],
    erases: bool,
    lengths: list[int],
    has_tail: bool,
) -> None:
    """The shapes are those of Mamba-2 and Qwen3.5.

    Steps of one token keep everything in registers, except when they fold a tail.
    """
    from hybridmem.memory.kernels import cuda

    (n_heads, n_groups, value_dim, key_dim), n = sizes, sum(lengths)
    state = slots(lengths, (n_heads, value_dim, key_dim), (dtype, dtype, F32) if has_tail else ())
    q, v = zeros(n, n_groups, key_dim, dtype=dtype), zeros(n, n_heads, value_dim, dtype=dtype)
    decay = zeros(n, n_heads, dtype=F32)
    cuda.matrix_scan(q, q, v, decay, Erase(q, None, after_decay=True) if erases else None, state, strength_TH=decay)
    if max(lengths) < 16:
        # In a tail, folding runs once. A few spilled bytes cost less there than fewer programs at a time.
        most = 256 if has_tail else 0
        assert all(kernel.spilled_bytes <= most for kernel in recorder.compiled), recorder.compiled


@pytest.mark.parametrize(
    "kernel, choice",
    one_in(
        3,
        [
            pytest.param("attend", {"block_n": 128, "num_warps": 8, "num_stages": 3}, id="prompt"),
            pytest.param("attend", {"block_n": 128, "num_warps": 4, "num_stages": 5}, id="decode"),
            pytest.param("scan_chunks", {"chunk": 64, "rows": 64, "num_warps": 8, "num_stages": 2}, id="chunks"),
        ],
    ),
)
def test_the_largest_tiles_that_tuning_tries_fit(recorder: Recorder, kernel: str, choice: dict[str, int]) -> None:
    """Tuning skips what does not fit."""
    from benchmarks.gpu_tune import OPTIONS
    from hybridmem.memory.kernels import cuda
    from hybridmem.memory.kernels.cuda.choices import TUNABLES

    assert all(value in OPTIONS[kernel][name] for name, value in choice.items())
    with TUNABLES[kernel].instead(lambda *_: TUNABLES[kernel].checked(choice)):
        if kernel == "attend":
            attend(BF16, (32, 8, 128), 100 if choice["num_warps"] == 8 else 1, PLAIN)
        else:
            q, v = zeros(100, 1, 128, dtype=BF16), zeros(100, 80, 64, dtype=BF16)
            cuda.matrix_scan(q, q, v, zeros(100, 80, dtype=F32), None, slots([100], (80, 64, 128)))


@pytest.mark.parametrize("has_bias", one_in(2, [True, False]), ids=lambda x: "bias" if x else "no bias")
def test_what_the_package_brings_fits_with_all_that_scores_may_have(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, has_bias: bool
) -> None:
    """Tile sizes were measured without windows, caps, sinks and biases.

    The tiles of latent attention are the largest.
    """
    from hybridmem.memory.kernels.cuda import choices

    monkeypatch.setattr(choices, "measured", lambda device: choices.read(choices.shipped_file("sm90"), "sm90"))
    everything = with_all(128)
    attend(BF16, (128, 1, 576), 1, everything if has_bias else everything._replace(bias_HL=None))


def test_prompts_that_fade_by_column(recorder: Recorder) -> None:
    """The prompts are those of RWKV-7 and of Kimi's delta rule."""
    from hybridmem.memory.kernels import cuda

    row = zeros(4096, 40, 64, dtype=BF16)
    rings = (BF16, BF16, F32, BF16, BF16)
    cuda.matrix_scan(row, row, row, row, Erase(row, row, after_decay=False), slots([4096], (40, 64, 64), rings))
    row, strength = zeros(4096, 32, 128, dtype=BF16), zeros(4096, 32, dtype=F32)
    erase, state = Erase(row, None, after_decay=True), slots([4096], (32, 128, 128), rings[:3])
    cuda.matrix_scan(row, row, row, row.float(), erase, state, strength_TH=strength)
    # Kimi's 128 columns do not fit into registers. On an H100, spilling them is still faster than half as many rows.
    assert all(kernel.spilled_bytes <= 96 for kernel in recorder.compiled[:-1]), recorder.compiled
    assert recorder.compiled[-1].spilled_bytes <= 704, recorder.compiled


def test_prompts_that_fade_by_head_with_a_vector_to_erase(recorder: Recorder) -> None:
    """No model has such a recurrence yet. Triton 3.6 could not compile it."""
    from hybridmem.memory.kernels import cuda

    row, decay = zeros(40, 2, 16, dtype=BF16), zeros(40, 2, dtype=F32)
    rings = (BF16, BF16, F32, BF16, BF16)
    cuda.matrix_scan(row, row, row, decay, Erase(row, row, after_decay=False), slots([40], (2, 16, 16), rings))


@only_in_long
@pytest.mark.parametrize("state_dtype", EIGHT_BITS.values(), ids=str)
def test_states_of_8_bits(recorder: Recorder, state_dtype: torch.dtype) -> None:
    """Bodies are read as codes by steps of one token, and decoded for prompts and for Mamba-1."""
    from hybridmem.memory.kernels import cuda

    def run(lengths: list[int]) -> None:
        n, n_heads = sum(lengths), 80
        q, v, decay = zeros(n, 1, 128, dtype=BF16), zeros(n, n_heads, 64, dtype=BF16), zeros(n, n_heads, dtype=F32)
        state = slots(lengths, (n_heads, 64, 128), (BF16, BF16, F32), state_dtype)
        cuda.matrix_scan(q, q, v, decay, None, state, strength_TH=decay)

    run([1] * 128)
    assert [kernel.name for kernel in recorder.compiled] == ["_read_states", "_encode"]
    run([4096])
    assert recorder.compiled[2].name == "_decode"
    row, key, channel = zeros(64, 5120, dtype=BF16), zeros(64, 16, dtype=BF16), zeros(5120, dtype=F32)
    state = slots([1] * 64, (16, 5120), (BF16,) * 3, state_dtype)
    cuda.selective_scan(row, row, channel, key, key, zeros(16, 5120, dtype=F32), channel, state)
    assert all(kernel.spilled_bytes == 0 for kernel in recorder.compiled if kernel.name in ("_decode", "_encode"))


def test_other_recurrences(recorder: Recorder) -> None:
    """Decode steps have 64 sequences. Prompts run through the convolution, and in chunks through Mamba-1."""
    from hybridmem.memory.kernels import cuda
    from hybridmem.memory.kernels.cuda.channel_states import SelectiveScan
    from hybridmem.memory.kernels.cuda.choices import TUNABLES

    one, n, n_channels = [1] * 64, 64, 5120
    row, weight = zeros(n, n_channels, dtype=BF16), zeros(4, n_channels, dtype=BF16)
    for lengths in (one, [n]):
        cuda.causal_conv(row, weight, None, slots(lengths, (3, n_channels), (BF16,), BF16))
    key, rate, channel = zeros(n, 16, dtype=BF16), zeros(16, n_channels, dtype=F32), zeros(n_channels, dtype=F32)
    for rings, lengths in itertools.product(((), (BF16,) * 3), (one, [n // 2 + 1, n // 2 - 1])):
        with TUNABLES["selective_scan"].instead(lambda *_: SelectiveScan(32, n // 4, 1)):
            cuda.selective_scan(row, row, channel, key, key, rate, channel, slots(lengths, (16, n_channels), rings))
    heads = zeros(n, 40, 64, dtype=BF16)  # RWKV-7 has heads like these.
    for rings in ((), (BF16, BF16, F32, BF16, BF16)):
        cuda.matrix_scan(
            heads, heads, heads, heads, Erase(heads, heads, after_decay=False), slots(one, (40, 64, 64), rings)
        )
    assert all(kernel.spilled_bytes == 0 for kernel in recorder.compiled[-2:]), recorder.compiled
    cuda.linear_scan(row, row, slots(one, (n_channels,)))
    cuda.wkv4(row, row, channel, channel, (slots(one, (n_channels,)),) * 3)
    cuda.softplus(row, channel)
    cuda.rms_norm(row, channel, 1e-6, gate_TE=row)
    assert all(kernel.spilled_bytes == 0 for kernel in recorder.compiled), recorder.compiled
