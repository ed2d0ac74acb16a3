"""Policies are compared with brute force: all rows stay in one array, and masks say which of them a query may see."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import cache
from typing import ClassVar, Protocol

import pytest
import torch
from torch import Tensor

from hybridmem.memory import AttentionSpec, HybridMemory, MemorySpec, Sequence, SpecError, Step, StepError
from hybridmem.memory.eviction import (
    H2O,
    TOVA,
    Candidates,
    EvictionPolicy,
    ExpectedAttention,
    KNorm,
    PyramidKV,
    Quest,
    Recent,
    Scissorhands,
    SnapKV,
)
from hybridmem.memory.kernels import Scoring
from hybridmem.memory.kernels.blocked import causal_mask
from tests.extent import few_cases
from tests.inside import kept_positions
from tests.tolerances import assert_kernel_close
from tests.toy import VOCAB, Toy

WINDOW, EVERY, BUDGET, DIM = 6, 4, 10, 8
SMALL = {"every": EVERY}
POLICIES: list[EvictionPolicy] = [
    Recent(BUDGET, sinks=3, **SMALL),
    Recent(BUDGET, sinks=0, **SMALL),
    KNorm(BUDGET, **SMALL),
    KNorm(BUDGET, sinks=1, recent=5, **SMALL),
    H2O(BUDGET, recent=2, **SMALL),
    H2O(BUDGET, recent=0, sinks=2, decay=0.7, **SMALL),
    Scissorhands(BUDGET, recent=3, **SMALL),
    TOVA(BUDGET, **SMALL),
    SnapKV(BUDGET, recent=1, observed=3, kernel=3, **SMALL),
    ExpectedAttention(BUDGET, sinks=0, recent=0, decay=0.0, **SMALL),
    ExpectedAttention(BUDGET, recent=2, **SMALL),
]
STEPS = (23, 1, 1, 1, 1, 5, 1, 17, 2, 1, 1, 1, 1, 1, 1, 1)


class Table:
    """A model of one attention layer, which reads queries, keys and values of a token from tables."""

    def __init__(self, policy: EvictionPolicy | None, n_heads: int, n_kv_heads: int, n_tokens: int = 512) -> None:
        self.memory_spec = MemorySpec(((AttentionSpec(n_heads, n_kv_heads, DIM, policy=policy),),), vocab_size=n_tokens)
        self.q, self.k, self.v = (torch.randn(n_tokens, n, DIM) for n in (n_heads, n_kv_heads, n_kv_heads))

    def __call__(self, step: Step) -> Tensor:
        ids = step.token_ids
        return step.select(step.attend(0, self.q[ids], self.k[ids], self.v[ids]).flatten(1))

    def memory(self, **options: object) -> HybridMemory:
        return HybridMemory(self.memory_spec, "4MiB", **({"rollback_window": WINDOW, "poison": True} | options))  # type: ignore[arg-type]


def feed(
    model: Callable[[Step], Tensor], memory: HybridMemory, sequence: Sequence, tokens: Seq[int], steps: Seq[int]
) -> Tensor:
    outputs, at = [], 0
    for n in steps:
        with memory.step({sequence: tokens[at : at + n]}, outputs="all") as step:
            outputs.append(model(step))
        memory.check()
        at += n
    return torch.cat(outputs)


class BruteForce:
    """Is one sequence, from its first token on."""

    def __init__(self, model: Table, policy: EvictionPolicy, tokens: Seq[int]) -> None:
        self.policy = policy
        self.q, self.k, self.v = (x[list(tokens)] for x in (model.q, model.k, model.v))
        n_tokens, n_kv_heads = self.k.shape[:2]
        self.n_shared = self.q.shape[1] // n_kv_heads
        self.kept = torch.zeros(n_kv_heads, n_tokens, dtype=torch.bool)
        self.scores = torch.zeros(n_kv_heads, n_tokens)
        self.body_at = self.length = 0

    def step(self, n_tokens: int) -> Tensor:
        queries = range(self.length, self.length + n_tokens)
        newer = torch.arange(len(self.k)) >= self.body_at
        weights = self.weights(queries, self.kept | newer)
        self.length += n_tokens
        self.fold(max(0, (self.length - WINDOW) // EVERY * EVERY))
        return torch.einsum("hnt,thd->nhd", weights, self.v.repeat_interleave(self.n_shared, 1)).flatten(1)

    def weights(self, queries: range, is_seen_GT: Tensor) -> Tensor:
        """Return (H, N, T): a softmax over all rows, of which most weights are zero."""
        scores = (
            torch.einsum("nhd,thd->hnt", self.q[list(queries)], self.k.repeat_interleave(self.n_shared, 1)) * DIM**-0.5
        )
        is_seen = is_seen_GT.repeat_interleave(self.n_shared, 0)[:, None] & (
            torch.arange(len(self.k)) <= torch.tensor(queries)[:, None]
        )
        return scores.masked_fill(~is_seen, -torch.inf).softmax(-1)

    def fold(self, to: int) -> None:
        for begin in range(self.body_at, to, EVERY):
            chunk = range(begin, begin + EVERY)
            candidates = self.kept.clone()
            candidates[:, list(chunk)] = True
            shares = self.weights(chunk, candidates)
            ranks = self.ranks(shares.unflatten(0, (-1, self.n_shared)), candidates, chunk)
            for g, own in enumerate(candidates):
                places = own.nonzero().flatten().tolist()
                safe = [p for p in places if p < self.policy.sinks or p >= begin + EVERY - self.policy.recent]
                rest = sorted((p for p in places if p not in safe), key=lambda p: (float(ranks[g, p]), p), reverse=True)
                stay = safe + rest[: self.policy.budget_tokens - len(safe)]
                self.kept[g] = False
                self.kept[g, stay] = True
        self.body_at = max(to, self.body_at)

    def ranks(self, shares_GSNT: Tensor, candidates: Tensor, chunk: range) -> Tensor:
        policy, by_head = self.policy, shares_GSNT.mean(1)
        if isinstance(policy, H2O):
            self.scores = torch.where(candidates, self.scores * policy.decay + by_head.sum(1), 0.0)
            return self.scores
        if isinstance(policy, Scissorhands):
            # These are the rows that a query could have seen if each head had kept what this one has.
            n_seen = torch.stack([candidates[0, : i + 1].sum() for i in chunk])
            self.scores = torch.where(
                candidates, self.scores * policy.decay + (by_head * n_seen[:, None] > 1).sum(1), 0.0
            )
            return self.scores
        if isinstance(policy, SnapKV):
            received = by_head[:, -policy.observed :].sum(1)
            smooth = torch.zeros_like(received)
            for g, own in enumerate(candidates):
                places = own.nonzero().flatten()
                padded = torch.cat(
                    [torch.zeros(policy.kernel // 2), received[g, places], torch.zeros(policy.kernel // 2)]
                )
                smooth[g, places] = padded.unfold(0, policy.kernel, 1).mean(-1)
            return smooth
        if isinstance(policy, ExpectedAttention):
            return self.expected(policy, candidates, chunk)
        if isinstance(policy, TOVA):
            return shares_GSNT[:, :, -1].flatten(0, 1).mean(0).expand(len(candidates), -1)
        if isinstance(policy, KNorm):
            return -self.k.norm(dim=-1).T
        return torch.arange(len(self.k)).float().expand(len(candidates), -1)

    def expected(self, policy: ExpectedAttention, candidates: Tensor, chunk: range) -> Tensor:
        """Return scores as the paper writes them, with mean and covariance of the queries."""
        q_NHD, scale = self.q[list(chunk)], DIM**-0.5
        mean_HD = q_NHD.mean(0)
        covariance_HDD = torch.einsum("nhd,nhe->hde", q_NHD - mean_HD, q_NHD - mean_HD) / len(q_NHD)
        shares = torch.zeros_like(self.scores)
        for h, mean_D in enumerate(mean_HD):
            g = h // self.n_shared
            spread = torch.einsum("td,de,te->t", self.k[:, g], covariance_HDD[h], self.k[:, g])
            z = (self.k[:, g] @ mean_D * scale + scale**2 / 2 * spread).masked_fill(~candidates[g], -torch.inf)
            shares[g] += z.softmax(-1) / self.n_shared
        averages = policy.decay * self.scores + (1 - policy.decay) * shares
        averages[:, list(chunk)] = shares[:, list(chunk)]
        self.scores = averages
        return averages * self.v.norm(dim=-1).T


@few_cases
@pytest.mark.parametrize("n_heads, n_kv_heads", [(2, 2), (6, 2), (7, 1)])
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_a_policy_keeps_what_brute_force_keeps(policy: EvictionPolicy, n_heads: int, n_kv_heads: int) -> None:
    model = Table(policy, n_heads, n_kv_heads)
    memory, tokens = model.memory(), torch.randperm(512)[: sum(STEPS)].tolist()
    sequence, oracle, at = memory.open(), BruteForce(model, policy, tokens), 0
    n_evicted = 0
    for n in STEPS:
        assert_kernel_close(feed(model, memory, sequence, tokens[at : at + n], [n]), oracle.step(n))
        at += n
        kept = kept_positions(memory, sequence)
        for g in range(n_kv_heads):
            assert kept[:, g].tolist() == oracle.kept[g].nonzero().flatten().tolist()
        n_evicted = oracle.body_at - len(kept)
    assert n_evicted > BUDGET


@few_cases
@pytest.mark.parametrize(
    "policy",
    [Recent(512), KNorm(512), H2O(512), TOVA(512, every=4), SnapKV(512), Scissorhands(512), ExpectedAttention(512)],
    ids=str,
)
@pytest.mark.parametrize("window", [0, 3, 20])
def test_a_budget_for_everything_is_dense_attention_to_the_bit(policy: EvictionPolicy, window: int) -> None:
    assert torch.equal(toy_outputs(policy, window), toy_outputs(None, window))


@cache
def toy_outputs(policy: EvictionPolicy | None, window: int) -> torch.Tensor:
    toy, generator = Toy(), torch.Generator().manual_seed(0)
    tokens = torch.randint(0, VOCAB, (130,), generator=generator).tolist()
    memory = HybridMemory(toy.memory_spec.with_policy(policy), "2MiB", rollback_window=window, poison=True)
    return feed(toy, memory, memory.open(), tokens, (40, 1, 1, 12, 1, 3, 1, *[1] * 50, 20, 1))


def assert_no_trace(model: Table, **options: object) -> None:
    """Assert that two sequences continue with the same bits if they differ only in tokens that both take back.

    Their forks must do so, too.
    """
    prompt, after = torch.randperm(512)[:90].split([40, 50])
    results = []
    for seed in (1, 2):
        dropped = torch.randint(0, 512, (WINDOW - 1,), generator=torch.Generator().manual_seed(seed)).tolist()
        memory = model.memory(**options)
        sequence = memory.open()
        feed(model, memory, sequence, prompt.tolist(), (30, 10))
        feed(model, memory, sequence, dropped, (3, 1, 1))
        memory.rollback(sequence, to=40)
        fork = memory.fork(sequence)
        parts = [feed(model, memory, s, after.tolist(), (2, *[1] * 30, 18)) for s in (sequence, fork)]
        assert torch.equal(*parts)
        results.append(parts[0])
        memory.close(sequence)
        memory.close(fork)
        assert memory.usage().used_bytes == 0
    assert torch.equal(*results)


@few_cases
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_what_was_dropped_leaves_no_trace(policy: EvictionPolicy) -> None:
    assert_no_trace(Table(policy, 6, 2))


class Remembering(Protocol):
    """Is a model that makes its own memories."""

    def __call__(self, step: Step) -> Tensor: ...
    def memory(self) -> HybridMemory: ...


def assert_each_as_alone(model: Remembering) -> None:
    """Assert that four sequences in a batch, with steps of all lengths, each have the bits of a memory of their own."""
    streams = [torch.randint(0, 512, (60,)).tolist() for _ in range(4)]
    steps = [(20, 1, 9, 30), (7, 7, 1, 45), (1, 30, 28, 1), (33, 1, 1, 25)]
    memory = model.memory()
    sequences, at = [memory.open() for _ in streams], [0] * 4
    parts: list[list[Tensor]] = [[] for _ in streams]
    for sizes in zip(*steps, strict=True):
        requests = {s: stream[a : a + n] for s, stream, a, n in zip(sequences, streams, at, sizes, strict=True)}
        with memory.step(requests, outputs="all") as step:
            for part, rows in zip(parts, step.split(model(step)), strict=True):
                part.append(rows)
        at = [a + n for a, n in zip(at, sizes, strict=True)]
        memory.check()
    for stream, own_steps, part in zip(streams, steps, parts, strict=True):
        alone = model.memory()
        assert torch.equal(feed(model, alone, alone.open(), stream, own_steps), torch.cat(part))


def test_each_sequence_of_a_batch_is_as_it_would_be_alone() -> None:
    assert_each_as_alone(Table(H2O(BUDGET, recent=2, **SMALL), 6, 2))


def test_observed_weights_are_those_of_a_plain_softmax() -> None:
    q, k = torch.randn(5, 6, DIM), torch.randn(2, 30, DIM)
    positions, scoring = torch.arange(30).expand(2, -1), Scoring(0.3)
    rows = Candidates(k, k, positions, torch.zeros(2, 30), q, scoring)
    expected = (
        torch.einsum("nhd,hrd->hnr", q, k.repeat_interleave(3, 0)) * 0.3 + causal_mask(5, 30, None, q.device)
    ).softmax(-1)
    torch.testing.assert_close(rows.weights.flatten(0, 1), expected, atol=1e-5, rtol=0)
    assert rows.weights.sum().item() == pytest.approx(5 * 6, abs=1e-4)


def test_expected_attention_knows_caps_and_sinks() -> None:
    q, k, v, sinks = torch.randn(5, 6, DIM), torch.randn(2, 30, DIM), torch.randn(2, 30, DIM), torch.randn(6)
    rows = Candidates(
        k, v, torch.arange(30).expand(2, -1), torch.zeros(2, 30), q, Scoring(0.7, softcap=2.0, sinks_H=sinks)
    )
    scores = 2 * torch.tanh(torch.einsum("nhd,hrd->hnr", q, k.repeat_interleave(3, 0)) * 0.7 / 2)
    z = torch.cat([scores.mean(1) + scores.var(1, correction=0) / 2, sinks[:, None]], 1)
    expected = z.softmax(-1)[:, :30].unflatten(0, (2, 3)).mean(1) * v.norm(dim=-1)
    new, half = ExpectedAttention(64), ExpectedAttention(64, decay=0.5)
    torch.testing.assert_close(half.rank(rows, half.score(rows))[:, :25], expected[:, :25] / 2)
    torch.testing.assert_close(new.rank(rows, new.score(rows))[:, 25:], expected[:, 25:])


def test_a_budget_may_be_a_share_of_the_longest_sequence() -> None:
    assert H2O.of_ratio(0.2, max_tokens=8192, decay=0.9) == H2O(1638, decay=0.9)
    assert Quest.of_ratio(1, max_tokens=100) == Quest(100)
    assert Recent.of_ratio(0.29, max_tokens=100, sinks=0) == Recent(29, sinks=0)
    for ratio in (0, 0.0, 1.2, -1, True, "half", float("nan")):
        with pytest.raises(SpecError, match=r"a ratio must lie in \(0, 1\]; for tokens write H2O\(n\)"):
            H2O.of_ratio(ratio, max_tokens=100)  # type: ignore[arg-type]
    for max_tokens in (0, 2.5, True):
        with pytest.raises(SpecError, match=r"max_tokens=.*the longest sequence planned"):
            H2O.of_ratio(0.2, max_tokens=max_tokens)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="protects 0 sinks and 16 recent rows, more than its budget of 2"):
        H2O.of_ratio(0.02, max_tokens=100)


def test_evicted_rows_take_no_bytes() -> None:
    """A fifth of 4,096 tokens takes at most 22 % of the bytes of dense attention, and a tail."""
    n_tokens, usages = 4096, []
    for policy in (None, H2O(n_tokens // 5)):
        model = Table(policy, 4, 4)
        memory = HybridMemory(model.memory_spec, "16MiB", rollback_window=32)
        memory.run(model, {memory.open(): torch.randint(0, 512, (n_tokens,)).tolist()}, max_tokens=256)
        usages.append(memory.usage())
    dense, sparse = usages
    tails = next(n for kind, n in sparse.by_kind.items() if kind.startswith("tails"))
    row_bytes = 2 * 4 * DIM * 4
    assert dense.used_bytes == n_tokens * row_bytes
    assert tails <= 66 * (row_bytes + 4 * DIM * 4), "a window, a fold and a little, with queries"
    # Positions and scores take 8 bytes for each row and head. That is a lot beside heads of 8, and little beside heads
    # of 64 or 128.
    assert sparse.used_bytes - tails - n_tokens // 5 * 8 * 4 <= 0.22 * dense.used_bytes


def test_layers_may_have_policies_of_their_own() -> None:
    toy, tokens = Toy(), torch.randint(0, VOCAB, (80,)).tolist()
    spec = toy.memory_spec.with_policy(H2O(8, recent=2, every=4), layers=[0]).with_policy(Recent(12), layers=[2])
    memory = HybridMemory(spec, "4MiB", rollback_window=8, poison=True)
    sequence = memory.open()
    logits = feed(toy, memory, sequence, tokens, (50, *[1] * 30))
    assert torch.isfinite(logits).all()
    names = ("attention 0, H2O(8)", "attention 1, Recent(12)")
    assert [kind for kind in memory.usage().by_kind if "attention" in kind] == [
        f"{p} of {n}" for n in names for p in ("states", "tails")
    ]
    dense = HybridMemory(spec.with_policy(None), "4MiB", rollback_window=8)
    assert not torch.allclose(feed(toy, dense, dense.open(), tokens, (50, *[1] * 30))[-1], logits[-1], atol=1e-3), (
        "nothing was evicted"
    )


def test_budgets_of_a_pyramid_sum_to_the_mean() -> None:
    policy = PyramidKV(100, recent=4)
    budgets = [policy.of_layer(i, 9).budget_tokens for i in range(9)]
    assert budgets == sorted(budgets, reverse=True) and budgets[0] == 195 and budgets[-1] == 5
    assert sum(budgets) / 9 == pytest.approx(100, abs=1)
    assert policy.of_layer(0, 1).budget_tokens == 100


def test_policies_that_cannot_work_are_refused() -> None:
    for wrong in (0, -3, 2.5, True):
        with pytest.raises(SpecError, match=r"Recent\.budget_tokens=.*at least 1 token"):
            Recent(wrong)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="protects 4 sinks and 0 recent rows, more than its budget of 3"):
        Recent(3)
    with pytest.raises(SpecError, match=r"H2O\.decay is 0"):
        H2O(64, decay=0.0)
    with pytest.raises(SpecError, match=r"ExpectedAttention\.decay is 1"):
        ExpectedAttention(64, decay=1)
    with pytest.raises(SpecError, match="kernel is 4; it must be odd"):
        SnapKV(64, kernel=4)
    with pytest.raises(SpecError, match="has a window of 5 tokens"):
        AttentionSpec(1, 1, 8, window=5, policy=Recent(64))
    spec = Toy(window=5).memory_spec
    assert spec.with_policy(Recent(64)).layers[2] == spec.layers[2]
    with pytest.raises(SpecError, match=r"layer 2 of toy has no attention without a window; choose from \[0\]"):
        spec.with_policy(Recent(64), layers=[2])
    with pytest.raises(SpecError, match="'h2o' is no EvictionPolicy"):
        HybridMemory(spec.with_policy("h2o"))  # type: ignore[arg-type]


def test_a_bias_by_distance_needs_every_row() -> None:
    model = Table(Recent(64), 2, 1)
    memory = model.memory()
    with pytest.raises(StepError, match="bias"), memory.step({memory.open(): [1, 2]}) as step:
        step.attend(0, model.q[:2], model.k[:2], model.v[:2], bias=torch.zeros(2, 4))


class Given(EvictionPolicy):
    """Ranks rows as it was told."""

    answers: ClassVar[dict[str, Callable[[Candidates], object]]] = {}

    def score(self, rows: Candidates) -> Tensor:
        return self.answers["score"](rows) if "score" in self.answers else super().score(rows)  # type: ignore[return-value]

    def rank(self, rows: Candidates, scores: Tensor) -> Tensor:
        return self.answers.get("rank", lambda rows: rows.positions.float())(rows)  # type: ignore[return-value]

    def keep(self, rows: Candidates) -> tuple[Tensor, Tensor]:
        return self.answers["keep"](rows) if "keep" in self.answers else super().keep(rows)  # type: ignore[return-value]


def one_nan(rows: Candidates) -> Tensor:
    return torch.where(rows.positions == 3, torch.nan, rows.positions.float())


WRONG_ANSWERS: dict[str, tuple[str, Callable[[Candidates], object], str]] = {
    "a number": (
        "rank",
        lambda rows: 1.0,
        r"Given.rank must give \(key/value heads, rows\) = \(2, 12\) numbers, a tensor, and gave 1.0",
    ),
    "nothing": ("rank", lambda rows: None, "a tensor, and gave None"),
    "a scalar": ("rank", lambda rows: torch.tensor(1.0), r"gave \(\) of torch.float32"),
    "a row": ("rank", lambda rows: torch.arange(rows.positions.shape[1]).float(), r"gave \(12,\)"),
    "a head too few": ("rank", lambda rows: rows.positions[:1].float(), r"gave \(1, 12\)"),
    "a number too many": ("rank", lambda rows: torch.zeros(2, 13), r"gave \(2, 13\)"),
    "complex": ("rank", lambda rows: rows.positions + 1j, "of torch.complex64"),
    "a NaN": ("rank", one_nan, r"below inf, and gave NaN or inf; give -inf"),
    "infinity": ("rank", lambda rows: torch.full((2, 12), torch.inf), "gave NaN or inf"),
    "a scalar score": ("score", lambda rows: torch.tensor(1.0), "Given.score must give"),
    "a NaN score": ("score", one_nan, r"Given.score must give .* gave NaN"),
    "fewer than there is room for": (
        "keep",
        lambda rows: (torch.zeros(2, 3).long(), rows.scores),
        r"must give int64 indices \(2, 10\)",
    ),
    "rows that are not there": ("keep", lambda rows: (torch.arange(3, 13).expand(2, -1), rows.scores), "give 0 to 11"),
}


@pytest.mark.parametrize("what", WRONG_ANSWERS)
def test_a_policy_that_gives_something_else_is_named_and_nothing_has_happened(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A policy is asked when rows fold, after a layer's attention.

    The error ends the step, and its sequence is as it was.
    """
    method, answer, says = WRONG_ANSWERS[what]
    policy, tokens = Given(BUDGET, every=EVERY), list(range(24))
    model = Table(policy, 4, 2)
    memory, fresh = model.memory(), model.memory()
    expected = feed(model, fresh, fresh.open(), tokens, (17, 7))[17:]
    right: dict[str, Callable[[Candidates], object]] = {
        "rank": lambda rows: rows.positions, "score": lambda rows: rows.scores,
        "keep": lambda rows: EvictionPolicy.keep(policy, rows),
    }  # fmt: skip

    def of_twelve(rows: Candidates) -> object:
        return (answer if rows.positions.shape[1] == 12 else right[method])(rows)

    sequence = memory.open()
    feed(model, memory, sequence, tokens, (17,))
    used = memory.usage().used_bytes
    with monkeypatch.context() as context:
        context.setattr(Given, "answers", {method: of_twelve})
        with pytest.raises(SpecError, match=says), memory.step({sequence: tokens[17:]}) as step:
            model(step)
    memory.check()
    assert (sequence.length, memory.usage().used_bytes) == (17, used)
    assert torch.equal(feed(model, memory, sequence, tokens[17:], (7,)), expected)


def test_a_rank_of_minus_infinity_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Given, "answers", {"rank": lambda rows: torch.where(rows.positions < 7, -torch.inf, -rows.positions.float())}
    )
    model = Table(Given(BUDGET, sinks=1, every=EVERY), 4, 2)
    memory = model.memory()
    sequence = memory.open()
    feed(model, memory, sequence, range(40), (40,))
    kept = kept_positions(memory, sequence)
    assert kept[:, 0].tolist() == [0, *range(7, 16)]


def test_a_model_that_gives_nan_fails_no_step() -> None:
    """Only the outputs of its own sequence show it. Neither the policy nor other requests of the step are affected."""
    for policy in (KNorm(BUDGET, every=EVERY), H2O(BUDGET, recent=2, every=EVERY)):
        model = Table(policy, 4, 2)
        model.k[5] = torch.nan
        memory, alone = model.memory(), model.memory()
        bad, good, other = memory.open(), memory.open(), alone.open()
        for begin in range(0, 48, 8):
            with memory.step({bad: range(begin, begin + 8), good: range(begin + 100, begin + 108)}) as step:
                outputs = model(step)
            with alone.step({other: range(begin + 100, begin + 108)}) as step:
                assert_kernel_close(outputs[1:], model(step))
        memory.check()


def test_weights_are_for_policies_that_ask_for_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Given, "answers", {"rank": lambda rows: rows.weights.sum((1, 2))})
    model = Table(Given(BUDGET, every=EVERY), 4, 2)
    memory = model.memory()
    with pytest.raises(SpecError, match=r"needs_queries: ClassVar\[bool\] = True"):
        feed(model, memory, memory.open(), range(40), (40,))


def test_other_hooks_of_a_policy() -> None:
    class Nowhere(Recent):
        def of_layer(self, number: int, n_layers: int) -> EvictionPolicy:
            return None  # type: ignore[return-value]

    class Often(Recent):
        needs_queries: ClassVar[bool] = 2  # type: ignore[assignment]

    @dataclass(frozen=True)
    class Listing(Recent):
        rows: list[int] = field(default_factory=list)

    with pytest.raises(SpecError, match=r"Nowhere.of_layer gave None; it must give a policy"):
        Table(Nowhere(BUDGET), 1, 1).memory()
    with pytest.raises(SpecError, match=r"Often.needs_queries is 2"):
        Often(BUDGET)
    with pytest.raises(SpecError, match="Listing has a field that cannot be hashed"):
        Table(Listing(BUDGET), 1, 1).memory()
