"""Decides which generations get drafts in a step, from where and of how many tokens, and learns whether drafts pay.

Drafts come from three sources: the prediction of a request and the text itself (`chat.engine.text_drafts`), and a
smaller model (`chat.engine.draft_models`). None changes what a reply says.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from hybridmem.chat.engine.choose import Plan
from hybridmem.chat.engine.draft_models import Drafts, JobDrafter
from hybridmem.chat.engine.pace import LOST_SHARE, MARGIN, TRIED_SHARE, Ledger, Pace
from hybridmem.chat.engine.requests import Job
from hybridmem.chat.engine.text_drafts import Rate, TextDrafts, lengths_of
from hybridmem.chat.engine.token_trees import TokenTree, branch, has_branch_at, n_first, takes_trees
from hybridmem.chat.prompts import Tokenizer
from hybridmem.chat.sampling.guesses import Guess
from hybridmem.memory import HybridMemory, SpecError
from hybridmem.memory.blocks import read_count

MOST_DRAFTED = 31
"""A draft has at most this many tokens. With the token before it, these are 32 rows, the most that `models.products`
multiplies by the kernels for few rows.
"""
_PROBED = 3
"""A draft that only measures what drafts cost, or tests whether a drafter is right, has this many tokens. Every other
draft of a text has twice as many.
"""
_PROBED_RATE = 0.6
"""What drafts from texts cost is measured when this share of them would have been right."""
_LOOKING_SHARE, _LONGEST_REST = 0.005, 32
"""Looking for drafts that are not found may take this share of the time, beyond what drafts of texts have saved.
Otherwise some steps go without, at most so many in a row.
"""
_FREE_STEPS = 4
"""Drafts from texts may lose the time of so many steps before a share of the time counts."""
_LEAST_RATE, _FORGIVEN = 0.2, 1.02
"""Where a drafter had a lower rate of right tokens, a generation gets no draft of it. Each time, its rate is raised by
this factor.
"""
_COMPARED_EVERY, _COMPARED_AT_FIRST = 64, 16
"""After this many steps with drafts, one goes without, so that both costs stay known."""
_OF_MODELS = 0.7
"""The expected share of right tokens of a model before any draft was verified."""
_TRIED_JOBS, _TRIED_STEPS = 2, 8
"""A trial of a drafter drafts for so many generations, in so many steps."""
_LONGEST_TRIAL = 256
"""A trial that has not come to its end after so many steps, because no generation could get drafts, has ended."""
_MODEL_REST = 15
"""After a step in which no draft paid, this many steps go without."""
_LENGTHS = (1, 2, 3, 4, 6, 8)
"""The drafter's drafts have one of these lengths, whichever promises the most tokens a second. If one step drafts all
tokens, they may also be as long as it makes them.
"""
BRANCHES = 1
"""A draft has at most this many branches, unless `Speculation` says otherwise. Trees were not measured to pay."""
_OF_SECONDS, _BRANCH_TOKENS = 0.4, 6
"""Where the first guess is wrong, this share of the others is expected to be right before any was verified. Others have
at most so many tokens.
"""
_SURE_RATE = 0.9
"""Guesses that are right as often as this get no branches beside them."""
_LEAST_REPLY = 32
"""A reply is expected to go on for as many tokens as it has, and at least for these."""


@dataclass(frozen=True)
class Speculation:
    """Says where an engine gets drafts from, in addition to predictions that come with requests.

    Attributes:
        looks_up: take drafts from the texts themselves (prompt lookup).
        adapts: draft only where measurements say that it pays. Replies are the same either way.
        drafter: drafts with a model, such as `ModelDrafter(small_model, its_memory)`. None: no model drafts.
        branches: drafts of texts are trees of at most so many branches, where these promise more than a chain. 1,
            the default: chains only. Memories with policies or storages take no trees, and get chains.
    """

    looks_up: bool = False
    adapts: bool = True
    drafter: JobDrafter | None = None
    branches: int = BRANCHES


@dataclass(frozen=True)
class _Turn:
    """Describes a step that is about to be made.

    Attributes:
        jobs: the jobs that decode.
        room: the most tokens of a draft for which the step has room.
        is_mixed: whether the step computes prompts as well.
    """

    jobs: list[Job]
    room: int
    is_mixed: bool

    @property
    def n(self) -> int:
        return len(self.jobs)


@dataclass
class _Proposal:
    """Holds the drafts of one step.

    Attributes:
        modelled: the jobs whose drafts are the drafter's.
        seconds: how long the drafter took.
    """

    drafts: Drafts = field(default_factory=dict)
    modelled: frozenset[Job] = frozenset()
    seconds: float = 0.0


_IDLE = _Proposal()
"""The proposal of a step in which nothing is looked for, measured or counted, because that would take time as well."""


class Drafting:
    """Proposes drafts for the steps of an engine, and measures whether they pay.

    There are no drafts without a rollback window, because wrong tokens could not be taken back.
    """

    def __init__(
        self, memory: HybridMemory, step_tokens: int, speculation: Speculation, tokenizer: Tokenizer | None = None
    ) -> None:
        self._most = min(MOST_DRAFTED, memory.rollback_window)
        self._step_tokens = step_tokens
        self._adapts = speculation.adapts
        self._drafter = speculation.drafter
        self._branches = read_count("branches", speculation.branches, 1)
        if self._branches > 1 and (not self._most or not takes_trees(memory)):
            self._branches = 1
        if self._drafter is not None:
            if not self._most:
                raise SpecError("a drafter needs a memory with a rollback window, such as rollback_window=32")
            self._drafter.check(memory, tokenizer)
        self._pace = Pace()
        self._texts, self._text_ledger = TextDrafts(looks_up=speculation.looks_up), Ledger()
        self._looks = Ledger()  # What looking takes in vain is lost here.
        self._seconds = Rate(_OF_SECONDS, kept=0.9)  # This says how often another guess is right if the first is wrong.
        self._rest, self._looking, self._n_drafted_steps = 0, 0.0, 0
        self._rates = WeakKeyDictionary[Job, Rate]()  # These are rates of the drafter's drafts.
        self._rate_of_all = _OF_MODELS
        self._ledger, self._n_tried, self._idle, self._model_rest = Ledger(), 0, 0, 0
        self._is_paused, self._n_due, self._n_followed, self._following = False, _TRIED_STEPS, 0, 0.0
        self._last = _Proposal()
        self._right: dict[Job, int] = {}
        self._share = 1.0

    def propose(self, plan: Plan) -> Drafts:
        """Return drafts for a step, where they are expected to pay. Often there are none."""
        if self._drafter is not None and self._adapts:
            self._pause_or_resume(self._drafter)
        if self._idle > 0:
            self._idle, self._last = self._idle - 1, _IDLE
            return {}
        self._last = self._propose(plan)
        self._share = self._share_of(plan, self._last)
        return self._last.drafts

    def _share_of(self, plan: Plan, proposal: _Proposal) -> float:
        """Return what a right token of these drafts saves (`Pace.worth`), in plain steps' time for one token."""
        if not proposal.drafts or not self._pace.plain.is_known:
            return 1.0
        right = [
            self._rate(job).expected(len(draft))
            if job in proposal.modelled
            else self._texts.expected(job, n_first(draft))
            for job, draft in proposal.drafts.items()
        ]
        n_decoding = sum(not job.is_prefilling for job, _ in plan)
        return self._pace.worth(n_decoding, right) / max(sum(right), 1e-9)

    def _propose(self, plan: Plan) -> _Proposal:
        if not self._most:
            return _Proposal()
        looks = self._texts.looks_up or any(job.request.prediction for job, _ in plan)
        if self._drafter is None:
            if self._rest > 0:
                self._rest -= 1
                return _Proposal()
            if not looks:
                return _Proposal()
        jobs = [job for job, _ in plan if not job.is_prefilling]
        if not jobs or (self._adapts and self._is_compared()):
            return _Proposal()
        turn = _Turn(jobs, self._step_tokens // len(plan) - 1, is_mixed=len(jobs) < len(plan))
        looked_up = self._look_up(turn) if looks else {}
        if self._drafter is None:
            return _Proposal(looked_up)
        if self._model_rest > 0:
            self._model_rest -= 1
            return _Proposal(looked_up)
        proposal = self._add_model(turn, looked_up, self._drafter)
        if not proposal.seconds and not looked_up and self._adapts and self._pace.plain.is_well_known:
            if looks:
                self._model_rest = _MODEL_REST
            else:
                self._idle = _MODEL_REST
        return proposal

    def _is_compared(self) -> bool:
        """Return True for one step in 64, which runs without drafts, so that the cost of such steps stays known.

        There are more such steps at first, because a few slow ones would make drafts look good.
        """
        self._n_drafted_steps += 1
        every = _COMPARED_EVERY if self._n_drafted_steps >= 3 * _COMPARED_EVERY else _COMPARED_AT_FIRST
        return self._n_drafted_steps % every == 0

    # The methods below take drafts from the texts.

    def _look_up(self, turn: _Turn) -> Drafts:
        if self._rest > 0:
            self._rest -= 1
            return {}
        started = time.perf_counter()
        found = self._texts.find(turn.jobs, lambda job: self._possible(job, turn.room))
        others = self._find_others(turn, found)
        lengths, branched = self._choose_lengths(turn, found, others)
        for job in lengths:
            self._texts.feed(job, found[job])
        self._pause(turn, time.perf_counter() - started, found=bool(lengths))
        return {
            job: branch(found[job].token_ids[:n], others.get(job, ()) if branched else ()) for job, n in lengths.items()
        }

    def _find_others(self, turn: _Turn, found: Mapping[Job, Guess]) -> dict[Job, list[list[int]]]:
        """Return second and further guesses, for jobs for which they may pay. In steps with prompts there are none."""
        if self._branches == 1 or turn.is_mixed or (self._adapts and not self._is_often_right(self._seconds)):
            return {}
        others = dict[Job, list[list[int]]]()
        for job, guess in found.items():
            if self._adapts and self._texts.rate(job, guess).value >= _SURE_RATE:
                continue
            room = (turn.room - len(guess.token_ids)) // (self._branches - 1)
            n_each = min(_BRANCH_TOKENS, room, self._possible(job, turn.room))
            if n_each > 0 and (ways := self._texts.others(job, guess, n_each, self._branches - 1)):
                others[job] = ways
        return others

    def _pause(self, turn: _Turn, seconds: float, *, found: bool) -> None:
        """Let some steps go without looking, if nothing was found and looking takes too long."""
        self._looking = min(seconds, 2 * self._looking) if self._looking else seconds
        if found:
            return
        self._looks.note(0.0, seconds)
        if self._adapts and self._pace.plain.is_known and not self._looks.allows(_LOOKING_SHARE):
            share = self._looking / self._pace.plain.of(turn.n)
            self._rest = min(_LONGEST_REST, int(share / _LOOKING_SHARE))

    def _choose_lengths(
        self, turn: _Turn, found: dict[Job, Guess], others: Mapping[Job, list[list[int]]]
    ) -> tuple[dict[Job, int], bool]:
        """Return how many tokens of each job's guess to verify, and whether to verify other guesses as well.

        The choice is the one that promises the most tokens a second.
        """
        most = {job: len(guess.token_ids) for job, guess in found.items()}
        if not self._adapts or not found:
            return most, True
        pace, n = self._pace, turn.n
        rates = {job: self._texts.rate(job, guess) for job, guess in found.items()}
        if not pace.is_known:
            if turn.is_mixed or not pace.plain.is_known:
                return {}, False
            likely = [job for job, rate in rates.items() if rate.value >= _PROBED_RATE]
            n_probed = _PROBED * (1 + pace.drafted.n_noted % 2)  # Two sizes say what a row costs.
            return {job: min(n_probed, most[job]) for job in likely[:_TRIED_JOBS]}, False
        if not self._text_ledger.allows(TRIED_SHARE, _FREE_STEPS * pace.plain.of(n)):
            return {}, False

        def speed(choice: tuple[dict[Job, int], bool]) -> float:
            lengths, is_branched = choice
            right, n_drafted = (
                [rates[job].expected(n_tokens) for job, n_tokens in lengths.items()],
                sum(lengths.values()),
            )
            if is_branched:
                right = [n + self._gain(rates[job], others.get(job, [])) for n, job in zip(right, lengths, strict=True)]
                n_drafted += sum(len(way) for job in lengths for way in others.get(job, []))
            worth = pace.worth(n, right)
            return pace.speed(n, n_drafted, worth, is_branched=is_branched)

        none, choices = dict[Job, int](), [(lengths, False) for lengths in lengths_of(rates, most)]
        if not choices:
            return none, False
        longest, _ = choices[0]
        if not others and not pace.may_pay(n, pace.worth(n, [rates[job].expected(k) for job, k in longest.items()])):
            return none, False
        choices += [(lengths, True) for lengths, _ in choices if any(job in others for job in lengths)]
        best = max(choices, key=speed)
        return best if speed(best) >= MARGIN * speed((none, False)) else (none, False)

    def _gain(self, rate: Rate, others: list[list[int]]) -> float:
        """Return how many tokens of other guesses are expected to be right, because the first one is wrong."""
        if not others:
            return 0.0
        n_tokens = sum(map(len, others)) / len(others)
        return (1 - rate.value) * self._seconds.value * (1 + rate.expected(int(n_tokens) - 1))

    def _possible(self, job: Job, room: int) -> int:
        """Return the most tokens of a draft that the job could use."""
        if job.ending is not None or not job.wants_choice(1):
            return 0
        return max(0, min(self._most, room, job.request.max_tokens - len(job.generation.token_ids) - 1))

    def _sums(self, drafts: Drafts) -> tuple[int, float]:
        """Return how many tokens drafts of texts have, and how many of these are expected to be right."""
        n_drafted = sum(map(len, drafts.values()))
        return n_drafted, sum(self._texts.expected(job, len(draft)) for job, draft in drafts.items())

    # The methods below take drafts from a model.

    def _add_model(self, turn: _Turn, looked_up: Drafts, drafter: JobDrafter) -> _Proposal:
        """Return the drafts of a step: those of the texts, and the drafter's for other jobs, if these pay."""
        most = {
            job: n
            for job in turn.jobs
            if job not in looked_up
            and (n := min(self._possible(job, turn.room), _lengths_of(drafter)[-1]))
            and drafter.n_behind(job) is not None
        }
        wanted = self._choose_model(turn, looked_up, most, drafter) if self._adapts else most
        if not wanted:
            return _Proposal(looked_up)
        started = time.perf_counter()
        drafts = drafter.draft(wanted)
        seconds = time.perf_counter() - started
        for n_rows, of_step in drafter.noted:
            self._pace.model.note(n_rows, of_step)
        return _Proposal(looked_up | drafts, frozenset(drafts), seconds)

    def _choose_model(
        self, turn: _Turn, looked_up: Drafts, most: dict[Job, int], drafter: JobDrafter
    ) -> dict[Job, int]:
        """Return how many tokens the drafter drafts for which jobs.

        If that is not expected to pay, it may be tried, as long as little of the time so far was lost.
        """
        if not most or self._is_paused:
            return {}
        good = [job for job in most if self._is_often_right(self._rate(job))]
        n_tokens, pays = self._best(turn, looked_up, good, drafter)
        if pays:
            self._n_tried, self._n_due = 0, self._n_due - 1
            return {job: min(n_tokens, most[job]) for job in pays}
        is_cheap = self._n_tried > 0 or self._n_due > 0 or self._ledger.allows(TRIED_SHARE)
        if turn.is_mixed or not self._pace.plain.is_well_known or not is_cheap:
            return {}
        self._n_tried, self._n_due = (self._n_tried + 1) % _TRIED_STEPS, self._n_due - 1
        tried = sorted(most, key=lambda job: (drafter.n_behind(job) or 0, -self._rate(job).value))[:_TRIED_JOBS]
        return {job: min(_PROBED, most[job]) for job in tried}

    def _pause_or_resume(self, drafter: JobDrafter) -> None:
        """Pause a drafter that has lost too much time, after one trial at least, and resume it for another trial later.

        A draft head follows texts whether or not they get drafts. So its trial begins with texts that it follows.
        """
        if self._is_paused and self._ledger.allows(TRIED_SHARE):
            self._is_paused, self._n_due, self._n_followed = False, _TRIED_STEPS, 0
            drafter.resume()
        elif not self._is_paused and not self._ledger.allows(LOST_SHARE):
            if self._n_due <= 0 or self._n_followed >= _LONGEST_TRIAL:
                self._is_paused = True
                drafter.pause()

    def _rate(self, job: Job) -> Rate:
        """Return how often the drafter is right for this job."""
        rate = self._rates.get(job)
        if rate is None:
            rate = self._rates[job] = Rate(self._rate_of_all)
        return rate

    @staticmethod
    def _is_often_right(rate: Rate) -> bool:
        if rate.value >= _LEAST_RATE:
            return True
        rate.value *= _FORGIVEN
        return False

    def _best(self, turn: _Turn, looked_up: Drafts, jobs: list[Job], drafter: JobDrafter) -> tuple[int, list[Job]]:
        """Return the best number of tokens for the drafter, and the jobs for which it pays. There may be none."""
        pace, n, n_jobs = self._pace, turn.n, len(jobs)
        if not jobs or not pace.is_known or not pace.model.is_known:
            return 0, []
        n_found, n_right = self._sums(looked_up)
        rate = Rate(sum(self._rate(job).value for job in jobs) / n_jobs)

        def speed(k: int) -> float:
            seconds = pace.seconds(n, n_found + k * n_jobs)
            n_steps = min(k, 1) if drafter.drafts_at_once else k
            return (n + n_right + n_jobs * rate.expected(k)) / (seconds + n_steps * pace.model.of(n_jobs))

        best = max((k for k in _lengths_of(drafter) if k <= self._most), key=speed)
        least = max(n / pace.plain.of(n), speed(0))
        if speed(best) < MARGIN * least:
            return 0, []
        saved = 1 / least - 1 / speed(best)  # This is in seconds for each token.
        return best, [job for job in jobs if self._is_worth_feeding(job, drafter, saved)]

    def _is_worth_feeding(self, job: Job, drafter: JobDrafter, saved: float) -> bool:
        """Return whether a job's reply is expected to go on for long enough to pay for feeding its text."""
        n_behind = drafter.n_behind(job) or 0
        if n_behind <= self._most + 1:
            return True
        n_said = len(job.generation.token_ids)
        n_left = min(job.request.max_tokens - n_said, max(_LEAST_REPLY, n_said))
        return n_left * saved >= self._pace.model.of(n_behind)

    # The methods below record what became of the drafts.

    def note(self, plan: Plan, drafts: Drafts, seconds: float) -> float:
        """Record how many seconds a step took, with the time in which its drafts were made.

        Returns how many seconds its drafts have saved. The number is negative if they lost time, and 0 if that is not
        known.
        """
        last, self._last = self._last, _Proposal()
        followed = self._note_following()
        self._looks.note(seconds, 0.0)
        if last is _IDLE:
            self._ledger.note(seconds, followed)
            return -followed
        right, self._right = self._right, {}
        n, n_fed, n_drafted = len(plan), sum(n_tokens for _, n_tokens in plan), sum(map(len, drafts.values()))
        pace, is_mixed = self._pace, n_fed > n
        branched = any(isinstance(draft, TokenTree) for draft in drafts.values())
        cost = pace.branched if branched else pace.drafted if drafts else pace.plain
        if not is_mixed:
            cost.note(n_fed + n_drafted, seconds - last.seconds)
        saved, n_decoding = 0.0, sum(n_tokens == 1 for _, n_tokens in plan)
        if not n_decoding:  # If drafts were made, the step was then planned again without their jobs.
            saved = -last.seconds
        elif (drafts or last.seconds) and pace.plain.is_known:
            plain = pace.plain.of(n_decoding)
            verified = pace.seconds(n_decoding, n_drafted, is_branched=branched) - plain if pace.is_known else 0.0
            if not is_mixed:  # A step is slower where the machine does something else as well.
                measured = seconds - last.seconds - plain
                verified = min(verified, measured) if cost.is_known else measured
            lost = last.seconds + verified
            of_token = self._share * plain / n_decoding
            saved = sum(right.values()) * of_token - lost
            for job, n_right in right.items():
                job.generation.saved_seconds += n_right * of_token - lost / len(right)
        is_known = bool(drafts) and not last.seconds and cost.is_known  # The first drafts may compile kernels.
        self._text_ledger.note(seconds, -saved if is_known else 0.0)
        if is_known and saved > 0:
            self._looks.note(0.0, -saved)
        if self._drafter is not None:
            self._ledger.note(seconds, followed - (saved if last.seconds else 0.0))
        return saved - followed

    def _note_following(self) -> float:
        """Return how many seconds the drafter has followed texts since the last call."""
        if self._drafter is None:
            return 0.0
        before, self._following = self._following, self._drafter.following_seconds
        self._n_followed += 1
        return self._following - before

    def count(self, job: Job, draft: list[int], right: Sequence[int]) -> None:
        """Count how many of a job's drafted tokens were right. `right` are their indices in the draft."""
        job.generation.n_drafts += 1
        job.generation.n_drafted += len(draft)
        job.generation.n_accepted += len(right)
        self._right[job] = len(right)
        n_drafted = n_first(draft)
        n_right = sum(node < n_drafted for node in right)
        if n_right < n_drafted and has_branch_at(draft, n_right):
            self._seconds.note(1, int(len(right) > n_right))
        if job not in self._last.modelled:
            self._texts.note(job, n_drafted, n_right)
            return
        rate = self._rate(job)
        rate.note(n_drafted, n_right)
        self._rate_of_all = 0.9 * self._rate_of_all + 0.1 * rate.value

    def forget(self, job: Job) -> None:
        """Free what a drafter keeps for a job that has ended."""
        if self._drafter is not None:
            self._drafter.forget(job)


def _lengths_of(drafter: JobDrafter) -> list[int]:
    """Return how many tokens the drafter's drafts may have, ascending."""
    most = drafter.most_drafted
    return [*(k for k in _LENGTHS if k < most), *([most] if drafter.drafts_at_once or most <= _LENGTHS[-1] else [])]
