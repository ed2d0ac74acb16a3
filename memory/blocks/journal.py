"""The journal undoes a change of a memory's books that an exception has interrupted.

Python may raise an exception between any two bytecodes: the handler of a signal does (Ctrl-C, a timeout by
`signal.setitimer`), and so does another thread (`PyThreadState_SetAsyncExc`). So a change can be left anywhere, and the
lines that would put things right can be left as well. Therefore the books are of two sorts:

- Records: what each sequence holds. Who is about to change one notes with `before` how to put it back.
- All that follows from the records: how often a block is referred to, which blocks and bytes are free. It is changed as
  the records are, without notes, and computed anew from them when a change was interrupted.

A change counts from one assignment on, when its block ends. An exception before that undoes the records and computes
the rest anew. If an exception interrupts this, too, whoever uses the memory next does it again from the beginning:
putting back what is back changes nothing. What cannot be undone waits until the change counts: see `after`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, Protocol, overload
from weakref import ref

from hybridmem.memory.errors import HybridMemoryError, SequenceError

_Call = tuple[Callable[..., object], tuple[Any, ...]]


class Left(Protocol):
    """Declares a block whose `__exit__` is an `ExitOnStack`."""

    _block: ref[Any] | None

    def _leave(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


class ExitOnStack:
    """Makes `__exit__` a new function at each access, which only a `with` statement keeps, on its stack.

    When that function is gone, the block has been left, even if an exception came before the first line of `_leave`.
    """

    @overload
    def __get__(self, block: None, owner: type[Left]) -> Callable[..., None]: ...
    @overload
    def __get__(self, block: Left, owner: type[Left] | None = None) -> partial[None]: ...
    def __get__(self, block: Left | None, owner: type[Left] | None = None) -> Callable[..., None]:
        if block is None:
            assert owner is not None, "it is looked up on the class"
            return owner._leave
        leave = partial(block._leave)
        block._block = ref(leave)
        return leave


def _do_nothing(*arguments: object) -> None:
    pass


class Journal:
    """Holds what undoes the change that is open, and what waits for its end. The memory's lock guards it.

    Attributes:
        is_open: True from the beginning of a change until nothing of it is left to be done.
        rebuild: computes from the records all that follows from them.
        watched: runs, each of several changes, that are undone by `abandon` if the `block` of one was left.
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
        """Return a block, `with journal.change(): ...`, that happens whole or not at all.

        Raises SequenceError on entering: a change is open, so what runs now has interrupted it, as handlers of signals
        and finalizers do.
        """
        return Change(self)

    def before(self, restore: Callable[..., object], *arguments: Any) -> None:
        """Note how to put back a record that is about to change: by `restore(*arguments)`, once or several times."""
        if self._undo is not None:
            self._undo.append((restore, arguments))

    def after(self, act: Callable[..., object], *arguments: Any) -> None:
        """Call `act(*arguments)` once the open change counts; at once if none is open.

        It must not matter if the call is left out or done in part, because an exception may come: then `rebuild` does
        what it would have done.
        """
        if self._undo is None:
            act(*arguments)
        else:
            self._after.append((act, arguments))

    @property
    def is_left(self) -> bool:
        """True if a change or a run was left before its end."""
        return (self.is_open and _is_gone(self._block)) or any(_is_gone(run.block) for run in list(self.watched))

    def mend(self) -> None:
        """Undo or finish a change whose block was left before its end, and undo such runs; else do nothing."""
        if self.is_open and _is_gone(self._block):
            self._roll_back()
        for run in [run for run in self.watched if _is_gone(run.block)]:
            self.abandon(run)

    def _begin(self, block: ref[Any] | None) -> None:
        if self.is_open:
            self._give_way()
        self._block = block
        self.is_open = True
        self._undo = []

    def _give_way(self) -> None:
        if _is_gone(self._block):
            self._roll_back()
        else:
            raise SequenceError(
                "this memory is in the middle of another change, which this call has interrupted; use it in no handler "
                "of a signal and in no finalizer, but set a flag there and act when the other call has returned"
            )

    def _settle(self) -> None:
        self._undo = None  # From here on the change counts.
        if self._after:
            for act, arguments in self._after:
                act(*arguments)
            self._after.clear()
        self.is_open = False

    def _refuse(self) -> None:
        """End a change that has refused, by an error of ours, before any record changed, and freed what it took."""
        if self._undo:
            self._roll_back()
        else:
            self._settle()

    def _roll_back(self) -> None:
        for restore, arguments in reversed(self._undo or ()):
            restore(*arguments)
        self.rebuild()
        self._after.clear()
        self._undo = None
        self.is_open = False


def _is_gone(block: ref[Any] | None) -> bool:
    return block is None or block() is None


class Change:
    """Is the block of a change; see `Journal.change`. Cost: about a microsecond."""

    __slots__ = ("_block", "_journal")

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._block: ref[Any] | None = None

    def __enter__(self) -> None:
        self._journal._begin(self._block)

    __exit__ = ExitOnStack()

    def _leave(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self._journal._settle()
        elif issubclass(kind, HybridMemoryError):
            self._journal._refuse()
        else:
            self._journal._roll_back()
