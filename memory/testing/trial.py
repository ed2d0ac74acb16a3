"""Runs a history on a memory, and compares all outputs with those of a sequence that saw only the tokens that count."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hybridmem.memory.testing.adapter import AbsentError, Adapter, Factory, Handle, InjectedError, Logits, RefusedError
from hybridmem.memory.testing.histories import (
    Branch,
    Checkpoint,
    Close,
    CloseAll,
    Fed,
    Fork,
    History,
    Misuse,
    Open,
    Operation,
    Parts,
    Reload,
    Reorder,
    Retell,
    ReturnTo,
    Rollback,
    Step,
    head,
    joined,
    length_of,
)  # fmt: skip
from hybridmem.memory.testing.tally import Tally


class BrokenPromiseError(Exception):
    """A promise is broken.

    Attributes:
        at: the index of the operation in its history.
        kind: the first words of the message, up to a number. A smaller history must give the same words. Otherwise it
            shows another fault.
    """

    def __init__(self, why: str, at: int) -> None:
        super().__init__(why)
        self.at = at
        self.kind = [word for word in why.split() if not any(map(str.isdigit, word))][:3]


class Oracle:
    """Recomputes outputs in a memory of its own, one sequence at a time, without rollbacks."""

    def __init__(self, factory: Factory) -> None:
        self._adapter = factory()
        self._known: dict[Parts, Logits] = {}
        self._can_accept = type(self._adapter).accept is not Adapter.accept

    def steps(self, parts: Parts) -> Parts:
        """Return the steps in which these tokens are recomputed."""
        agreement = self._adapter.agreement
        if agreement.reproducible:
            return tuple(Fed((token,)) for token in joined(parts))
        if not agreement.is_in_steps:
            return (Fed(joined(parts)),)
        return parts if agreement.cuts_matter and self._can_accept else tuple(Fed(part.tokens) for part in parts)

    def logits(self, steps: Parts) -> Logits:
        """Return the logits (n, vocab) of a sequence that saw only these tokens.

        If a step was taken back in part, that part was fed to the sequence too, but it does not count.
        """
        if steps not in self._known:
            if len(self._known) > 4096:
                self._known.clear()
            sequence = self._adapter.open()
            rows = [self._feed(sequence, part) for part in steps]
            self._adapter.close(sequence)
            self._known[steps] = np.concatenate(rows)
        return self._known[steps]

    def _feed(self, sequence: Handle, part: Fed) -> Logits:
        tokens, n_kept = [*part.tokens, *part.taken_back], len(part.tokens)
        if part.taken_back:
            return self._adapter.accept(sequence, tokens, n_kept)[:n_kept]
        return self._adapter.step({sequence: tokens})[0]


@dataclass(frozen=True)
class _Row:
    """Holds outputs that are yet to be compared: those of the last tokens of `parts`, from operation number `at`.

    Attributes:
        is_alike: False if they were computed in a step of another shape than that of their parts.
    """

    parts: Parts
    logits: Logits
    at: int
    is_alike: bool = True


@dataclass(frozen=True)
class _Mark:
    """Holds a checkpoint, the name of its sequence, and that sequence's tokens and furthest position at that moment."""

    handle: Handle
    source: str
    parts: Parts
    peak: int


class Trial:
    """Runs one history on a new memory.

    Args:
        oracle: recomputes outputs. It may serve many trials of the same factory.
        window_tokens: how far a memory must be able to go back from the furthest position of a sequence. It may refuse
            to go further, and to go back beyond a checkpoint to which a sequence has returned.
    """

    def __init__(self, factory: Factory, oracle: Oracle, tally: Tally, window_tokens: int = 8) -> None:
        self._factory, self._oracle, self._tally, self._window_tokens = factory, oracle, tally, window_tokens
        self._at = 0
        with self._guarded("making it"):
            self._adapter: Adapter = factory()
        self._handles: dict[str, Handle] = {}
        self._parts: dict[str, Parts] = {}
        self._peaks: dict[str, int] = {}
        self._marks: dict[str, _Mark] = {}
        self._rows: list[_Row] = []
        self._loaded: set[Handle] = set()
        self._is_out_of_reach = False
        self._unused = self._usage()

    def run(self, history: History) -> None:
        """Run the operations. Raise `BrokenPromiseError` at the first one with a wrong result."""
        for self._at, operation in enumerate(history):
            before, kind = self._usage(), type(operation).__name__
            self._is_out_of_reach = False
            try:
                with self._guarded("it"):
                    is_done = self._do(operation)
                if not is_done:
                    continue  # The sequence does not exist. That can happen in a history that was made smaller.
                self._tally.done[kind] += 1
            except RefusedError as error:
                if isinstance(error, AbsentError):
                    self._tally.lack(_absent_part(operation), str(error))
                else:
                    self._tally.refuse(kind, str(error), is_allowed=self._is_out_of_reach)
                if self._usage() != before:
                    raise self._broken(f"it refused ({error}) and uses {self._usage()} bytes, not {before}") from error
            self._tally.operations += 1
            self._check_books()
        self._note_events(self._adapter)
        self._compare()

    @contextmanager
    def _guarded(self, who: str) -> Iterator[None]:
        """Turn an exception of the subject into a fault, unless it is a refusal.

        That includes exceptions that would end this process, or make a test runner skip the test.
        """
        try:
            yield
        except (BrokenPromiseError, RefusedError, KeyboardInterrupt):
            raise
        except BaseException as error:
            raise self._broken(f"{who} raised {type(error).__name__}: {error}") from error

    def _note_events(self, adapter: Adapter) -> None:
        with self._guarded("its count of events"):
            self._tally.events.update(adapter.events())

    def _broken(self, why: str) -> BrokenPromiseError:
        return BrokenPromiseError(why, self._at)

    def _usage(self) -> int | None:
        try:
            with self._guarded("its count of bytes"):
                return self._adapter.usage()
        except AbsentError:
            return None

    def _check_books(self) -> None:
        try:
            with self._guarded("its own check"):
                self._adapter.check()
                for name, parts in self._parts.items():
                    length = self._adapter.length(self._handles[name])
                    if length != length_of(parts):
                        raise self._broken(f"{name} has {length_of(parts)} tokens, and the memory says {length}")
                    self._tally.done["Length"] += 1
        except AbsentError as error:
            self._tally.lack("Length", str(error))

    def _do(self, operation: Operation) -> bool:
        """Carry out an operation. Return False if the memory cannot be asked for it."""
        match operation:
            case Open(name) if name not in self._handles:
                self._handles[name], self._parts[name], self._peaks[name] = self._adapter.open(), (), 0
            case Step():
                return self._step(operation)
            case Branch(name) if name in self._handles:
                self._branch(operation)
            case Rollback(name, n_tokens) if self._parts.get(name):
                self._rollback(name, max(0, length_of(self._parts[name]) - n_tokens))
            case Checkpoint(source, name) if source in self._handles:
                self._mark(source, name)
            case ReturnTo(name, mark) if name in self._handles and mark in self._marks:
                self._return_to(name, self._marks[mark])
            case Fork(source, name) if source in self._handles and name not in self._handles:
                self._handles[name] = self._adapter.fork(self._handles[source])
                self._copy({name: source})
            case Reorder():
                return self._reorder(operation)
            case Reload(name, anew) if name in self._handles:
                self._reload([*self._handles] if anew else [name], anew)
            case Close(name) if name in self._handles:
                self._close(name)
            case CloseAll():
                self._close_all()
            case Retell(name) if self._parts.get(name):
                self._retell(self._parts[name], operation.n_tokens)
            case Misuse(name, how) if name in self._handles:
                self._misuse(self._handles[name], how)
            case _:
                return False
        return True

    def _step(self, operation: Step) -> bool:
        requests = {name: tokens for name, tokens in operation.requests if name in self._handles}
        if not requests:
            return False
        asked = {self._handles[name]: list(tokens) for name, tokens in requests.items()}
        try:
            rows = self._adapter.step(asked, fail_after=operation.fail_after)
        except InjectedError as error:
            if operation.fail_after is None:
                raise self._broken("it raised the error of a failing layer, and no layer was to fail") from error
            self._tally.done["Fault"] += 1
            return True
        for (name, tokens), logits in zip(requests.items(), rows, strict=True):
            self._parts[name] = (*self._parts[name], Fed(tokens))
            self._peaks[name] = max(self._peaks[name], length_of(self._parts[name]))
            self._tally.done["Fed"] += len(tokens)
            self._rows.append(_Row(self._parts[name], np.asarray(logits, np.float32), self._at))
        return True

    def _branch(self, operation: Branch) -> None:
        name, parts = operation.name, self._parts[operation.name]
        found = self._adapter.branch(
            self._handles[name], list(operation.tokens), list(operation.parents), list(operation.path)
        )
        logits = np.asarray(found, np.float32)
        for leaf in {*range(len(operation.tokens))} - {*operation.parents}:
            path = operation.path_to(leaf)
            # Steps of another shape need not give the same bits.
            self._rows.append(_Row((*parts, Fed(operation.tokens_of(path))), logits[[*path]], self._at, is_alike=False))
        if operation.path:
            others = tuple(token for i, token in enumerate(operation.tokens) if i not in operation.path)
            self._parts[name] = (*parts, Fed(operation.tokens_of(operation.path), others))
        self._peaks[name] = max(self._peaks[name], length_of(self._parts[name]))
        self._tally.done["Fed"] += len(operation.tokens)

    def _rollback(self, name: str, to: int) -> None:
        said = self._adapter.can("rollback", self._handles[name], to)
        self._tally.done["Answer"] += said is not None
        self._is_out_of_reach = to < self._peaks[name] - self._window_tokens
        try:
            self._adapter.rollback(self._handles[name], to)
        except RefusedError as error:
            if said:
                raise self._broken(f"it said that it can go back to {to}, and refused: {error}") from error
            raise
        if said is False:
            raise self._broken(f"it said that it cannot go back to {to}, and did")
        self._tally.done["Return"] += self._handles[name] in self._loaded
        self._tally.done["TakenBack"] += length_of(self._parts[name]) - to
        self._parts[name] = head(self._parts[name], to)
        self._peaks[name] = self._peaks[name] if to else 0

    def _mark(self, source: str, name: str) -> None:
        handle = self._adapter.checkpoint(self._handles[source])
        if name in self._marks:
            self._adapter.close(self._marks[name].handle)
        self._marks[name] = _Mark(handle, source, self._parts[source], self._peaks[source])

    def _return_to(self, name: str, mark: _Mark) -> None:
        self._adapter.return_to(self._handles[name], mark.handle)
        self._parts[name] = mark.parts
        # A checkpoint need not hold what is needed to go back further, so the memory may refuse that.
        self._peaks[name] = max(mark.peak, length_of(mark.parts) + self._window_tokens)

    def _forget_marks(self, name: str) -> None:
        """Close the checkpoints of a sequence, because the sequence is replaced by another one."""
        for mark in [mark for mark, its in self._marks.items() if its.source == name]:
            self._adapter.close(self._marks.pop(mark).handle)

    def _close(self, name: str) -> None:
        self._forget_marks(name)
        self._adapter.close(self._handles.pop(name))
        del self._parts[name], self._peaks[name]

    def _reorder(self, operation: Reorder) -> bool:
        moves = {a: b for a, b in operation.moves if a in self._handles and b in self._handles}
        if not moves:
            return False
        self._adapter.reorder({self._handles[a]: self._handles[b] for a, b in moves.items()})
        for name in moves:
            self._forget_marks(name)
        self._copy(moves)
        return any(a != b for a, b in moves.items())

    def _copy(self, moves: dict[str, str]) -> None:
        """Record that each key now has the tokens of its value."""
        self._parts |= {a: self._parts[b] for a, b in moves.items()}
        self._peaks |= {a: self._peaks[b] for a, b in moves.items()}

    def _reload(self, names: list[str], anew: bool) -> None:
        """Load copies before the originals are closed. A memory may have no room for both."""
        old, new = self._adapter, self._factory() if anew else self._adapter
        with tempfile.TemporaryDirectory() as folder:
            paths = {name: Path(folder) / str(i) for i, name in enumerate(names)}
            for name, path in paths.items():
                old.save(self._handles[name], path)
            copies = {name: new.load(path) for name, path in paths.items()}
        for name in names:
            self._forget_marks(name)
            old.close(self._handles[name])
        if anew:
            self._note_events(old)
        self._adapter = new
        self._handles |= copies
        self._loaded = {*copies.values()}

    def _close_all(self) -> None:
        for name in list(self._handles):
            self._close(name)
        if self._unused is None:
            raise AbsentError("it does not say what it uses")
        if self._usage() != self._unused:
            raise self._broken(f"no sequence is open, and it uses {self._usage()} bytes, not {self._unused}")

    def _retell(self, parts: Parts, n_tokens: int) -> None:
        if not self._adapter.agreement.reproducible:
            raise AbsentError("it does not promise that outputs have the same bits in other steps")
        sequence, tokens = self._adapter.open(), joined(parts)
        for start in range(0, len(tokens), n_tokens):
            (logits,) = self._adapter.step({sequence: list(tokens[start : start + n_tokens])})
            fed = (Fed(tokens[: start + n_tokens]),)
            self._rows.append(_Row(fed, np.asarray(logits, np.float32), self._at))
        self._adapter.close(sequence)

    def _misuse(self, sequence: Handle, how: str) -> None:
        adapter, length = self._adapter, length_of(self._parts[self._name_of(sequence)])
        tokens = {"no tokens": [], "a negative token": [0, -1], "a token too large": [0, adapter.vocab_size]}
        before = self._usage()
        try:
            if how in tokens:
                adapter.step({sequence: tokens[how]})
            else:
                adapter.rollback(sequence, length + 1 if how == "a position too large" else -1)
        except (AbsentError, KeyboardInterrupt):
            raise
        except BaseException:  # A memory may refuse with any error.
            if self._usage() != before:
                raise self._broken(f"it refused {how}, and uses {self._usage()} bytes, not {before}") from None
            return
        raise self._broken(f"it took {how}")

    def _name_of(self, sequence: Handle) -> str:
        return next(name for name, handle in self._handles.items() if handle is sequence)

    def _compare(self) -> None:
        """Compare all outputs of the history.

        The longest texts are recomputed first, because their outputs include those of all their prefixes.
        """
        in_steps, known = self._adapter.agreement.is_in_steps, list[tuple[tuple[object, ...], Logits]]()
        for row in sorted(self._rows, key=lambda row: -length_of(row.parts)):
            steps = self._oracle.steps(row.parts)
            key: tuple[object, ...] = steps if in_steps else joined(steps)
            expected = next((logits for text, logits in known if text[: len(key)] == key), None)
            if expected is None:
                expected = self._recompute(row, steps)
                known.append((key, expected))
            end, is_alike = length_of(row.parts), in_steps and steps == row.parts and row.is_alike
            finite = expected[np.isfinite(expected)]
            spread = float(np.ptp(finite)) if finite.size else 0.0
            if not spread and length_of(row.parts) > 1:
                raise BrokenPromiseError("all outputs of a text are one number, so that they show nothing", row.at)
            self._agree(row, expected[end - len(row.logits) : end], spread, is_alike)

    def _recompute(self, row: _Row, steps: Parts) -> Logits:
        """Return the outputs of a text that is fed alone, in these steps or, if they are refused, as it was fed."""
        try:
            try:
                return self._oracle.logits(steps)
            except RefusedError:
                return self._oracle.logits(tuple(Fed(part.tokens) for part in row.parts))
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise BrokenPromiseError(f"its text, fed alone, raised {type(error).__name__}: {error}", row.at) from error

    def _agree(self, row: _Row, expected: Logits, spread: float, is_alike: bool) -> None:
        """Compare outputs. With `is_alike`, the recomputed steps have the same lengths as those that were fed."""
        self._tally.compared += len(row.logits)
        if row.logits.shape != expected.shape:
            raise BrokenPromiseError(f"outputs are of shape {row.logits.shape}, not {expected.shape}", row.at)
        if np.isnan(expected).any():
            raise BrokenPromiseError("outputs of a text that is fed alone are no numbers", row.at)
        if not np.array_equal(np.isfinite(row.logits), np.isfinite(expected)):
            raise BrokenPromiseError("outputs are not finite: memory was read that nobody wrote", row.at)
        # Infinite logits, such as those of masked tokens, are left out if they are equal. If their signs differ, they
        # differ by infinity.
        differs = row.logits != expected
        worst = float(np.abs(row.logits[differs] - expected[differs]).max(initial=0.0))
        agreement = self._adapter.agreement
        is_exact = agreement.reproducible or (agreement.same_bits and is_alike)
        allowed = 0.0 if is_exact else agreement.rounding * spread
        if worst > allowed:
            raise BrokenPromiseError(
                f"outputs differ from recomputed ones by {worst / spread:.2g} of their spread", row.at
            )


def _absent_part(operation: Operation) -> str:
    """Return which of the calls that an operation needs the memory does not have."""
    match operation:
        case Step(fail_after=int()):
            return "Fault"
        case Misuse(how=how) if "position" in how:
            return "Rollback"
    return type(operation).__name__
