"""Defines the journal, which undoes a change of a memory's books that an exception has interrupted.

Python may raise an exception between any two bytecodes: the handler of a signal does (Ctrl-C, a timeout by
`signal.setitimer`), and so does another thread (`PyThreadState_SetAsyncExc`). So a change may stop anywhere, and so may
the lines that would repair it. Therefore the books consist of two kinds of data:

- Records: what each sequence holds. Code that is about to change a record first tells `before` how to restore it.
- What follows from the records: how many references a block has, which blocks and bytes are free. It changes together
  with the records, but its old values are not kept. After an interrupted change it is computed from the records.

One assignment at the end of the block makes a change count. If an exception comes before it, the records are restored,
and what follows from them is computed anew. If an exception interrupts that as well, the next call of the memory
repeats it from the beginning. Restoring a record twice does no harm. An action that cannot be undone waits until the
change counts: see `after`.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any
from weakref import ref

from hybridmem.memory.blocks.ends import ExitOnStack, has_ended
from hybridmem.memory.errors import HybridMemoryError, SequenceError

_Call = tuple[Callable[..., object], tuple[Any, ...]]


def _do_nothing(*arguments: object) -> None:
    pass


class Journal:
    """Holds what undoes the open change, and the actions that wait for its end. The memory's lock protects it.

    Attributes:
        is_open: True from the beginning of a change until it has ended completely.
        rebuild: the function that computes what follows from the records.
        watched: runs, each of which consists of several changes. If the `block` of a run ended too early, `abandon`
            undoes the run.
    """

    __slots__ = ("_after", "_block", "_undo", "abandon", "is_open", "rebuild", "watched")

    def __init__(self) -> None:
        self.is_open = False
        self.rebuild: Callable[[], None] = _do_nothing
        self.abandon: Callable[[Any], None] = _do_nothing
        self.watched: dict[Any, None] = {}
        self._undo: list[_Call] | None = None
        self._after: list[_Call] = []
        self._block: ref[Any] | None = None

    def change(self) -> Change:
        """Return a context manager, `with journal.change(): ...`. Of the changes in its block, all happen or none.

        Entering it raises SequenceError if a change is open: then the caller has interrupted that change, which only
        handlers of signals and finalizers do.
        """
        return Change(self)

    def before(self, restore: Callable[..., object], *arguments: Any) -> None:
        """Remember that `restore(*arguments)`, called once or more often, restores a record that is about to change."""
        if self._undo is not None:
            self._undo.append((restore, arguments))

    def after(self, act: Callable[..., object], *arguments: Any) -> None:
        """Call `act(*arguments)` as soon as the open change counts, or now if no change is open.

        An exception may skip this call or stop it half-way. That must do no harm, because `rebuild` then does the same
        work.
        """
        if self._undo is None:
            act(*arguments)
        else:
            self._after.append((act, arguments))

    @property
    def is_left(self) -> bool:
        """True if an exception left a change or a run before its end."""
        return (self.is_open and has_ended(self._block)) or any(has_ended(run.block) for run in list(self.watched))

    def mend(self) -> None:
        """Undo or finish a change whose block ended too early, and undo such runs. Otherwise do nothing."""
        if self.is_open and has_ended(self._block):
            self._roll_back()
        for run in [run for run in self.watched if has_ended(run.block)]:
            self.abandon(run)

    def _give_way(self) -> None:
        if has_ended(self._block):
            self._roll_back()
        else:
            raise SequenceError(
                "this memory is in the middle of another change, which this call has interrupted; use it in no handler "
                "of a signal and in no finalizer, but set a flag there and act when the other call has returned"
            )

    def _roll_back(self) -> None:
        for restore, arguments in reversed(self._undo or ()):
            restore(*arguments)
        self.rebuild()
        self._after.clear()
        self._undo = None
        self.is_open = False


class Change:
    """Is the context manager of a change; see `Journal.change`. Cost: about a microsecond."""

    __slots__ = ("_block", "_journal")
    _block: ref[Any] | None

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    def __enter__(self) -> None:
        journal = self._journal
        if journal.is_open:
            journal._give_way()
        journal._block = self._block
        journal.is_open = True
        journal._undo = []

    __exit__ = ExitOnStack()

    def _leave(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        journal = self._journal
        # If an error of this library refuses a change before any record has changed, all allocated blocks are free
        # again.
        if kind is not None and (journal._undo or not issubclass(kind, HybridMemoryError)):
            journal._roll_back()
            return
        journal._undo = None  # From here on the change counts.
        if journal._after:
            for act, arguments in journal._after:
                act(*arguments)
            journal._after.clear()
        journal.is_open = False
