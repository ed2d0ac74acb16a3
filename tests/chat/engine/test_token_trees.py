"""Drafts may be trees. Replies are the same, drawn ones too, and counters count what was verified."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from hybridmem.chat.engine.drafting import Drafting, Speculation
from hybridmem.chat.engine.engine import Engine, Generation
from hybridmem.chat.engine.token_trees import TokenTree, branch, has_branch_at, n_levels, parents_of, right_nodes
from hybridmem.chat.sampling.sampling import Sampling
from hybridmem.memory import HybridMemory, SpecError
from hybridmem.memory.testing.subjects import STORAGES
from tests.chat.engine.test_drafting import Repeating
from tests.chat.engines import draw_sampling, make_memory, run_checked
from tests.extent import few_cases
from tests.toy import VOCAB


def test_branches_share_their_beginning() -> None:
    tree = TokenTree([[5, 6, 7], [5, 8], [9], [5, 6]])
    assert (list(tree), tree.parents, tree.n_first, n_levels(tree)) == ([5, 6, 7, 8, 9], [-1, 0, 1, 0, -1], 3, 3)
    assert right_nodes(tree, [5, 8, 7]) == [0, 3]
    assert right_nodes(tree, [9, 5]) == [4] and right_nodes(tree, [6]) == []
    assert [has_branch_at(tree, n) for n in range(3)] == [True, True, False]


def test_a_chain_is_a_list() -> None:
    draft = branch([5, 6], [[5], [5, 6]])
    assert draft == [5, 6] and not isinstance(draft, TokenTree)
    assert list(parents_of(draft)) == [-1, 0] and right_nodes(draft, [5, 7]) == [0] and not has_branch_at(draft, 0)


Said = dict[int, list[int]]


def draw_path(generator: random.Random, ahead: list[int], most: int) -> list[int]:
    """Draw a path of tokens.

    If the reply is known, most tokens are those of the reply. Otherwise they are arbitrary.
    """
    path = list[int]()
    for i in range(generator.randint(1, most)):
        is_right = i < len(ahead) and generator.random() < 0.7
        path.append(ahead[i] if is_right else generator.randrange(5))
    return path


def drawn_trees(monkeypatch: pytest.MonkeyPatch, seed: int, said: Said) -> Counter[str]:
    """Let all engines draft random trees, and count their paths. `said` has known replies."""
    generator, counts = random.Random(seed), Counter[str]()
    count = Drafting.count

    def propose(self: Drafting, plan: Any) -> dict[Any, list[int]]:
        drafts = dict[Any, list[int]]()
        for job, _ in plan:
            most = 0 if job.is_prefilling or job.ending is not None or not job.wants_choice(1) else 9
            most = min(most, job.request.max_tokens - len(job.generation.token_ids) - 1)
            ahead = said.get(job.generation.id, [])[len(job.generation.token_ids) :]
            if most > 0:
                drafts[job] = TokenTree([draw_path(generator, ahead, most) for _ in range(4)])
        return drafts

    def note(self: Drafting, job: Any, draft: list[int], right: list[int]) -> None:
        counts["trees"] += isinstance(draft, TokenTree)
        counts["beside the first path"] += any(node >= draft.n_first for node in right)  # type: ignore[attr-defined]
        counts["of several tokens"] += len(right) > 1
        count(self, job, draft, right)

    monkeypatch.setattr(Drafting, "propose", propose)
    monkeypatch.setattr(Drafting, "count", note)
    return counts


def replies(seed: int) -> tuple[list[Generation], Engine]:
    generator, model = random.Random(seed), Repeating()
    engine = Engine(model, make_memory(model), None, stop_ids=(4,) if seed % 2 else (), step_tokens=160, max_running=4)
    generations = []
    for _ in range(6):
        prompt = [generator.randrange(VOCAB) for _ in range(generator.randint(1, 30))]
        generations.append(
            engine.submit(
                prompt, max_tokens=generator.randint(0, 30), sampling=draw_sampling(generator), keeps_sequence=True,
                remembers_end=generator.random() < 0.5,
            )
        )  # fmt: skip
    run_checked(engine)
    return generations, engine


@pytest.mark.parametrize("seed", range(4))
def test_replies_and_sequences_are_the_same_with_trees(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replies are greedy or drawn, with penalties and end tokens.

    The sequences hold the same tokens, and no others.
    """
    without, plain = replies(seed)
    counts = drawn_trees(monkeypatch, seed, {g.id: g.token_ids for g in without})
    drafted, engine = replies(seed)
    for a, b in zip(without, drafted, strict=True):
        assert (a.token_ids, a.finish_reason) == (b.token_ids, b.finish_reason)
        assert a.sequence is not None and b.sequence is not None
        assert a.sequence.tokens.tolist() == b.sequence.tokens.tolist()
    assert plain.stats.n_generated == engine.stats.n_generated
    assert sum(g.n_accepted for g in drafted) == engine.stats.n_accepted == sum(engine.stats.accepted_at.values())
    assert min(counts[name] for name in ("trees", "beside the first path", "of several tokens")) > 2


@few_cases
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
def test_drawn_tokens_have_the_same_distribution(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chi-square test of the last two of three tokens, with other seeds than those of plain sampling."""
    n, counts = 300, list[Counter[tuple[int, ...]]]()
    for first_seed in (0, n):
        model = Repeating()
        engine = Engine(model, make_memory(model), None, stop_ids=(), step_tokens=512, max_running=16)
        samplings = [Sampling(temperature=temperature, seed=first_seed + i) for i in range(n)]
        generations = [engine.submit([1, 2], max_tokens=3, sampling=sampling) for sampling in samplings]
        engine.run()
        counts.append(Counter(tuple(g.token_ids[1:]) for g in generations))
        if first_seed == 0:
            drawn_trees(monkeypatch, 0, {})
    common = [key for key in counts[0] | counts[1] if counts[0][key] + counts[1][key] >= 10]
    pairs = [(counts[0][key], counts[1][key]) for key in common]
    # The last pair counts all rarer outcomes together.
    pairs.append((n - sum(a for a, _ in pairs), n - sum(b for _, b in pairs)))
    chi_square = sum((a - b) ** 2 / (a + b) for a, b in pairs if a + b)
    freedom = max(1, len(pairs) - 1)
    assert chi_square < freedom + 4 * (2 * freedom) ** 0.5 + 6


def test_a_memory_that_takes_no_trees_gets_chains(caplog: pytest.LogCaptureFixture) -> None:
    model = Repeating()
    memory = HybridMemory(
        model.memory_spec.with_storage(next(iter(STORAGES.values()))), "4MiB", rollback_window=8, page_tokens=4
    )
    with caplog.at_level("INFO", logger="hybridmem.chat"):
        engine = Engine(
            model, memory, None, stop_ids=(), speculation=Speculation(looks_up=True, adapts=False, branches=4)
        )
    assert "drafts are chains: trees of drafts are not for" in caplog.text
    generation = engine.submit([1, 2, 3, 1, 2, 4, 1, 2], max_tokens=20)
    engine.run()
    assert generation.n_drafted > 0


def test_a_number_of_branches_that_is_none_is_refused() -> None:
    with pytest.raises(SpecError, match="branches=0"):
        Drafting(make_memory(Repeating()), 256, Speculation(branches=0))
