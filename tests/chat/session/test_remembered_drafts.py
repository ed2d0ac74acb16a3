"""A draft head remembers a session that was saved: it drafts as if the session had never left its engine."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from hybridmem import EMBEDDED, load_model
from hybridmem.chat.engine.blank_drafts import BlankDrafter
from hybridmem.chat.engine.drafting import Speculation
from hybridmem.chat.engine.engine import Engine
from hybridmem.chat.prompts import Tokenizer, load_tokenizer
from hybridmem.chat.session import ChatSession
from hybridmem.chat.simulation.dialogues import make_dialogue
from hybridmem.memory import HybridMemory
from hybridmem.memory.prefix import PrefixCache
from tests.extent import pick


@pytest.fixture(scope="module")
def model() -> Any:
    return load_model("embedded", draft_head=True)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(EMBEDDED)


def make_engine(model: Any, tokenizer: Tokenizer, *, has_head: bool = True) -> Engine:
    drafter = None
    if has_head:
        own = HybridMemory(model.draft_head.memory_spec, "8MiB", rollback_window=16)
        drafter = BlankDrafter(model, model.draft_head, own, prefixes=PrefixCache(own))
    memory = HybridMemory(model.memory_spec, "32MiB", rollback_window=16)
    speculation = Speculation(adapts=False, drafter=drafter)
    return Engine(model, memory, tokenizer, prefixes=PrefixCache(memory), speculation=speculation)


def accepted(engine: Engine) -> tuple[int, int]:
    return engine.stats.n_accepted, engine.stats.n_drafted


def test_a_saved_session_goes_on_with_what_its_head_remembered(
    model: Any, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Of two equal chats, one is saved and resumed before its last turn: equal replies, and equally many right drafts.

    Without the file of the head, the replies are the same, and the head begins behind the text.
    """
    rng, counts, replies = random.Random(11), dict[str, list[tuple[int, int]]](), dict[str, list[str]]()
    for number in range(pick(2, 8)):
        turns = [turn.user for turn in make_dialogue(rng, 6, held_out=True)]
        for way in ("stays", "saved", "blind"):
            engine = make_engine(model, tokenizer)
            session = ChatSession(engine, max_tokens=24)
            for text in turns[:-1]:
                session.say(text)
            if way != "stays":
                folder = tmp_path / f"{number}-{way}"
                session.save(folder)
                assert len([*folder.glob("drafts-*.safetensors")]) == 1
                if way == "blind":
                    next(folder.glob("drafts-*.safetensors")).unlink()
                engine = make_engine(model, tokenizer)
                session = ChatSession.resume(engine, folder)
            texts, live = engine.drafted_texts, session.sequence
            assert texts is not None and live is not None
            assert texts.hold(live.tokens, None) == (way != "blind")
            before = accepted(engine)
            replies.setdefault(way, []).append(session.say(turns[-1]).text)
            counts.setdefault(way, []).append(tuple(a - b for a, b in zip(accepted(engine), before, strict=True)))
    assert replies["stays"] == replies["saved"] == replies["blind"]
    assert counts["stays"] == counts["saved"]
    assert min(right for right, _ in counts["saved"]) > 0


def test_sessions_of_engines_with_and_without_a_head_are_read_by_both(
    model: Any, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    replies = set[str]()
    for has_head in (True, False):
        folder = tmp_path / f"{has_head}"
        session = ChatSession(make_engine(model, tokenizer, has_head=has_head), max_tokens=24)
        session.say("My cat is called Zoe.")
        session.save(folder)
        about = json.loads((folder / "session.json").read_text())
        assert about["version"] == 1 and ("drafts" in about) == has_head, "files without a head are as they were"
        for other in (True, False):
            resumed = ChatSession.resume(make_engine(model, tokenizer, has_head=other), folder)
            replies.add(resumed.say("What is my cat called?").text)
        session.save(folder)
        names = {path.name.partition("-")[0] for path in folder.iterdir()}
        assert names == {"session.json", "memory"} | ({"drafts"} if has_head else set())
        assert len([*folder.iterdir()]) == len(names), "files of the first save are gone"
    assert len(replies) == 1
