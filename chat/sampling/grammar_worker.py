"""Compiles grammars in a program of its own, which may be killed.

It reads one grammar from each line of its input, and answers each with a line.

It imports nothing from this library, so that it starts in a moment. `grammar_sandbox.py` runs this file and writes the
lines.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module

try:
    import resource
    import signal
except ImportError:  # Windows has neither module.
    resource = signal = None  # type: ignore[assignment]


def main() -> None:
    """Read the vocabulary, and then grammars until the input ends."""
    library = import_module("llguidance")
    first = json.loads(sys.stdin.readline())
    vocabulary = library.LLTokenizer(first["tokenizer"], n_vocab=first["n_vocab"], eos_token=first["stop_ids"] or None)
    if resource is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        most = first["most_bytes"] if hard == resource.RLIM_INFINITY else min(first["most_bytes"], hard)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _answer("ready")
    for line in sys.stdin:
        if signal is not None:
            signal.alarm(int(2 * first["seconds"]) + 1)  # If no parent is left to kill this process, the alarm ends it.
        matcher = library.LLMatcher(vocabulary, json.loads(line), log_level=0)
        if not matcher.is_error():
            matcher.compute_bitmask()
        if signal is not None:
            signal.alarm(0)
        _answer("compiled")


def _answer(word: str) -> None:
    sys.stdout.write(word + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
