"""Selected pages are compared with brute force, which loops over queries, heads and pages."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hybridmem.memory import UNROTATED, AttentionSpec, HybridMemory, MemorySpec, Sequence, SpecError, Step, StepError
from hybridmem.memory.eviction import H2O, Quest
from hybridmem.memory.kernels.reference import page_scores
from tests.extent import few_cases
from tests.memory.eviction.test_policies import assert_each_as_alone
from tests.tolerances import assert_kernel_close
from tests.toy import VOCAB, Toy

PAGE, DIM, N_TOKENS = 4, 8, 512
EVERY_QUERY = 10**6
POLICIES = [
    Quest(12, recent=1, select_up_to=EVERY_QUERY),
    Quest(18, recent=6, select_up_to=EVERY_QUERY),
    Quest(20, sinks=5, recent=2, select_up_to=EVERY_QUERY),
]


class Table:
    """A model of one attention layer, which reads queries, keys and values from tables.

    `sinks` has a learned sink for each head.
    """

    def __init__(
        self,
        policy: Quest | None,
        n_heads: int,
        n_kv_heads: int,
        *,
        sinks: bool = False,
        dtype: torch.dtype = torch.float32,
    ):
        spec = AttentionSpec(n_heads, n_kv_heads, DIM, policy=policy, rotation=UNROTATED)
        self.memory_spec = MemorySpec(((spec,),), vocab_size=N_TOKENS, dtype=dtype)
        generator = torch.Generator().manual_seed(3)
        heads = (n_heads, n_kv_heads, n_kv_heads)
        self.q, self.k, self.v = (torch.randn(N_TOKENS, n, DIM, generator=generator).to(dtype) for n in heads)
        self.sinks = torch.randn(n_heads, generator=generator) if sinks else None

    def __call__(self, step: Step) -> Tensor:
        ids = step.token_ids
        return step.select(step.attend(0, self.q[ids], self.k[ids], self.v[ids], sinks=self.sinks).flatten(1))

    def memory(self) -> HybridMemory:
        return HybridMemory(self.memory_spec, "4MiB", rollback_window=6, page_tokens=PAGE, poison=True)


def feed(model: Table | Toy, memory: HybridMemory, sequence: Sequence, tokens: Seq[int], steps: Seq[int]) -> Tensor:
    outputs, at = [], 0
    for n in steps:
        with memory.step({sequence: tokens[at : at + n]}, outputs="all") as step:
            outputs.append(model(step))
        memory.check()
        at += n
    return torch.cat(outputs)


def brute_force(model: Table, policy: Quest, tokens: Seq[int], first: int = 0) -> tuple[Tensor, int]:
    """Return outputs of tokens[first:], each of which selects, and how many (query, head, page) were left out."""
    q, k, v = (x[list(tokens)].float() for x in (model.q, model.k, model.v))
    n_shared, outputs, n_left_out = q.shape[1] // k.shape[1], [], 0
    for t in range(first, len(q)):
        q_HD, parts = q[t], []
        for h, q_D in enumerate(q_HD):
            g = h // n_shared
            group = q_HD[g * n_shared : (g + 1) * n_shared]
            pages = [range(p, min(p + PAGE, t + 1)) for p in range(0, t + 1, PAGE)]
            always = [p for p in pages if p[0] < policy.sinks or p[-1] > t - policy.recent]
            best = sorted((p for p in pages if p not in always), key=lambda p: -page_bound(group, k[list(p), g]))
            read = always + best[: policy.budget_tokens // PAGE - len(always)]
            n_left_out += len(pages) - len(read)
            rows = [i for p in read for i in p]
            scores = k[rows, g] @ q_D * DIM**-0.5
            if model.sinks is not None:
                scores = torch.cat([scores, model.sinks[h, None]])
            parts.append(scores.softmax(0)[: len(rows)] @ v[rows, g])
        outputs.append(torch.cat(parts))
    return torch.stack(outputs), n_left_out


def page_bound(group: Tensor, keys: Tensor) -> float:
    return max(float(torch.maximum(q_D * keys.amin(0), q_D * keys.amax(0)).sum()) for q_D in group)


@few_cases
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("n_heads, n_kv_heads", [(2, 2), (6, 2), (7, 1)])
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_queries_read_the_pages_that_brute_force_reads(
    policy: Quest, n_heads: int, n_kv_heads: int, sinks: bool
) -> None:
    model = Table(policy, n_heads, n_kv_heads, sinks=sinks)
    memory, tokens = model.memory(), torch.randperm(N_TOKENS)[:60].tolist()
    expected, n_left_out = brute_force(model, policy, tokens)
    assert_kernel_close(
        feed(model, memory, memory.open(), tokens, (9, 1, 1, 17, 1, 3, 1, 1, 1, 20, 1, 1, 1, 1, 1)), expected
    )
    assert n_left_out > 100


def test_pages_that_a_drop_has_filled_anew_are_found_like_others() -> None:
    policy = POLICIES[0]
    model, tokens = Table(policy, 6, 2), torch.randperm(N_TOKENS)[:70].tolist()
    for start, end in ((3, 21), (8, 16), (0, 5), (30, 41)):
        memory = model.memory()
        sequence = memory.open()
        feed(model, memory, sequence, tokens[:50], (50,))
        memory.drop(sequence, start, end)
        kept = tokens[:start] + tokens[end:]
        expected, n_left_out = brute_force(model, policy, kept, first=len(kept) - 20)
        assert_kernel_close(feed(model, memory, sequence, kept[-20:], (1, 5, *[1] * 14)), expected)
        assert n_left_out > 100


def test_prompts_read_everything_and_steps_of_few_tokens_select() -> None:
    policy = Quest(12, recent=1, select_up_to=3)
    model, tokens = Table(policy, 6, 2), torch.randperm(N_TOKENS)[:50].tolist()
    dense, memory = Table(None, 6, 2), model.memory()
    expected, _ = brute_force(model, policy, tokens)
    other = dense.memory()
    full = feed(dense, other, other.open(), tokens, (40, 3, 4, 3))
    found = feed(model, memory, memory.open(), tokens, (40, 3, 4, 3))
    selects = torch.zeros(50, dtype=torch.bool)
    selects[40:43] = selects[47:] = True
    assert torch.equal(found[~selects], full[~selects])
    assert_kernel_close(found[selects], expected[selects])
    assert not torch.allclose(found[selects], full[selects], atol=1e-3)


@given(st.integers(0, 2**31), st.sampled_from([1, 3, 7]), st.integers(1, 6))
def test_a_page_scores_no_less_than_any_of_its_keys(seed: int, n_shared: int, page_tokens: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2 * n_shared, DIM, generator=generator), torch.randn(5, page_tokens, 2, DIM, generator=generator)
    found = page_scores(q, k.amin(1), k.amax(1))
    true = torch.einsum("gsd,npgd->gnps", q.view(2, n_shared, DIM), k).amax((2, 3))
    assert (found >= true - 1e-5).all()
    if page_tokens == 1:
        torch.testing.assert_close(found, true)
    by_definition = torch.tensor(
        [[page_bound(q[g * n_shared : (g + 1) * n_shared], page[:, g]) for page in k] for g in range(2)]
    )
    torch.testing.assert_close(found, by_definition)


@pytest.mark.parametrize("window", [0, 3, 20])
def test_a_budget_for_everything_is_dense_attention_to_the_bit(window: int) -> None:
    toy = Toy()
    tokens, steps = torch.randint(0, VOCAB, (130,)).tolist(), (40, 1, 1, 12, 1, 3, 1, *[1] * 50, 20, 1)
    outputs = []
    for spec in (toy.memory_spec, toy.memory_spec.with_policy(Quest(132, sinks=4))):
        memory = HybridMemory(spec, "2MiB", rollback_window=window, page_tokens=PAGE, poison=True)
        outputs.append(feed(toy, memory, memory.open(), tokens, steps))
    assert torch.equal(*outputs)


@few_cases
@pytest.mark.parametrize("seed", range(4))
def test_whatever_was_dropped_shared_or_aborted_leaves_no_trace(seed: int) -> None:
    """Random steps, rollbacks, forks and reorderings give the outputs of brute force.

    Some steps are accepted in part or not at all.
    """
    policy, rng = POLICIES[seed % len(POLICIES)], random.Random(seed)
    model = Table(policy, 3, 1)
    memory = model.memory()
    held: dict[Sequence, list[int]] = {memory.open(): [] for _ in range(2)}
    n_back = 0
    for _ in range(60):
        sequence = rng.choice(list(held))
        what = rng.choice(["step"] * 5 + ["rollback", "rollback", "fork", "reorder"])
        if what == "step":
            chosen = rng.sample(list(held), rng.randint(1, len(held)))
            fed = {s: [rng.randrange(N_TOKENS) for _ in range(rng.choice((1, 1, 2, 9)))] for s in chosen}
            accepted = {s: rng.randint(0, len(tokens)) for s, tokens in fed.items() if rng.random() < 0.4}
            with memory.step(fed, outputs="all") as step:
                rows = step.split(model(step))
                step.accept(accepted)
            for s, found in zip(fed, rows, strict=True):
                assert_kernel_close(found, brute_force(model, policy, held[s] + fed[s], len(held[s]))[0])
                held[s] += fed[s][: accepted.get(s, len(fed[s]))]
        elif what == "rollback":
            to = rng.randint(0, len(held[sequence]))
            memory.rollback(sequence, to=to)
            n_back += len(held[sequence]) - to
            del held[sequence][to:]
        elif what == "fork" and len(held) < 4:
            held[memory.fork(sequence)] = list(held[sequence])
        elif what == "reorder":
            sources = {target: rng.choice(list(held)) for target in held}
            memory.reorder(sources)
            held = {target: list(held[source]) for target, source in sources.items()}
        memory.check()
        assert [s.length for s in held] == [len(tokens) for tokens in held.values()]
    assert n_back
    for sequence in held:
        memory.close(sequence)
    assert memory.usage().used_bytes == 0


def test_after_a_rollback_bits_are_those_of_a_sequence_that_never_saw_what_was_dropped() -> None:
    model = Table(POLICIES[0], 6, 2)
    tokens = torch.randperm(N_TOKENS)[:90].tolist()
    results = []
    for seed in (None, 1, 2):
        memory = model.memory()
        sequence = memory.open()
        feed(model, memory, sequence, tokens[:41], (30, 11))
        if seed is not None:  # Go back over three full pages, and then over tokens that fill the cut page differently.
            dropped = torch.randint(0, N_TOKENS, (13,), generator=torch.Generator().manual_seed(seed)).tolist()
            memory.rollback(sequence, to=30)
            feed(model, memory, sequence, dropped, (3, 9, 1))
            memory.rollback(sequence, to=30)
            feed(model, memory, sequence, tokens[30:41], (11,))
        fork = memory.fork(sequence)
        parts = [feed(model, memory, s, tokens[41:], (2, *[1] * 30, 17)) for s in (sequence, fork)]
        assert torch.equal(*parts)
        results.append(parts[0])
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_each_sequence_of_a_batch_is_as_it_would_be_alone() -> None:
    assert_each_as_alone(Table(Quest(12, recent=3), 6, 2))


def test_any_dtype_selects() -> None:
    policy = POLICIES[1]
    model = Table(policy, 6, 2, dtype=torch.bfloat16)
    memory, tokens = model.memory(), torch.randperm(N_TOKENS)[:50].tolist()
    found = feed(model, memory, memory.open(), tokens, (30, *[1] * 20))
    torch.testing.assert_close(found.float(), brute_force(model, policy, tokens)[0], atol=0.02, rtol=0.02)


def test_a_page_holds_two_rows_of_keys_more() -> None:
    model = Table(Quest(24), 6, 2)
    memory = HybridMemory(model.memory_spec, "4MiB", page_tokens=8)
    feed(model, memory, memory.open(), list(range(64)), (64,))
    assert memory.usage().by_kind == {"pages of attention 0, Quest(24)": 8 * (2 * 8 + 2) * 2 * DIM * 4}


def test_layers_may_select_evict_or_neither() -> None:
    toy, tokens = Toy(), torch.randint(0, VOCAB, (80,)).tolist()
    spec = toy.memory_spec.with_policy(Quest(32), layers=[0]).with_policy(H2O(24, every=4), layers=[2])
    memory = HybridMemory(spec, "4MiB", rollback_window=8, poison=True)
    assert torch.isfinite(feed(toy, memory, memory.open(), tokens, (50, *[1] * 30))).all()
    both = HybridMemory(toy.memory_spec.with_policy(Quest(32), layers=[0]).with_policy(Quest(48), layers=[2]), "4MiB")
    assert [n for n in both.usage().by_kind if "attention" in n] == [
        f"pages of attention {i}, Quest({n})" for i, n in ((0, 32), (1, 48))
    ]
    dry = HybridMemory(spec, "4MiB", device="meta")
    dry.run(None, {dry.open(): tokens})
    dry.check()


def test_a_selection_that_cannot_work_is_refused() -> None:
    with pytest.raises(SpecError, match=r"Quest\.recent=0; it must be an integer of at least 1"):
        Quest(64, recent=0)
    spec = Toy().memory_spec
    with pytest.raises(
        SpecError, match=r"always reads up to 3 pages of 16 tokens, for 4 sinks and 16 recent rows; give it 48 tokens"
    ):
        HybridMemory(spec.with_policy(Quest(47, sinks=4)), "4MiB")
    HybridMemory(spec.with_policy(Quest(48, sinks=4)), "4MiB")
    with pytest.raises(SpecError, match="has a window of 5 tokens"):
        AttentionSpec(1, 1, 8, window=5, policy=Quest(64))
    model = Table(Quest(64), 2, 1)
    memory = model.memory()
    with pytest.raises(StepError, match="bias"), memory.step({memory.open(): [1, 2]}) as step:
        step.attend(0, model.q[:2], model.k[:2], model.v[:2], bias=torch.zeros(2, 4))
