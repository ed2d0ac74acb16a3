"""Measures what the embedded model remembers of words that training never showed.

    python -m training.evaluate --model models/embedded

Every dialogue ends in a question, and the answer counts only if all of its tokens are right. Words are held out by
their spelling: real words and made-up words of any letters (see `training.words`).
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from hybridmem.chat.prompts import Tokenizer, load_tokenizer
from hybridmem.chat.simulation.dialogues import NAMED, NOTED, UNKNOWN, Turn, make_dialogue, messages, small_talk
from hybridmem.memory import HybridMemory
from hybridmem.models import LanguageModel, load_model
from hybridmem.models.loading.folders import find_folder
from training.facts import AGE, COMES, IS_CALLED, LIVES, Fact, choose_fact, named, valued
from training.words import REAL, Words

_BATCH = 32
_LATER_TURNS = 14
"""Turns of small talk that put some 250 tokens between a fact and its question."""

ASKED: dict[str, tuple[str, tuple[Fact, ...]]] = {
    "names": ("name", (*(named(thing) for thing in NAMED), named("parrot"), named("friend"), IS_CALLED)),
    "cities": ("city", (valued("home city", "city"), valued("favourite city", "city"), LIVES, COMES)),
    "colours": ("colour", tuple(valued(f"{owner} colour", "colour") for owner in ("favourite", "car", "door"))),
    "numbers": ("number", (*(valued(f"{owner} number", "number") for owner in ("lucky", "house", "phone")), AGE)),
    "made-up words": ("any", (*(named(thing) for thing in NAMED), valued("home city", "city"), LIVES)),
}
"""Row of the table: (kind of its words, facts that are asked for)."""


@dataclass(frozen=True)
class Situation:
    """Describes a dialogue up to its question.

    Attributes:
        n_facts: how many facts are told, in any order, including the fact that is asked for.
        n_changes: how often the fact that is asked for is changed; the last statement counts.
        n_later: how many turns of small talk come before the question.
        is_told: if False, the question is about something that was never told, and the right answer says so.
    """

    n_facts: int
    n_changes: int = 0
    n_later: int = 0
    is_told: bool = True


SITUATIONS: dict[str, Situation] = {
    "1 fact": Situation(1),
    "2 facts": Situation(2),
    "3 facts": Situation(3),
    "5 facts": Situation(5),
    "changed once": Situation(2, n_changes=1),
    "changed twice": Situation(3, n_changes=2),
    "250 tokens later": Situation(3, n_later=_LATER_TURNS),
    "never told": Situation(3, is_told=False),
}


def make_held_out_dialogue(rng: random.Random, words: Words, row: str, situation: Situation) -> list[Turn]:
    """Make a dialogue that ends in a question whose answer is a word that training never showed."""
    kind, facts = ASKED[row]

    def word() -> str:
        if kind in REAL:
            return rng.choice(REAL[kind])
        return words.make("name" if kind == "any" else kind, held_out=True)

    def tell(fact: Fact, value: str, *, is_change: bool = False) -> Turn:
        return Turn(rng.choice(fact.change if is_change else fact.say).format(value), NOTED, fact.key, value)

    asked = rng.choice(facts)
    told = {asked.key: tell(asked, word())} if situation.is_told else {}
    while len(told) < situation.n_facts:
        other = choose_fact(rng, words)
        if other.key == asked.key:
            continue
        told.setdefault(other.key, tell(other, words.make(other.kind, held_out=True)))
    turns = list(told.values())
    rng.shuffle(turns)
    if not situation.is_told:
        return [*turns, Turn(rng.choice(asked.ask), UNKNOWN, asked.key, is_question=True)]
    value = told[asked.key].value
    for _ in range(situation.n_changes):
        value = word()
        turns.append(tell(asked, value, is_change=True))
    turns += [small_talk(rng) for _ in range(situation.n_later)]
    assert value is not None
    return [*turns, Turn(rng.choice(asked.ask), asked.answer.format(value), asked.key, value, is_question=True)]


def last_answers(model: LanguageModel, tokenizer: Tokenizer, dialogues: list[list[Turn]]) -> list[tuple[bool, str]]:
    """Return whether each last reply would be right, and the model's predictions while it is fed the right reply."""
    memory, answers = HybridMemory(model.memory_spec, "256MiB"), []
    for start in range(0, len(dialogues), _BATCH):
        prompts, replies = {}, []
        for turns in dialogues[start : start + _BATCH]:
            encoded: Any = tokenizer.apply_chat_template(messages(turns)[:-1], add_generation_prompt=True)
            prompts[memory.open()] = encoded["input_ids"]
            replies.append([*tokenizer.encode(turns[-1].reply), tokenizer.eos_token_id])
        memory.run(model, {s: prompt[:-1] for s, prompt in prompts.items()}, max_tokens=4096)
        requests = {s: [p[-1], *r[:-1]] for (s, p), r in zip(prompts.items(), replies, strict=True)}
        with memory.step(requests, outputs="all") as step:
            rows = step.split(model(step))
        for sequence, row, reply in zip(prompts, rows, replies, strict=True):
            said = row.argmax(-1).tolist()
            answers.append((said == reply, str(tokenizer.decode(said[:-1]))))
            memory.close(sequence)
    return answers


def evaluate(
    model: LanguageModel, tokenizer: Tokenizer, n_questions: int, seed: int,
    on_wrong: Callable[[list[Turn], str], None] = lambda turns, said: None,
) -> dict[str, dict[str, float]]:  # fmt: skip
    """Return the share of right answers for each pair of kind of word and situation, from `n_questions` questions each.

    `on_wrong` is called with each dialogue whose answer is wrong, and the wrong answer.
    """
    shares: dict[str, dict[str, float]] = {}
    for row in ASKED:
        shares[row] = {}
        for name, situation in SITUATIONS.items():
            rng = random.Random(f"{seed} {row} {name}")
            words = Words(rng)
            dialogues = [make_held_out_dialogue(rng, words, row, situation) for _ in range(n_questions)]
            answers = last_answers(model, tokenizer, dialogues)
            for turns, (is_right, said) in zip(dialogues, answers, strict=True):
                if not is_right:
                    on_wrong(turns, said)
            shares[row][name] = sum(is_right for is_right, _ in answers) / n_questions
        shares[row]["all"] = sum(shares[row].values()) / len(SITUATIONS)
    return shares


def evaluate_demo(model: LanguageModel, tokenizer: Tokenizer, n_questions: int, seed: int) -> float:
    """Return the share of right last answers in dialogues of the demo's kind, of 6, 12 and 20 turns."""
    rng = random.Random(f"{seed} demo")
    dialogues = [make_dialogue(rng, rng.choice((6, 12, 20)), held_out=True, talk=0.4) for _ in range(n_questions)]
    answers = last_answers(model, tokenizer, dialogues)
    return sum(is_right for is_right, _ in answers) / n_questions


def main(
    model: Annotated[str, typer.Option(help='a checkpoint\'s folder, or "embedded"')] = "embedded",
    questions: Annotated[int, typer.Option(help="of each kind of word in each situation")] = 100,
    seed: int = 0,
    wrong: Annotated[bool, typer.Option(help="show the dialogues whose answers are wrong")] = False,
) -> None:
    """Print a table of right answers to questions about words that training never showed."""
    folder = find_folder(model)

    def show(turns: list[Turn], said: str) -> None:
        print(json.dumps({"told": [turn.user for turn in turns], "right": turns[-1].reply, "said": said}))

    loaded, tokenizer = load_model(folder), load_tokenizer(folder)
    shares = evaluate(loaded, tokenizer, questions, seed, show if wrong else lambda turns, said: None)
    table = Table(title=f"right answers, %; {questions} questions in each cell")
    for heading in ("", *SITUATIONS, "all"):
        table.add_column(heading, justify="right" if heading else "left")
    for row, cells in shares.items():
        table.add_row(row, *(f"{100 * share:.1f}" for share in cells.values()))
    Console(width=120).print(table)
    total = sum(cells["all"] for cells in shares.values()) / len(shares)
    demo = evaluate_demo(loaded, tokenizer, 4 * questions, seed)
    print(f"the demo's words: {100 * demo:.2f} % of {4 * questions} questions")
    print(f"{100 * total:.2f} % of {questions * len(SITUATIONS) * len(shares)} questions")


if __name__ == "__main__":
    typer.run(main)
