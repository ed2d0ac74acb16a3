"""Selected groups of rows in few bits are compared with brute force, which loops over queries, heads and groups."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hybridmem.memory import HybridMemory, SpecError
from hybridmem.memory.eviction import Quest
from hybridmem.memory.kernels import Kernels, Scoring, cpu, reference
from hybridmem.memory.quantization import Float8, Quantized, Storage
from tests.extent import few_cases
from tests.memory.attention.test_selection import EVERY_QUERY, N_TOKENS, PAGE, Table, feed, page_bound
from tests.memory.eviction.test_policies import assert_each_as_alone, assert_no_trace
from tests.memory.kernels.test_kernels import Pages
from tests.memory.test_quantization import STORAGES, folded_rows
from tests.tolerances import assert_kernel_close

WINDOW = 6
"""Of `Table`'s memories."""
STEPS = (9, 1, 1, 17, 1, 3, 1, 1, 1, 20, 1, 1, 1, 1, 1)


def make_model(policy: Quest, storage: Storage | None, n_heads: int, n_kv_heads: int, *, sinks: bool = False) -> Table:
    model = Table(policy, n_heads, n_kv_heads, sinks=sinks)
    model.memory_spec = model.memory_spec.with_storage(storage)
    return model


def brute_force(model: Table, policy: Quest, storage: Storage, tokens: Seq[int], steps: Seq[int]) -> tuple[Tensor, int]:
    """Return outputs, and how many (query, head, group) were left out."""
    group = storage.group
    q, k, v = (x[list(tokens)] for x in (model.q, model.k, model.v))
    n_shared, outputs, n_left_out, start = q.shape[1] // k.shape[1], [], 0, 0

    def stored(x_TGD: Tensor, rows: range, *, is_key: bool) -> Tensor:
        x_GRD = x_TGD[list(rows)].transpose(0, 1)
        return storage.decode(storage.encode(x_GRD, by_channel=is_key)).transpose(0, 1)

    for n in steps:
        groups = [range(at, at + group) for at in range(0, (start - WINDOW) // group * group, group)]
        n_folded = len(groups) * group
        k_seen, v_seen = k.clone(), v.clone()
        for rows in groups:
            k_seen[list(rows)], v_seen[list(rows)] = stored(k, rows, is_key=True), stored(v, rows, is_key=False)
        for t in range(start, start + n):
            parts, newer = [], list(range(n_folded, t + 1))
            for h, q_D in enumerate(q[t]):
                g = h // n_shared
                heads = q[t, g * n_shared : (g + 1) * n_shared]
                read, n_read = groups, policy.budget_tokens // group
                if n <= policy.select_up_to and len(groups) > n_read:
                    always = [r for r in groups if r[0] < policy.sinks or r[-1] > t - policy.recent]
                    best = sorted(
                        (r for r in groups if r not in always), key=lambda r: -page_bound(heads, k[list(r), g])
                    )
                    read = always + best[: n_read - len(always)]
                    n_left_out += len(groups) - len(read)
                rows = [i for r in read for i in r] + newer
                scores = k_seen[rows, g] @ q_D * q_D.shape[0] ** -0.5
                if model.sinks is not None:
                    scores = torch.cat([scores, model.sinks[h, None]])
                parts.append(scores.softmax(0)[: len(rows)] @ v_seen[rows, g])
            outputs.append(torch.cat(parts))
        start += n
    return torch.stack(outputs), n_left_out


@few_cases
@pytest.mark.parametrize("n_heads, n_kv_heads, sinks", [(2, 2, True), (6, 2, False), (7, 1, True)])
@pytest.mark.parametrize(
    "policy",
    [
        Quest(16, recent=1, select_up_to=EVERY_QUERY),
        Quest(24, recent=9, select_up_to=EVERY_QUERY),
        Quest(24, sinks=5, recent=2, select_up_to=1),
    ],
    ids=str,
)
@pytest.mark.parametrize("storage", STORAGES, ids=str)
def test_queries_read_the_groups_that_brute_force_reads(
    storage: Storage, policy: Quest, n_heads: int, n_kv_heads: int, sinks: bool
) -> None:
    model = make_model(policy, storage, n_heads, n_kv_heads, sinks=sinks)
    memory, tokens = model.memory(), torch.randperm(N_TOKENS)[: sum(STEPS)].tolist()
    expected, n_left_out = brute_force(model, policy, storage, tokens, STEPS)
    assert_kernel_close(feed(model, memory, memory.open(), tokens, STEPS), expected)
    assert n_left_out > 20


@pytest.mark.parametrize("storage", STORAGES, ids=str)
def test_a_budget_for_everything_is_the_storage_alone_to_the_bit(storage: Storage) -> None:
    tokens, outputs = torch.randperm(N_TOKENS)[: sum(STEPS)].tolist(), []
    for policy in (None, Quest(64, sinks=4)):
        model = Table(policy, 6, 2)
        model.memory_spec = model.memory_spec.with_storage(storage)
        memory = model.memory()
        outputs.append(feed(model, memory, memory.open(), tokens, STEPS))
    assert torch.equal(*outputs)


@pytest.mark.parametrize("storage", [Quantized(4, group=4), Float8(group=8)], ids=str)
def test_sequences_leave_no_trace_on_each_other_nor_dropped_tokens(storage: Storage) -> None:
    assert_no_trace(make_model(Quest(16, recent=3, select_up_to=EVERY_QUERY), storage, 6, 2))
    assert_each_as_alone(make_model(Quest(16, recent=3), storage, 6, 2))


def test_a_block_holds_two_rows_of_keys_more() -> None:
    held = []
    for policy in (None, Quest(64)):
        model = Table(policy, 6, 2)
        model.memory_spec = model.memory_spec.with_storage(Quantized(8, group=16))
        memory = HybridMemory(model.memory_spec, "4MiB", rollback_window=6, page_tokens=PAGE)
        feed(model, memory, memory.open(), list(range(70)), (70,))
        held.append(next(n for kind, n in memory.usage().by_kind.items() if kind.startswith("pages")))
    n_blocks, row_bytes = (70 - 6) // 16, 2 * 8 * 4
    assert held[1] - held[0] == n_blocks * 2 * row_bytes


@pytest.mark.parametrize("kernels", [cpu, reference])
@pytest.mark.parametrize("storage", STORAGES, ids=str)
def test_each_head_may_read_blocks_of_its_own(kernels: Kernels, storage: Storage) -> None:
    """A head gets the same output as if all heads read its blocks."""
    pages, lengths = Pages(6, 2, 24, 4, lengths=(1, 2, 1, 20), histories=(0, 40, 3, 0)), [64, 0, 8, 16]
    folded = folded_rows(storage, lengths, 8, 2, 24, by_channel=True)
    turned = [folded.blocks.flip(0), folded.blocks]
    own = replace(folded, blocks=torch.stack(turned))

    def attend(rows: object) -> Tensor:
        return kernels.paged_attention(
            pages.q, pages.arena, pages.arena[pages.values_at :], pages.batch, 2, Scoring(0.3), rows
        )  # type: ignore[arg-type]

    expected = [attend(replace(folded, blocks=blocks)) for blocks in turned]
    assert_kernel_close(attend(own), torch.cat([expected[0][:, :3], expected[1][:, 3:]], 1))
    assert not torch.allclose(*expected, atol=1e-3)


def test_a_budget_below_what_is_always_read_is_refused() -> None:
    spec = Table(Quest(100, sinks=4), 2, 1).memory_spec.with_storage(Quantized(4))
    with pytest.raises(
        SpecError, match=r"up to 3 pages of 64 tokens.*give it 192 tokens or more, or Quantized\(.*a smaller group"
    ):
        HybridMemory(spec, "4MiB")


def test_a_plan_that_fails_sets_nothing_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(Quest(16, recent=1), Quantized(4, group=8), 6, 2)
    memory = model.memory()
    sequence = memory.open()
    feed(model, memory, sequence, list(range(53)), (53,))
    used_bytes = memory.usage().used_bytes
    with monkeypatch.context() as patch:
        patch.setattr("hybridmem.memory.attention.selection.PageChoice", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError), memory.step({sequence: [1]}):  # The 54th token folds a group.
            pass
    assert memory.usage().used_bytes == used_bytes and sequence.length == 53
    memory.check()
    feed(model, memory, sequence, [1], (1,))
