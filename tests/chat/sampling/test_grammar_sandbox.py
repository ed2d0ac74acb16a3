"""Some grammars keep the process busy in which they are tried, or end it."""

from __future__ import annotations

import logging
import subprocess
import sys
from functools import partial
from threading import Timer
from time import monotonic
from typing import Any

import pytest

from hybridmem.chat.prompts import Tokenizer
from hybridmem.chat.sampling import grammar as grammar_module
from hybridmem.chat.sampling.grammar import GrammarError, Grammars
from hybridmem.chat.sampling.grammar_sandbox import Trial

ENDLESS = {"type": "integer", "multipleOf": 9999991}
DEADLY = 'start: %json {"const": -9223372036854775808}'


@pytest.fixture
def grammars(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Grammars:
    monkeypatch.setattr(grammar_module, "Trial", partial(Trial, seconds=2.0))
    return Grammars(tokenizer, len(tokenizer), [0], is_guarded=True)


def test_a_grammar_that_keeps_busy_or_kills_is_refused_and_the_next_one_read(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammars.json_schema({"type": "integer"})
    # This hides the number, as if nobody knew of it.
    monkeypatch.setattr(grammar_module, "find_in_grammar", lambda text: None)
    for number, ask in enumerate((partial(grammars.lark, DEADLY), partial(grammars.json_schema, ENDLESS))):
        with pytest.raises(GrammarError, match="cannot be compiled within 2 seconds; ask for a simpler form"):
            ask()
        grammars.json_schema({"type": "integer", "minimum": number})
    began = monotonic()
    with pytest.raises(GrammarError, match="cannot be compiled"):
        grammars.json_schema(ENDLESS)
    assert monotonic() - began < 1, "it is known by now"
    grammars.json_schema({"type": "boolean"})
    closing = Timer(0.3, grammars.close)
    closing.start()
    with pytest.raises(GrammarError, match="cannot be compiled"):
        grammars.json_schema({"type": "integer", "multipleOf": 9999973})
    assert monotonic() - began < 2, "it is not waited for"
    closing.join()
    grammars.close()


def test_a_process_that_somebody_has_ended_is_started_again(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = list[subprocess.Popen[str]]()

    def start(*arguments: Any, **options: Any) -> subprocess.Popen[str]:
        started.append(whole(*arguments, **options))
        return started[-1]

    whole = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", start)
    for number in range(3):
        grammars.json_schema({"type": "integer", "minimum": number})
        started[-1].kill()
        if number:
            started[-1].wait()
    assert len(started) == 3
    grammars.close()
    assert all(process.poll() is not None for process in started)


def test_without_a_process_grammars_are_compiled_all_the_same(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with caplog.at_level(logging.WARNING):
        for kind in ("integer", "boolean"):
            grammars.json_schema({"type": kind})
    assert sum("without a trial" in record.message for record in caplog.records) == 1
    grammars.close()
