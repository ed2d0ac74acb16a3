"""On a reproducible server, a request has one answer: alone, under load, after a kept prefix and after a restart."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

from hybridmem.chat.prompts import Tokenizer
from hybridmem.chat.simulation.dialogues import make_dialogue
from hybridmem.models import load_model
from tests.chat.servers import MODEL, Gated, Running, running, wait_until
from tests.extent import only_in_long, pick

N_AT_ONCE = pick(6, 32)
DRAWN = {"temperature": 1.3, "top_p": 0.9}


def requests() -> list[dict[str, Any]]:
    """Return requests of one to six turns. Every other one is drawn with a seed of its own."""
    random, found = Random(11), list[dict[str, Any]]()
    for i in range(N_AT_ONCE):
        turns = make_dialogue(random, n_turns=random.randint(2, 6))
        said = [text for turn in turns for text in (("user", turn.user), ("assistant", turn.reply))][:-1]
        body: dict[str, Any] = {"messages": [{"role": role, "content": text} for role, text in said]}
        drawn = {"temperature": 1.3, "top_p": 0.9, "seed": i} if i % 2 else {"temperature": 0}
        found.append(body | drawn | {"max_tokens": 12, "logprobs": True, "top_logprobs": 4})
    return found


def ask(server: Running, request: dict[str, Any]) -> tuple[Any, int]:
    """Return the reply, the exact log probabilities of its tokens and of others, and how many tokens were cached."""
    answer = server.call("POST", "/v1/chat/completions", {"model": MODEL} | request)
    assert answer.status == 200, answer.body
    choice, usage = answer.json["choices"][0], answer.json["usage"]
    return (choice["message"]["content"], choice["logprobs"]), usage["prompt_tokens_details"]["cached_tokens"]


@only_in_long
def test_a_server_gives_a_request_one_answer(tokenizer: Tokenizer, tmp_path: Path) -> None:
    model, asked, folder = load_model("embedded", progress=False, reproducible=True), requests(), tmp_path / "prefixes"
    with running(model, tokenizer) as server:
        alone = list[Any]()
        for request in asked:
            server.forget()
            reply, n_cached = ask(server, request)
            alone.append(reply)
            assert n_cached == 0
        again = [ask(server, request) for request in asked]
        with server.engine.lock:
            server.prefixes.save(folder)
    assert len({str(reply) for reply in alone}) == len(asked)
    assert [reply for reply, _ in again] == alone and sum(n_cached for _, n_cached in again) > 0
    for saved in (None, folder):  # Each new server starts without the prefixes of the one before, or with them.
        gated = Gated(model)
        with running(gated, tokenizer, saved=saved) as server, ThreadPoolExecutor(N_AT_ONCE) as pool:
            gated.is_open = False
            waiting = [pool.submit(ask, server, request) for request in asked]
            wait_until(lambda server=server: server.engine.load.total == N_AT_ONCE)
            gated.open()
            answers = [one.result() for one in waiting]
        assert [reply for reply, _ in answers] == alone
    assert sum(n_cached for _, n_cached in answers) > 0, "no prefix of the server before was used"
