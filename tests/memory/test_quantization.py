"""Rows are kept in few bits. The tests check codes, kernels that read them, and attention against brute force."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from hybridmem.memory import AttentionSpec, HybridMemory, MemorySpec, SpecError
from hybridmem.memory.eviction import H2O, EvictionPolicy, KNorm, Recent
from hybridmem.memory.kernels import FoldedRows, PagedBatch, Scoring, cpu, reference
from hybridmem.memory.quantization import Float8, Quantized, Storage
from tests.extent import few_cases
from tests.inside import kept_positions
from tests.memory.eviction.test_policies import BUDGET, EVERY, WINDOW, BruteForce, Table, assert_no_trace, feed
from tests.subjects import IS_FULL
from tests.tolerances import assert_kernel_close

STORAGES: list[Storage] = [Quantized(8, group=8), Quantized(4, group=4), Quantized(2, group=8), Float8(group=4)]


@pytest.mark.parametrize("by_channel", [True, False])
@pytest.mark.parametrize("bits", [8, 4, 2])
def test_numbers_come_back_to_half_a_scale(bits: int, by_channel: bool) -> None:
    """Groups have any spread and offset; some are constant, and some have outliers."""
    x = (
        torch.randn(3, 16, 32) * torch.tensor([1e-4, 1.0, 300.0])[:, None, None]
        + torch.tensor([0.0, -50.0, 2000.0])[:, None, None]
    )
    x[:, :, 5] = 7.25
    x[1, 3] = -3.0
    storage = Quantized(bits, group=16)
    parts = storage.encode(x, by_channel=by_channel)
    assert [(tuple(p.shape), p.dtype) for p in parts] == list(storage.shapes(3, 16, 32, by_channel=by_channel))
    y = storage.decode(parts)
    grouped = x if by_channel else x.view(3, 16, 2, 16)
    spread = (
        grouped.amax(1, keepdim=True) - grouped.amin(1, keepdim=True)
        if by_channel
        else grouped.amax(-1) - grouped.amin(-1)
    )
    largest = grouped.abs().amax(1, keepdim=True) if by_channel else grouped.abs().amax(-1)
    # A number may be off by half a step of its group. Float16 moves the group's low end and its step by an ulp at most.
    step = (spread + (largest * 2**-10).clamp(min=2**-24)) / (2**bits - 1) * (1 + 2**-10) + 2**-24
    allowed = step / 2 + largest * 2**-21
    assert ((y - x).abs() <= allowed.repeat_interleave(x.shape[-1] // allowed.shape[-1], -1)).all()
    assert (parts[0] >> (8 - bits)).max() == 2**bits - 1, "the highest codes are used"


def test_numbers_that_float16_cannot_hold_are_clipped() -> None:
    for storage in STORAGES:
        x = torch.tensor([1e9, -1e9, 3.0, 0.0] * 4).view(1, 2, 8)
        for by_channel in (True, False):
            assert torch.isfinite(storage.decode(storage.encode(x, by_channel=by_channel))).all()


def test_float8_is_torch_s() -> None:
    x = torch.cat([torch.randn(2, 3, 64) * 10.0**e for e in range(-4, 4)])
    assert torch.equal(
        Float8().decode(Float8().encode(x, by_channel=True)), x.clamp(-448, 448).to(torch.float8_e4m3fn).float()
    )


def test_what_else_is_in_the_batch_changes_no_byte() -> None:
    x = torch.randn(5, 2, 8, 16)
    for storage in STORAGES:
        together = storage.encode(x, by_channel=True)
        for i in range(5):
            assert all(
                torch.equal(a[i], b) for a, b in zip(together, storage.encode(x[i], by_channel=True), strict=True)
            )


def folded_rows(
    storage: Storage, lengths: Seq[int], block_rows: int, n_heads: int, head_dim: int, *, by_channel: bool
) -> FoldedRows:
    """Return random rows of that many requests in an arena of their own. All bytes between them are NaN."""
    shapes = [
        shape
        for is_key in (True, False)
        for shape in storage.shapes(n_heads, block_rows, head_dim, by_channel=by_channel and is_key)
    ]
    sizes = [int(np.prod(shape)) * dtype.itemsize for shape, dtype in shapes]
    places = np.cumsum([0, *(-(-size // 64) * 64 for size in sizes)])
    counts = [-(-n // block_rows) for n in lengths]
    blocks = torch.randperm(sum(counts) + 3)[: sum(counts)].numpy() * places[-1]
    arena = torch.full(((sum(counts) + 3) * int(places[-1]) + 64,), 0xFF, dtype=torch.uint8)
    flats = [
        arena.view(dtype)[place // dtype.itemsize :] for (_, dtype), place in zip(shapes, places[:-1], strict=True)
    ]
    for block in blocks:
        rows = torch.randn(2, n_heads, block_rows, head_dim) * 2 + 1
        parts = [
            part
            for x, is_key in ((rows[0], True), (rows[1], False))
            for part in storage.encode(x, by_channel=by_channel and is_key)
        ]
        for flat, part in zip(flats, parts, strict=True):
            at = int(block) // part.element_size()
            flat[at : at + part.numel()] = part.flatten()
    cu = np.cumsum([0, *counts])
    return FoldedRows(
        storage, tuple(s for s, _ in shapes), tuple(flats), torch.as_tensor(blocks), cu, np.array(lengths), head_dim
    )


@few_cases
@pytest.mark.parametrize("by_channel", [True, False])
@pytest.mark.parametrize("n_heads, n_kv_heads, head_dim", [(2, 2, 8), (6, 2, 24), (7, 1, 64), (8, 4, 16)])
@pytest.mark.parametrize("storage", STORAGES, ids=str)
def test_the_kernel_reads_what_the_reference_reads(
    storage: Storage, n_heads: int, n_kv_heads: int, head_dim: int, by_channel: bool
) -> None:
    """There are few queries or many, and requests without folded rows.

    Some blocks are not full, and there is every kind of score.
    """
    counts, lengths, block_rows = [1, 2, 1, 20], [75, 0, 1, 13], 8 if by_channel else 80
    if by_channel:
        lengths = [-(-n // 8) * 8 for n in lengths]
    folded = folded_rows(storage, lengths, block_rows, n_kv_heads, head_dim, by_channel=by_channel)
    own = [c + extra for c, extra in zip(counts, (0, 70, 3, 0), strict=True)]
    pages = [torch.randperm(90)[: -(-n // 4)] for n in own]
    keys, values = (torch.randn(90 * 4 * n_kv_heads * head_dim) for _ in range(2))
    offsets = torch.cat(pages) * 4 * n_kv_heads * head_dim
    batch = PagedBatch(
        np.cumsum([0, *counts]), np.array(own), offsets, np.cumsum([0, *(len(p) for p in pages)]), page_tokens=4
    )
    q = torch.randn(sum(counts), n_heads, head_dim)
    for scoring in (
        Scoring(0.3),
        Scoring(0.3, softcap=2.0, sinks_H=torch.randn(n_heads)),
        Scoring(0.3, bias_HL=torch.randn(n_heads, 30)),
        Scoring(0.3, bias_HL=torch.randn(len(q), n_heads, 30)),
    ):
        expected = reference.paged_attention(q, keys, values, batch, n_kv_heads, scoring, folded)
        assert_kernel_close(cpu.paged_attention(q, keys, values, batch, n_kv_heads, scoring, folded), expected)
        k, v = reference.gather_folded(folded, 0)
        own_k, own_v = (reference.gather_rows(flat, batch, 0, n_kv_heads, head_dim) for flat in (keys, values))
        alone = reference.attend_rows(q[:1], torch.cat([k, own_k]), torch.cat([v, own_v]), scoring.of(slice(1)))
        assert_kernel_close(expected[:1], alone)


@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("group", [1, 4, 24], ids=["as many scales as channels", "several", "one"])
@pytest.mark.parametrize("bits", [8, 4, 2])
def test_a_block_of_one_row_is_read_by_its_own_scales(bits: int, group: int, by_channel: bool) -> None:
    folded = folded_rows(Quantized(bits, group=group), [1, 0, 1], 1, 2, 24, by_channel=by_channel)
    keys, values = torch.randn(2, 3 * 2 * 24)
    batch = PagedBatch(np.arange(4), np.ones(3, np.int64), torch.arange(3) * 2 * 24, np.arange(4), page_tokens=1)
    arguments = (torch.randn(3, 6, 24), keys, values, batch, 2, Scoring(0.3), folded)
    assert_kernel_close(cpu.paged_attention(*arguments), reference.paged_attention(*arguments))


class FoldedBruteForce(BruteForce):
    """Is `BruteForce` in which a storage rounds the rows that have folded."""

    def __init__(self, model: Table, policy: EvictionPolicy | None, storage: Storage, tokens: Seq[int]) -> None:
        super().__init__(model, policy or Recent(4096, sinks=0, every=storage.group), tokens)
        self.exact, self.group = (self.k, self.v), self.policy.every

        def through(x_TGD: Tensor, *, is_key: bool) -> Tensor:
            by_channel, n = policy is None and is_key, len(x_TGD) // self.group * self.group
            x_BGRD = x_TGD[:n].view(-1, self.group, *x_TGD.shape[1:]).transpose(1, 2)
            decoded = storage.decode(storage.encode(x_BGRD, by_channel=by_channel))
            return torch.cat([decoded.transpose(1, 2).flatten(0, 1), x_TGD[n:]])

        self.folded = through(self.k, is_key=True), through(self.v, is_key=False)

    def show(self, end: int) -> None:
        """Return the rows before `end` as the storage has them, and the others exactly."""
        has_folded = (torch.arange(len(self.k)) < end)[:, None, None]
        self.k, self.v = (torch.where(has_folded, a, b) for a, b in zip(self.folded, self.exact, strict=True))

    def weights(self, queries: range, is_seen_GT: Tensor) -> Tensor:
        is_folding = queries.start < self.length
        self.show(queries.stop if is_folding else self.body_at)
        return super().weights(queries, is_seen_GT)

    def step(self, n_tokens: int) -> Tensor:
        queries = range(self.length, self.length + n_tokens)
        weights = self.weights(queries, self.kept | (torch.arange(len(self.k)) >= self.body_at))
        out = torch.einsum("hnt,thd->nhd", weights, self.v.repeat_interleave(self.n_shared, 1)).flatten(1)
        self.length += n_tokens
        self.fold(max(0, (self.length - WINDOW) // self.group * self.group))
        return out

    def ranks(self, shares_GSNT: Tensor, candidates: Tensor, chunk: range) -> Tensor:
        self.show(chunk.stop)
        return super().ranks(shares_GSNT, candidates, chunk)


@few_cases
@pytest.mark.parametrize("n_heads, n_kv_heads", [(2, 2), (6, 2), (7, 1)])
@pytest.mark.parametrize(
    "policy",
    [None, Recent(BUDGET, every=EVERY), KNorm(BUDGET, every=EVERY), H2O(BUDGET, recent=2, every=EVERY)],
    ids=str,
)
@pytest.mark.parametrize("storage", STORAGES, ids=str)
def test_attention_is_what_brute_force_makes_of_the_same_rows(
    storage: Storage, policy: EvictionPolicy | None, n_heads: int, n_kv_heads: int
) -> None:
    steps = (23, 1, 1, 1, 1, 5, 1, 37, 2, *[1] * 20)
    model = Table(policy, n_heads, n_kv_heads)
    model.memory_spec = model.memory_spec.with_storage(storage)
    memory, tokens = model.memory(page_tokens=4), torch.randperm(512)[: sum(steps)].tolist()
    sequence, oracle, outputs, at = memory.open(), FoldedBruteForce(model, policy, storage, tokens), [], 0
    for n in steps:
        outputs.append(feed(model, memory, sequence, tokens[at : at + n], [n]))
        assert_kernel_close(outputs[-1], oracle.step(n))
        at += n
        if policy is not None:
            kept = kept_positions(memory, sequence)
            assert [row.tolist() for row in kept.T] == [row.nonzero().flatten().tolist() for row in oracle.kept]
    exact = replace(model.memory_spec, layers=((replace(model.memory_spec.layers[0][0], storage=None),),))  # type: ignore[type-var]
    memory = HybridMemory(exact, "4MiB", rollback_window=WINDOW)
    assert not torch.allclose(feed(model, memory, memory.open(), tokens, steps), torch.cat(outputs), atol=1e-4), (
        "nothing was quantised"
    )


@few_cases
@pytest.mark.parametrize("policy", [None, H2O(BUDGET, recent=2, every=EVERY)], ids=str)
@pytest.mark.parametrize("storage", STORAGES, ids=str)
def test_what_was_dropped_leaves_no_trace(storage: Storage, policy: EvictionPolicy | None) -> None:
    model = Table(policy, 6, 2)
    model.memory_spec = model.memory_spec.with_storage(storage)
    assert_no_trace(model, page_tokens=4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, *([torch.float16] if IS_FULL else [])])
@pytest.mark.parametrize("policy", [None, H2O(64, every=64)], ids=str)
def test_memories_of_16_bits(dtype: torch.dtype, policy: EvictionPolicy | None) -> None:
    """Rows in 8 bits give what exact rows give, up to a step of the codes."""
    outputs = []
    for storage in (None, Quantized(8, group=64)):
        spec = MemorySpec(((AttentionSpec(4, 2, 32, policy=policy, storage=storage),),), 512, dtype=dtype)
        model = Table(None, 4, 2)
        model.memory_spec = spec
        generator = torch.Generator().manual_seed(3)
        model.q, model.k, model.v = (torch.randn(512, n, 32, generator=generator).to(dtype) for n in (4, 2, 2))
        memory = HybridMemory(spec, "4MiB", rollback_window=8, poison=True)
        sequence = memory.open()
        outputs.append(feed(model, memory, sequence, list(range(200)), (100, *[1] * 40, 60)).float())
    torch.testing.assert_close(*outputs, atol=0.05, rtol=0)
    assert not torch.equal(*outputs)


def test_bytes_are_those_of_the_codes() -> None:
    """Rows of 4 bits in groups of 64 take at most 30 % of the bytes of float16.

    The arena is measured without the exact tail.
    """
    n_tokens, row_elements = 4096, 2 * 4 * 64
    spec = MemorySpec(((AttentionSpec(4, 4, 64),),) * 2, 512)
    memory = HybridMemory(spec.with_storage(Quantized(4)), "64MiB", rollback_window=32, device="meta")
    sequence = memory.open()
    memory.run(None, {sequence: [1] * n_tokens}, max_tokens=256)
    usage = memory.usage()
    exact, quantised = (
        next(n for kind, n in usage.by_kind.items() if kind.startswith(start)) for start in ("exact", "pages")
    )
    n_folded = (n_tokens - 32) // 64 * 64
    assert sequence.horizon == n_tokens - 32, "before it, a sequence would read the last group exact"
    assert quantised == 2 * n_folded * row_elements * 4.5 / 8 <= 0.30 * 2 * n_folded * row_elements * 2
    assert exact == 2 * (n_tokens - n_folded) * row_elements * 4, "a window, and what is left of a group"
    assert usage.used_bytes == exact + quantised


def test_layers_may_differ_and_read_well() -> None:
    """Layer 0 is exact, layer 1 has 8 bits, and the others have a budget of rows in 4 bits."""
    plain = MemorySpec(((AttentionSpec(4, 2, 16),),) * 4, 512)
    spec = plain.with_storage(Quantized(8, group=16), layers=[1])
    spec = spec.with_policy(H2O(64), layers=[2, 3]).with_storage(Quantized(4, group=16), layers=[2, 3])
    memory = HybridMemory(spec, "16MiB", rollback_window=8, device="meta")
    memory.run(None, {memory.open(): [1] * 300})
    assert list(memory.usage().by_kind) == [
        "pages",
        "exact pages of attention 1, 8 bits",
        "pages of attention 1, 8 bits",
        "states of attention 2, H2O(64) of 4 bits",
        "tails of attention 2, H2O(64) of 4 bits",
    ]
    assert spec.same_memories(plain)
    assert spec.with_policy(None).with_storage(None) == plain
    memory.check()


def test_storages_that_cannot_work_are_refused() -> None:
    for bits in (3, 16, 0, "4", True):
        with pytest.raises(SpecError, match=r"Quantized\.bits is .*choose 8, 4 or 2"):
            Quantized(bits)  # type: ignore[arg-type]
    for group in (0, -8, 1.5, True):
        with pytest.raises(SpecError, match=r"group=.*at least 1 token"):
            Quantized(4, group=group)  # type: ignore[arg-type]

    def refuse(storage: object, match: str, head_dim: int = 64, **options: int) -> None:
        for policy in (None, Recent(64)):
            spec = MemorySpec(((AttentionSpec(2, 1, head_dim, policy=policy),),), 19).with_storage(storage)  # type: ignore[arg-type]
            with pytest.raises(SpecError, match=match):
                HybridMemory(spec, "1MiB", **options)  # type: ignore[arg-type]

    refuse("4 bits", "'4 bits' is no Storage; give an instance")
    refuse(Quantized(4, group=48), "groups of 48 do not divide heads of 64 channels")
    refuse(Quantized(2, group=16), "heads of 7 channels do not fill bytes of 4 codes", head_dim=7)
    with pytest.raises(SpecError, match="groups of 24 tokens are no whole number of pages of 16"):
        HybridMemory(MemorySpec(((AttentionSpec(2, 1, 24),),), 19).with_storage(Quantized(4, group=24)))
    with pytest.raises(SpecError, match="has a window of 5 tokens; storages like"):
        AttentionSpec(1, 1, 8, window=5, storage=Quantized(4))
