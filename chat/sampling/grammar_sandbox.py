"""Compiles grammars of strangers in a separate process first. A hostile grammar may hang or crash only that process.

llguidance limits many costs, but not all. A small schema can keep it busy for minutes, for example with 200 patterns in
an `allOf`, or overflow its stack. If it ran in a thread, it could not be stopped.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import time
import weakref
from collections import OrderedDict
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

SECONDS = 5.0
"""A grammar must be compiled within this many seconds. Most take milliseconds, and the largest ones a second."""
_START_SECONDS = 120.0
_MOST_BYTES = 4 << 30
"""The bytes of address space that the process may use, including the vocabulary."""
_MOST_KEPT = 256
_WORKER = Path(__file__).with_name("grammar_worker.py")


class Trial:
    """Tries grammars for one vocabulary, one at a time. Any thread may use it.

    The first grammar starts the process, which ends with this process. If none can be started, as in some sandboxes, a
    warning is logged once and no grammar is tried.

    Args:
        vocabulary: the tokenizer as JSON.
        seconds: the time limit for one grammar.
    """

    def __init__(self, vocabulary: str, n_vocab: int, stop_ids: list[int], seconds: float = SECONDS) -> None:
        about = {"tokenizer": vocabulary, "n_vocab": n_vocab, "stop_ids": stop_ids}
        self._first = about | {"seconds": seconds, "most_bytes": _MOST_BYTES}
        self._seconds = seconds
        self._process: subprocess.Popen[str] | None = None
        self._refused: OrderedDict[str, str] = OrderedDict()
        self._is_possible = True
        self._is_closed = False
        self._lock = threading.Lock()

    def why_not(self, source: str) -> str | None:
        """Return why a grammar must not be compiled in this process. None: it may be compiled.

        Cost: that of compiling the grammar, up to `seconds`.

        Args:
            source: the grammar in the form that llguidance takes.
        """
        with self._lock:
            if source in self._refused:
                self._refused.move_to_end(source)
                return self._refused[source]
            # A worker that was killed proves nothing about the grammar, so try a second time.
            for _ in range(0 if self._is_closed else 2):
                began = time.monotonic()
                if not self._is_possible or not self._start() or self._ask(source, self._seconds) == "compiled":
                    return None
                self._end()
                if self._is_closed or time.monotonic() - began >= self._seconds:
                    break
            why = f"it cannot be compiled within {self._seconds:g} seconds; ask for a simpler form"
            self._refused[source] = why
            while len(self._refused) > _MOST_KEPT:
                self._refused.popitem(last=False)
            return why

    def close(self) -> None:
        """End the process, and the grammar that it is trying. New grammars are refused from now on."""
        self._is_closed = True
        if (process := self._process) is not None:
            process.kill()
        with self._lock:
            self._end()

    def _start(self) -> bool:
        if self._process is not None and self._process.poll() is None:
            return True
        self._end()
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        try:
            self._process = subprocess.Popen([sys.executable, "-P", str(_WORKER)], **pipes, text=True, encoding="utf-8")
        except OSError as error:
            log.warning("grammars of clients are not tried in a process of their own: it cannot be started: %s", error)
        else:
            self._finalizer = weakref.finalize(self, _stop, self._process)
        if self._process is None or self._ask(self._first, _START_SECONDS) != "ready":
            self._is_possible = False
            self._end()
            log.warning("grammars of clients are compiled without a trial: a hostile one can keep a thread busy")
        return self._is_possible

    def _ask(self, question: object, seconds: float) -> str:
        """Ask the process a question, and return its answer, or "" if the process ends first.

        After this many seconds, the process is killed.
        """
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        timer = threading.Timer(seconds, process.kill)
        timer.start()
        try:
            process.stdin.write(json.dumps(question) + "\n")
            process.stdin.flush()
            return process.stdout.readline().strip()
        except (OSError, ValueError):  # The process has ended.
            return ""
        finally:
            timer.cancel()

    def _end(self) -> None:
        if self._process is not None:
            self._finalizer()
            self._process = None


def _stop(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()
