"""The baseline of `benchmarks agentic` is counted by hand, and both sides run on a small trace."""

from __future__ import annotations

import numpy as np
import torch

from benchmarks.agentic import LruBlocks, Request, block_tokens, replay, requests_of
from hybridmem.chat.simulation.agents import AgentHabits, AgentWorkload
from hybridmem.memory import AttentionSpec, MemorySpec, RecurrentSpec, StateTensor
from tests.toy import VOCAB, Toy

SPEC = Toy().memory_spec
ATTENTION, ROW_BYTES = AttentionSpec(4, 2, 8), 2 * 2 * 8 * 4
TOKENS = block_tokens(SPEC)


def request(*blocks: int, reply: int = 0) -> Request:
    """Return a prompt of whole blocks, each of one token id, and one token more.

    The reply is one token shorter than a block.
    """
    prompt = np.append(np.repeat(np.array(blocks), TOKENS), 9)
    return Request(prompt, np.full(TOKENS - 1, reply))


def blocks(n: int) -> LruBlocks:
    lru = LruBlocks(SPEC, 1 << 30)
    lru.n_blocks = n
    return lru


def test_blocks_are_found_from_the_first_on_and_the_least_recently_used_give_way() -> None:
    lru = blocks(4)
    assert lru.serve(request(1, 2)) == 0  # The cache then holds blocks 1, 2 and the one with the reply.
    assert lru.serve(request(1, 2)) == 2 * TOKENS
    # The cache then holds 1, 3, the reply, and of the older blocks only 2.
    assert lru.serve(request(1, 3)) == TOKENS
    assert lru.serve(request(1, 2)) == 2 * TOKENS
    assert lru.serve(request(4, 5, 6)) == 0  # This request takes all four blocks.
    assert lru.serve(request(1)) == 0
    assert lru.serve(request(1, 2, 3, 4)) == 0  # Five blocks do not fit.


def test_a_block_has_as_many_bytes_of_rows_as_of_states() -> None:
    states = RecurrentSpec("family", (5,), (StateTensor("mean", (2048,), torch.float32),))
    assert (
        block_tokens(MemorySpec(((ATTENTION, states),), vocab_size=VOCAB, model="both")) == 2048 * 4 // ROW_BYTES == 64
    )
    attention = MemorySpec(((ATTENTION,),), vocab_size=VOCAB, model="attention")
    assert block_tokens(attention) == 16
    assert LruBlocks(attention, 1 << 20).n_blocks == (1 << 20) // (16 * ROW_BYTES)


def test_with_room_for_all_the_prefix_cache_reuses_what_the_trace_repeats() -> None:
    habits = AgentHabits(n_agents=3, turns=5, system_tokens=300, result_tokens=60, reply_tokens=20, subagents=0.2)
    workload, seen, n_tokens, n_known = AgentWorkload(habits, seed=1), [], 0, 0
    for one in requests_of(workload, VOCAB):
        n_tokens += len(one.prompt)
        n_known += max([common(one.prompt, tokens) for tokens in seen], default=0)
        seen.append(np.append(one.prompt, one.reply))
    ideal = n_known / n_tokens
    share, n_bytes = replay(SPEC, requests_of(workload, VOCAB), 1 << 40)
    assert 0.7 < ideal < 1 and ideal - 0.02 < share <= ideal
    little, _ = replay(SPEC, requests_of(workload, VOCAB), n_bytes // 6)
    behind, _ = replay(SPEC, requests_of(workload, VOCAB), n_bytes // 6, host_bytes=n_bytes)
    assert little < behind <= share


def common(prompt: np.ndarray, tokens: np.ndarray) -> int:
    n = min(len(prompt) - 1, len(tokens))
    differs = np.flatnonzero(prompt[:n] != tokens[:n])
    return int(differs[0]) if len(differs) else n
