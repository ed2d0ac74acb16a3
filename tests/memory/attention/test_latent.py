"""In latent attention, values are a part of the keys, in one row for each token (DeepSeek-AI 2024, "DeepSeek-V2")."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hybridmem.memory import AttentionSpec, HybridMemory, MemorySpec, Sequence, SpecError, Step, StepError
from hybridmem.memory.eviction import H2O, TOVA, EvictionPolicy, KNorm, Recent
from tests.inside import kept_positions
from tests.tolerances import assert_kernel_close

H, LATENT, ROTARY, NOPE, VALUE = 5, 12, 4, 7, 6
SPEC = AttentionSpec(H, 1, LATENT + ROTARY, value_dim=LATENT)
N_IDS, SCALE = 256, (NOPE + ROTARY) ** -0.5
STEPS = (23, 1, 1, 5, 1, 17, 2, 1, 1, 1)


class LatentTable:
    """A model of one attention layer, which reads what is known of a token from tables.

    `keys_up` and `values_up` map a latent to the keys and values of each head. The memory never makes these.
    """

    def __init__(self, spec: AttentionSpec = SPEC) -> None:
        self.memory_spec = MemorySpec(((spec,),), vocab_size=N_IDS)
        self.q_nope, self.q_rotary = torch.randn(N_IDS, H, NOPE), torch.randn(N_IDS, H, ROTARY)
        self.rows = torch.randn(N_IDS, LATENT + ROTARY)
        self.keys_up, self.values_up = torch.randn(H, NOPE, LATENT) * LATENT**-0.5, torch.randn(H, VALUE, LATENT)

    def __call__(self, step: Step) -> Tensor:
        ids = step.token_ids
        q = torch.cat([torch.einsum("thn,hnl->thl", self.q_nope[ids], self.keys_up), self.q_rotary[ids]], -1)
        y = step.attend(0, q, self.rows[ids, None], scale=SCALE)
        return step.select(torch.einsum("thl,hvl->thv", y, self.values_up))

    def expected(self, ids: Seq[int], window: int | None = None) -> Tensor:
        """Return outputs (T, H, VALUE): make the keys and values of each head, and take a softmax over all of them."""
        ids, (latents, rotary) = list(ids), self.rows.split([LATENT, ROTARY], -1)
        keys = torch.cat([torch.einsum("tl,hnl->htn", latents[ids], self.keys_up), rotary[ids].expand(H, -1, -1)], -1)
        q = torch.cat([self.q_nope, self.q_rotary], -1)[ids].transpose(0, 1)
        distance = torch.arange(len(ids))[:, None] - torch.arange(len(ids))
        is_hidden = (distance < 0) | (distance >= (window or len(ids)))
        weights = (q @ keys.mT * SCALE).masked_fill(is_hidden, -torch.inf).softmax(-1)
        return (weights @ torch.einsum("tl,hvl->htv", latents[ids], self.values_up)).transpose(0, 1)


def feed(model: object, memory: HybridMemory, sequence: Sequence, tokens: Seq[int], steps: Seq[int] = STEPS) -> Tensor:
    outputs, at = [], 0
    for n in steps:
        with memory.step({sequence: tokens[at : at + n]}, outputs="all") as step:
            outputs.append(model(step))  # type: ignore[operator]
        memory.check()
        at += n
    return torch.cat(outputs)


@pytest.mark.parametrize("window", [None, 7])
def test_latents_give_what_keys_and_values_of_all_heads_give(window: int | None) -> None:
    model = LatentTable(replace(SPEC, window=window))
    memory = HybridMemory(model.memory_spec, "1MiB", rollback_window=4, page_tokens=4, poison=True)
    tokens = torch.randperm(N_IDS)[: sum(STEPS)].tolist()
    sequence = memory.open()
    assert_kernel_close(feed(model, memory, sequence, tokens), model.expected(tokens, window))
    fork = memory.fork(sequence)
    memory.rollback(sequence, to=len(tokens) - 3)
    for other, kept in ((sequence, tokens[:-3]), (fork, tokens)):
        assert_kernel_close(
            feed(model, memory, other, [9, 8, 7], [1, 2]), model.expected([*kept, 9, 8, 7], window)[-3:]
        )


def test_each_request_of_a_batch_reads_its_own_latents() -> None:
    model = LatentTable()
    memory = HybridMemory(model.memory_spec, "1MiB", page_tokens=4, poison=True)
    prompts = [torch.randperm(N_IDS)[:n].tolist() for n in (9, 1, 30, 4)]
    with memory.step([(memory.open(), prompt) for prompt in prompts], outputs="all") as step:
        parts = step.split(model(step))
    for part, prompt in zip(parts, prompts, strict=True):
        assert_kernel_close(part, model.expected(prompt))


def test_a_page_holds_one_row_a_token() -> None:
    """With DeepSeek-V2's sizes, a token takes 576 elements in each layer.

    Keys and values of its 128 heads would take 57 times as many.
    """
    sizes = {"latent": AttentionSpec(128, 1, 576, value_dim=512), "expanded": AttentionSpec(128, 128, 128)}
    pages = {}
    for name, attention in sizes.items():
        spec = MemorySpec(((attention,), (), (attention,)), vocab_size=8, dtype=torch.bfloat16)
        memory = HybridMemory(spec, "1GiB", page_tokens=16, device="meta")
        memory.run(None, {memory.open(): [1] * 100})
        pages[name] = memory.usage().block_bytes["pages"]
        assert memory.usage().used_bytes == 7 * pages[name]
    assert pages == {"latent": 2 * 16 * 576 * 2, "expanded": 2 * 16 * 128 * (128 + 128) * 2}


def test_layers_of_both_kinds_share_pages() -> None:
    """Values of one layer must not be read from where the next layer has its keys."""
    latent, dense = AttentionSpec(2, 1, 8, value_dim=6), AttentionSpec(2, 2, 4)
    spec = MemorySpec(((dense,), (latent,), (dense, replace(latent, name="other"))), vocab_size=8)
    names = ("attention", "attention", "attention", "other")
    layers, specs = (0, 1, 2, 2), (dense, latent, dense, latent)
    q, k, v = (
        [torch.randn(20, n, s.head_dim) for s in specs for n in [s.n_query_heads if x == "q" else s.n_kv_heads]]
        for x in "qkv"
    )
    memory = HybridMemory(spec, "1MiB", page_tokens=4, poison=True)
    sequence, outputs = memory.open(), []
    for at in (slice(0, 18), slice(18, 20)):
        with memory.step({sequence: [1] * (at.stop - at.start)}) as step:
            outputs.append([
                step.attend(layer, q[i][at], k[i][at], None if s.value_dim else v[i][at], name=name)
                for i, (layer, s, name) in enumerate(zip(layers, specs, names, strict=True))
            ])  # fmt: skip
    for i, s in enumerate(specs):
        values = k[i][..., :6] if s.value_dim else v[i]
        n_shared = s.n_query_heads // s.n_kv_heads
        scores = torch.einsum("nhd,thd->hnt", q[i], k[i].repeat_interleave(n_shared, 1)) * s.head_dim**-0.5
        weights = scores.masked_fill(torch.ones(20, 20).triu(1).bool(), -torch.inf).softmax(-1)
        expected = torch.einsum("hnt,thd->nhd", weights, values.repeat_interleave(n_shared, 1))
        assert_kernel_close(torch.cat([part[i] for part in outputs]), expected)


class Values(EvictionPolicy):
    """Ranks rows by the lengths of their values."""

    def rank(self, rows, scores):
        assert rows.values.shape == (2, rows.positions.shape[1], 5)
        return rows.values.norm(dim=-1)


@pytest.mark.parametrize(
    "policy", [Recent(9, sinks=2, every=4), KNorm(9, every=4), H2O(9, recent=2, every=4), TOVA(9, every=4)], ids=str
)
def test_a_policy_chooses_as_if_the_values_were_rows_of_their_own(policy: EvictionPolicy) -> None:
    """There are two key/value heads.

    A dense spec gets the same keys and gets their parts as values, too. It keeps the same rows and gives the same bits.
    """
    q, k = torch.randn(N_IDS, 4, 8), torch.randn(N_IDS, 2, 8)
    tokens = torch.randperm(N_IDS)[: sum(STEPS)].tolist()
    outputs, bytes_held, kept = [], [], []
    for value_dim in (None, 5):
        spec = MemorySpec(((AttentionSpec(4, 2, 8, policy=policy, value_dim=value_dim),),), vocab_size=N_IDS)
        memory = HybridMemory(spec, "1MiB", rollback_window=6, poison=True)

        def model(step: Step, value_dim: int | None = value_dim) -> Tensor:
            ids = step.token_ids
            return step.select(step.attend(0, q[ids], k[ids], k[ids] if value_dim is None else None))

        sequence = memory.open()
        before = feed(model, memory, sequence, tokens)
        memory.rollback(sequence, to=len(tokens) - 3)
        outputs.append(torch.cat([before, feed(model, memory, memory.fork(sequence), tokens, (1, 20, 1))]))
        kept.append(kept_positions(memory, sequence))
        bytes_held.append(memory.usage().block_bytes)
    assert torch.isfinite(outputs[1]).all() and torch.equal(outputs[0][..., :5], outputs[1])
    assert torch.equal(*kept) and len(kept[0]) == 9
    states, tails = sorted(bytes_held[0])
    row_bytes = 2 * 8 * 4
    assert (
        bytes_held[0][states] - bytes_held[1][states] == (9 + 8) * row_bytes
    )  # These are the budget, and the rows that two folds may have evicted within a window of 6.
    assert bytes_held[0][tails] / bytes_held[1][tails] == (4 / 3 if policy.needs_queries else 2)


def test_a_policy_is_shown_values_of_their_own_size() -> None:
    spec = MemorySpec(((AttentionSpec(4, 2, 8, policy=Values(9, every=4), value_dim=5),),), vocab_size=N_IDS)
    memory, k = HybridMemory(spec, "1MiB", rollback_window=6, poison=True), torch.randn(30, 2, 8)
    sequence = memory.open()
    with memory.step({sequence: range(30)}) as step:
        step.attend(0, torch.randn(30, 4, 8), k)
    kept = kept_positions(memory, sequence)
    candidates: list[set[int]] = [set(), set()]
    for fold in range(0, 24, 4):
        for g in range(2):
            ranked = sorted(candidates[g] | set(range(fold, fold + 4)), key=lambda p, g=g: -float(k[p, g, :5].norm()))  # type: ignore[misc]
            candidates[g] = set(ranked[:9])
    assert [set(kept[:, g].tolist()) for g in range(2)] == candidates


@pytest.mark.parametrize("policy", [None, Recent(64)], ids=str)
def test_values_are_given_where_the_spec_wants_them_and_nowhere_else(policy: EvictionPolicy | None) -> None:
    q, k = torch.zeros(2, 2, 8), torch.zeros(2, 1, 8)
    for value_dim, v, named in (
        (None, None, "v is missing.*value_dim"), (6, k, "v is given.*first 6 elements.*leave v out"),
        (6, k[..., :6], "v is given"), (6, 3, "v is 3, not a tensor"),
    ):  # fmt: skip
        spec = MemorySpec(((AttentionSpec(2, 1, 8, value_dim=value_dim, policy=policy),),), vocab_size=4)
        memory = HybridMemory(spec, "1MiB")
        sequence = memory.open()
        with pytest.raises(StepError, match=named), memory.step({sequence: [1, 2]}) as step:
            step.attend(0, q, k, v)  # type: ignore[arg-type]
        assert sequence.length == 0


def test_sizes_that_cannot_be_are_refused() -> None:
    for wrong in (0, True, 2.0):
        with pytest.raises(SpecError, match=r"AttentionSpec\.value_dim="):
            AttentionSpec(2, 1, 8, value_dim=wrong)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="value_dim is 9, but values are a part of keys of 8"):
        AttentionSpec(2, 1, 8, value_dim=9)
    assert AttentionSpec(2, 1, 8, value_dim=8).n_parts == 1


def test_a_memory_of_other_values_is_another_models() -> None:
    model = LatentTable()
    for value_dim in (None, LATENT - 1):
        other = replace(model.memory_spec, layers=((replace(SPEC, value_dim=value_dim),),))
        assert not other.same_memories(model.memory_spec)
    assert model.memory_spec.with_policy(Recent(64)).same_memories(model.memory_spec)
