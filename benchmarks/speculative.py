"""Measures speculative decoding on the CPU.

It covers prompt lookup on repetitive text, steps with drafts of given lengths and quality, and the bytes that drafts
need.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from benchmarks.harness import Report, interleave
from benchmarks.ours import VOCAB
from benchmarks.workloads import CONFIGS, make_peer
from hybridmem.chat.decoding.drafts import Draft, Drafter, DraftRequest, PromptLookup
from hybridmem.chat.decoding.speculative import SpeculativeBatch
from hybridmem.chat.engine.engine import Engine
from hybridmem.chat.prompts import Message, Tokenizer, encode_turn, find_stop_ids, load_tokenizer
from hybridmem.chat.simulation.conversation import MAX_REPLY_TOKENS, Conversation, Player
from hybridmem.chat.simulation.dialogues import Turn, make_dialogue
from hybridmem.memory import HybridMemory, Sequence, Step
from hybridmem.models import EMBEDDED, LanguageModel, load_model

WINDOW = 32
LENGTHS = (1, 2, 4, 8)
PERIOD = 16
SCALES = {"repeats itself": 16.0, "slips now and then": 6.0}
"""How far the embeddings of a token outweigh what the layers add; the smaller, the more often another token follows."""

NOTE = (
    "Random weights alone write text without any repetition. So the Jamba of 120M parameters is given a head of its "
    f"own, in which the row of each token is the embedding of the token before it on a cycle of {PERIOD}, and larger "
    "embeddings: what it writes greedily runs round such cycles, through all of its layers. A head of its own takes "
    "as long as a tied one. Real text repeats itself less, or not at all; the table of given drafts says what a share "
    "of right tokens is worth."
)


@contextmanager
def repeating_model(scale: float) -> Iterator[LanguageModel]:
    """Yield the 120M Jamba with random layers, and with an embedding and a head that make it repeat itself."""
    config = CONFIGS["jamba"]()
    config.tie_word_embeddings = False
    peer = make_peer(config)
    token_ids = torch.arange(VOCAB)
    with torch.no_grad():
        embedding = peer.get_input_embeddings().weight
        peer.get_output_embeddings().weight[token_ids // PERIOD * PERIOD + (token_ids + 1) % PERIOD] = embedding
        embedding *= scale
    with tempfile.TemporaryDirectory() as folder:
        peer.save_pretrained(folder)
        del peer
        yield load_model(folder, progress=False)


class GivenDrafts:
    """Drafts from a known text; each token is right with a given probability, and otherwise another token."""

    vocab_size = None

    def __init__(self, text: list[int], n_draft: int, share_right: float) -> None:
        self.n_draft = n_draft
        self._text, self._share_right = text, share_right
        self._random = random.Random(n_draft)

    def draft(self, requests: Mapping[Sequence, DraftRequest]) -> dict[Sequence, Draft]:
        drafts = {}
        for sequence, request in requests.items():
            ahead = self._text[len(request.text) :][: min(request.most_tokens, self.n_draft)]
            if ahead:
                drafts[sequence] = Draft(
                    [t if self._random.random() < self._share_right else (t + 1) % VOCAB for t in ahead]
                )
        return drafts

    def forget(self, sequence: Sequence) -> None: ...


class Watched:
    """Runs a model in each step, after it has called a function. No step is recorded or replayed."""

    is_recordable = False

    def __init__(self, model: LanguageModel, call: Callable[[], None]) -> None:
        self._model, self._call = model, call

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, step: Step) -> Tensor:
        self._call()
        return self._model(step)


class Decoding:
    """Holds a sequence after a prompt; each measurement decodes the continuation in a fork of it."""

    def __init__(self, model: LanguageModel, prompt: list[int], n_tokens: int) -> None:
        self.model, self.prompt, self.n_tokens = model, prompt, n_tokens
        self.memory = HybridMemory(model.memory_spec, "2GiB", rollback_window=WINDOW)
        self._root = self.memory.open()
        self.memory.run(model, {self._root: prompt[:-1]})
        self.text = [*prompt, *self.decode(None)[0]]

    def decode(
        self,
        drafter: Drafter | None,
        model: LanguageModel | None = None,
        *,
        adapts: bool = True,
        after_step: Callable[[], None] = lambda: None,
    ) -> tuple[list[int], Engine | SpeculativeBatch]:
        """Decode the tokens that follow the prompt; return them, and the batch or engine that decoded them.

        Without a drafter, the engine decodes.
        """
        model, sequence = model or self.model, self.memory.fork(self._root)
        if drafter is None:
            engine = Engine(model, self.memory, None, stop_ids=())
            generation = engine.submit(self.prompt[-1:], sequence=sequence, max_tokens=self.n_tokens)
            while not engine.is_idle:
                engine.step()
                after_step()
            return generation.token_ids, engine
        batch = SpeculativeBatch(model, self.memory, (), drafter, adapts=adapts)
        batch.add(sequence, self.prompt[-1:], self.n_tokens)
        token_ids = []
        while not batch.is_idle:
            token_ids += [new.token_id for new in batch.step()]
            after_step()
        batch.discard(sequence)
        self.memory.close(sequence)
        return token_ids, batch

    def most_bytes(self, drafter: Drafter | None) -> tuple[dict[str, int], dict[str, int]]:
        """Return the most bytes of each kind that are held between steps, and the most that are held during steps.

        Bytes of the prompt's own sequence are not counted.
        """
        before = self.memory.usage().by_kind
        between, inside = dict.fromkeys(before, 0), dict.fromkeys(before, 0)

        def count(most: dict[str, int]) -> None:
            for kind, n_bytes in self.memory.usage().by_kind.items():
                most[kind] = max(most[kind], n_bytes - before[kind])

        watched = cast(LanguageModel, Watched(self.model, lambda: count(inside)))
        self.decode(drafter, watched, adapts=False, after_step=lambda: count(between))
        return between, inside


def speculative(*, quick: bool) -> Report:
    """Measure speculative decoding: prompt lookup on repetitive text, against plain decoding.

    Also measures steps by length and quality of the drafts, and bytes.
    """
    report = Report("speculative")
    report.notes.append(NOTE)
    prompt = list(range(10 * PERIOD, 11 * PERIOD)) * 6
    for name, scale in SCALES.items():
        with repeating_model(scale) as model:
            decoding = Decoding(model, prompt, 36 if quick else 256)
            _repetitive(report, name, decoding, quick=quick)
            if scale == max(SCALES.values()):
                decoding = Decoding(model, prompt, 18 if quick else 96)
                _given(report, decoding, quick=quick)
                _bytes(report, decoding)
        if quick:
            break
    _dialogues(report, n_users=2 if quick else 8)
    return report


def _repetitive(report: Report, name: str, decoding: Decoding, *, quick: bool) -> None:
    """Measure plain decoding against prompt lookup on text that the model writes greedily.

    Each round measures both, one after the other.
    """
    runs = {"plain": partial(decoding.decode, None), "lookup": lambda: decoding.decode(PromptLookup())}
    times = interleave(runs, 3 if quick else 9)
    token_ids, batch = decoding.decode(PromptLookup())
    assert isinstance(batch, SpeculativeBatch)
    plain, lookup = (times[run].median_ms / decoding.n_tokens for run in ("plain", "lookup"))
    report.add("repetitive text, jamba, 1 sequence, ms a token", {
        "text": name, "tokens": decoding.n_tokens, "of which different": len(set(token_ids)), "plain": plain,
        "prompt lookup": lookup, "ratio": plain / lookup, "asked": 1.5, "drafts accepted": batch.acceptance.rate,
        "tokens a step": batch.acceptance.tokens_per_step,
        "same text": "yes" if token_ids == decoding.text[len(decoding.prompt) :] else "NO",
    })  # fmt: skip


def _given(report: Report, decoding: Decoding, *, quick: bool) -> None:
    """Measure steps with drafts of a given length, whose tokens are right with a given probability."""
    shares = (0.0, 1.0) if quick else (0.0, 0.5, 0.8, 0.95, 1.0)
    cases = [(0, 0.0), *((n, share) for n in LENGTHS for share in shares)]

    def run(n_draft: int, share: float) -> Engine | SpeculativeBatch:
        drafter = GivenDrafts(decoding.text, n_draft, share) if n_draft else None
        token_ids, batch = decoding.decode(drafter, adapts=False)
        assert token_ids == decoding.text[len(decoding.prompt) :], "drafts must not change the text"
        return batch

    batches = {case: run(*case) for case in cases}
    times = interleave({str(case): partial(run, *case) for case in cases}, 2 if quick else 4, n_warm_up=0)
    plain = times[str(cases[0])].median_ms / decoding.n_tokens
    for case in cases:
        ms, n_steps = times[str(case)].median_ms, batches[case].stats.n_steps
        report.add("drafts of given length and quality, jamba, 1 sequence", {
            "drafts a step": case[0], "each right with probability": case[1] if case[0] else "-",
            "ms a step": ms / n_steps, "tokens a step": decoding.n_tokens / n_steps,
            "ms a token": ms / decoding.n_tokens, "times plain speed": plain * decoding.n_tokens / ms,
        })  # fmt: skip


def _bytes(report: Report, decoding: Decoding) -> None:
    """Measure the most bytes that one sequence holds, without drafts and with them.

    During a step in which the body moves, a tail may be held twice.
    """
    state_bytes = decoding.memory.usage().block_bytes["states"]
    for n_draft in (0, *LENGTHS, WINDOW):
        between, inside = decoding.most_bytes(GivenDrafts(decoding.text, n_draft, 0.8) if n_draft else None)
        report.add(f"one sequence at most, rollback_window={WINDOW}, jamba", {
            "drafts a step": n_draft, "states, KiB": between["states"] / 1024, "tails, KiB": between["tails"] / 1024,
            "states inside a step, KiB": inside["states"] / 1024, "tails inside a step, KiB": inside["tails"] / 1024,
            "a state copy a draft would be, KiB": n_draft * state_bytes / 1024,
        })  # fmt: skip


def _dialogues(report: Report, n_users: int) -> None:
    """Measure what prompt lookup saves in replies of the embedded model.

    Users state facts and ask for them later.
    """
    model, tokenizer = load_model("embedded"), load_tokenizer(EMBEDDED)
    # Dialogues run one after the other, because speculation helps with few sequences.
    dialogues = [make_dialogue(random.Random(i), 8) for i in range(n_users)]
    memory, plain = HybridMemory(model.memory_spec, "256MiB", rollback_window=WINDOW), list[list[Message]]()
    player = Player(Engine(model, memory, tokenizer), tokenizer, lambda *_: None)
    for turns in dialogues:
        user = Conversation("user", memory.open())
        player.play("dialogue", [(user, turns)])
        plain.append(user.messages)
    memory = HybridMemory(model.memory_spec, "256MiB", rollback_window=WINDOW)
    batch = SpeculativeBatch(model, memory, find_stop_ids(tokenizer, model), PromptLookup(2, 8), remembers_end=True)
    drafted = [_talk(batch, tokenizer, turns) for turns in dialogues]
    report.add("dialogues of the embedded model, one at a time", {
        "drafts": "prompt lookup, n-grams of 2", "tokens": batch.acceptance.n_generated,
        "accepted": batch.acceptance.rate, "tokens a step": batch.acceptance.tokens_per_step,
        "same replies": "yes" if drafted == plain else "NO",
    })  # fmt: skip


def _talk(batch: SpeculativeBatch, tokenizer: Tokenizer, turns: list[Turn]) -> list[Message]:
    """Play a dialogue whose replies are decoded with drafts, and return its messages."""
    sequence, messages = batch.memory.open(), list[Message]()
    for turn in turns:
        batch.add(sequence, encode_turn(tokenizer, messages, turn.user), MAX_REPLY_TOKENS)
        token_ids = []
        while not batch.is_idle:
            token_ids += [new.token_id for new in batch.step()]
        reply = tokenizer.decode(token_ids, skip_special_tokens=True)
        messages += [{"role": "user", "content": turn.user}, {"role": "assistant", "content": reply}]
    return messages
