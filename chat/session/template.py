"""Fills templates with holes: given text is fed, the model generates the holes, and one batch fills many templates.

    article = Template(
        "Q: {question}\\nA: {answer:max_tokens=20,stop='\\n'}\\nConfidence: {score:choices=['low','high']}"
    )
    filled = fill(engine, article, [{"question": question} for question in questions])
    filled[0].values["answer"]

Each text and each value is tokenised by itself. So no token spans the border of two parts, and the value of a hole does
not change the tokens around it. Texts and choices may contain special tokens. In given values they are plain text,
unless the caller asks for them. Tokens that the tokenizer puts in front of every text are at the beginning once.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hybridmem.chat.engine.engine import Engine, Generation, Sampling, require_engine
from hybridmem.chat.engine.requests import GREEDY
from hybridmem.chat.sampling.sampling import check_sampling
from hybridmem.chat.session.history import common_tokens, decode
from hybridmem.chat.session.reuse import resume
from hybridmem.chat.session.template_syntax import Hole, Template, Text
from hybridmem.chat.special_tokens import special_tokens_of
from hybridmem.memory import BatchError, FormatError, Sequence

__all__ = ["Filled", "Hole", "Template", "Text", "fill"]

GIVEN, CHOSEN = "given", "choice"


@dataclass(frozen=True)
class Filled:
    """Holds a filled template.

    Attributes:
        text: the whole text.
        values: hole -> its words, including given ones.
        reasons: hole -> "given", "choice", or the engine's reason for its end: "stop" or "length".
        scores: hole with choices -> choice -> log probability.
        token_ids: the tokens that the model read, up to the last hole that was not given. The text after it is not
            tokenised.
        n_generated: how many tokens were chosen one by one. Choices are compared, not generated.
    """

    text: str
    values: dict[str, str]
    reasons: dict[str, str]
    scores: dict[str, dict[str, float]]
    token_ids: tuple[int, ...]
    n_generated: int


def fill(
    engine: Engine,
    templates: Template | Iterable[Template],
    values: Mapping[str, str] | Iterable[Mapping[str, str]] | None = None,
    *,
    sampling: Sampling = GREEDY,
    owner: Hashable = None,
    parse_special: bool = False,
) -> list[Filled]:
    """Fill templates, all at once.

    A common beginning of templates is computed once. Tokens that the prefix cache holds are not computed at all. After
    the common beginning, each token of a text or a given value is fed once, however many holes follow. Only the last
    token before a hole may be fed again for its output: if no text stands between two holes, or if two templates are
    the same up to a hole.

    Args:
        templates: one template for all values, or one for each.
        values: hole -> given words, for each filled template. None: nothing is given.
        sampling: the sampling of holes that have none of their own. If it has a seed, all of them use that seed.
        parse_special: whether values may contain special tokens, as the template's texts may. Otherwise they are plain
            text there.
        owner: the owner of the prefixes that are reused and kept; see `PrefixCache`.
    Returns:
        The filled templates, in the order of `values`.
    Raises:
        BatchError: values that are not texts or belong to no hole, or a hole at the very beginning. FormatError: an
        engine without a tokenizer. CapacityError: there is no room. Whatever the model raises. No sequence stays open
        after an error.
    """
    require_engine(engine, "fill(engine, templates, values)")
    check_sampling(sampling)
    jobs = [
        _Job(template, dict(given), engine, parse_special=parse_special) for template, given in _pair(templates, values)
    ]
    filler = _Filler(engine, jobs, sampling, owner)
    try:
        filler.share()
        filler.run()
    finally:
        filler.close()
    return [job.filled() for job in jobs]


def _pair(templates: Template | Iterable[Template], values: Any) -> list[tuple[Template, Mapping[str, str]]]:
    if isinstance(templates, str) or not isinstance(templates, Template | Iterable):
        raise BatchError(f"{templates!r} is no Template; give Template({templates!r}), or several")
    wanted = templates if isinstance(templates, Template) else list(templates)
    for template in wanted if isinstance(wanted, list) else ():
        if not isinstance(template, Template):
            raise BatchError(f"{template!r} is no Template; give Template({template!r})")
    if not isinstance(values, Iterable | None):
        raise BatchError(f"values={values!r}; give {{hole: words}}, or a list with one for each template")
    given: list[Mapping[str, str]]
    if values is None:
        given = [{}] * (1 if isinstance(wanted, Template) else len(wanted))
    else:
        given = [values] if isinstance(values, Mapping) else list(values)
        if wrong := [row for row in given if not isinstance(row, Mapping)]:
            raise BatchError(
                f"{wrong[0]!r} fills no template; give {{hole: words}}, or a list with one for each template"
            )
    if isinstance(wanted, Template):
        wanted = [wanted] * len(given)
    if len(wanted) != len(given):
        raise BatchError(
            f"{len(wanted)} templates and {len(given)} rows of values; give one template, or as many as rows"
        )
    return list(zip(wanted, given, strict=True))


class _Job:
    """Holds a template that is being filled: the next part, and the text so far."""

    def __init__(self, template: Template, given: dict[str, str], engine: Engine, *, parse_special: bool) -> None:
        if engine.tokenizer is None:
            raise FormatError("this engine has no tokenizer, so no template can be read; make it with one")
        if unknown := sorted(given.keys() - set(template.names)):
            raise BatchError(f"the template has no hole {unknown[0]!r}; it has {', '.join(template.names) or 'none'}")
        for name, words in given.items():
            if not isinstance(words, str):
                raise BatchError(f"{words!r} for hole {name!r} is no text; give a string")
        self.tokenizer = engine.tokenizer
        self.encode_words = self.encode if parse_special else special_tokens_of(engine.tokenizer).encode_text
        self.words = given
        self.reasons = dict.fromkeys(given, GIVEN)
        self.scores: dict[str, dict[str, float]] = {}
        self.tokens: list[int] = []
        self.n_generated = 0
        self.sequence: Sequence | None = None
        self.generation: Generation | None = None
        self._template = template
        self._at = 0
        self.advance()
        lead = self.tokenizer.encode("")  # The tokenizer puts these tokens in front of any text.
        if self.tokens[: len(lead)] != lead:  # The template's text may begin with these tokens itself.
            self.tokens = [*lead, *self.tokens]
        if self.hole is not None and not self.tokens:
            raise BatchError(
                f"nothing stands before hole {self.hole.name!r}, so there is nothing to go on from; begin with a text"
            )

    @property
    def hole(self) -> Hole | None:
        """Return the hole to fill next. None: no hole is left."""
        part = self._template.parts[self._at] if self._at < len(self._template.parts) else None
        return part if isinstance(part, Hole) else None

    def advance(self) -> None:
        """Advance to the next hole whose text is not given. After the last hole, nothing needs to be fed."""
        rest = self._template.parts[self._at :]
        n_known = next(
            (i for i, part in enumerate(rest) if isinstance(part, Hole) and part.name not in self.words), None
        )
        if n_known is None:
            self._at = len(self._template.parts)
            return
        for part in rest[:n_known]:
            self.tokens += (
                self.encode(part.text) if isinstance(part, Text) else self.encode_words(self.words[part.name])
            )
        self._at += n_known

    def put(self, words: str, token_ids: Seq[int], reason: str) -> None:
        """Fill the hole, and advance."""
        assert self.hole is not None, "there was one to fill"
        self.words[self.hole.name], self.reasons[self.hole.name] = words, reason
        self.tokens += token_ids
        self._at += 1
        self.advance()

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def filled(self) -> Filled:
        parts = self._template.parts
        text = "".join(part.text if isinstance(part, Text) else self.words[part.name] for part in parts)
        return Filled(text, self.words, self.reasons, self.scores, tuple(self.tokens), self.n_generated)


@dataclass
class _Filler:
    """Fills all jobs of a batch.

    `open` holds the sequences that the filler has opened; they are closed however it ends.
    """

    engine: Engine
    jobs: list[_Job]
    sampling: Sampling
    owner: Hashable
    running: list[Generation] = field(default_factory=list)
    open: set[Sequence] = field(default_factory=set)

    def close(self) -> None:
        with self.engine.lock:
            for generation in self.running:
                self.engine.cancel(generation)
            for sequence in self.open:
                if not sequence.closed:
                    self.engine.memory.close(sequence)

    # The methods below find common prefixes.

    def share(self) -> None:
        """Feed common prefixes once, and give each job a fork.

        This walks the tree of all jobs' tokens level by level.
        """
        groups: list[tuple[list[_Job], Sequence | None, int]] = [
            ([job for job in self.jobs if job.hole is not None], None, 0)
        ]
        while groups:
            trunks = [
                (group, sequence, n_held, _n_shared(group)) for group, sequence, n_held in groups if len(group) > 1
            ]
            for group, sequence, _ in groups:
                if len(group) == 1:
                    group[0].sequence = sequence
            fed = [self._feed(group[0].tokens[:n], sequence, n_held) for group, sequence, n_held, n in trunks]
            self._wait()
            groups = [
                part
                for (group, _, _, n), sequence in zip(trunks, fed, strict=True)
                for part in self._split(group, sequence, n)
            ]

    def _feed(self, tokens: list[int], sequence: Sequence | None, n_held: int) -> Sequence | None:
        """Feed the rest of these tokens to a sequence that holds the first `n_held` of them.

        If `sequence` is None, a new one is opened, or none at all if there are no tokens.
        """
        if len(tokens) == n_held:
            return sequence
        if sequence is None:
            start = resume(self.engine, None, tokens, self.owner)
            sequence, n_held = start.sequence, start.n_kept
            self.open.add(sequence)
        generation = self.engine.submit(
            tokens[n_held:], sequence=sequence, max_tokens=0, keeps_sequence=True, owner=self.owner
        )
        self.running.append(generation)
        return sequence

    def _split(
        self, group: list[_Job], trunk: Sequence | None, n: int
    ) -> list[tuple[list[_Job], Sequence | None, int]]:
        """Divide jobs by the token at index n.

        Each part gets a fork of the trunk; the last part gets the trunk itself.
        """
        alike: dict[object, list[_Job]] = {}
        for job in group:
            alike.setdefault(job if len(job.tokens) == n + 1 else job.tokens[n], []).append(job)
        parts = list(alike.values())
        with self.engine.lock:
            forks = [None if trunk is None else self.engine.memory.fork(trunk) for _ in parts[1:]]
        self.open |= {fork for fork in forks if fork is not None}
        return [(part, sequence, n) for part, sequence in zip(parts, [*forks, trunk], strict=True)]

    def _wait(self) -> None:
        """Step until all generations in progress have ended. Raises the error that ended one of them."""
        while not all(generation.is_finished for generation in self.running):
            self.engine.step()
        for generation in self.running:
            if generation.error is not None:
                raise generation.error
        self.running.clear()

    # The methods below fill hole by hole.

    def run(self) -> None:
        """Fill hole after hole. A job that has filled a hole goes on to the next, without waiting for other jobs."""
        todo = [job for job in self.jobs if job.hole is not None]
        while todo:
            if choosing := [job for job in todo if job.hole is not None and job.hole.choices]:
                self._choose(choosing)
            for job in todo:
                if job.generation is None and job.hole is not None and not job.hole.choices:
                    self._submit(job, job.hole)
            if self.running:
                self.engine.step()
            for job in todo:
                if job.generation is not None and job.generation.is_finished:
                    self._read(job, job.generation)
            todo = [job for job in todo if job.hole is not None]

    def _resume(self, job: _Job) -> tuple[Sequence, list[int]]:
        """Return the job's sequence, and the tokens that it lacks."""
        start = resume(self.engine, job.sequence, job.tokens, self.owner)
        self.open.add(start.sequence)
        job.sequence = start.sequence
        return start.sequence, job.tokens[start.n_kept :]

    def _submit(self, job: _Job, hole: Hole) -> None:
        sequence, rest = self._resume(job)
        sampling = self.sampling if hole.sampling is None else hole.sampling
        job.generation = self.engine.submit(
            rest,
            sequence=sequence,
            max_tokens=hole.max_tokens,
            stop=hole.stop,
            sampling=sampling,
            keeps_sequence=True,
            owner=self.owner,
        )
        self.running.append(job.generation)

    def _read(self, job: _Job, generation: Generation) -> None:
        self.running.remove(generation)
        job.generation = None
        if generation.error is not None:
            raise generation.error
        ids = generation.token_ids
        job.n_generated += len(ids)
        if generation.stopped_by is None and ids and ids[-1] in self.engine.stop_ids:
            ids = ids[:-1]
        job.put(generation.text, _tokens_of(job, generation.text, ids), str(generation.finish_reason))

    # The methods below are about choices.

    def _choose(self, jobs: list[_Job]) -> None:
        """Fill the holes of these jobs, each with the most likely of its choices."""
        engine, memory = self.engine, self.engine.memory
        with engine.lock:
            rest = dict(self._resume(job) for job in jobs)
            firsts_JV = self._run(rest, "last").log_softmax(-1)
            choices = [[job.encode(choice) for choice in job.hole.choices] for job in jobs if job.hole is not None]
            forks: dict[tuple[int, int], Sequence] = {}
            for i, job in enumerate(jobs):
                assert job.sequence is not None, "it was resumed"
                for j, ids in enumerate(choices[i]):
                    if len(ids) > 1:
                        forks[i, j] = memory.fork(job.sequence)
                        self.open.add(forks[i, j])
            scores = [
                [float(firsts_V[ids[0]]) for ids in row] for firsts_V, row in zip(firsts_JV, choices, strict=True)
            ]
            if forks:
                rows_TV = self._run({fork: choices[i][j][:-1] for (i, j), fork in forks.items()}, "all").log_softmax(-1)
                at = 0
                for i, j in forks:
                    ids = choices[i][j][1:]
                    scores[i][j] += float(
                        rows_TV[at : at + len(ids)].gather(1, torch.tensor(ids, device=rows_TV.device)[:, None]).sum()
                    )
                    at += len(ids)
            for i, job in enumerate(jobs):
                self._settle(job, choices[i], scores[i], {j: fork for (k, j), fork in forks.items() if k == i})

    def _settle(self, job: _Job, choices: list[list[int]], scores: list[float], forks: dict[int, Sequence]) -> None:
        """Continue with the best choice, and close the forks of the others."""
        assert job.hole is not None and job.sequence is not None
        best = max(range(len(scores)), key=scores.__getitem__)
        forks[-1] = job.sequence
        job.sequence = forks.pop(best if best in forks else -1)
        for fork in forks.values():
            self.engine.memory.close(fork)
        self.open -= set(forks.values())
        job.scores[job.hole.name] = dict(zip(job.hole.choices, scores, strict=True))
        job.put(job.hole.choices[best], choices[best], CHOSEN)

    def _run(self, requests: dict[Sequence, list[int]], outputs: Any) -> Tensor:
        """Feed the requests, and return the rows' logits in float64.

        The engine's statistics count the tokens as fed.
        """
        logits = self.engine.memory.run(
            self.engine.model, requests, max_tokens=self.engine.step_tokens, outputs=outputs
        )
        assert logits is not None, "only a dry run has none"
        self.engine.stats.n_fed += sum(map(len, requests.values()))
        return logits.double()


def _n_shared(jobs: list[_Job]) -> int:
    """Count the leading tokens that all jobs have in common, not counting the last token of the shortest job."""
    first = jobs[0].tokens
    return min(min(common_tokens(first, job.tokens) for job in jobs[1:]), *(len(job.tokens) - 1 for job in jobs))


def _tokens_of(job: _Job, text: str, ids: Seq[int]) -> list[int]:
    """Return the chosen tokens of the text.

    If a stop string cut a token in two, the text after the last whole token is tokenised.
    """
    for n in range(len(ids), -1, -1):
        words = decode(job.tokenizer, ids[:n])
        if text.startswith(words):
            return [*ids[:n], *(job.encode_words(text[len(words) :]) if len(words) < len(text) else [])]
    raise AssertionError("no tokens have no text")
