"""The engine batches continuously: it makes one step of the model after the other for many generations over one memory.

Each step decodes one token of every running reply, and prefills prompts beside them. Finished generations leave after
a step and waiting ones join before it. Prompts of up to `step_tokens` are prefilled one after the other, the oldest
first, and longer ones after them, of which the oldest goes on at every step; see `plan_step`. A prompt that begins like
another waits for it: with a prefix cache their common part is computed once. When the memory is full, the request that
was admitted last is swapped out and comes back before new ones: what was computed for it is kept, and its reply stays
the same.

A sequence that is kept (`keeps_sequence`) holds, when its generation has ended with
- "stop" or "length": the prompt and every chosen token but the last, which did not have to be fed. With `remembers_end`
it holds the last token too, and after a reply that was cut (by max_tokens or a stop string) the first of `stop_ids`. A
stop string is found only when its tokens have been chosen, so they stand in the sequence although the text ends before
them. Roll back to continue from the text itself. - "cancelled", "deadline" or "error": the part of this that had been
fed by then. It may be swapped out.
"""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Callable, Hashable, Iterable
from collections.abc import Sequence as Seq
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

from hybridmem.chat.engine.arguments import (
    HOW_TO_LOAD,
    check_belonging,
    check_can_decode,
    check_parts,
    check_tokenizer,
    read_stop_ids,
)
from hybridmem.chat.engine.callbacks import Callbacks
from hybridmem.chat.engine.choose import Choose, choose_tokens
from hybridmem.chat.engine.context import fit_reply, named_context_tokens
from hybridmem.chat.engine.drafting import Drafting, Speculation
from hybridmem.chat.engine.output import PLAIN, Output
from hybridmem.chat.engine.remembered_texts import RememberedTexts
from hybridmem.chat.engine.requests import GREEDY, Generation, Job, OnToken, Request
from hybridmem.chat.engine.scheduling import Load, Scheduler
from hybridmem.chat.engine.serving import Serving
from hybridmem.chat.engine.stats import EngineStats
from hybridmem.chat.engine.stepping import Stepper
from hybridmem.chat.engine.streaming import CONTEXT_TOKENS, TextStream
from hybridmem.chat.prompts import Tokenizer, find_stop_ids
from hybridmem.chat.sampling.sampling import Sampling
from hybridmem.chat.special_tokens import find_turn_begin
from hybridmem.defaults import STEP_TOKENS
from hybridmem.memory import BatchError, HybridMemory, Sequence, SequenceError, SpecError, StepError
from hybridmem.memory.blocks import Int64s, read_count, refuse_to_copy
from hybridmem.memory.prefix import Lookup, PrefixCache
from hybridmem.memory.sequences import Lease, count_tokens, uninterrupted, uninterrupted_call
from hybridmem.models import LanguageModel

__all__ = ["Engine", "EngineStats", "Generation", "OnToken", "Sampling"]

_NO_SPECULATION = Speculation()


def require_engine(engine: object, call: str) -> None:
    """Raise SpecError unless this is an engine. The message shows `call`, the right call."""
    if not isinstance(engine, Engine):
        raise SpecError(
            f"{engine!r} is no Engine; call {call}, with engine = Engine(model, memory, tokenizer), {HOW_TO_LOAD}"
        )


class Engine:
    """Generates replies to any number of requests at once.

    Drive it with `step` or `run`, or let `serve` do so beside an event loop.

    `submit`, `cancel` and the properties may be used from any thread at any time. The memory may not: while steps run
    in another thread, hold `lock` to use it (or any of the engine's sequences). A step holds it from its beginning to
    its end.

    Args:
        tokenizer: decodes replies. None: generations have token ids and no text.
        stop_ids: tokens that end a reply. The first is written after a reply that is cut short and to be remembered.
            The default are those that the tokenizer and the model's config name.
        prefixes: the prefix cache. The engine looks prompts up in it, and inserts prompts and replies.
        step_tokens: the tokens of prompts in one step. If many short prompts wait, a step has up to twice as many.
        max_running: the most requests in one step. This number is less than `step_tokens`, so that prompts always make
            progress.
        clock: returns seconds. Tests replace it.
        choose: chooses the next tokens from a step's logits. Dry runs, which have no logits, replace it.
        context_tokens: the most tokens of a prompt and its reply together. Longer prompts are refused, and replies end
            there with "length". The default is what the model's config names, if it names a limit; then also
            `engine.context_tokens`.
        speculation: where drafts come from, such as `Speculation(looks_up=True)` for the replies' own texts, or
            `Speculation(drafter=ModelDrafter(small_model, its_memory))`. Drafts change no reply, not even drawn ones.
    Raises:
        SpecError: impossible numbers; a memory that was made for another model, or a prefix cache of another memory.
    """

    __reduce_ex__ = refuse_to_copy("make one in each process, with a memory of its own")

    def __init__(
        self,
        model: LanguageModel,
        memory: HybridMemory,
        tokenizer: Tokenizer | None,
        *,
        stop_ids: Iterable[int] | None = None,
        prefixes: PrefixCache | None = None,
        step_tokens: int = STEP_TOKENS,
        max_running: int = 64,
        clock: Callable[[], float] = time.perf_counter,
        choose: Choose = choose_tokens,
        context_tokens: int | None = None,
        speculation: Speculation = _NO_SPECULATION,
    ) -> None:
        check_parts(model, memory, "Engine(model, memory, tokenizer)")
        check_tokenizer(tokenizer)
        for name, value in (("step_tokens", step_tokens), ("max_running", max_running)):
            read_count(name, value, 1)
        if step_tokens <= max_running:
            raise SpecError(
                f"step_tokens={step_tokens} leaves nothing to prompts beside max_running={max_running} replies; give "
                "more"
            )
        check_belonging(model, memory, prefixes)
        if context_tokens is not None:
            read_count("context_tokens", context_tokens, 1)
        self.context_tokens = context_tokens or named_context_tokens(getattr(model, "config", None))
        self.model = model
        self.memory = memory
        self.prefixes = prefixes
        self.step_tokens = step_tokens
        self.max_running = max_running
        self.stats = EngineStats()
        self.lock = threading.RLock()
        if stop_ids is not None:
            self.stop_ids = read_stop_ids(stop_ids, memory.spec.vocab_size)
        else:
            self.stop_ids = find_stop_ids(tokenizer, model) if tokenizer is not None else ()
        self.tokenizer = tokenizer
        self._clock = clock
        turn_begin = find_turn_begin(tokenizer) if prefixes is not None and tokenizer is not None else ()
        self._scheduler = Scheduler(memory, prefixes, self.stats, max_running, turn_begin, self.open_prefix)
        self._serving = Serving(self)
        self._stepping = Lease()
        self._callbacks = Callbacks(self._scheduler)
        self._drafter = drafter = speculation.drafter
        run = model if drafter is None else drafter.watch(model, lambda: self._scheduler.running)
        self._stepper = Stepper(
            run, memory, prefixes, self._scheduler, self._callbacks, self.stats, choose, clock, step_tokens,
            self.stop_ids, Drafting(memory, step_tokens, speculation, tokenizer),
        )  # fmt: skip
        self._finished: list[Generation] = []
        self._n_possible = 0

    # The methods below take and answer requests.

    def submit(
        self,
        token_ids: Any,
        *,
        sequence: Sequence | None = None,
        max_tokens: int = 256,
        sampling: Sampling = GREEDY,
        stop: str | Iterable[str] = (),
        output: Output = PLAIN,
        deadline_s: float | None = None,
        marks: Iterable[int] = (),
        keeps_sequence: bool = False,
        remembers_end: bool = False,
        on_token: OnToken | None = None,
        priority: int = 0,
        owner: Hashable = None,
        reports_prefill: bool = False,
        prediction: Any = (),
    ) -> Generation:
        """Submit a request for a reply. It joins the batch before the next step in which there is room.

        Args:
            token_ids: the tokens to feed. The reply follows them.
            sequence: a live sequence to continue, swapped out or not. Nothing else may use it until the generation has
                ended. None: a new one.
            max_tokens: the most tokens to choose, including the one that ends the reply. 0: feed the tokens and choose
                none.
            stop: strings that end the reply. Its text is cut before them.
            output: the tokens that end the reply, its grammar, and log probabilities.
            deadline_s: after so many seconds from now, the reply ends as it is.
            marks: positions in `token_ids` that the prefix cache should remember, such as the ends of messages.
            keeps_sequence: leave the sequence open (`generation.sequence`). Otherwise it is closed at the end, even if
                it was given.
            remembers_end: also feed the tokens that end the reply, so that a next turn can follow. The generation ends
                after they were fed.
            on_token: see `OnToken`. It is called by the thread that steps, after the step. If it raises, its generation
                ends with "error", and no other.
            priority: requests with larger values are admitted first and preempted last.
            owner: the owner of the prefixes that the request reuses and leaves in the cache. No other owner finds them.
                Give each user an owner if users must not learn about each other's prompts; see `PrefixCache`.
            reports_prefill: call `on_token` after each part of the prompt, too, when `generation.n_prefilled` has
                grown.
            prediction: token ids that most of the reply is expected to repeat. They serve as drafts, and do not change
                the reply.
        Raises:
            BatchError: wrong arguments, or a prompt that is longer than the model's context. SequenceError: a bad
            handle, or one that is in use. CapacityError: a prompt that the memory's whole budget could not hold.
            Nothing has changed then.
        """
        options = {
            "sequence": sequence, "max_tokens": max_tokens, "sampling": sampling, "stop": stop, "output": output,
            "deadline_s": deadline_s, "marks": marks, "keeps_sequence": keeps_sequence, "owner": owner,
            "remembers_end": remembers_end, "on_token": on_token, "priority": priority,
            "reports_prefill": reports_prefill, "prediction": prediction,
        }  # fmt: skip
        request = self._read(token_ids, options)
        with uninterrupted_call(holds_all=True) as _until_return:
            (generation,) = self._add([request])
            return generation

    def submit_choices(self, token_ids: Any, samplings: Iterable[Sampling], **options: Any) -> list[Generation]:
        """Submit one request for several replies to one prompt. The prompt is computed once.

        The first choice computes the prompt. The sequences of the others are then forked from its sequence, which
        copies no tensor. If there is no room for all of them, some wait as preempted generations do.

        Args:
            samplings: the sampling of each choice. `generation.choice` is the choice's number, for `on_token`.
            options: the options of `submit`, for all choices, without `sampling` and `sequence`. `reports_prefill`
                concerns the first choice.
        Raises:
            As `submit`. No choice has been submitted then.
        """
        wanted = [*samplings]
        if not wanted or options.keys() & {"sampling", "sequence"}:
            raise BatchError(
                f"samplings={wanted!r:.80}, {', '.join(options)}; give the sampling of each choice, and neither "
                "sampling nor sequence beside them: fork a sequence, and submit each fork"
            )
        first = self._read(token_ids, {**options, "sampling": wanted[0]})
        others = [replace(first, sampling=sampling, reports_prefill=False) for sampling in wanted[1:]]
        with uninterrupted_call(holds_all=True) as _until_return:
            return self._add([first, *others])

    def _read(self, token_ids: Any, options: dict[str, Any]) -> Request:
        n_base = self._require_possible(token_ids, options.get("sequence"))
        spec = self.memory.spec
        request = Request.read(token_ids, options, self.stop_ids, spec.vocab_size, spec.soft_tokens)
        check_can_decode(self.memory, self.tokenizer, request.sequence, request.stop)
        max_tokens = fit_reply(n_base + len(request.token_ids), request.max_tokens, self.context_tokens)
        return request if max_tokens == request.max_tokens else replace(request, max_tokens=max_tokens)

    def _add(self, choices: list[Request]) -> list[Generation]:
        streams = [
            TextStream(
                self.tokenizer, each.stop, shows_special=each.output.shows_special, hidden_ids=each.output.hidden_ids,
                before=each.token_ids[-CONTEXT_TOKENS:] if each.output.continues_text else (),
            )
            for each in choices
        ]  # fmt: skip
        generations = self._scheduler.add(choices, streams, self._clock())
        self._serving.wake()
        return generations

    def _require_possible(self, token_ids: object, sequence: Sequence | None) -> int:
        """Raise CapacityError if a prompt is too long for the budget, before its tokens are read.

        Returns how many tokens the sequence holds. The check assumes steps of few tokens, which need the least room,
        because the engine falls back to them when room is short.
        """
        n_base = 0 if sequence is None else self._scheduler.check_sequence(sequence)
        n_tokens = int(count_tokens([token_ids])[0])
        if (sequence is None or sequence.is_whole) and n_base + n_tokens > self._n_possible:
            self.memory.counters.require_possible(n_tokens, n_held=n_base, max_tokens=1)
            # Shorter prompts fit as well, so only longer ones need the check from now on.
            self._n_possible = n_base + n_tokens
        return n_base

    def cancel(self, generation: Generation) -> None:
        """End a generation with the text that it has. Nothing happens if it has already ended.

        Its bytes are free at once, or after the step that is running.
        """
        if not isinstance(generation, Generation):
            raise BatchError(f"{generation!r} is no generation; give what engine.submit(...) returned")
        if not self._scheduler.cancel(generation):
            return
        self._serving.wake()
        with ExitStack() as held:
            # If a step holds the lock, the step releases the generation at its end. An event loop must not wait for a
            # step.
            with uninterrupted():
                has_lock = self.lock.acquire(blocking=False)
                if has_lock:
                    held.callback(self.lock.release)
            if has_lock and not self._stepping.is_taken:
                self._settle()

    @property
    def is_idle(self) -> bool:
        """Return whether every generation has ended."""
        return not self._scheduler.jobs

    @property
    def load(self) -> Load:
        """Count the generations that have not ended: running, waiting, preempted."""
        return self._scheduler.load

    def waiting_sequences(self) -> list[Sequence]:
        """Return the live sequences of generations that do not run, unless they are swapped out.

        Those that will wait longest come first. Swap them out where room is short (`HybridMemory.add_reclaimer`).
        """
        return self._scheduler.waiting_sequences()

    # The methods below find what was computed before.

    @property
    def drafted_texts(self) -> RememberedTexts | None:
        """Return what the drafter remembers of texts, to be saved beside the engine's own memory; None without it."""
        return None if self._drafter is None else self._drafter.texts

    def open_prefix(self, token_ids: Seq[int] | Int64s, owner: Hashable) -> tuple[Sequence, Lookup]:
        """Open a sequence with the longest cached prefix of a prompt, from which its drafter can continue, too.

        The engine must have a prefix cache. Raises what `PrefixCache.open` does. Hold `lock` where steps run.
        """
        assert self.prefixes is not None, "the caller has looked"
        sequence, lookup = self.prefixes.open(token_ids, owner)
        reused = self.resumes_at(sequence, sequence.length, owner)
        if reused < sequence.length:
            self.memory.rollback(sequence, to=reused)
            lookup = replace(lookup, reused=reused)
        return sequence, lookup

    def resumes_at(self, sequence: Sequence, n_tokens: int, owner: Hashable) -> int:
        """Return from which position on a text should be fed, of which a sequence holds `n_tokens` tokens.

        It is one less for a drafter that remembers the text but for the hidden state of its last token.
        """
        return n_tokens if self._drafter is None else self._drafter.resumes_at(sequence, n_tokens, owner)

    # The methods below work beside an event loop.

    def stream(self, token_ids: Any, **options: Any) -> AsyncIterator[str]:
        """Return the text of a reply, piece by piece; arguments and errors as `submit`. See `Serving.stream`."""
        return self._serving.stream(token_ids, **options)

    async def serve(self) -> None:
        """Step in a thread while there is something to do, and sleep otherwise, until this call is cancelled.

        A running step is finished before the call ends. Call `serve` again to go on. Raises StepError if the engine is
        being served already. Raises whatever the model raises; every generation has ended with that error then.
        """
        await self._serving.serve()

    # The methods below make steps.

    def step(self) -> list[Generation]:
        """Make one step of the model, over all generations that have tokens to be fed.

        Returns:
            The generations that ended since the last step returned, in the order in which they did.
        Raises:
            StepError: called by one of its own callbacks. Whatever the model raises: every request is then where it
            was, and the same step can be tried again.
        """
        with self.lock:
            if self._stepping.is_taken:
                raise StepError("this engine is in a step; call step() elsewhere than in on_token")
            with self._stepping:
                self._settle()
                self._scheduler.admit(self._clock())
                self._stepper.feed()
                self._settle()
            with uninterrupted_call(holds_all=True) as until_return:
                finished, self._finished = self._finished, []
        del until_return  # Otherwise the error of a failed request would keep `until_return` alive.
        return finished

    def run(self) -> None:
        """Step until every generation has ended. Raises as `step`.

        A request that fails raises nothing here, since the others go on: its `finish_reason` is "error", and its
        `error` is the reason.
        """
        while not self.is_idle:
            self.step()

    # The methods below work between two steps.

    def _settle(self) -> None:
        """Release ended generations, fill the prefix cache and call the callbacks."""
        while True:
            self._scheduler.reap(self._clock())
            while self._stepper.to_remember:
                job = self._stepper.to_remember.pop()
                if job.sequence is None or job.sequence.closed:
                    continue
                if self.prefixes is not None:
                    self.prefixes.insert(job.sequence, job.request.owner)
                if self._drafter is not None:
                    self._drafter.remember(job)
            for job in self._scheduler.ended():
                self._release(job)
            if not self._callbacks.call():
                return

    def _release(self, job: Job) -> None:
        """Close or keep the sequence of a job that has ended, and write its result."""
        assert job.outcome is not None, "it has ended"
        generation, (reason, error) = job.generation, job.outcome
        with uninterrupted():
            piece = ""
            try:
                piece = job.stream.flush()
                if job.calls is not None:
                    piece = job.calls.release(generation) + piece
            except Exception as failure:  # The tokenizer may raise anything.
                reason, error = "error", error or failure
            if job.sequence is not None and not job.sequence.closed:
                if job.request.keeps_sequence:
                    generation.sequence = job.sequence
                else:
                    # The caller may have the sequence in a step. Then the caller closes it.
                    with suppress(SequenceError):
                        self.memory.close(job.sequence)
            self._callbacks.add(job, piece)
            generation.text = job.stream.text
            generation.error, generation.finished_at = error, self._clock()
            self._scheduler.forget(job, reason)
            self._stepper.drafting.forget(job)
            if job.sequence is not None:
                self._scheduler.make_room()
            self._finished.append(generation)
            self.stats.finished[reason] += 1

    def end_all(self, error: Exception) -> None:
        """End every generation with an error, because the model cannot go on."""
        with self.lock:
            for job in self._scheduler.going_on():
                self._scheduler.end(job, "error", error)
            self._settle()
