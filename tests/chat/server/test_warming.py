"""The prompts of a file are computed for each key before anybody sends them, and stay cached."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hybridmem.chat.prompts import Tokenizer
from hybridmem.chat.server import ServerOptions
from hybridmem.chat.server.keys import Key
from hybridmem.chat.server.warming import read_warmed
from hybridmem.memory import SpecError
from hybridmem.models import LanguageModel
from tests.chat.servers import MODEL, Running, running, wait_until

SYSTEM = "You know cats and dogs, and you never forget what anybody has told you about them, not even years later."
LINES: list[dict[str, Any]] = [
    {"messages": [{"role": "system", "content": SYSTEM}]},
    {"system": [{"type": "text", "text": f"Be brief. {SYSTEM}"}], "cache_salt": "mine"},
    {"messages": [{"role": "user", "content": "My cat is called Zoe."}]},
]


def write(folder: Path, *lines: object) -> str:
    path = folder / "warm.jsonl"
    path.write_text("\n".join(json.dumps(line) if not isinstance(line, str) else line for line in lines))
    return str(path)


def computed(server: Running, system: str, user: str, **options: Any) -> tuple[int, int]:
    headers = options.pop("headers", None)
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    asked = {"model": MODEL, "messages": messages, "max_tokens": 1} | options
    usage = server.call("POST", "/v1/chat/completions", asked, headers).json["usage"]
    return usage["hybrid_memory"]["computed_tokens"], usage["prompt_tokens"]


@pytest.mark.parametrize("key", [None, "a", "b"])
def test_a_warmed_system_prompt_is_not_computed_again(
    embedded: LanguageModel, tokenizer: Tokenizer, tmp_path: Path, key: str | None
) -> None:
    keys = () if key is None else (Key("a", "a"), Key("b", "b"))
    options = ServerOptions(warm=write(tmp_path, *LINES, ""), keys=keys)
    headers = {} if key is None else {"Authorization": f"bearer {key}"}
    with running(embedded, tokenizer, options) as server:
        wait_until(lambda: server.engine.stats.finished["length"] == len(LINES) * max(1, len(keys)))
        wait_until(lambda: server.engine.is_idle)
        n_computed, n_prompt = computed(server, SYSTEM, "Zoe", headers=headers)
        assert n_computed <= 5 and n_prompt > 25
        n_computed, _ = computed(server, f"Be brief. {SYSTEM}", "Zoe", headers=headers, cache_salt="mine")
        assert n_computed <= 5
        # What is pinned stays when all else gives way.
        with server.engine.lock:
            server.prefixes.reclaim(1 << 60)
        assert computed(server, SYSTEM, "Rex", headers=headers)[0] <= 5


@pytest.mark.parametrize(
    ("line", "word"),
    [("{", "line 2"), ("[]", "line 2"), ('{"messages": [{"role": "king"}]}', "role"), ('{"wings": 2}', "wings")],
)
def test_a_line_that_is_no_request_is_named(tmp_path: Path, line: str, word: str) -> None:
    with pytest.raises(SpecError, match=word) as raised:
        read_warmed(write(tmp_path, LINES[0], line))
    assert "line 2" in str(raised.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"warm='.*nothing'"):
        read_warmed(str(tmp_path / "nothing"))
