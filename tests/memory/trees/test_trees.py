"""Draft trees run beside chains. The tests say what they give, what they leave in the memory, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridmem.memory import BatchError, CapacityError, HybridMemory, Sequence, SequenceError, SpecError, StepError
from hybridmem.memory.eviction import H2O, Quest
from hybridmem.memory.quantization import Quantized
from hybridmem.memory.recurrences import FAMILIES
from hybridmem.memory.trees.attention import TreeAttention
from hybridmem.memory.trees.recurrence import TreeRecurrence
from tests.extent import only_in_long
from tests.tolerances import assert_split_close
from tests.toy import VOCAB, FamilyToy, Toy

Folds = Literal["keep", "replay", "defer"]
TOKENS, PARENTS, PATH = [3, 7, 5, 9, 2, 4, 11], [-1, 0, 0, -1, 2, 2, 4], [0, 2, 4]
PROMPT = [i * 7 % VOCAB for i in range(21)]
TOY = Toy()


def memory_of(model: Any = TOY, fold: Folds | None = None, **options: Any) -> HybridMemory:
    usual: dict[str, Any] = {"rollback_window": 8, "page_tokens": 4, "poison": True}
    return HybridMemory(model.memory_spec, "2MiB", fold=fold, **(usual | options))


def feed(memory: HybridMemory, model: Any, sequence: Sequence, tokens: list[int]) -> torch.Tensor:
    with memory.step({sequence: tokens}, outputs="all") as step:
        logits: torch.Tensor = model(step)
    memory.check()
    return logits


def feed_tree(memory: HybridMemory, model: Any, sequence: Sequence, path: list[int] = PATH) -> torch.Tensor:
    with memory.step({sequence: TOKENS}, outputs="all", parents={sequence: PARENTS}) as step:
        logits: torch.Tensor = model(step)
        step.accept({sequence: path})
    memory.check()
    return logits


def observed(memory: HybridMemory, sequence: Sequence) -> tuple[object, ...]:
    usage = memory.usage()
    return sequence.tokens.tolist(), sequence.horizon, usage.used_bytes, usage.by_kind


@given(
    links=st.lists(st.integers(0, 99), min_size=1, max_size=20), n_prompt=st.integers(0, 30),
    family=st.sampled_from([*FAMILIES]), fold=st.sampled_from(["keep", "replay", "defer"]),
    window=st.sampled_from([0, 3, 8]),
)  # fmt: skip
def test_each_token_is_as_at_the_end_of_its_path(
    links: list[int], n_prompt: int, family: str, fold: Folds, window: int
) -> None:
    if fold == "defer" and family in ("rg_lru", "rwkv4"):
        fold = "replay"
    model, parents = FamilyToy(FAMILIES[family]), [link % (i + 1) - 1 for i, link in enumerate(links)]
    tokens = [link % VOCAB for link in links]
    memory = memory_of(model, fold, rollback_window=window)
    sequence, chain = memory.open(), memory.open()
    if n_prompt:
        feed(memory, model, sequence, [i % VOCAB for i in range(n_prompt)])
    ways = [way_to(node, parents) for node in range(len(links))]
    longest = max(ways, key=len)
    with memory.step({chain: [1, 2, 3], sequence: tokens}, outputs="all", parents={sequence: parents}) as step:
        of_chain, found = step.split(model(step))
        step.accept({sequence: longest})
    memory.check()
    for way in ways:
        fresh = memory.open()
        logits = feed(memory, model, fresh, [i % VOCAB for i in range(n_prompt)] + [tokens[node] for node in way])
        assert_split_close(found[way[-1]], logits[-1])
        memory.close(fresh)
    assert sequence.tokens.tolist()[n_prompt:] == [tokens[node] for node in longest]
    fresh = memory.open()
    expected = feed(memory, model, fresh, [*sequence.tokens.tolist(), 5])
    assert_split_close(feed(memory, model, sequence, [5])[-1], expected[-1])
    assert_split_close(of_chain, feed(memory, model, memory.open(), [1, 2, 3]))


def way_to(node: int, parents: list[int]) -> list[int]:
    return [*(way_to(parents[node], parents) if parents[node] >= 0 else []), node]


@pytest.mark.parametrize("fold", ["keep", "replay"])
@pytest.mark.parametrize("path", [PATH, [3], []])
def test_the_memory_is_as_if_the_path_alone_had_been_fed(fold: Folds, path: list[int]) -> None:
    """This holds for its bytes and its horizon too.

    The other tokens count for nothing, so the sequence can go back as far.
    """
    memory, other = memory_of(fold=fold), memory_of(fold=fold)
    sequence, chain = memory.open(), other.open()
    for one, where in ((sequence, memory), (chain, other)):
        feed(where, TOY, one, PROMPT)
    for _ in range(3):
        feed_tree(memory, TOY, sequence, path)
        if path:
            feed(other, TOY, chain, [TOKENS[node] for node in path])
        assert observed(memory, sequence) == observed(other, chain)
    memory.rollback(sequence, to=sequence.horizon)
    other.rollback(chain, to=chain.horizon)
    assert_split_close(feed(memory, TOY, sequence, [1, 2]), feed(other, TOY, chain, [1, 2]))


def test_a_fork_and_its_origin_go_down_different_paths() -> None:
    memory = memory_of()
    origin = memory.open()
    feed(memory, TOY, origin, PROMPT)
    fork = memory.fork(origin)
    with memory.step(
        {origin: TOKENS, fork: TOKENS}, outputs="all", parents={origin: PARENTS, fork: PARENTS}
    ) as step:  # fmt: skip
        of_origin, of_fork = step.split(TOY(step))
        step.accept({origin: [0, 1], fork: [3]})
    assert torch.equal(of_origin, of_fork)
    memory.check()
    assert origin.tokens.tolist() == [*PROMPT, 3, 7] and fork.tokens.tolist() == [*PROMPT, 9]
    for one in (origin, fork):
        found = feed(memory, TOY, one, [6])
        assert_split_close(found[-1], feed(memory, TOY, memory.open(), one.tokens.tolist())[-1])


@pytest.mark.parametrize("fold", ["keep", "replay"])
def test_a_rejected_tree_leaves_all_tokens_of_others(fold: Folds) -> None:
    """As many tokens are then kept as there are sequences, and yet this is no decode step."""
    memory = memory_of(fold=fold)
    rejected, chain = memory.open(), memory.open()
    for sequence in (rejected, chain):
        feed(memory, TOY, sequence, PROMPT)
    with memory.step({rejected: TOKENS, chain: [14, 15]}, parents={rejected: PARENTS}) as step:
        TOY(step)
        step.accept({rejected: []})
    memory.check()
    for sequence, tokens in ((rejected, PROMPT), (chain, [*PROMPT, 14, 15])):
        assert sequence.tokens.tolist() == tokens
        found = feed(memory, TOY, sequence, [6])
        assert_split_close(found[-1], feed(memory, TOY, memory.open(), [*tokens, 6])[-1])


def test_positions_are_the_length_and_the_depth() -> None:
    memory = memory_of()
    sequence = memory.open()
    feed(memory, TOY, sequence, PROMPT)
    with memory.step({sequence: TOKENS}, parents={sequence: PARENTS}) as step:
        assert step.positions.tolist() == [21 + depth for depth in (0, 1, 1, 0, 2, 2, 3)]
        TOY(step)
        step.accept({sequence: []})


def test_states_that_are_ahead_after_a_drop_take_trees() -> None:
    """Their positions are those of the sequence plus the number of dropped tokens."""
    model = FamilyToy(FAMILIES["ssd"])
    memory = memory_of(model)
    sequence = memory.open()
    feed(memory, model, sequence, PROMPT)
    memory.drop(sequence, 3, 9, approximate=True)
    fork = memory.fork(sequence)
    found = feed_tree(memory, model, sequence)
    expected = feed(memory, model, fork, [TOKENS[node] for node in PATH])
    assert_split_close(found[PATH], expected)
    assert_split_close(feed(memory, model, sequence, [1]), feed(memory, model, fork, [1]))


def test_a_chain_with_parents_is_a_chain() -> None:
    """It is accepted by a number, by a list, or completely without either."""
    memory = memory_of()
    sequence = memory.open()
    for accepted, n_kept in (([0, 1], 2), (1, 1), (None, 3)):
        before = sequence.length
        with memory.step({sequence: [1, 2, 3]}, parents={sequence: [-1, 0, 1]}) as step:
            TOY(step)
            if accepted is not None:
                step.accept({sequence: accepted})
        assert sequence.length == before + n_kept
        memory.check()


def test_a_dry_run_takes_trees() -> None:
    memory = HybridMemory(TOY.memory_spec, "2MiB", rollback_window=8, device="meta")
    sequence = memory.open()
    with memory.step({sequence: TOKENS}, parents={sequence: PARENTS}) as step:
        step.accept({sequence: PATH})
    assert sequence.length == 3
    memory.check()


def test_a_step_in_which_no_path_is_accepted_changes_nothing() -> None:
    memory = memory_of()
    sequence = memory.open()
    feed(memory, TOY, sequence, PROMPT)
    before = observed(memory, sequence)
    with pytest.raises(BatchError, match="no path of the tree"), memory.step(
        {sequence: TOKENS}, parents={sequence: PARENTS}
    ) as step:  # fmt: skip
        TOY(step)
    memory.check()
    assert observed(memory, sequence) == before
    assert_split_close(feed(memory, TOY, sequence, [1])[-1], feed(memory, TOY, memory.open(), [*PROMPT, 1])[-1])


@pytest.mark.parametrize("fold", ["keep", "defer"])
@pytest.mark.parametrize("where", [(TreeRecurrence, "settle"), (TreeRecurrence, "keep"), (TreeRecurrence, "recur")])
def test_a_failure_changes_nothing(
    fold: Folds, where: tuple[type, str], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """It may come anywhere, even when some layer memories have kept the path already."""
    model = FamilyToy(FAMILIES["gated_delta"])
    memory = memory_of(model, fold)
    sequence, other = memory.open(), memory.open()
    feed(memory, model, sequence, PROMPT)
    before, real = observed(memory, sequence), getattr(*where)

    def fails(*given: Any) -> Any:
        real(*given)
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(*where, fails)
        with pytest.raises(ZeroDivisionError), memory.step(
            {sequence: TOKENS, other: [1, 2]}, parents={sequence: PARENTS}
        ) as step:  # fmt: skip
            model(step)
            step.accept({sequence: PATH})
    memory.check()
    assert observed(memory, sequence) == before and other.length == 0
    fresh = memory.open()
    assert_split_close(feed(memory, model, sequence, [1])[-1], feed(memory, model, fresh, [*PROMPT, 1])[-1])


def test_a_step_without_room_changes_nothing() -> None:
    memory = HybridMemory(TOY.memory_spec, 16384, rollback_window=8, page_tokens=4)
    sequence = memory.open()
    feed(memory, TOY, sequence, PROMPT)
    tokens = [i % VOCAB for i in range(400)]
    parents = [-1, *(i // 2 for i in range(399))]
    before = observed(memory, sequence)
    with pytest.raises(CapacityError), memory.step({sequence: tokens}, parents={sequence: parents}):
        raise AssertionError("there is room")
    memory.check()
    assert observed(memory, sequence) == before


@only_in_long
@pytest.mark.parametrize("fold", ["keep", "replay"])
def test_a_step_that_has_room_for_a_tree_has_room_for_any_path(fold: Folds) -> None:
    """Budgets are so small that the tree barely fits.

    Only entering the step may be refused.
    """
    n_entered = n_refused = 0
    for budget in range(2560, 7168, 256):
        for path in ([0], PATH, [0, 2, 4, 6]):
            memory = HybridMemory(TOY.memory_spec, budget, rollback_window=4, page_tokens=4, fold=fold)
            sequence, fork = memory.open(), None
            try:
                memory.run(TOY, {sequence: PROMPT[: budget // 256 % 9 + 4]})
                fork = memory.fork(sequence)
                with memory.step({sequence: TOKENS}, parents={sequence: PARENTS}) as step:
                    TOY(step)
                    n_entered += 1
                    step.accept({sequence: path})
            except CapacityError:
                n_refused += 1
            else:
                assert sequence.length == fork.length + len(path)
                n_entered -= 1
            memory.check()
    assert n_entered == 0 < n_refused


WRONG: dict[str, tuple[object, object, type[Exception], str]] = {
    "no mapping": ([-1, 0, 0], [0], BatchError, "give {sequence"),
    "too few": ([-1, 0], [0], BatchError, "2 parents for 3 tokens"),
    "later": ([-1, 2, 0], [0], BatchError, "parent of token 1"),
    "itself": ([0, 0, 0], [0], BatchError, "parent of token 0"),
    "no integers": ([-1, 0.0, 0], [0], BatchError, "give an integer for each token"),
    "a number": ([-1, 0, 0], 2, BatchError, "give the list of the tokens"),
    "no path": ([-1, 0, 0], [0, 1, 2], BatchError, "token 2 does not follow token 1; there, nothing does"),
    "not from the end": ([-1, 0, 0], [1], BatchError, r"does not follow the sequence's end; there, \[0\] does"),
    "beyond": ([-1, 0, 0], [0, 5], BatchError, "token 5 does not follow token 0"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_trees_and_paths_are_refused(case: str) -> None:
    parents, path, error, message = WRONG[case]
    memory = memory_of()
    sequence = memory.open()
    given: Any = parents if case == "no mapping" else {sequence: parents}
    with pytest.raises(error, match=message), memory.step({sequence: [1, 2, 3]}, parents=given) as step:
        TOY(step)
        step.accept({sequence: path})
    memory.check()
    assert sequence.length == 0


def test_parents_and_paths_of_others_are_refused() -> None:
    memory = memory_of()
    sequence, other = memory.open(), memory.open()
    with pytest.raises(SequenceError, match="no tokens in this step"):
        memory.step({sequence: [1, 2, 3]}, parents={other: [-1, 0, 0]})
    with memory.step({sequence: [1, 2, 3]}, parents={sequence: [-1, 0, 0]}) as step:
        TOY(step)
        with pytest.raises(SequenceError, match="accept only what was fed"):
            step.accept({other: [0]})
        step.accept({sequence: [0, 2]})
    assert sequence.tokens.tolist() == [1, 3]


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda spec: spec.with_policy(H2O(16, recent=8)), "H2O"),
        (lambda spec: spec.with_policy(Quest(64)), "Quest"),
        (lambda spec: spec.with_storage(Quantized(4, group=4)), "4"),
        (lambda spec: Toy(n_chosen=4).memory_spec, "index"),
    ],
    ids=["policy", "selection", "storage", "index"],
)  # fmt: skip
def test_memories_that_cannot_say_so_by_name(change: Callable[[Any], Any], name: str) -> None:
    memory = HybridMemory(change(TOY.memory_spec), "2MiB", rollback_window=8, page_tokens=4)
    sequence = memory.open()
    with pytest.raises(SpecError, match=f"trees of drafts are not for .*{name}.*leave parents= out"):
        memory.step({sequence: [1, 2, 3]}, parents={sequence: [-1, 0, 0]})
    assert sequence.length == 0


def test_sequences_in_host_memory_are_refused() -> None:
    memory = memory_of(host_pages="1MiB")
    sequence = memory.open()
    feed(memory, TOY, sequence, PROMPT)
    memory.to_host(sequence)
    with pytest.raises(SequenceError, match="in host memory"), memory.step(
        {sequence: TOKENS}, parents={sequence: PARENTS}
    ):  # fmt: skip
        raise AssertionError("it was entered")
    memory.check()
    memory.to_device(sequence)
    feed_tree(memory, TOY, sequence)
    assert sequence.length == 24


def test_attention_over_a_window_counts_positions_and_not_rows() -> None:
    """Rows of other branches take no place in the window.

    This holds however many are stored before a token's own row.
    """
    model = Toy(window=3)
    memory = memory_of(model)
    sequence = memory.open()
    feed(memory, model, sequence, PROMPT)
    tokens, parents = [1] * 10 + [2, 3, 4], [-1] * 10 + [9, 10, 11]
    with memory.step({sequence: tokens}, outputs="all", parents={sequence: parents}) as step:
        found = model(step)
        step.accept({sequence: [9, 10, 11, 12]})
    expected = feed(memory, model, memory.open(), [*PROMPT, 1, 2, 3, 4])[-4:]
    assert_split_close(found[9:], expected)


def test_a_layer_is_used_once_as_in_any_step() -> None:
    memory = memory_of()
    sequence = memory.open()

    def twice(step: Any) -> None:
        TOY(step)
        TOY(step)

    with pytest.raises(StepError, match="twice"), memory.step({sequence: TOKENS}, parents={sequence: PARENTS}) as step:
        twice(step)
    with (
        pytest.raises(StepError, match="before the"),
        memory.step({sequence: TOKENS}, parents={sequence: PARENTS}) as s,
    ):
        s.accept({sequence: PATH})
    assert sequence.length == 0


def test_rows_of_other_branches_are_never_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens on other branches have keys and values that are NaN."""
    memory = memory_of(Toy(recurrent=False))
    model, sequence = Toy(recurrent=False), memory.open()
    feed(memory, model, sequence, PROMPT)
    real = TreeAttention.attend

    def attend(self: Any, plan: Any, index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> Any:
        k, v = k.clone(), v.clone()
        k[[1, 3]] = v[[1, 3]] = torch.nan
        return real(self, plan, index, q, k, v, *rest)

    monkeypatch.setattr(TreeAttention, "attend", attend)
    logits = feed_tree(memory, model, sequence)
    assert torch.isfinite(logits[[0, 2, 4, 5, 6]]).all() and logits[[1, 3]].isnan().all()
    monkeypatch.undo()
    assert torch.isfinite(feed(memory, model, sequence, [1])).all()


def test_accepting_again_replaces_a_path() -> None:
    memory = memory_of()
    sequence = memory.open()
    with memory.step({sequence: TOKENS}, parents={sequence: PARENTS}) as step:
        TOY(step)
        step.accept({sequence: [3]})
        step.accept({sequence: PATH})
    assert sequence.tokens.tolist() == [TOKENS[node] for node in PATH]
    given: Mapping[Sequence, int] = {sequence: 1}
    with memory.step({sequence: [1, 2]}) as step:
        TOY(step)
        step.accept(given)
    memory.check()
