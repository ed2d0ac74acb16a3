"""Decides which generations run, which wait, and which are preempted."""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from itertools import takewhile

from hybridmem.chat.engine.requests import LEAST_CHUNK_TOKENS, FinishReason, Generation, Job, Request
from hybridmem.chat.engine.sizes import Sizes
from hybridmem.chat.engine.stats import EngineStats
from hybridmem.chat.engine.streaming import TextStream
from hybridmem.chat.engine.turns import apart, begun_turns
from hybridmem.memory import CapacityError, HybridMemory, HybridMemoryError, Sequence, SequenceError
from hybridmem.memory.prefix import Lookup, PrefixCache
from hybridmem.memory.sequences import uninterrupted

ALL_SCORED = "all tokens of the prompt are scored, so all were computed"
_MOST_ASKED = 64
"""In one step, at most this many waiting jobs are considered for admission."""
_REGAINED_SHARE = 32
"""A preemption lowers `most_bytes`. Each request that ends raises it again, by the budget divided by this."""


def _n_common(a: list[int], b: list[int]) -> int:
    """Count the leading tokens that two lists have in common. Comparing slices is faster than comparing tokens."""
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
        running: generations that take part in the steps.
        waiting: generations that have not been admitted yet.
        preempted: generations that were taken out of the steps. They come back before those that wait.
    """

    running: int
    waiting: int
    preempted: int

    @property
    def total(self) -> int:
        return self.running + self.waiting + self.preempted


class Scheduler:
    """Holds all jobs that have not ended, and decides which run, which wait and which are preempted.

    Any thread may call `add`, `cancel`, `check_sequence`, `waiting_sequences` and `load`. Everything else belongs to
    the thread that steps.

    Args:
        turn_begin: the tokens with which each turn of a user begins.
        open_prefix: opens a sequence with the longest cached prefix of these tokens, for this owner.
    Attributes:
        jobs: all jobs, by generation.
        waiting: jobs that are not admitted yet, the next one first.
        running: jobs that take part in the steps.
        parked: preempted jobs, the next one to come back first. They are swapped out, or stay in place if there is
            nowhere to swap to.
        most_bytes: the most bytes that running jobs may be expected to take. It begins as the budget, falls with a
            preemption, and rises again as jobs end.
    """

    def __init__(
        self, memory: HybridMemory, prefixes: PrefixCache | None, stats: EngineStats, max_running: int,
        turn_begin: tuple[int, ...], open_prefix: Callable[[list[int], Hashable], tuple[Sequence, Lookup]],
    ) -> None:  # fmt: skip
        # This lock guards `jobs`, `waiting`, and the sets of given sequences and cancelled jobs.
        self._lock = threading.Lock()
        self._n_submitted = 0
        self.jobs: dict[Generation, Job] = {}
        self.waiting: list[Job] = []
        self.running: list[Job] = []
        self.parked: list[Job] = []
        self.most_bytes = memory.budget_bytes
        self._given: set[Sequence] = set()  # Callers have given these sequences to jobs.
        self._cancelled: list[Job] = []
        self._deadlines: list[tuple[float, int, Job]] = []  # The deadlines ascend.
        self._ended: list[Job] = []
        self._memory = memory
        self._prefixes = prefixes
        self._stats = stats
        self._max_running = max_running
        self._turn_begin, self._open_prefix = turn_begin, open_prefix
        self._sizes = Sizes(memory)
        self._n_admitted = 0

    def add(self, choices: list[Request], streams: list[TextStream], now: float) -> list[Generation]:
        """Queue a request of one or several choices, each with its stream.

        The caller holds a Ctrl-C back. Raises SequenceError if the request's sequence cannot be continued.
        """
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
        """Return the live sequences of waiting and parked jobs, unless swapped out.

        Those that will wait longest come first.
        """
        with uninterrupted(), self._lock:
            jobs = [*self.parked, *self.waiting]
        return [job.sequence for job in reversed(jobs) if job.sequence is not None and not job.sequence.is_swapped]

    def check_sequence(self, sequence: Sequence) -> int:
        """Return the length of a sequence that a generation can continue. Raises SequenceError for any other."""
        with uninterrupted(), self._lock:
            return self._length_of(sequence)

    def _length_of(self, sequence: Sequence) -> int:
        if sequence in self._given:
            raise SequenceError(f"{sequence!r} is in use by another generation; wait for its end, or fork it")
        # This raises for a bad handle. It does not raise for a sequence that is swapped out.
        self._memory.private_bytes(sequence)
        if sequence.is_checkpoint:
            raise SequenceError(f"{sequence!r} is a checkpoint and stays as it is; fork it and use the fork")
        return sequence.length

    def going_on(self) -> list[Job]:
        """Return jobs without an outcome, in the order of their submission."""
        with uninterrupted(), self._lock:
            return [job for job in self.jobs.values() if job.outcome is None]

    def ended(self) -> list[Job]:
        """Return jobs with an outcome that are not released yet, in the order of their submission."""
        return sorted(self._ended, key=lambda job: job.generation.id)

    def forget(self, job: Job, reason: FinishReason) -> None:
        """Remove a job that has ended. The caller holds a Ctrl-C back."""
        with self._lock:  # Once `finish_reason` is set, callers may submit the sequence again.
            job.generation.finish_reason = reason
            del self.jobs[job.generation]
            self._ended.remove(job)
            for other in job.others:
                other.others.remove(job)
            job.others = []
            # The search needs only the first two fields of an entry.
            at = bisect_left(self._deadlines, (job.deadline, job.generation.id))
            if at < len(self._deadlines) and self._deadlines[at][2] is job:
                del self._deadlines[at]
            if job.request.sequence is not None:
                self._given.discard(job.request.sequence)

    def cancel(self, generation: Generation) -> bool:
        """Mark a generation to end at the next `reap`. Return False if it has ended. Any thread may call this."""
        with uninterrupted(), self._lock:
            job = self.jobs.get(generation)
            if job is None:
                return False
            job.is_cancelled = True
            self._cancelled.append(job)
        return True

    def reap(self, now: float) -> None:
        """End jobs that were cancelled or are past their deadline, or whose sequence was closed.

        For a waiting job, a closed sequence is noticed only at admission.
        """
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
        """Take a job out of the steps. The engine releases it when the step is over."""
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

        A job waits if a running job is computing the beginning of its prompt.
        """
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
                self.end(job, "error", error)  # No other job is left that could make room.
            except (
                HybridMemoryError,
                OSError,
            ) as error:  # Somebody has closed the sequence, or a swap file is gone.
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
        return None if self.running else late  # If nothing else can run, wait for the job's files.

    def _has_arrived(self, job: Job) -> bool:
        """Return whether a job can start without first reading its sequence or prefix from files.

        Another thread reads the files, while other jobs run.
        """
        if job.sequence is not None:
            return self._memory.counters.swaps.fetch(job.sequence.slot)
        if self._prefixes is None or job.request.sequence is not None:
            return True
        if job.arriving is None:
            job.arriving = self._prefixes.fetch(job.tokens, job.request.owner)
        return not job.arriving or self._prefixes.has_arrived(*job.arriving)

    def _follows(self, job: Job) -> bool:
        """Return whether a job should wait for a running one, or for the first choice of its own request.

        Later the job finds the common part of the prompts in the prefix cache.

        The running job (the leader) feeds the common part or ends, so no job waits in vain.
        """
        if any(other in self.running and not other.has_prompt for other in job.others if job.is_new):
            return True  # The job is forked from the first choice then.
        if self._prefixes is None or job.sequence is not None or job.admitted or job.request.sequence is not None:
            return False
        if job.most_reused < LEAST_CHUNK_TOKENS:  # The job computes its whole prompt in any case.
            return False
        if job.leader is None or job.leader[0] not in self.running:
            job.leader = self._find_leader(job)
        if job.leader is None:
            return False
        leader, n_common = job.leader
        return leader.n_fed < n_common

    def _find_leader(self, job: Job) -> tuple[Job, int] | None:
        """Return the running job that will feed the longest common beginning, and where its checkpoint will be."""
        assert self._prefixes is not None
        n_common, leader, most = 0, None, min(job.most_reused, len(job.tokens) - 1)
        for other in self.running:
            if other.n_base == 0 and other.is_prefilling and other.request.owner == job.request.owner:
                least = max(n_common, other.n_fed, LEAST_CHUNK_TOKENS - 1)  # Fewer common tokens are of no use.
                if job.tokens[least : least + 1] != other.tokens[least : least + 1]:
                    continue  # Nearly all jobs end here. With many requests, comparing all of them takes long.
                n = min(_n_common(job.tokens, other.tokens), most, other.generation.n_prompt)
                if n > least:
                    n_common, leader = n, other
        if leader is None:
            return None
        n_known = self._prefixes.find(job.tokens[: most + 1], job.request.owner).reused
        if n_common - n_known < LEAST_CHUNK_TOKENS:
            return None
        near = [cut for cut in leader.cuts if n_common - LEAST_CHUNK_TOKENS < cut <= n_common and cut > leader.n_fed]
        if near:
            return leader, near[-1]
        insort(leader.cuts, n_common)
        return leader, n_common

    def _has_room(self, job: Job) -> bool:
        """Return whether the job is expected to fit beside the running ones."""
        return not self.running or self._sizes.taken(self.running) + self._sizes.more(job) <= self.most_bytes

    def _expect_less(self) -> None:
        """Lower `most_bytes` to the bytes of the running jobs, because the room was used up earlier than estimated."""
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
            # A job keeps its first number. Otherwise it would come back as the latest, and be preempted first again.
            if not job.admitted:
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
            job.sequence, job.lookup = self._open(job)
            job.n_fed = job.n_reused = job.sequence.length
            # A job that starts again has chosen tokens, and looks up more than the prompt.
            if not job.generation.token_ids:
                job.generation.lookup, job.generation.n_prefilled = job.lookup, job.n_fed
        if self._prefixes is not None:
            marks = [job.n_base + mark for mark in request.marks]
            start = job.n_base + job.n_fed
            cuts = self._prefixes.cuts(known, start, marks, request.owner)
            # A checkpoint of a few tokens saves less than the step that ends there costs.
            cuts = [cut for cut in cuts if cut - start >= LEAST_CHUNK_TOKENS or cut in marks]
            turns = begun_turns(known, self._turn_begin, start, self._memory.rollback_window)
            job.cuts = [cut - job.n_base for cut in apart(cuts, turns)]
        job.begin_reply(known)

    def _open(self, job: Job) -> tuple[Sequence, Lookup]:
        """Open a sequence with the longest cached prefix that the job may reuse."""
        n_most = job.most_reused
        if n_most == 0:
            return self._memory.open(), Lookup(len(job.tokens), 0, 0, 0, ALL_SCORED)
        sequence, lookup = self._open_prefix(job.tokens[: n_most + 1], job.request.owner)
        return sequence, replace(lookup, n_tokens=len(job.tokens))

    def join(self, job: Job, sequence: Sequence, source: Job, now: float) -> None:
        """Let a new job continue with a fork of another job's sequence, at the end of their common prompt.

        If there is no room, the job waits as if it had been preempted.
        """
        with uninterrupted():
            job.sequence, job.is_forked, job.generation.lookup = sequence, True, source.generation.lookup
            job.generation.prompt_logprobs = source.generation.prompt_logprobs
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
        """Preempt the job with the least priority, and among several of them the one admitted last.

        The memory of its computed tokens is kept.
        """
        job = min(self.running, key=lambda job: (job.request.priority, -job.admitted))
        self._stats.n_preempted += 1
        with uninterrupted():
            if job.is_untouched:  # Nothing was computed for the job, so nothing need be kept.
                self._close(job)
                self.running.remove(job)
                self._expect_less()
                with self._lock:
                    insort(self.waiting, job, key=lambda job: job.rank)
                return
            try:
                self._memory.swap_out(job.live_sequence)
            except (CapacityError, OSError):
                pass  # There is nowhere to swap to. The job waits in place, and the others use the room that is left.
            self.running.remove(job)
            self._expect_less()
            insort(self.parked, job, key=lambda job: job.rank)

    def restart(self) -> bool:
        """Close the sequence of the last parked job that is not swapped out. Return whether there was one.

        The sequence is computed again later. The tokens that were chosen stay.
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
