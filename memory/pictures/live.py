"""Shows the map of the arena and the tree of forks live in a notebook, while steps run in any thread.

IPython's display handles are enough, so nothing has to be installed in addition to the notebook itself.
"""

from __future__ import annotations

import contextvars
import threading
import time
import weakref
from collections.abc import Callable
from html import escape
from importlib import import_module
from typing import TYPE_CHECKING

from hybridmem.memory.errors import SpecError
from hybridmem.memory.hybrid import require_memory
from hybridmem.memory.pictures.cells import arena_of
from hybridmem.memory.pictures.forks import trees_of
from hybridmem.memory.pictures.svg import arena_legend, arena_svg, tree_svg
from hybridmem.memory.views.text_tables import count, format_bytes

if TYPE_CHECKING:
    from hybridmem.memory.hybrid import HybridMemory

MOST_SHARE = 0.01
"""The largest share of the time that drawing may take.

A large memory is drawn less often, so that drawing slows steps by at most 2 %.
"""
MOST_SEQUENCES = 16
"""The most sequences and checkpoints in the tree. If there are more, the others are only counted."""


def watch(memory: HybridMemory, *, times_a_second: float = 4.0) -> Watch:
    """Show a memory live below the calling cell, with what `arena_map` and `fork_tree` show.

    A thread draws when something has changed. It ends when the returned object's `stop()` is called or its `with` block
    ends, when the same memory gets another `watch`, or when the memory ends. Raises SpecError outside of a notebook.

    Args:
        times_a_second: how often a picture is drawn at most. Drawing takes at most 1 % of the time, so a large memory
            is drawn less often.
    """
    require_memory(memory, "watch(memory)")
    if not 0 < times_a_second <= 60:
        raise SpecError(f"times_a_second={times_a_second!r}; give a number above 0, and 60 at most")
    return Watch(memory, _publisher(), times_a_second).start()


def _publisher() -> Callable[[str], None]:
    """Return a function that shows HTML, always in the same place. Raises SpecError outside of a notebook."""
    remedy = "call it in a cell of a notebook, or print(memory.usage())"
    try:
        ipython, shown = import_module("IPython"), import_module("IPython.display")
    except ImportError:
        raise SpecError(f"watch(memory) needs IPython, which is not installed; {remedy}") from None
    if ipython.get_ipython() is None:
        raise SpecError(f"watch(memory) shows pictures in a notebook, and this is none; {remedy}")
    handle = shown.DisplayHandle()
    handle.display(shown.HTML("<p>…</p>"))

    def publish(html: str) -> None:
        handle.update(shown.HTML(html))

    return publish


_watches: weakref.WeakKeyDictionary[HybridMemory, Watch] = weakref.WeakKeyDictionary()
"""Maps a memory to the watch that draws it. A cell that is run again replaces the picture of its earlier run."""


class Watch:
    """Draws a memory in one place, a few times a second, until it is stopped or the memory is gone.

    Args:
        publish: a function that shows a picture, as HTML, in place of the last one.
        times_a_second: how often it draws at most.
    Attributes:
        n_drawn: how many pictures have been drawn so far.
        error: the error that has stopped the drawing, or None.
    """

    def __init__(self, memory: HybridMemory, publish: Callable[[str], None], times_a_second: float = 4.0) -> None:
        self.n_drawn = 0
        self.error: Exception | None = None
        self._memory = weakref.ref(memory)
        self._publish = publish
        self._pause_seconds = 1 / times_a_second
        self._version: object = None
        self._stopped = threading.Event()
        # The thread runs in the context of the cell, so that its output belongs to the cell.
        run = contextvars.copy_context().run
        self._thread = threading.Thread(target=run, args=(self._run,), name="watch", daemon=True)

    def start(self) -> Watch:
        """Begin to draw, and stop the earlier watch of this memory."""
        memory = self._memory()
        if memory is not None:
            before, _watches[memory] = _watches.get(memory), self
            if before is not None:
                before.stop()
        self._thread.start()
        return self

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive() and not self._stopped.is_set()

    def stop(self) -> None:
        """Draw once more if something has changed, and end. It may be called again."""
        if not self._stopped.is_set():
            self._stopped.set()
            if self._thread.is_alive() and self._thread is not threading.current_thread():
                self._thread.join()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        state = "running" if self.is_running else f"stopped by {self.error!r}" if self.error else "stopped"
        return f"<Watch: {state}, {count(self.n_drawn, 'picture', 'pictures')}>"

    def refresh(self) -> bool:
        """Draw and show if something has changed. Return False if the memory is gone.

        Cost: O(slots), or that of `draw`.
        """
        memory = self._memory()
        if memory is None or not memory.is_open:
            return False
        version = memory.counters.version()
        if version != self._version:
            self._publish(draw(memory))
            self._version = version
            self.n_drawn += 1
        return True

    def _run(self) -> None:
        try:
            is_alive = True
            while is_alive and not self._stopped.is_set():
                started = time.thread_time()
                is_alive = self.refresh()
                self._stopped.wait(max(self._pause_seconds, (time.thread_time() - started) / MOST_SHARE))
            self.refresh()
        except Exception as error:  # This thread has no caller, so nobody else would report the error.
            memory = self._memory()
            # If the memory was closed while it was drawn, the error is no fault.
            if memory is not None and memory.is_open:
                self.error = error
                self._publish(f"<p>watch(memory) has stopped: {escape(repr(error))}</p>")


def draw(memory: HybridMemory) -> str:
    """Return the map of the arena and the tree of forks as HTML with SVG. Any thread may call it.

    Cost: O(blocks in use), and O(tokens of the sequences in the tree).
    """
    with memory.counters.lock:  # While the lock is held no step begins or ends, so the picture shows one moment.
        inventory = memory.counters.inventory().frozen()
        roots, title = trees_of(memory, MOST_SEQUENCES)
        tree = tree_svg(memory, roots) if roots else ""
    arena = arena_of(inventory)
    used, budget = format_bytes(inventory.arena.used_bytes), format_bytes(inventory.arena.capacity_bytes)
    return (
        f'<div style="font:12px sans-serif"><p><b>{used} of {budget} in use</b>{arena_legend(arena)}</p>'
        f"{arena_svg(arena, inventory.arena.capacity_bytes)}<p>{escape(title)}</p>{tree}</div>"
    )
