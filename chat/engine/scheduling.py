"""Schedules generations: which run, which wait, and which are preempted."""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from dataclasses import dataclass
from itertools import takewhile

from hybridmem.chat.engine.requests import LEAST_CHUNK_TOKENS, FinishReason, Generation, Job, Request
from hybridmem.chat.engine.room import Sizes
from hybridmem.chat.engine.stats import EngineStats
from hybridmem.chat.engine.streaming import TextStream
from hybridmem.memory import CapacityError, HybridMemory, HybridMemoryError, Sequence, SequenceError
from hybridmem.memory.prefix.cache import PrefixCache
from hybridmem.memory.sequences.interrupts import uninterrupted

_MOST_ASKED = 64
"""The most waiting jobs that are considered for admission in a step."""
_REGAINED_SHARE = 32
"""The budget divided by this is added to `most_bytes`, after a preemption lowered it, for each request that ends."""


def _n_common(a: list[int], b: list[int]) -> int:
    """Count the leading tokens that are the same; slices are compared faster than tokens."""
    at, size = 0, 1024
    while size:
        if a[at : at + size] == b[at : at + size] and at < min(len(a), len(b)):
            at += size
        else:
            size //= 2
    return min(at, len(a), len(b))


@dataclass(frozen=True)
class Load:
    """Counts generations that have not ended.

    Attributes:
        running: take part in the steps.
        waiting: have not been admitted yet.
        preempted: were taken out of the steps, and come back before those that wait.
    """

    running: int
    waiting: int
    preempted: int

    @property
    def total(self) -> int:
        return self.running + self.waiting + self.preempted


class Scheduler:
    """Holds all jobs that have not ended, and decides which run, which wait and which are preempted.

    `add`, `cancel`, `check_sequence`, `waiting_sequences` and `load` may be called from any thread; everything else
    belongs to the thread that steps.

    Attributes:
        jobs: all of them, by generation.
        waiting: not admitted yet, the next one first.
        running: take part in the steps.
        parked: preempted, the next one to come back first. They are swapped out, or stay in place if there is nowhere
            to swap to.
        most_bytes: the most that running jobs may be expected to take: the budget, less after a preemption, more again
            as jobs end.
    """

    def __init__(
        self, memory: HybridMemory, prefixes: PrefixCache | None, stats: EngineStats, max_running: int
    ) -> None:
        self._lock = threading.Lock()  # of `jobs`, `waiting` and what was given or cancelled
        self._n_submitted = 0
        self.jobs: dict[Generation, Job] = {}
        self.waiting: list[Job] = []
        self.running: list[Job] = []
        self.parked: list[Job] = []
        self.most_bytes = memory.budget_bytes
        self._given: set[Sequence] = set()  # sequences of callers that jobs go on with
        self._cancelled: list[Job] = []
        self._deadlines: list[tuple[float, int, Job]] = []  # ascending
        self._ended: list[Job] = []
        self._memory = memory
        self._prefixes = prefixes
        self._stats = stats
        self._max_running = max_running
        self._sizes = Sizes(memory)
        self._n_admitted = 0

    def add(self, choices: list[Request], streams: list[TextStream], now: float) -> list[Generation]:
        """Queue a request, of one or several choices, each with its stream. The caller holds a Ctrl-C back.
        Raises SequenceError if its sequence cannot go on."""
        sequence, deadline_s = choices[0].sequence, choices[0].deadline_s
        deadline = now + (float("inf") if deadline_s is None else deadline_s)
        jobs = list[Job]()
        with self._lock:
            n_base = 0 if sequence is None else self._length_of(sequence)
            for number, (request, stream) in enumerate(zip(choices, streams, strict=True)):
                generation = Generation(self._n_submitted, len(request.token_ids), now, choice=number)
                job = Job(request, generation, stream, deadline, sequence, list(request.token_ids), n_base=n_base)
                jobs.append(job)
                self._n_submitted += 1
                self.jobs[generation] = job
                if deadline < float("inf"):
                    insort(self._deadlines, (deadline, generation.id, job))
                insort(self.waiting, job, key=lambda job: job.rank)
            for job in jobs:
                job.others = [other for other in jobs if other is not job]
            if sequence is not None:
                self._given.add(sequence)
        return [job.generation for job in jobs]

    @property
    def load(self) -> Load:
        return Load(len(self.running), len(self.waiting), len(self.parked))

    def waiting_sequences(self) -> list[Sequence]:
        """Return live sequences of waiting and parked jobs, not swapped out, those first that will wait longest."""
        with uninterrupted(), self._lock:
            jobs = [*self.parked, *self.waiting]
        return [job.sequence for job in reversed(jobs) if job.sequence is not None and not job.sequence.is_swapped]

    def check_sequence(self, sequence: Sequence) -> int:
        """Return the length of a sequence that a generation can go on with. Raises SequenceError for any other."""
        with uninterrupted(), self._lock:
            return self._length_of(sequence)

    def _length_of(self, sequence: Sequence) -> int:
        if sequence in self._given:
            raise SequenceError(f"{sequence!r} is in use by another generation; wait for its end, or fork it")
        self._memory.private_bytes(sequence)  # raises for a bad handle, and for none that is swapped out
        if sequence.is_checkpoint:
            raise SequenceError(f"{sequence!r} is a checkpoint and stays as it is; fork it and use the fork")
        return sequence.length

    def going_on(self) -> list[Job]:
        """Return jobs that have no outcome yet, in the order of their submission."""
        with uninterrupted(), self._lock:
            return [job for job in self.jobs.values() if job.outcome is None]

    def ended(self) -> list[Job]:
        """Return jobs that have an outcome and are not released yet, in the order of their submission."""
        return sorted(self._ended, key=lambda job: job.generation.id)

    def forget(self, job: Job, reason: FinishReason) -> None:
        """Remove a job that has ended. The caller holds a Ctrl-C back."""
        with self._lock:  # once `finish_reason` is set, callers may submit its sequence again
            job.generation.finish_reason = reason
            del self.jobs[job.generation]
            self._ended.remove(job)
            for other in job.others:
                other.others.remove(job)
            job.others = []
            at = bisect_left(self._deadlines, (job.deadline, job.generation.id))  # without the job
            if at < len(self._deadlines) and self._deadlines[at][2] is job:
                del self._deadlines[at]
            if job.request.sequence is not None:
                self._given.discard(job.request.sequence)

    def cancel(self, generation: Generation) -> bool:
        """Mark a generation to end at the next `reap`; False if it has ended. From any thread."""
        with uninterrupted(), self._lock:
            job = self.jobs.get(generation)
            if job is None:
                return False
            job.is_cancelled = True
            self._cancelled.append(job)
        return True

    def reap(self, now: float) -> None:
        """End jobs that were cancelled, are past their deadline, or whose sequence was closed.
        For waiting jobs a closed sequence is found at admission."""
        with uninterrupted():
            with self._lock:
                cancelled, self._cancelled = self._cancelled, []
                late = [job for _, _, job in takewhile(lambda entry: entry[0] <= now, self._deadlines)]
            for job in (*cancelled, *late):
                if job.outcome is None:
                    self.end(job, "cancelled" if job.is_cancelled else "deadline")
        for job in [*self.running, *self.parked]:
            if job.sequence is not None and job.sequence.closed:
                self.end(job, "error", SequenceError(f"{job.sequence!r} was closed while its generation was running"))

    def end(self, job: Job, reason: FinishReason, error: Exception | None = None) -> None:
        """Take a job out of the steps; the engine releases it when the step is over."""
        with uninterrupted():
            if job.outcome is None:
                self._ended.append(job)
            job.outcome = reason, error
            for queue in (self.running, self.parked):
                if job in queue:
                    queue.remove(job)
                    return
            with self._lock:
                if job in self.waiting:
                    self.waiting.remove(job)

    def admit(self, now: float) -> None:
        """Admit jobs that fit, preempted ones first.
        A job that would only compute what a running one is computing waits for it."""
        while len(self.running) < self._max_running:
            job = self._next()
            if job is None or not self._has_room(job):
                return
            try:
                self._start(job, now)
            except CapacityError as error:
                if self.running:
                    self._expect_less()
                    return
                if self.restart():
                    continue
                self.end(job, "error", error)  # no other job is left that could make room
            except (
                HybridMemoryError,
                OSError,
            ) as error:  # a handle that was spoilt from outside, a swap file that is gone
                self.end(job, "error", error)

    def _next(self) -> Job | None:
        with uninterrupted(), self._lock:
            waiting = [*self.parked[:1]] or self.waiting[:_MOST_ASKED]
        late = None
        for job in waiting:
            if self._follows(job):
                continue
            if self._has_arrived(job):
                return job
            late = late or job
        return None if self.running else late  # with nothing else to do, its files are waited for

    def _has_arrived(self, job: Job) -> bool:
        """True if what was computed for a job, or for its prompt, need not be read from files first.
        They are read in another thread, while others run.
        """
        if job.sequence is not None:
            return self._memory.counters.swaps.fetch(job.sequence.slot)
        if self._prefixes is None or job.request.sequence is not None:
            return True
        if job.arriving is None:
            job.arriving = self._prefixes.fetch(job.tokens, job.request.owner)
        return not job.arriving or self._prefixes.has_arrived(*job.arriving)

    def _follows(self, job: Job) -> bool:
        """True if a new request should wait for a running one, whose prompt it will then find in the prefix cache, or
        for the first of its choices.

        The leader runs until it has fed the common part, or runs no more, so no request waits in vain.
        """
        if any(other in self.running and not other.has_prompt for other in job.others if job.is_new):
            return True  # and be forked from it
        if self._prefixes is None or job.sequence is not None or job.admitted or job.request.sequence is not None:
            return False
        if job.leader is None or job.leader[0] not in self.running:
            job.leader = self._find_leader(job)
        if job.leader is None:
            return False
        leader, n_common = job.leader
        return leader.n_fed < n_common

    def _find_leader(self, job: Job) -> tuple[Job, int] | None:
        """Return the running job that is about to feed most of what this request begins with, and where its checkpoint
        of that will be.
        """
        assert self._prefixes is not None
        n_common, leader = 0, None
        for other in self.running:
            if other.n_base == 0 and other.is_prefilling and other.request.owner == job.request.owner:
                least = max(n_common, other.n_fed, LEAST_CHUNK_TOKENS - 1)  # fewer in common are of no use
                if job.tokens[least : least + 1] != other.tokens[least : least + 1]:
                    continue  # as for nearly all others: with many requests, to compare them all takes long
                n = min(_n_common(job.tokens, other.tokens), len(job.tokens) - 1, other.generation.n_prompt)
                if n > least:
                    n_common, leader = n, other
        if leader is None or n_common - self._prefixes.find(job.tokens, job.request.owner).reused < LEAST_CHUNK_TOKENS:
            return None
        near = [cut for cut in leader.cuts if n_common - LEAST_CHUNK_TOKENS < cut <= n_common and cut > leader.n_fed]
        if near:
            return leader, near[-1]
        insort(leader.cuts, n_common)
        return leader, n_common

    def _has_room(self, job: Job) -> bool:
        """True if the job is expected to fit beside the running ones."""
        return not self.running or self._sizes.taken(self.running) + self._sizes.more(job) <= self.most_bytes

    def _expect_less(self) -> None:
        """Lower `most_bytes` to what is running: room ran out earlier than estimated."""
        self.most_bytes = min(self.most_bytes, self._sizes.taken(self.running))

    def make_room(self) -> None:
        """Raise `most_bytes` a little, since a job has ended."""
        self.most_bytes = min(self._sizes.budget_bytes, self.most_bytes + self._sizes.budget_bytes // _REGAINED_SHARE)

    def _start(self, job: Job, now: float) -> None:
        """Swap in or open a job's sequence and let it run. Raises as the memory does; the job stays where it was."""
        if job.sequence is not None and job.sequence.is_swapped:
            self._memory.swap_in(job.sequence)
            self._stats.n_swapped_in += 1
        with uninterrupted():
            if job.sequence is None or not job.admitted:
                self._prepare(job)
            if not job.admitted:  # once: coming back must not make an early job the first to be preempted
                self._n_admitted += 1
                job.admitted, job.generation.admitted_at = self._n_admitted, now
            with self._lock:
                (self.parked if job in self.parked else self.waiting).remove(job)
            job.served, job.leader = self._stats.n_steps, None
            self.running.append(job)

    def _prepare(self, job: Job) -> None:
        request = job.request
        known = job.tokens
        if job.sequence is not None:
            job.n_base = job.generation.n_base = job.sequence.length
            known = [*job.sequence.tokens.tolist(), *job.tokens]
        elif self._prefixes is None:
            job.sequence = self._memory.open()
        else:
            job.sequence, job.lookup = self._prefixes.open(job.tokens, request.owner)
            job.n_fed = job.n_reused = job.sequence.length
            if not job.generation.token_ids:  # else it starts again, and looks up more than the prompt
                job.generation.lookup, job.generation.n_prefilled = job.lookup, job.n_fed
        if self._prefixes is not None:
            marks = [job.n_base + mark for mark in request.marks]
            start = job.n_base + job.n_fed
            cuts = self._prefixes.cuts(known, start, marks, request.owner)
            # A checkpoint of a few tokens saves less than the step that ends there costs.
            job.cuts = [cut - job.n_base for cut in cuts if cut - start >= LEAST_CHUNK_TOKENS or cut in marks]
        job.sampler = job.sampler or job.make_sampler(known)

    def join(self, job: Job, sequence: Sequence, source: Job, now: float) -> None:
        """Let a new job go on with a fork of another one's sequence, at the end of their prompt.
        It runs, or, where there is no room, waits as if it had been preempted."""
        with uninterrupted():
            job.sequence, job.is_forked, job.generation.lookup = sequence, True, source.generation.lookup
            job.n_fed = job.n_reused = job.generation.n_prefilled = job.generation.n_prompt
            self._n_admitted += 1
            job.admitted, job.generation.admitted_at, job.leader = self._n_admitted, now, None
            job.served = self._stats.n_steps
            self._stats.n_forked += job.n_fed
            with self._lock:
                self.waiting.remove(job)
            if len(self.running) < self._max_running and self._has_room(job):
                self.running.append(job)
            else:
                insort(self.parked, job, key=lambda job: job.rank)

    def preempt(self) -> None:
        """Preempt the job of least priority, of these the one admitted last. What was computed for it is kept."""
        job = min(self.running, key=lambda job: (job.request.priority, -job.admitted))
        self._stats.n_preempted += 1
        with uninterrupted():
            if job.is_untouched:  # there is nothing to keep
                self._close(job)
                self.running.remove(job)
                self._expect_less()
                with self._lock:
                    insort(self.waiting, job, key=lambda job: job.rank)
                return
            try:
                self._memory.swap_out(job.live_sequence)
            except (CapacityError, OSError):
                pass  # nowhere to swap to: it waits in place, and the others use the room that is left
            self.running.remove(job)
            self._expect_less()
            insort(self.parked, job, key=lambda job: job.rank)

    def restart(self) -> bool:
        """Close the sequence of the last parked job that is not swapped out; True if there was one.
        It is computed again later; the tokens that were chosen stay.
        """
        for job in reversed(self.parked):
            if job.request.sequence is None and job.sequence is not None and not job.sequence.is_swapped:
                with uninterrupted():
                    self._close(job)
                return True
        return False

    def _close(self, job: Job) -> None:
        self._memory.close(job.live_sequence)
        job.sequence = job.lookup = None
        job.n_fed = job.n_reused = 0
        job.is_forked = False
