"""The tests check single requests: what text they show, what their sequences hold, and what prefixes save.

If something goes wrong, it ends only the request that it concerns.
"""

from __future__ import annotations

import random
import signal
from typing import Any

import pytest

from hybridmem.chat.engine.engine import Engine, Generation, Sampling
from hybridmem.chat.prompts import Tokenizer
from hybridmem.memory import BatchError, HybridMemory, SequenceError, SpecError, StepError
from hybridmem.memory.prefix.cache import PrefixCache
from hybridmem.models import LanguageModel
from tests.chat.engines import (
    Scripted,
    Wanted,
    assert_as_alone,
    decode_alone,
    draw_prompt,
    make_engine,
    make_memory,
    private_bytes,
    run_checked,
    submit_some,
)
from tests.extent import only_in_long
from tests.toy import VOCAB, Toy

# The tests below are about what goes wrong.


def test_a_step_that_fails_changes_nothing_and_can_be_tried_again() -> None:
    scripted = Scripted(Toy(), list(range(VOCAB)), n_prompt=2)
    engine = make_engine(scripted)
    generations = [engine.submit([1, 2], max_tokens=10, sampling=s) for s in (Sampling(), Sampling(1.0, seed=1))]
    expected = decode_alone(Scripted(Toy(), list(range(VOCAB)), n_prompt=2), [1, 2], 10, Sampling(1.0, seed=1))
    for n in range(10):
        scripted.fails = n % 3 == 1
        if scripted.fails:
            before = [list(g.token_ids) for g in generations]
            with pytest.raises(RuntimeError, match="the model broke"):
                engine.step()
            assert [g.token_ids for g in generations] == before and not engine.is_idle
            engine.memory.check()
        scripted.fails = False
        engine.step()
    assert [g.finish_reason for g in generations] == ["length"] * 2
    assert [g.token_ids for g in generations] == [list(range(10)), expected]
    assert engine.memory.usage().used_bytes == 0


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, seed=0)])
def test_logits_that_are_not_finite_end_their_request_alone(sampling: Sampling) -> None:
    scripted = Scripted(Toy(), [5], n_prompt=1)
    scripted.spoils = 7
    engine = make_engine(scripted)
    bad, good = engine.submit([1], max_tokens=20, sampling=sampling), engine.submit([1], max_tokens=5)
    run_checked(engine)
    assert bad.finish_reason == "error" and isinstance(bad.error, StepError) and len(bad.token_ids) == 6
    assert good.finish_reason == "length" and good.token_ids == [5] * 5
    assert engine.memory.usage().used_bytes == 0


def test_a_callback_that_raises_ends_its_own_request() -> None:
    def hear(generation: Generation, piece: str) -> None:
        if len(generation.token_ids) == 2:
            raise ValueError("nobody listens")

    handler = signal.getsignal(signal.SIGINT)
    engine = make_engine(Toy())
    bad, good = engine.submit([1], max_tokens=9, on_token=hear), engine.submit([2], max_tokens=9)
    run_checked(engine)
    assert (bad.finish_reason, str(bad.error), len(bad.token_ids)) == ("error", "nobody listens", 2)
    assert signal.getsignal(signal.SIGINT) is handler, "the frames that the error keeps hold a Ctrl-C back"
    assert good.token_ids == decode_alone(Toy(), [2], 9)
    assert engine.memory.usage().used_bytes == 0


def test_a_tokenizer_that_raises_ends_its_own_request(tokenizer: Tokenizer, embedded: LanguageModel) -> None:
    class Breaking:
        eos_token_id = None

        def decode(self, ids: list[int], **options: Any) -> str:
            if 7 in ids:
                raise ValueError("no such token")
            return "x" * len(ids)

    scripted = Scripted(Toy(), [3, 4, 7, 5], n_prompt=1)
    engine = Engine(scripted, make_memory(scripted), Breaking(), stop_ids=())  # type: ignore[arg-type]
    bad, good = engine.submit([1], max_tokens=9), engine.submit([1], max_tokens=2)
    run_checked(engine)
    assert (bad.finish_reason, str(bad.error), bad.text) == ("error", "no such token", "xx")
    assert (good.finish_reason, good.text) == ("length", "xx")


def test_a_sequence_that_is_closed_or_spoilt_outside_ends_its_generation_alone() -> None:
    engine = make_engine(Toy())
    sequences = [engine.memory.open() for _ in range(3)]
    generations = [engine.submit([i], sequence=s, max_tokens=9) for i, s in enumerate(sequences)]
    engine.step()
    engine.memory.close(sequences[1])
    engine.step()
    assert generations[1].finish_reason == "error" and isinstance(generations[1].error, SequenceError)
    with engine.memory.step({sequences[2]: [3]}) as step:
        Toy()(step)
        engine.step()  # This happens in the middle of somebody else's step.
    assert generations[2].finish_reason is None or isinstance(generations[2].error, SequenceError)
    engine.run()
    assert generations[0].token_ids == decode_alone(Toy(), [0], 9)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"token_ids": []}, "empty"),
        ({"token_ids": "hello"}, "'hello'"),
        ({"token_ids": 5}, "list of token ids"),
        ({"token_ids": [1, VOCAB]}, f"token {VOCAB} .*< {VOCAB}"),
        ({"token_ids": [1, -1]}, "token -1"),
        ({"token_ids": [1, 2.0]}, "2.0"),
        ({"token_ids": [True]}, "True"),
        ({"max_tokens": -1}, "max_tokens=-1"),
        ({"max_tokens": 2.5}, "max_tokens=2.5"),
        ({"sampling": None}, "sampling=None"),
        ({"stop": ("x",)}, "no tokenizer"),
        ({"stop": ("",)}, "at least one character"),
        ({"stop": (5,)}, "stop="),
        ({"stop": 5}, "stop=5"),
        ({"deadline_s": 0}, "deadline_s=0"),
        ({"deadline_s": float("nan")}, "deadline_s=nan"),
        ({"deadline_s": "1"}, "deadline_s='1'"),
        ({"marks": [0]}, "marks"),
        ({"marks": [4]}, "marks"),
        ({"on_token": 3}, "on_token=3"),
        ({"priority": None}, "priority=None"),
    ],
)
def test_arguments_that_make_no_request_are_refused(options: dict[str, Any], words: str) -> None:
    engine = make_engine(Toy())
    with pytest.raises(BatchError, match=words):
        engine.submit(**({"token_ids": [1, 2, 3]} | options))
    assert engine.is_idle and engine.step() == []


def test_sequences_that_cannot_be_gone_on_with_are_refused() -> None:
    engine = make_engine(Toy())
    memory = engine.memory
    closed, live, mark, foreign = (
        memory.open(),
        memory.open(),
        memory.checkpoint(memory.open()),
        make_memory(Toy()).open(),
    )
    away, other = memory.checkpoint(live), make_memory(Toy())
    away_elsewhere = other.open()
    memory.close(closed)
    memory.swap_out(away)
    other.swap_out(away_elsewhere)
    engine.submit([1], sequence=live)
    bad = {closed: "closed", mark: "checkpoint", foreign: "another memory", live: "in use", 7: "7"}
    for handle, word in (bad | {away: "checkpoint", away_elsewhere: "another memory"}).items():
        with pytest.raises(SequenceError, match=word):
            engine.submit([1], sequence=handle)  # type: ignore[arg-type]
    assert engine.load.waiting == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"step_tokens": 0}, "step_tokens=0"),
        ({"max_running": True}, "max_running=True"),
        ({"step_tokens": 6}, "leaves nothing to prompts"),
    ],
)
def test_engines_that_cannot_work_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        make_engine(Toy(), **options)


# The tests below are about text.


def scripted_text(embedded: LanguageModel, tokenizer: Tokenizer, text: str) -> Engine:
    """Return an engine whose model says this text and then ends."""
    script = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
    memory = HybridMemory(embedded.memory_spec, "16MiB", poison=True)
    return Engine(Scripted(embedded, script, n_prompt=1), memory, tokenizer)


def test_pieces_make_up_the_text_and_the_last_says_why(embedded: LanguageModel, tokenizer: Tokenizer) -> None:
    text = "Okay — 😀 noted, café."
    engine = scripted_text(embedded, tokenizer, text)
    told: list[tuple[str, str | None]] = []
    generation = engine.submit([1], on_token=lambda g, piece: told.append((piece, g.finish_reason)))
    run_checked(engine)
    assert "".join(piece for piece, _ in told) == generation.text == text
    assert [reason for _, reason in told] == [None] * (len(told) - 1) + ["stop"]
    assert len(told) == len(generation.token_ids) == len(tokenizer.encode(text, add_special_tokens=False)) + 1
    assert not any("�" in piece for piece, _ in told)


@pytest.mark.parametrize("stop", ["noted", "ay, no", "y", ".", " ", "Okay, noted."])
def test_a_stop_string_ends_the_reply_before_it(embedded: LanguageModel, tokenizer: Tokenizer, stop: str) -> None:
    text = "Okay, noted. And more."
    engine = scripted_text(embedded, tokenizer, text)
    generation = engine.submit([1], stop=["never", stop])
    run_checked(engine)
    assert (generation.text, generation.finish_reason, generation.stopped_by) == (text[: text.find(stop)], "stop", stop)
    assert stop in tokenizer.decode(generation.token_ids) and stop not in tokenizer.decode(generation.token_ids[:-1])
    assert engine.memory.usage().used_bytes == 0


def test_one_stop_string_may_be_given_as_it_is(embedded: LanguageModel, tokenizer: Tokenizer) -> None:
    engine = scripted_text(embedded, tokenizer, "Okay, noted.")
    generation = engine.submit([1], stop="not")
    engine.run()
    assert generation.text == "Okay, "


def test_what_was_held_back_is_shown_when_the_reply_is_cut(embedded: LanguageModel, tokenizer: Tokenizer) -> None:
    n_tokens = len(tokenizer.encode("Okay, noted", add_special_tokens=False))
    engine = scripted_text(embedded, tokenizer, "Okay, noted. And more.")
    generation = engine.submit([1], stop="noted!", max_tokens=n_tokens)
    engine.run()
    assert (generation.text, generation.finish_reason) == ("Okay, noted", "length")


# The tests below are about sequences that go on.


def test_what_kept_sequences_hold() -> None:
    scripted = Scripted(Toy(), [3, 4, 5, 6, 7], n_prompt=2)
    for stop_ids, max_tokens, remembers_end, held in (
        ((6,), 9, False, [1, 2, 3, 4, 5]),
        ((6,), 9, True, [1, 2, 3, 4, 5, 6]),
        ((9, 8), 2, False, [1, 2, 3]),
        ((9, 8), 2, True, [1, 2, 3, 4, 9]),
        ((), 2, True, [1, 2, 3, 4]),
        ((9,), 0, True, [1, 2]),
    ):
        engine = make_engine(scripted, stop_ids=stop_ids)
        other = engine.submit([1, 2], max_tokens=4)
        generation = engine.submit([1, 2], max_tokens=max_tokens, keeps_sequence=True, remembers_end=remembers_end)
        assert generation.sequence is None
        run_checked(engine)
        assert generation.sequence is not None and generation.sequence.tokens.tolist() == held
        assert (
            generation.finish_reason == ("stop" if stop_ids == (6,) else "length")
            and len(generation.token_ids) <= max_tokens
        )
        assert other.sequence is None
        engine.memory.close(generation.sequence)
        assert engine.memory.usage().used_bytes == 0


def test_turns_on_one_sequence_are_one_conversation(model: LanguageModel) -> None:
    engine, generator = make_engine(model, stop_ids=(0,)), random.Random(8)
    sequence, history = engine.memory.open(), list[int]()
    for turn in range(4):
        prompt = draw_prompt(generator, 9, model.memory_spec.vocab_size)
        if turn == 2:
            engine.memory.swap_out(sequence)
        sampling = Sampling(repetition_penalty=1.2)
        generation = engine.submit(
            prompt, sequence=sequence, max_tokens=6, sampling=sampling, keeps_sequence=True, remembers_end=True
        )
        run_checked(engine)
        assert generation.sequence is sequence
        history += prompt
        assert generation.token_ids == decode_alone(model, history, 6, sampling, stop_ids=(0,))
        history += generation.token_ids if generation.finish_reason == "stop" else [*generation.token_ids, 0]
        assert sequence.tokens.tolist() == history
    generation = engine.submit([1], sequence=sequence, max_tokens=2)
    run_checked(engine)
    assert sequence.closed and generation.sequence is None and engine.memory.usage().used_bytes == 0


def test_cancelled_generations_leave_kept_sequences_open() -> None:
    engine = make_engine(Toy(), max_running=1)
    given = engine.memory.open()
    runs, waits = (engine.submit([1, 2], sequence=s, max_tokens=9, keeps_sequence=True) for s in (given, None))
    for _ in range(3):
        engine.step()
    for generation in (runs, waits):
        engine.cancel(generation)
    assert runs.sequence is given and given.tokens.tolist() == [1, 2, *runs.token_ids[:-1]]
    assert waits.sequence is None and engine.is_idle


# The tests below are about prefixes.


def with_prefixes(
    model: Any, budget: int | str = "4MiB", *, rollback_window: int = 8, **options: Any
) -> tuple[Engine, PrefixCache]:
    memory = make_memory(model, budget, rollback_window=rollback_window)
    prefixes = PrefixCache(memory, grid_tokens=16)
    return Engine(model, memory, None, prefixes=prefixes, **({"step_tokens": 24, "max_running": 6} | options)), prefixes


def test_prompts_go_on_from_what_was_said_before(model: LanguageModel) -> None:
    engine, prefixes = with_prefixes(model)
    generator = random.Random(9)
    shared = draw_prompt(generator, 50, model.memory_spec.vocab_size)
    prompts = [shared + draw_prompt(generator, 7, model.memory_spec.vocab_size) for _ in range(5)]
    fresh = engine.submit(shared, max_tokens=8)
    run_checked(engine)
    assert fresh.lookup is not None and fresh.lookup.reused == 0
    generations = [engine.submit(prompt, max_tokens=8) for prompt in prompts]
    again = engine.submit(shared + fresh.token_ids[:-1] + [3], max_tokens=8)
    run_checked(engine)
    for generation, prompt in zip(generations, prompts, strict=True):
        assert generation.token_ids == decode_alone(model, prompt, 8)
        assert generation.lookup is not None and generation.lookup.reused >= len(shared) - 1
    assert again.lookup is not None and again.lookup.reused == len(shared) + 7, "the end of a reply was not remembered"
    assert engine.stats.n_reused == sum(g.lookup.reused for g in (*generations, again) if g.lookup is not None)
    assert (
        engine.stats.n_fed
        == sum(g.n_prompt + len(g.token_ids) - 1 for g in (fresh, *generations, again)) - engine.stats.n_reused
    )
    known = [g.lookup for g in (*generations, again) if g.lookup is not None]
    assert engine.stats.recomputed.total() == sum(lookup.by_attention - lookup.reused for lookup in known)
    prefixes.clear()
    assert engine.memory.usage().used_bytes == 0


def test_what_a_prefix_could_not_save_is_counted_by_reason() -> None:
    engine, prompt = with_prefixes(Toy(), rollback_window=0)[0], [i % VOCAB for i in range(30)]
    engine.submit(prompt, max_tokens=1)
    run_checked(engine)
    engine.submit(prompt[:20] + [0] * 9, max_tokens=1)  # Checkpoints stand at 16 and 30.
    run_checked(engine)
    assert engine.stats.n_reused == 16 and engine.stats.recomputed == {"no state": 4}
    # The two prompts part at 20. There is no checkpoint there, because it would save less than a step costs.
    engine.submit(prompt, max_tokens=1)
    run_checked(engine)
    assert engine.stats.recomputed == {"no state": 4 + 13, "last token": 1}


def test_marks_are_remembered_where_they_are(model: LanguageModel) -> None:
    engine, _ = with_prefixes(model)
    prompt = draw_prompt(random.Random(10), 61, model.memory_spec.vocab_size)
    engine.submit(prompt, max_tokens=1, marks=[5, 13, 37])
    run_checked(engine)
    for mark in (5, 13, 37):
        other = (prompt[mark] + 1) % model.memory_spec.vocab_size
        generation = engine.submit([*prompt[:mark], other, 1, 2], max_tokens=4)
        run_checked(engine)
        assert generation.lookup is not None and generation.lookup.reused == mark
        assert generation.token_ids == decode_alone(model, [*prompt[:mark], other, 1, 2], 4)


@only_in_long
def test_prefixes_give_way_when_memory_is_short(model: LanguageModel) -> None:
    engine, prefixes = with_prefixes(model, 5 * private_bytes(model, 90))
    generator, wanted = random.Random(11), Wanted()

    def arrive(n: int) -> None:
        if n < 60 and n % 3 == 0:
            wanted.extend(submit_some(engine, model, generator, 1, 60, 25))

    engine.submit([1], max_tokens=70)
    run_checked(engine, arrive)
    assert_as_alone(model, wanted)
    prefixes.clear()
    assert engine.memory.usage().used_bytes == 0
