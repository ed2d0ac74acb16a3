"""Measures how much of agents' prompts is reused with budgets from 1 to 100 % of the bytes that all prompts would fill.

Each agent sends its whole history with every request, as clients of a chat API do. The prefix cache is compared with
engines that cache by blocks: each block of tokens holds its keys, its values and a state at its end, the least recently
used block is evicted first, and a prompt resumes at the end of its longest run of cached blocks. Both get the same
number of bytes for the same model, in dry runs. The ideal cache reuses every token that was in any earlier prompt or
reply.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from benchmarks.harness import Report
from benchmarks.workloads import CONFIGS
from hybridmem.chat.simulation.agents import AgentHabits, AgentWorkload
from hybridmem.chat.simulation.dry import Words
from hybridmem.chat.simulation.workload import Event, Workload
from hybridmem.memory import CapacityError, HybridMemory, MemorySpec
from hybridmem.memory.blocks.arrays import Int64s, ceil_div
from hybridmem.memory.prefix import PrefixCache
from hybridmem.models import plan_memory

_SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
_GRID_TOKENS = 2048
_WINDOW = 32


@dataclass(frozen=True)
class Request:
    """Holds the tokens that an agent sends, and the tokens of the reply."""

    prompt: Int64s
    reply: Int64s


def agentic(*, quick: bool) -> Report:
    """Measure, in dry runs, how much of agents' prompts is reused with small budgets, beside LRU by blocks."""
    report = Report("agentic")
    habits = AgentHabits(n_agents=8, turns=10) if quick else AgentHabits(n_agents=40)
    config = CONFIGS["jamba"]()
    spec = plan_memory(config, "JambaForCausalLM", dtype="bfloat16")
    workload = AgentWorkload(habits)
    _describe(report, workload, spec)
    ideal, working_bytes = replay(spec, requests_of(workload, spec.vocab_size), 1 << 44)
    everything = _everything_seen(workload, spec)
    for share in _SHARES:
        budget = int(share * working_bytes)
        requests = list(requests_of(workload, spec.vocab_size)) if quick else None
        again = lambda own=requests: own or requests_of(workload, spec.vocab_size)  # noqa: E731
        ours, _ = replay(spec, again(), budget)
        with_host, _ = replay(spec, again(), budget, host_bytes=working_bytes)
        report.add("share of prompt tokens reused, by budget in percent of the working set", {
            "budget, %": 100 * share, "MiB": budget / 2**20, "all tokens seen before": everything,
            "this library, no limit": ideal, "this library": ours,
            "LRU by blocks": LruBlocks(spec, budget).replay(again()), "with host memory behind it": with_host,
        })  # fmt: skip
    return report


def _describe(report: Report, workload: AgentWorkload, spec: MemorySpec) -> None:
    families = list(workload)
    says = [[e for e in family if e.user == family[0].user and e.action == "say"] for family in families]
    opening = workload.habits.system_tokens
    last = [opening + sum((e.n_tokens or 0) + (e.n_reply or 0) for e in own) - (own[-1].n_reply or 0) for own in says]
    report.add("the agents", {
        "agents": len(families), "subagents": sum(e.action == "branch" for f in families for e in f),
        "median turns": float(np.median([len(own) for own in says])),
        "median tokens of the last prompt": float(np.median(last)),
        "median tokens of a reply": float(np.median([e.n_reply or 0 for own in says for e in own])),
        "tokens a block of the LRU": block_tokens(spec),
    })  # fmt: skip


def requests_of(workload: Workload, vocab_size: int) -> Iterator[Request]:
    """Generate the requests of all agents, in the order of their times, each with its whole history."""
    words = Words(None, vocab_size, (0,), 0, is_dry=True)
    said: dict[str, Int64s] = {}
    last: dict[str, Event] = {}
    openings: dict[str, Event] = {}
    for event in sorted((event for family in workload for event in family), key=lambda event: event.at):
        user = event.user
        if event.action == "arrive":
            said[user], openings[user] = np.array(words.opening(event), np.int64), event
        elif event.action == "branch" and event.into is not None:
            said[event.into] = said[user]
        elif event.action == "leave":
            del said[user]
        elif event.action in ("say", "regenerate"):
            if event.action == "say":
                prompt = np.append(said[user], words.later([], event))
                last[user] = event
            else:
                prompt = said[user][: -(last[user].n_reply or 0)]
            made = words.reply(Event(event.at, user, "say", n_tokens=1, n_reply=last[user].n_reply))
            said[user] = np.append(prompt, made)
            yield Request(prompt, said[user][len(prompt) :])


def replay(spec: MemorySpec, requests: Iterable[Request], budget: int, *, host_bytes: int = 0) -> tuple[float, int]:
    """Serve requests one by one through a prefix cache in a dry run.

    Returns:
        The share of prompt tokens that were reused, and the bytes that were in use at the end. A request that does not
        fit reuses nothing.
    """
    with HybridMemory(spec, budget, rollback_window=_WINDOW, device="meta") as memory:
        cache = PrefixCache(memory, grid_tokens=_GRID_TOKENS, max_bytes=host_bytes)
        n_tokens = n_reused = 0
        for request in requests:
            n_tokens += len(request.prompt)
            sequence, lookup = cache.open(request.prompt)
            try:
                at = lookup.reused
                for cut in [*cache.cuts(request.prompt, at), len(request.prompt)]:
                    memory.run(None, {sequence: request.prompt[at:cut]}, max_tokens=4096)
                    cache.insert(sequence)
                    at = cut
                memory.run(None, {sequence: request.reply}, max_tokens=4096)
                cache.insert(sequence)
                n_reused += lookup.reused
            except CapacityError:
                pass
            finally:
                memory.close(sequence)
        return n_reused / n_tokens, memory.counters.used_bytes


def _everything_seen(workload: Workload, spec: MemorySpec) -> float:
    """Return the share of prompt tokens that lie in a prefix shared with an earlier prompt and its reply."""
    attention = MemorySpec(
        tuple(tuple(m for m in layer if m in spec.of_kind("attention")) for layer in spec.layers),
        vocab_size=spec.vocab_size, model=spec.model, dtype=spec.dtype,
    )  # fmt: skip
    return replay(attention, requests_of(workload, spec.vocab_size), 1 << 44)[0]


def block_tokens(spec: MemorySpec) -> int:
    """Return how many tokens of keys and values take as many bytes as a state: engines pad blocks to this size."""
    row_bytes, state_bytes = _bytes_of(spec)
    return 16 * max(1, ceil_div(state_bytes, 16 * row_bytes))


def _bytes_of(spec: MemorySpec) -> tuple[int, int]:
    """Return the bytes of a token's keys and values in all layers, and the bytes of a sequence's states."""
    with HybridMemory(spec, 1 << 44, rollback_window=0, page_tokens=16, device="meta") as memory:
        ends = [memory.counters.bytes_at(n) for n in (16, 32)]
        rows = ends[1] - ends[0]
        return rows // 16, ends[0] - rows


class LruBlocks:
    """Caches blocks of tokens, each with keys, values and a state, and evicts the least recently used block."""

    def __init__(self, spec: MemorySpec, budget: int) -> None:
        row_bytes, state_bytes = _bytes_of(spec)
        self.tokens = block_tokens(spec)
        self.n_blocks = budget // (self.tokens * row_bytes + state_bytes)
        self._blocks: OrderedDict[int, None] = OrderedDict()  # The key is a hash of all tokens up to a block's end.

    def replay(self, requests: Iterable[Request]) -> float:
        """Serve requests one by one; return the share of prompt tokens that were reused."""
        n_tokens = n_reused = 0
        for request in requests:
            n_tokens += len(request.prompt)
            n_reused += self.serve(request)
        return n_reused / n_tokens

    def serve(self, request: Request) -> int:
        """Serve one request; return the tokens that are reused: blocks from the first on, and never the last token."""
        tokens = np.append(request.prompt, request.reply)
        keys, key = list[int](), 0
        for end in range(self.tokens, len(tokens) + 1, self.tokens):
            key = hash((key, tokens[end - self.tokens : end].tobytes()))
            keys.append(key)
        if len(keys) > self.n_blocks:
            return 0  # The request does not fit, so none of its blocks are kept.
        most = (len(request.prompt) - 1) // self.tokens
        n_found = next((i for i, own in enumerate(keys[:most]) if own not in self._blocks), min(most, len(keys)))
        for own in reversed(keys):  # The last blocks of a prompt are evicted first, as in vLLM.
            self._blocks[own] = None
            self._blocks.move_to_end(own)
        while len(self._blocks) > self.n_blocks:
            self._blocks.popitem(last=False)
        return n_found * self.tokens
