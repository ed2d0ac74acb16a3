"""Invariant 4: after a rollback, later outputs are those of a sequence that never saw the dropped tokens."""

from __future__ import annotations

import itertools

import pytest
import torch

from hybridmem.memory import RollbackError, SequenceError
from tests.subjects import Subject

WINDOW = 8
PROMPT = 21
NEXT = ([3, 1, 4], [1], [9, 2, 6, 5, 3, 5], [5])
"""Steps after the rollback: their logits are compared."""


def ones(tokens: list[int]) -> list[list[int]]:
    return [[t] for t in tokens]


class InjectedError(Exception):
    pass


def test_every_distance_at_once(subject: Subject) -> None:
    """Sequences and forks of them are side by side in every step. Each went back by another distance."""
    prompt = subject.tokens(PROMPT)
    memory = subject.memory(WINDOW, budget="8MiB")
    firsts = {k: memory.open() for k in range(1, WINDOW + 1)}
    subject.feed_together(memory, {first: [prompt, *ones(subject.tokens(k, seed=k))] for k, first in firsts.items()})
    pairs = {k: (first, memory.fork(first)) for k, first in firsts.items()}
    for sequence in (sequence for pair in pairs.values() for sequence in pair):
        memory.rollback(sequence, to=PROMPT)
    memory.check()
    found = subject.feed_together(
        memory, dict.fromkeys((sequence for pair in pairs.values() for sequence in pair), NEXT)
    )
    expected = subject.fresh([prompt, *NEXT], WINDOW)[PROMPT:]
    for logits in found.values():  # On a GPU, bits may depend on the shape of the whole step.
        subject.assert_same(logits, expected, bits=subject.spec.device.type == "cpu")


def test_abort(subject: Subject) -> None:
    """Steps of any length are aborted many times, before and after the model."""
    prompt = subject.tokens(PROMPT)
    memory = subject.memory(WINDOW)
    sequence, bystander = memory.open(), memory.open()
    subject.feed(memory, sequence, [prompt])
    subject.feed(memory, bystander, [prompt])
    used = memory.usage().used_bytes
    for n_tokens, is_run in itertools.product((1, 3, WINDOW, 40), (False, True)):
        with (
            pytest.raises(InjectedError),
            memory.step({sequence: subject.tokens(n_tokens, seed=1), bystander: [1]}) as step,
        ):
            if is_run:
                subject.model(step)
            raise InjectedError
        memory.check()
        assert sequence.tokens.tolist() == prompt
        assert memory.usage().used_bytes == used
    expected = subject.fresh([prompt, *NEXT], WINDOW)[PROMPT:]
    subject.assert_same(subject.feed(memory, sequence, NEXT), expected, bits=True)
    subject.assert_same(subject.feed(memory, bystander, NEXT), expected, bits=True)


def test_accept_some_drafts(subject: Subject) -> None:
    """All numbers of accepted drafts are in one step, beside a sequence that feeds its prompt."""
    prompt, drafts = subject.tokens(PROMPT), subject.tokens(WINDOW, seed=1)
    memory = subject.memory(WINDOW, budget="8MiB")
    sequences, other = {n: memory.open() for n in range(WINDOW + 1)}, memory.open()
    subject.feed_together(memory, {sequence: [prompt] for sequence in sequences.values()})
    with memory.step({other: prompt, **dict.fromkeys(sequences.values(), drafts)}, outputs="all") as step:
        subject.model(step)
        step.accept({sequence: n for n, sequence in sequences.items()})
    memory.check()
    found = subject.feed_together(memory, dict.fromkeys((*sequences.values(), other), NEXT))
    for n_accepted, sequence in sequences.items():
        kept = drafts[:n_accepted]
        assert sequence.tokens.tolist() == list(itertools.chain(prompt, kept, *NEXT))
        steps = subject.cut([prompt, *([kept] if kept else []), *NEXT])
        subject.assert_same(found[sequence], subject.fresh(steps, WINDOW)[PROMPT + n_accepted :])
    subject.assert_same(found[other], subject.fresh([prompt, *NEXT], WINDOW)[PROMPT:])


def test_speculative_rounds(subject: Subject) -> None:
    """Each of many rounds of drafts is accepted in part.

    The tail is rewound while the body moves on.
    """
    memory = subject.memory(WINDOW)
    sequence = memory.open()
    tokens = subject.tokens(3)
    subject.feed(memory, sequence, [tokens])
    steps = [tokens]
    for i in range(2 * WINDOW + 1):
        drafts = subject.tokens(1 + i % WINDOW, seed=i)
        n_accepted = i * 7 % (len(drafts) + 1)
        with memory.step({sequence: drafts}) as step:
            subject.model(step)
            step.accept({sequence: n_accepted})
        memory.check()
        tokens = tokens + drafts[:n_accepted]
        if n_accepted:
            steps.append(drafts[:n_accepted])
    assert sequence.tokens.tolist() == tokens
    expected = subject.fresh([*subject.cut(steps), *NEXT], WINDOW)[len(tokens) :]
    subject.assert_same(subject.feed(memory, sequence, NEXT), expected)


@pytest.mark.parametrize("window", [0, 1, 3, 4, 13, 64])
def test_any_window_reaches_that_far(subject: Subject, window: int) -> None:
    to = 26
    tokens, n_prompt = subject.tokens(to + window), 20 if window < 20 else 50
    # Feed tokens one by one up to the position to which it goes back, and at the end.
    far = max(to + window - 5, n_prompt)
    memory = subject.memory(window)
    sequence = memory.open()
    steps = [
        tokens[:n_prompt],
        *ones(tokens[n_prompt:to]),
        tokens[max(n_prompt, to) : far],
        *ones(tokens[max(far, to) :]),
    ]
    subject.feed(memory, sequence, filter(None, steps))
    assert sequence.tokens.tolist() == tokens and sequence.horizon <= to
    memory.rollback(sequence, to=to)
    kept = [tokens[: min(n_prompt, to)], *ones(tokens[n_prompt:to])]
    expected = subject.fresh(subject.cut([*kept, *NEXT]), window)[to:]
    subject.assert_same(subject.feed(memory, sequence, NEXT), expected)


def test_out_of_reach(subject: Subject) -> None:
    """The position is beyond the window.

    An error names the nearest reachable position, and nothing has changed.
    """
    tokens = subject.tokens(60)
    memory = subject.memory(WINDOW)
    sequence = memory.open()
    subject.feed(memory, sequence, [tokens])
    if sequence.horizon == 0:
        pytest.skip("attention alone reaches everything")
    fold_tokens = WINDOW if subject.fold == "keep" else 4
    assert 60 - WINDOW - fold_tokens < sequence.horizon <= 60 - WINDOW
    to, used = sequence.horizon - 1, memory.usage()
    assert not memory.can_rollback(sequence, to=to)
    with pytest.raises(RollbackError, match=str(to)) as caught:
        memory.rollback(sequence, to=to)
    assert (caught.value.to, caught.value.horizon, caught.value.resume_at) == (to, sequence.horizon, 0)
    assert memory.usage() == used
    assert sequence.length == 60
    assert memory.resume_point(sequence, to=to) == 0
    subject.assert_same(subject.feed(memory, sequence, NEXT), subject.fresh([tokens, *NEXT], WINDOW)[60:], bits=True)


def test_accept_beyond_the_window_is_refused(subject: Subject) -> None:
    memory = subject.memory(WINDOW)
    sequence = memory.open()
    with memory.step({sequence: subject.tokens(40)}) as step:
        subject.model(step)
        horizons = 40 - WINDOW
        if not subject.reaches_everything:
            with pytest.raises(RollbackError):
                step.accept({sequence: 5})
        step.accept({sequence: horizons})
    assert sequence.length == horizons
    with memory.step({sequence: subject.tokens(40, seed=2)}) as step:
        subject.model(step)
        step.accept({sequence: 0})
    steps = subject.cut([subject.tokens(40)[:horizons], *NEXT])
    expected = subject.fresh(steps, WINDOW)[horizons:]
    subject.assert_same(subject.feed(memory, sequence, NEXT), expected)


def test_checkpoint_at_any_distance(subject: Subject) -> None:
    """The sequence returns many times, from near and far."""
    prompt = subject.tokens(PROMPT)
    memory = subject.memory(WINDOW)
    sequence = memory.open()
    subject.feed(memory, sequence, [prompt])
    mark = memory.checkpoint(sequence)
    expected = subject.fresh([prompt, *NEXT], WINDOW)[PROMPT:]
    for distance, steps in ((1, NEXT[:2]), (WINDOW, NEXT[:1]), (100, NEXT), (3 * WINDOW, NEXT)):
        subject.feed(memory, sequence, [subject.tokens(distance, seed=distance)])
        assert memory.can_rollback(sequence, to=mark)
        memory.rollback(sequence, to=mark)
        memory.check()
        assert sequence.tokens.tolist() == prompt
        found = subject.feed(memory, sequence, steps)
        subject.assert_same(found, expected[: len(found)], bits=True)


def test_positions_below_a_checkpoint_are_reachable_through_it(subject: Subject) -> None:
    tokens = subject.tokens(100)
    memory = subject.memory(WINDOW)
    sequence = memory.open()
    subject.feed(memory, sequence, [tokens[:40]])
    mark = memory.checkpoint(sequence, holds_tail=True)
    subject.feed(memory, sequence, [tokens[40:]])
    assert memory.resume_point(sequence, to=37) == 37
    assert memory.resume_point(sequence, to=45) in (40, 45)
    memory.rollback(sequence, to=37)
    assert sequence.tokens.tolist() == tokens[:37]
    expected = subject.fresh(subject.cut([tokens[:37], *NEXT]), WINDOW)[37:]
    subject.assert_same(subject.feed(memory, sequence, NEXT), expected)
    assert mark.length == 40


def test_a_checkpoint_holds_its_own_position_alone(subject: Subject) -> None:
    """It holds its tail only if it is told to.

    If there is no state at its position, it also holds the tail.
    """
    memory = subject.memory(WINDOW)
    sequence = memory.open()
    subject.feed(memory, sequence, [subject.tokens(40)])
    small, whole = memory.checkpoint(sequence), memory.checkpoint(sequence, holds_tail=True)
    assert whole.horizon == sequence.horizon and small.horizon in (40, sequence.horizon)
    subject.feed(memory, sequence, [subject.tokens(60, seed=1)])
    memory.close(whole)
    memory.rollback(sequence, to=small)
    assert sequence.horizon == small.horizon


def test_a_checkpoint_of_other_tokens_is_no_help_for_a_position(subject: Subject) -> None:
    """The tokens of the checkpoint have since been replaced.

    A rollback may return to the checkpoint by its handle, but never by position.
    """
    tokens = subject.tokens(100)
    memory = subject.memory(WINDOW)
    sequence = memory.open()
    subject.feed(memory, sequence, [tokens[:36], tokens[36:40]])
    mark = memory.checkpoint(sequence, holds_tail=True)
    memory.rollback(sequence, to=36)
    others = [(t + 1) % 19 for t in tokens[36:100]]
    subject.feed(memory, sequence, [others])
    if not subject.reaches_everything:
        assert memory.resume_point(sequence, to=39) == 36
    memory.rollback(sequence, to=mark)
    assert sequence.tokens.tolist() == tokens[:40]


def test_checkpoints_are_not_advanced(subject: Subject) -> None:
    memory = subject.memory(WINDOW)
    sequence, stranger = memory.open(), memory.open()
    subject.feed(memory, sequence, [subject.tokens(5)])
    mark = memory.checkpoint(sequence)
    with pytest.raises(SequenceError, match="checkpoint"):
        memory.step({mark: [1]})
    with pytest.raises(SequenceError, match="family"):
        memory.rollback(stranger, to=mark)
    with pytest.raises(SequenceError, match="no checkpoint"):
        memory.rollback(sequence, to=memory.fork(sequence))
    assert not memory.can_rollback(stranger, to=mark)
    live = memory.fork(mark)
    assert not live.is_checkpoint
    subject.feed(memory, live, NEXT)
    memory.close(mark)
    with pytest.raises(SequenceError, match="closed"):
        memory.rollback(sequence, to=mark)


def test_a_rollback_touches_no_byte(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rollback copies no tensor and runs no layer.

    It still works when every way to a byte is cut off.
    """
    from hybridmem.memory.blocks.store import Store

    memory = subject.memory(WINDOW)
    sequence = memory.open()
    subject.feed(memory, sequence, [subject.tokens(PROMPT)])
    fork = memory.fork(sequence)
    subject.feed(memory, sequence, ones(subject.tokens(WINDOW - 1, seed=1)))

    def touched(*_: object) -> None:
        raise AssertionError("a rollback touched bytes")

    with monkeypatch.context() as patch:
        patch.setattr(Store, "copy", touched)
        patch.setattr(torch.Tensor, "copy_", touched)
        memory.rollback(sequence, to=PROMPT)
        memory.rollback(fork, to=PROMPT - 3)
    memory.check()
