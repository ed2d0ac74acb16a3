"""Measures how much of an agent's prompts a server computes again: by stored responses, and by plain chat completions.

The trace has the shape of published agentic workloads (`chat.simulation.agents`): 43 turns of tool results and calls,
two subagents that begin with a copy of their parent's history, replies that are generated again, tool results that are
edited, and a restart of the server in the middle. The model is a small Jamba with random weights: its replies are
noise, so a reply that a client sends back as text is split into other tokens than were generated. The server is a
process of its own.
"""

from __future__ import annotations

import json
import math
import random
import shutil
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import openai
import torch
from safetensors.torch import load_file, save_file

from benchmarks.harness import Report
from benchmarks.servers import running
from hybridmem.chat.prompts import Tokenizer, load_tokenizer
from hybridmem.chat.simulation.agents import AgentHabits
from hybridmem.models import EMBEDDED

_TURNS, _SUBAGENT_TURNS = 43, 8
_SUBAGENTS_AT, _RETRIES_AT, _EDITS_AT = (14, 29), (8, 20, 35), (11, 25, 38)
_SEED = 26
_PATIENCE_SECONDS = 600.0


@dataclass(frozen=True)
class Turn:
    """Holds one request of an agent: a tool's result, and the length of the reply.

    Attributes:
        of: the agent, 0 for the first one.
        kind: "say"; "retry": the last reply is asked for again; "edit": the last tool result is replaced by another
            one; "fork": the first request of a subagent, which begins where the first agent stands.
    """

    of: int
    kind: str
    text: str
    n_reply: int


def make_trace(tokenizer: Tokenizer, scale: float) -> list[Turn]:
    """Return the requests of an agent and its subagents, with the lengths of `AgentHabits` times `scale`."""
    rng, habits = random.Random(_SEED), AgentHabits()
    words = [i for i in range(len(tokenizer)) if i not in tokenizer.added_tokens_decoder]

    def text(n_tokens: float) -> str:
        return str(tokenizer.decode(rng.choices(words, k=max(1, round(scale * n_tokens)))))

    def turn(of: int, kind: str, opening: str = "") -> Turn:
        n_result = rng.lognormvariate(math.log(habits.result_tokens), 1.0)
        n_reply = rng.lognormvariate(math.log(habits.reply_tokens), 0.6)
        return Turn(of, kind, opening + text(n_result), max(1, round(scale * n_reply)))

    trace, n_subagents = list[Turn](), 0
    for number in range(_TURNS):
        trace.append(turn(0, "say", "" if number else text(habits.system_tokens)))
        trace += [turn(0, "retry")] if number in _RETRIES_AT else []
        trace += [turn(0, "edit")] if number in _EDITS_AT else []
        if number in _SUBAGENTS_AT:
            n_subagents += 1
            trace += [turn(n_subagents, "fork" if i == 0 else "say") for i in range(_SUBAGENT_TURNS)]
    return trace


@dataclass
class Counts:
    """Counts the tokens of all prompts.

    Attributes:
        n_seen: tokens that were at the same position in an earlier prompt or reply.
        n_again: how many of the `n_seen` tokens were computed again.
    """

    n_requests: int = 0
    n_prompt: int = 0
    n_cached: int = 0
    n_seen: int = 0
    n_again: int = 0
    seconds: list[float] = field(default_factory=list)

    def add(self, n_prompt: int, n_cached: int, n_seen: int, seconds: float) -> None:
        self.n_requests += 1
        self.n_prompt += n_prompt
        self.n_cached += n_cached
        n_seen = min(n_seen, n_prompt - 1)  # The last token is fed for its output.
        self.n_seen += n_seen
        self.n_again += max(0, n_seen - n_cached)
        self.seconds.append(seconds)


@dataclass(frozen=True)
class Said:
    """Holds the history of an agent: what its next request must refer to, and how many tokens the history has."""

    handle: Any
    n_tokens: int = 0


class ByResponses:
    """Sends only the new messages, with the id of the reply that they follow."""

    name = "stored responses"

    def ask(self, client: openai.OpenAI, model: str, before: Said | None, turn: Turn) -> tuple[Said, int, int]:
        reply = client.responses.create(
            model=model, input=turn.text, previous_response_id=None if before is None else before.handle,
            max_output_tokens=turn.n_reply, extra_body={"seed": _SEED},
        )  # fmt: skip
        usage = reply.usage
        assert usage is not None
        return Said(reply.id, usage.total_tokens - 1), usage.input_tokens, usage.input_tokens_details.cached_tokens


class ByChats:
    """Sends the whole history every time."""

    name = "chat completions"

    def ask(self, client: openai.OpenAI, model: str, before: Said | None, turn: Turn) -> tuple[Said, int, int]:
        history = [*(before.handle if before is not None else []), {"role": "user", "content": turn.text}]
        reply = client.chat.completions.create(
            model=model, messages=history, max_completion_tokens=turn.n_reply, seed=_SEED
        )
        usage = reply.usage
        assert usage is not None and usage.prompt_tokens_details is not None
        heard = [*history, {"role": "assistant", "content": reply.choices[0].message.content or ""}]
        cached = usage.prompt_tokens_details.cached_tokens or 0
        return Said(heard, usage.total_tokens - 1), usage.prompt_tokens, cached


def agent_trace(*, quick: bool, scale: float | None = None) -> Report:
    """Replay the trace against each kind of server. Each server is restarted in the middle."""
    report = Report("agent_trace")
    scale = scale if scale is not None else 0.04 if quick else 0.25
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "noise")
        trace = make_trace(load_tokenizer(model), scale)
        for style in (ByResponses(), ByChats()):
            counts, n_first = replay(trace, style, model, Path(folder) / "sessions")
            report.add("share of prompt tokens, with a restart in the middle", {
                "by": style.name, "requests": counts.n_requests, "prompt tokens": counts.n_prompt,
                "tokens of the last prompt": n_first, "not computed again": 1 - counts.n_again / counts.n_prompt,
                "reused": counts.n_cached / counts.n_prompt, "could be reused": counts.n_seen / counts.n_prompt,
                "first request after the restart, s": counts.seconds[len(trace) // 2],
                "median request, s": sorted(counts.seconds)[len(counts.seconds) // 2],
            })  # fmt: skip
            shutil.rmtree(Path(folder) / "sessions")
    report.notes += _NOTES
    return report


def replay(trace: list[Turn], style: ByResponses | ByChats, model: Path, sessions: Path) -> tuple[Counts, int]:
    """Send a trace; return the counts, and the tokens of the first agent's last prompt."""
    counts, n_last, middle = Counts(), 0, len(trace) // 2
    stood, heard = {0: list[Said | None]([None])}, dict[int, str]()
    for part in (trace[:middle], trace[middle:]):
        with (
            running(_options(model, sessions)) as url,
            openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=_PATIENCE_SECONDS) as client,
        ):
            for turn in part:
                path = stood.setdefault(turn.of, [stood[0][-1]])
                if turn.kind in ("retry", "edit"):
                    path.pop()
                if turn.kind != "retry":
                    heard[turn.of] = turn.text
                before, started = path[-1], time.perf_counter()
                said, n_prompt, n_cached = style.ask(client, model.name, before, replace(turn, text=heard[turn.of]))
                n_seen = n_prompt if turn.kind == "retry" else 0 if before is None else before.n_tokens
                counts.add(n_prompt, n_cached, n_seen, time.perf_counter() - started)
                path.append(said)
                n_last = n_prompt if turn.of == 0 else n_last
    return counts, n_last


def make_model(folder: Path) -> Path:
    """Write a Jamba of the embedded model's shapes with random weights, and a long context."""
    shutil.copytree(EMBEDDED, folder)
    weights, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(_SEED)
    noise = {
        name: tensor if tensor.dim() < 2 else torch.randn(tensor.shape, generator=generator) * tensor.std()
        for name, tensor in weights.items()
    }
    save_file(noise, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 1 << 18}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _options(model: Path, sessions: Path) -> list[str]:
    return ["--max-body", "8MiB", "--model", str(model), "--budget", "1GiB", "--sessions", str(sessions)]


_NOTES = [
    "not computed again: all prompt tokens but those that an earlier prompt or reply had at the same place, and that "
    "were computed once more. reused: prompt tokens taken from a checkpoint; new text is computed once.\n",
    "llama-server, by its documents, its source and its issues #25913 and #28194 (2026-11): clients send the whole "
    "history. A hybrid model is not rolled back, but returns to one of 32 checkpoints of a slot (--ctx-checkpoints), "
    "which are made where user messages begin and near the end of a prompt, 8,192 tokens apart "
    "(--checkpoint-min-step), never during a reply; without one the whole prompt is processed again. A slot that is "
    "saved to a file is saved without them: after a restart, its next prompt is processed as a whole.\n",
    "vLLM, by its documents and its source (2026-11): responses are stored with VLLM_ENABLE_RESPONSES_API_STORE=1, "
    "in the memory of the process, and never removed; `previous_response_id` renders and encodes the history anew. The "
    "prefix of a hybrid model is found at whole blocks, which are enlarged until a page is as large as a state. "
    "Without a connector to another store nothing of it survives a restart.",
]
