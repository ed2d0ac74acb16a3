"""The engine drafts from texts. Replies are the same with drafts, and drafting stops where it does not pay."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
import torch

from hybridmem.chat.engine.drafting import Speculation
from hybridmem.chat.engine.engine import Engine, Generation
from hybridmem.chat.engine.output import Output
from hybridmem.chat.engine.pace import Cost, Pace
from hybridmem.chat.prompts import Tokenizer
from hybridmem.chat.sampling.grammar import Grammars
from hybridmem.chat.sampling.guesses import Guess, Guesses
from hybridmem.chat.sampling.sampling import Sampling
from hybridmem.memory import BatchError, HybridMemory
from hybridmem.models import LanguageModel
from tests.chat.engines import draw_sampling, make_memory, run_checked
from tests.extent import few_cases, only_in_long
from tests.toy import Toy

ALWAYS = Speculation(looks_up=True, adapts=False, branches=4)


class Repeating(Toy):
    """Is a toy that mostly lets the same token follow each token. So drafts are often right, and sometimes not."""

    def __call__(self, step: Any) -> Any:
        logits = super().__call__(step)
        ids = step.select(step.token_ids)
        return logits + 6.0 * torch.nn.functional.one_hot((ids * 7 + 3) % 5, logits.shape[1])


def replies(
    speculation: Speculation, seed: int, *, keeps: bool = True, **options: Any
) -> tuple[list[Generation], Engine]:
    generator, model = random.Random(seed), Repeating()
    memory = make_memory(model, **options)
    engine = Engine(
        model, memory, None, stop_ids=(4,) if seed % 2 else (), step_tokens=40, max_running=4, speculation=speculation
    )
    generations = []
    for _ in range(6):
        prompt = [generator.randrange(model.memory_spec.vocab_size) for _ in range(generator.randint(1, 30))]
        prediction = [generator.randrange(5) for _ in range(20)] if generator.random() < 0.4 else ()
        generations.append(
            engine.submit(
                prompt, max_tokens=generator.randint(0, 30), sampling=draw_sampling(generator), prediction=prediction,
                keeps_sequence=keeps, remembers_end=generator.random() < 0.5,
            )
        )  # fmt: skip
    run_checked(engine)
    return generations, engine


@few_cases
@pytest.mark.parametrize("seed", range(6))
def test_replies_and_sequences_are_the_same_with_drafts(seed: int) -> None:
    """Replies are greedy or drawn, with penalties, in small budgets too.

    The sequences that are left are the same.
    """
    without, _ = replies(Speculation(), seed)
    drafted, engine = replies(ALWAYS, seed)
    for a, b in zip(without, drafted, strict=True):
        assert (a.token_ids, a.finish_reason) == (b.token_ids, b.finish_reason)
        assert a.sequence is not None and b.sequence is not None
        assert a.sequence.tokens.tolist() == b.sequence.tokens.tolist()
        assert 0 <= b.n_accepted <= b.n_drafted
    assert sum(g.n_accepted for g in drafted) > 10
    assert engine.stats.n_generated == sum(len(g.token_ids) for g in drafted)


def test_texts_stop_strings_and_predictions(embedded: LanguageModel, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode("<|bos|><|user|>My cat is called Zoe.<|end|><|assistant|>")
    said = "Okay, noted."

    memory = HybridMemory(embedded.memory_spec, "16MiB", rollback_window=16)
    engine = Engine(embedded, memory, tokenizer, speculation=Speculation(adapts=False))

    def ask(prediction: str, **options: Any) -> Generation:
        generation = engine.submit(prompt, prediction=tokenizer.encode(prediction), keeps_sequence=True, **options)
        engine.run()
        return generation

    right = ask(said)
    assert (right.text, right.finish_reason) == (said, "stop") and right.n_accepted >= len(tokenizer.encode(said)) - 1
    wrong = ask("Okay, my dog is called Rex.")
    assert wrong.text == said and wrong.n_accepted < 2 < wrong.n_drafted
    other = ask("My dog is called Rex, and nothing else is.")
    assert (other.text, other.n_drafted) == (said, 0), "the first token comes with the prompt"
    for stop in ("not", ","):
        cut, plain = ask(said, stop=stop), ask("Zoe Zoe", stop=stop)
        assert (cut.text, cut.stopped_by, cut.token_ids) == (plain.text, plain.stopped_by, plain.token_ids)
        assert cut.sequence is not None and plain.sequence is not None and cut.sequence.length == plain.sequence.length


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.5, seed=3)])
def test_the_mask_of_a_grammar_is_that_of_each_drafted_token(
    embedded: LanguageModel, tokenizer: Tokenizer, sampling: Sampling
) -> None:
    """A draft is fed as far as the grammar allows it.

    The token that is chosen after it follows the grammar from there.
    """
    pattern = r"(yes|no)( (yes|no)){11}"
    grammar = Grammars(tokenizer, len(tokenizer), (tokenizer.eos_token_id,)).regex(pattern)
    prompt = tokenizer.encode("<|bos|><|user|>My cat is called Zoe.<|end|><|assistant|>")

    def ask(prediction: list[int]) -> Generation:
        memory = HybridMemory(embedded.memory_spec, "16MiB", rollback_window=16)
        engine = Engine(embedded, memory, tokenizer, speculation=Speculation(adapts=False))
        generation = engine.submit(prompt, prediction=prediction, output=Output(grammar=grammar), sampling=sampling)
        run_checked(engine)
        assert re.fullmatch(pattern, generation.text) and generation.finish_reason == "stop"
        return generation

    perhaps = tokenizer.encode("perhaps")
    without = ask(perhaps)
    assert without.n_drafted == 0, "tokens that the grammar forbids were fed"
    right = without.token_ids
    drafted = [ask(prediction) for prediction in (right, right[:9], right[:9] + perhaps)]
    assert all(reply.token_ids == right and reply.n_accepted > 3 for reply in drafted)
    assert drafted[1].n_drafted == drafted[2].n_drafted, "a draft goes as far as the grammar allows it"


@only_in_long
def test_a_step_that_has_no_room_for_drafts_is_taken_without() -> None:
    for budget in ("12KiB", "16KiB", "24KiB"):
        without, _ = replies(Speculation(), 3, keeps=False, budget=budget)
        drafted, _ = replies(ALWAYS, 3, keeps=False, budget=budget)
        assert [g.token_ids for g in without] == [g.token_ids for g in drafted]
        assert {g.error for g in drafted} == {None}


def test_a_prediction_that_is_no_tokens_is_refused() -> None:
    model = Toy()
    engine = Engine(model, make_memory(model), None, step_tokens=8, max_running=2)
    with pytest.raises(BatchError, match="outside the vocabulary"):
        engine.submit([1], prediction=[10**6])


def test_guesses() -> None:
    text = [1, 2, 3, 4, 5, 1, 2, 3]
    guesses = Guesses(text, len(text), (), looks_up=True)
    assert guesses.next(4).token_ids == [4, 5, 1, 2] and guesses.next(7).token_ids == [4, 5, 1, 2, 3, 4, 5]
    assert guesses.next(4).n_same == 3
    assert Guesses([9], 1, (), looks_up=True).next(4).token_ids == []
    text.append(9)
    predicted = Guesses(text, len(text), (7, 8, 9, 10, 11, 12), looks_up=False)
    assert predicted.next(3) == Guess([7, 8, 9], 1, is_predicted=True)
    text.append(7)
    assert predicted.next(3).token_ids == [8, 9, 10]
    text += [5, 9, 10, 11]
    assert predicted.next(3).token_ids == [12] and not Guesses(text, len(text), (), looks_up=False).next(3).token_ids


def test_guesses_go_on_after_a_call_was_taken_back() -> None:
    """The text is shorter then, and ends with tokens that occurred before, within what was taken back too."""
    text = [*range(10), 1, 2, 3, 50, 51, 52, 53, 1, 2, 3]
    guesses = Guesses(text, 10, (), looks_up=True)
    assert guesses.next(4).token_ids == [50, 51, 52, 53]
    text += [60, 61, 62, 1, 2, 3, 9]
    guesses.next(4)
    del text[13:]
    assert guesses.next(4).token_ids == [4, 5, 6, 7]
    text += [8, 9, 1, 2, 3]
    assert guesses.next(4).token_ids == [8, 9, 1, 2]


class Read(list[int]):
    """Counts how many tokens are read from a text."""

    n_read = 0

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        self.n_read += len(found) if isinstance(at, slice) else 1
        return found


def test_a_look_at_a_text_reads_a_few_tokens_whatever_its_length() -> None:
    """Ordinary text says some words again, and other words follow these."""
    generator, text = random.Random(0), Read()
    guesses = Guesses(text, 1, (), looks_up=True)
    for _ in range(4000):
        text.append(generator.randrange(12))
        assert guesses.grow() or guesses.next(32).token_ids == [], "where there may be no guess, there is none"
    assert text.n_read / len(text) < 8


def test_a_guess_after_a_change_is_where_the_copy_goes_on() -> None:
    """In the cases, one token or two were replaced, one was left out, or the change is too long ago."""
    source = [*range(100, 160)]
    for said, expected in (
        ([100, 101, 102, 7], [104, 105]), ([100, 101, 102, 7, 8, 105], [106, 107]),
        ([100, 101, 102, 104], [105, 106]), ([100, 101, 102, *range(50)], []),
    ):  # fmt: skip
        text = source[:]
        guesses = Guesses(text, len(text), (), looks_up=True)
        for token in said:
            text.append(token)
            guess = guesses.next(2)
        assert guess.token_ids == expected and guess.n_same == 0


def test_what_steps_bring_with_drafts_by_what_they_cost() -> None:
    pace = Pace()
    for n in (1, 1, 1, 2, 4, 8):
        pace.plain.note(n, 0.010 + 0.001 * n)
    assert not pace.is_known
    for n in (5, 5, 5, 9, 20, 36):
        pace.drafted.note(n, 0.012 + 0.001 * n)
    assert pace.is_known
    assert pace.speed(1, 8, 4) > 1.05 * pace.speed(1, 0, 0), "a step of one costs mostly what every step costs"
    assert pace.speed(4, 32, 2) < pace.speed(4, 0, 0)
    assert abs(pace.plain.of(16) - 0.026) < 0.002


def test_no_step_is_expected_to_be_faster_with_drafts_than_without() -> None:
    """That was measured while the machine did something else in plain steps. Right tokens decide then, not the clock.

    So drafts that save less than the margin are refused before anything else is computed.
    """
    pace = Pace()
    for _ in range(6):
        pace.plain.note(32, 0.020)
        pace.drafted.note(38, 0.012)
    assert pace.seconds(32, 6) == pace.seconds(32, 0) == 0.020
    assert pace.speed(32, 6, 1.0) < 1.05 * pace.speed(32, 0, 0.0)
    assert not pace.may_pay(32, 1.0) and pace.may_pay(32, 2.0)


def test_one_slow_step_does_not_change_a_cost_much() -> None:
    cost = Cost()
    for _ in range(20):
        cost.note(4, 0.01)
    cost.note(4, 5.0)
    assert cost.of(4) < 0.013


def test_steps_far_larger_than_measured_ones_promise_nothing() -> None:
    """A line says little of them: their products may be bound by computing, and those of small steps by memory."""
    cost = Cost()
    for _ in range(5):
        cost.note(38, 0.020)
        cost.note(44, 0.021)
    assert cost.of(88) < 0.030
    assert cost.of(176) == pytest.approx(2 * cost.of(88)) and cost.of(152) > 0.045


def test_a_slow_step_at_the_beginning_is_soon_forgotten() -> None:
    """Such a step compiles a kernel, for example.

    In a mean, it would make drafts look slow for hundreds of steps.
    """
    cost = Cost()
    for seconds in (5.0, 5.0, 5.0, 0.01, 0.01, 0.01):
        cost.note(4, seconds)
    assert cost.of(4) == 0.01 and cost.of(9) < 0.03
