"""The tests are about many sequences: order, isolation, forks, reordering, capacity, and failures of steps."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from hybridmem.memory import CapacityError, HybridMemory, Sequence, SequenceError, StepError
from hybridmem.memory.capacity import plan_sequence
from hybridmem.memory.sequences import chunks
from tests.subjects import Subject

WINDOW = 8
NEXT = ([3, 1, 4], [1], [5])


def test_every_split_of_a_prompt_equals_one_shot(subject: Subject) -> None:
    if subject.is_lossy:
        pytest.skip("a step sees the body as it was before: how tokens are cut matters")
    tokens = subject.tokens(24)
    expected = subject.fresh([tokens], WINDOW)
    cuts = [(first, second) for first in range(1, 24) for second in {first, (first + 24) // 2}]
    memory = subject.memory(WINDOW, budget="8MiB")
    sequences = [memory.open() for _ in cuts]
    found: list[list[torch.Tensor]] = [[] for _ in cuts]
    for n in range(3):  # One step takes the n-th part of every text.
        parts = [(tokens[:first], tokens[first:second], tokens[second:])[n] for first, second in cuts]
        chosen = [i for i, part in enumerate(parts) if part]
        with memory.step({sequences[i]: parts[i] for i in chosen}, outputs="all") as step:
            for i, rows in zip(chosen, step.split(subject.model(step)), strict=True):
                found[i].append(rows)
    memory.check()
    for rows in found:
        subject.assert_same(torch.cat(rows), expected)
    for parts in (
        [tokens[:1], tokens[1:]],
        [tokens[:5], tokens[5:11], tokens[11:]],
        [tokens[:23], tokens[23:]],
        [[t] for t in tokens],
    ):
        subject.assert_same(subject.fresh(parts, WINDOW), expected)


def test_64_sequences_shuffled_equal_each_alone(subject: Subject) -> None:
    """Sequences have mixed lengths, prompts run beside single tokens, and the order changes at every step.

    Row i belongs to request i. Each text is there four times, cut in the same way and fed beside others, so that a
    lossy subject needs one oracle for each text.
    """
    rng = random.Random(0)
    histories = 4 * [subject.tokens(n, seed=i) for i, n in enumerate(4 * (1, 5, 17, 26))]
    memory = subject.memory(WINDOW, budget="32MiB")
    sequences = [memory.open() for _ in histories]
    left = [list(h) for h in histories]
    steps: list[list[list[int]]] = [[] for _ in histories]
    logits: list[list[torch.Tensor]] = [[] for _ in histories]
    while any(left):
        chosen = [i for i in range(64) if left[i] and rng.random() < 0.7]
        rng.shuffle(chosen)
        if not chosen:
            continue
        requests = {}
        for i in chosen:
            n_tokens = random.Random(100 * (i % 16) + len(steps[i])).choice((1, 1, 4, 20))
            requests[sequences[i]] = left[i][:n_tokens]
            steps[i].append(left[i][:n_tokens])
            left[i] = left[i][n_tokens:]
        with memory.step(requests, outputs="all") as step:
            for i, rows in zip(chosen, step.split(subject.model(step)), strict=True):
                logits[i].append(rows)
    memory.check()
    for i in range(64):
        subject.assert_same(torch.cat(logits[i]), subject.fresh(subject.cut(steps[i]), WINDOW))


def test_last_rows_are_the_last_of_all_rows(subject: Subject) -> None:
    memory = subject.memory(WINDOW)
    a, b, c = (memory.open() for _ in range(3))
    requests = {a: subject.tokens(30), b: [7], c: subject.tokens(3)}
    with memory.step(requests) as step:
        last = subject.model(step)
    twins = {memory.open(): tokens for tokens in requests.values()}
    with memory.step(twins, outputs="all") as step:
        every = step.split(subject.model(step))
    assert [len(rows) for rows in every] == [30, 1, 3]
    subject.assert_same(last, torch.stack([rows[-1] for rows in every]))


def test_forks_of_a_long_sequence_cost_a_tail_a_head_and_a_page(subject: Subject) -> None:
    """Each fork has taken a token of its own.

    The bytes are those of `usage` and of the arena's own count.
    """
    memory = subject.memory(WINDOW, budget="8MiB", page_tokens=subject.page_tokens)
    sequence = memory.open()
    memory.run(subject.model, {sequence: subject.tokens(256)})
    before = memory.usage()
    forks = [memory.fork(sequence) for _ in range(8)]
    with memory.step({fork: [i] for i, fork in enumerate(forks)}) as step:
        subject.model(step)
    after = memory.usage()
    allowed = 8 * sum(after.block_bytes.values())
    assert 0 < after.used_bytes - before.used_bytes <= allowed
    assert after.used_bytes == sum(after.by_kind.values()) == after.budget_bytes - after.free_bytes
    assert sum(u.private_bytes for u in after.by_sequence.values()) <= after.used_bytes
    memory.check()


def test_beam_search_equals_scoring_every_beam_afresh(subject: Subject) -> None:
    memory = subject.memory(WINDOW)
    beams = [memory.open()]
    with memory.step({beams[0]: subject.tokens(12)}) as step:
        logits = subject.model(step)
    beams += [memory.fork(beams[0]) for _ in range(3)]
    scores = torch.full((4,), -torch.inf, device=logits.device)
    scores[0] = 0.0
    logits = logits.expand(4, -1)
    for _ in range(10):
        total = scores[:, None] + logits.log_softmax(-1)
        scores, flat = total.flatten().topk(4)
        sources, tokens = flat // logits.shape[1], flat % logits.shape[1]
        memory.reorder({beams[i]: beams[s] for i, s in enumerate(sources.tolist())})
        with memory.step(dict(zip(beams, tokens.tolist(), strict=True))) as step:
            logits = subject.model(step)
        memory.check()
    for i, beam in enumerate(beams):
        tokens = beam.tokens.tolist()
        steps = subject.cut([tokens[:12], *([t] for t in tokens[12:])])
        subject.assert_same(logits[i : i + 1], subject.fresh(steps, WINDOW)[-1:])


# The tests below are about capacity.


def bytes_of(subject: Subject, n_sequences: int, n_tokens: int) -> int:
    """Return what so many sequences take, and a tenth more, but no less than a memory needs to be made."""
    plan = HybridMemory(subject.spec, "1GiB", rollback_window=4, page_tokens=4, fold=subject.fold, device="meta")
    plan.run(None, {plan.open(): [1] * n_tokens for _ in range(n_sequences)})
    least = plan_sequence(subject.spec, 1, page_tokens=4, rollback_window=4, fold=subject.fold).least_bytes
    return max(least, int(1.1 * plan.usage().used_bytes))


def test_capacity_is_refused_before_anything_changes(subject: Subject) -> None:
    budget = max(
        24 * 1024 if subject.name.startswith("toy") else 128 * 1024, bytes_of(subject, n_sequences=5, n_tokens=30)
    )
    memory = subject.memory(4, budget, page_tokens=subject.page_tokens)
    sequences: list[Sequence] = []
    tokens = subject.tokens(30)
    with pytest.raises(CapacityError) as caught:
        for _ in range(1000):
            sequences.append(memory.open())
            with memory.step({sequences[-1]: tokens, **({sequences[0]: [1]} if len(sequences) > 1 else {})}) as step:
                subject.model(step)
    memory.check()
    assert caught.value.needed > 0
    assert caught.value.unit == "bytes"
    assert f"{caught.value.needed:,}" in str(caught.value)
    n_fed = len(sequences) - 2
    assert sequences[0].tokens.tolist() == tokens + [1] * n_fed
    assert sequences[-1].length == 0
    memory.close(sequences.pop(1))
    expected = subject.fresh([tokens, *([[1]] * n_fed), *NEXT], 4)[30 + n_fed :]
    subject.assert_same(subject.feed(memory, sequences[0], NEXT), expected, bits=True)
    for sequence in sequences:
        memory.close(sequence)
    memory.check()
    assert memory.usage().used_bytes == 0


def test_the_split_follows_demand(subject: Subject) -> None:
    """The same budget serves one long sequence, then many short ones, then a long one again."""
    budget = max(2**17, bytes_of(subject, n_sequences=1, n_tokens=300), bytes_of(subject, n_sequences=40, n_tokens=3))
    memory = subject.memory(4, budget, page_tokens=4)
    for n_sequences, n_tokens in ((1, 300), (40, 3), (1, 300)):
        sequences = [memory.open() for _ in range(n_sequences)]
        memory.run(
            subject.model, {s: subject.tokens(n_tokens, seed=i) for i, s in enumerate(sequences)}, max_tokens=150
        )
        memory.check()
        for sequence in sequences:
            memory.close(sequence)
        assert memory.usage().used_bytes == 0
    usage = memory.usage()
    assert usage.padding_bytes == 0


# The tests below are about `run`.


def test_run_gives_what_one_step_would(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt fits into a step.

    If the split of tokens into steps matters, `run` gives what steps of GRID_TOKENS would.
    """
    monkeypatch.setattr(chunks, "GRID_TOKENS", 8)
    requests = [subject.tokens(n, seed=n) for n in (20, 1, 9, 2, 1)]
    memory = subject.memory(WINDOW)
    if subject.is_lossy:
        cells = {memory.open(): [tokens[i : i + 8] for i in range(0, len(tokens), 8)] for tokens in requests}
        expected = torch.cat(list(subject.feed_together(memory, cells).values()))
    else:
        with memory.step({memory.open(): t for t in requests}, outputs="all") as step:
            expected = subject.model(step)
    ends = np.cumsum([len(t) for t in requests]) - 1
    for max_tokens, outputs in ((1, "all"), (7, "last"), (7, "all"), (16, "last"), (1000, "all"), (1000, "last")):
        pairs = [(memory.open(), tokens) for tokens in requests]
        found = memory.run(subject.model, iter(pairs), max_tokens=max_tokens, outputs=outputs)
        subject.assert_same(found, expected if outputs == "all" else expected[ends])
        assert [s.length for s, _ in pairs] == [len(t) for t in requests]
        for sequence, _ in pairs:
            memory.close(sequence)
    memory.check()


def test_run_goes_on_from_the_middle_of_a_cell(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text is fed in two runs.

    The second run is cut at the same positions as it would be alone or beside others.
    """
    if not subject.is_lossy:
        pytest.skip("how tokens are cut makes no difference")
    monkeypatch.setattr(chunks, "GRID_TOKENS", 8)
    first, second = subject.tokens(13, seed=1), subject.tokens(24, seed=2)
    steps = [first[:8], first[8:], second[:3], second[3:11], second[11:19], second[19:]]
    expected = subject.fresh(subject.cut(steps), WINDOW)
    for max_tokens, n_beside in ((1, 0), (8, 1), (11, 2), (1000, 2)):
        memory = subject.memory(WINDOW)
        sequence, beside = memory.open(), [memory.open() for _ in range(n_beside)]
        found = [
            memory.run(
                subject.model,
                {sequence: tokens} | {other: [1, 2, 3] for other in beside},
                max_tokens=max_tokens,
                outputs="all",
            )[: len(tokens)]
            for tokens in (first, second)
        ]
        subject.assert_same(torch.cat(found), expected)


def test_run_is_all_or_nothing(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model fails in the fifth chunk.

    Every sequence is as it was, even one whose chunks were all done.
    """
    monkeypatch.setattr(chunks, "GRID_TOKENS", 16)
    memory = subject.memory(WINDOW)
    old, new = memory.open(), memory.open()
    prompt = subject.tokens(20)
    subject.feed(memory, old, [prompt])
    used, n_calls = memory.usage().used_bytes, 0

    def failing(step):
        nonlocal n_calls
        n_calls += 1
        if n_calls == 5:
            raise RuntimeError("out of luck")
        return subject.model(step)

    with pytest.raises(RuntimeError, match="out of luck"):
        memory.run(failing, {old: subject.tokens(50, seed=1), new: subject.tokens(30, seed=2)}, max_tokens=16)
    memory.check()
    assert (old.tokens.tolist(), new.length) == (prompt, 0)
    assert memory.usage().used_bytes == used
    assert len(memory.usage().by_sequence) == 2
    subject.assert_same(subject.feed(memory, old, NEXT), subject.fresh([prompt, *NEXT], WINDOW)[20:], bits=True)


def test_a_step_without_its_model_is_refused(subject: Subject) -> None:
    memory = subject.memory(WINDOW)
    sequence = memory.open()
    with pytest.raises(StepError, match="run the whole model"), memory.step({sequence: [1, 2]}):
        pass
    memory.check()
    assert sequence.length == 0


def test_a_busy_sequence_is_left_alone(subject: Subject) -> None:
    memory = subject.memory(WINDOW)
    sequence, other = memory.open(), memory.open()
    with memory.step({sequence: [1, 2]}) as step:
        for call in (
            memory.fork,
            memory.checkpoint,
            memory.close,
            lambda s: memory.rollback(s, to=0),
            lambda s: memory.step({s: [1]}),
        ):
            with pytest.raises(SequenceError, match="open step"):
                call(sequence)
        subject.feed(memory, other, [[5, 6]])
        memory.check()
        subject.model(step)
    memory.check()
    assert (sequence.length, other.length) == (2, 2)
    with pytest.raises(StepError, match="entered before"), step:
        pass


def test_two_steps_open_at_once_on_two_forks(subject: Subject) -> None:
    """Both steps want to append to the same shared page and the same shared tail."""
    prompt = subject.tokens(21)
    memory = subject.memory(WINDOW)
    first = memory.open()
    subject.feed(memory, first, [prompt])
    second = memory.fork(first)
    with memory.step({first: [3, 1, 4]}, outputs="all") as outer:
        with memory.step({second: [2]}, outputs="all") as inner:
            rows = subject.model(outer), subject.model(inner)
            memory.check()
        memory.check()
    memory.check()
    for sequence, tokens, got in ((first, [3, 1, 4], rows[0]), (second, [2], rows[1])):
        expected = subject.fresh([prompt, tokens, *NEXT], WINDOW)[21:]
        subject.assert_same(torch.cat([got, subject.feed(memory, sequence, NEXT)]), expected, bits=True)


def test_an_interrupt_is_an_abort(subject: Subject) -> None:
    memory = subject.memory(WINDOW)
    sequence = memory.open()
    prompt = subject.tokens(21)
    subject.feed(memory, sequence, [prompt])
    for interrupt in (KeyboardInterrupt, SystemExit, GeneratorExit):
        with pytest.raises(interrupt), memory.step({sequence: subject.tokens(30)}) as step:
            subject.model(step)
            raise interrupt
        memory.check()
    subject.assert_same(subject.feed(memory, sequence, NEXT), subject.fresh([prompt, *NEXT], WINDOW)[21:], bits=True)


def test_fragments_never_lose_a_byte(subject: Subject) -> None:
    """In a small budget, many sequences of all lengths are opened and closed at random.

    Refusals change nothing.
    """
    rng = random.Random(1)
    spec = subject.spec
    budget = bytes_of(subject, n_sequences=5, n_tokens=300)
    memory = HybridMemory(spec, budget, rollback_window=4, page_tokens=4, fold=subject.fold, device="meta")
    open_ones: list[Sequence] = []
    n_refused = 0
    for _ in range(120):
        if n_refused and open_ones and rng.random() < 0.45:  # The budget is full from then on.
            memory.close(open_ones.pop(rng.randrange(len(open_ones))))
            continue
        sequence = memory.open()
        used = memory.usage().used_bytes
        try:
            memory.run(None, {sequence: [1] * rng.choice((1, 3, 20, 100, 300))}, max_tokens=64)
            open_ones.append(sequence)
        except CapacityError:
            assert memory.usage().used_bytes == used
            memory.close(sequence)
            n_refused += 1
        memory.check()
    assert n_refused
    for sequence in open_ones:
        memory.close(sequence)
    memory.check()
    assert memory.usage().used_bytes == 0
