"""Computes how many bytes the same sessions take in other engines, by the formulas in the engines' documents.

`tests/chat/planning/test_peers.py` checks each formula against figures that the engines publish.

As in this library, attention is kept in the model's dtype, and states are kept in the plan's dtype (for llama.cpp, in
float32). Nothing is shared between sessions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from hybridmem.memory import AttentionSpec, MemorySpec, RecurrentSpec, StateTensor
from hybridmem.memory.blocks import ceil_div


@dataclass(frozen=True)
class Model:
    """Holds the numbers of a model that the formulas need.

    Attributes:
        token_elements: for each attention layer, the elements that it keeps of a token.
        windows: for each attention layer, the rows that it sees. None: all rows.
        row_bytes: for each recurrence, the old rows in its state, such as a convolution's window: their number of
            columns, and the bytes of one column.
        fixed_bytes: for each recurrence, the bytes of its state without these rows.
        float32_bytes: for each recurrence, the bytes of its whole state in float32.
        itemsize: the bytes of an element in the model's dtype.
    """

    architecture: str
    token_elements: tuple[int, ...]
    windows: tuple[int | None, ...]
    row_bytes: tuple[tuple[int, int], ...]
    fixed_bytes: tuple[int, ...]
    float32_bytes: tuple[int, ...]
    itemsize: int

    @staticmethod
    def of(spec: MemorySpec, architecture: str) -> Model:
        memories = [m for layer in spec.layers for m in layer]
        attention = [m for m in memories if isinstance(m, AttentionSpec)]
        states = [m.states for m in memories if isinstance(m, RecurrentSpec)]
        itemsize = spec.dtype.itemsize
        return Model(
            architecture,
            tuple(m.n_parts * m.n_kv_heads * m.head_dim for m in attention),
            tuple(m.window for m in attention),
            tuple(_rows_of(own, itemsize) for own in states),
            tuple(sum(math.prod(s.shape) * s.dtype.itemsize for s in own if s.dtype is not None) for own in states),
            tuple(sum(math.prod(s.shape) * 4 for s in own) for own in states),
            itemsize,
        )

    @property
    def state_bytes(self) -> tuple[int, ...]:
        """Return the bytes of the whole state of each recurrence."""
        return tuple(n * size + fixed for (n, size), fixed in zip(self.row_bytes, self.fixed_bytes, strict=True))

    @property
    def token_bytes(self) -> int:
        """Return the bytes of one token in all attention layers."""
        return sum(self.token_elements) * self.itemsize


def _rows_of(states: tuple[StateTensor, ...], itemsize: int) -> tuple[int, int]:
    """Return how many columns of the states are kept as rows, and the bytes of one column; (0, 0) if none are."""
    rows = [s.shape for s in states if s.dtype is None]
    n = rows[0][0] if rows else 0
    return n, sum(math.prod(shape) for shape in rows) * itemsize // n if n else 0


@dataclass(frozen=True)
class PeerPlan:
    """Holds the bytes that an engine takes for a session, and how many sessions fit.

    If the engine's documents do not say, `why_not` holds the reason.

    Attributes:
        window_bytes, n_window_sessions: the bytes of a session and the number of sessions, if the newest tokens of
            every session can be taken back. None: the engine cannot take them back.
        sources: where the formulas are documented.
    """

    name: str
    sources: tuple[str, ...]
    notes: tuple[str, ...] = ()
    session_bytes: int = 0
    n_sessions: int = 0
    window_bytes: int | None = None
    n_window_sessions: int | None = None
    why_not: str = ""


def plan_peers(model: Model, budget_bytes: int, context_tokens: int, window_tokens: int) -> tuple[PeerPlan, ...]:
    """Plan the same sessions in each engine."""
    engines: tuple[Callable[[Model, int, int, int], PeerPlan], ...] = (llama_cpp, vllm, sglang)
    return tuple(engine(model, budget_bytes, context_tokens, window_tokens) for engine in engines)


# The functions below are the formulas of llama.cpp.

_LLAMA_SOURCES = (
    "llama.cpp, August 2026: src/llama-memory-recurrent.cpp (states in F32, a row for each sequence and for each token "
    "to take back), src/llama-kv-cache.cpp (K and V for all cells of all sequences, in F16), src/llama-arch.cpp "
    "(llm_arch_supports_rs_rollback)",
)
_LLAMA_ROLLS_BACK = frozenset(
    {
        "Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForCausalLM",
        "Qwen3_5MoeForConditionalGeneration",
        "NemotronHForCausalLM", "Lfm2ForCausalLM", "Lfm2MoeForCausalLM",
    }
)  # fmt: skip
_LLAMA_CELLS, _LLAMA_UBATCH, _LLAMA_ITEMSIZE = 256, 512, 2


def llama_cpp_kv_bytes(model: Model, context_tokens: int) -> int:
    """Return the KV bytes of one sequence. A sliding window's cache has room for the window and one physical batch."""
    n_bytes = 0
    for elements, window in zip(model.token_elements, model.windows, strict=True):
        wanted = context_tokens if window is None else min(context_tokens, window + _LLAMA_UBATCH)
        n_bytes += _up(wanted, _LLAMA_CELLS) * elements * _LLAMA_ITEMSIZE
    return n_bytes


def llama_cpp(model: Model, budget_bytes: int, context_tokens: int, window_tokens: int) -> PeerPlan:
    kv_bytes, state_bytes = llama_cpp_kv_bytes(model, context_tokens), sum(model.float32_bytes)
    session_bytes, window_bytes = kv_bytes + state_bytes, None
    notes = ["llama.cpp sets all of it aside for every slot when it starts"]
    if not state_bytes or model.architecture in _LLAMA_ROLLS_BACK:
        window_bytes = kv_bytes + (1 + window_tokens) * state_bytes
        notes += (
            ["llama.cpp takes tokens back from states once, right after the step that read them"] if state_bytes else []
        )
    else:
        notes.append(
            "llama.cpp takes no tokens back from states of this architecture; it reads the prompt again, or restores a "
            "host copy"
        )
    return _plan("llama.cpp", _LLAMA_SOURCES, notes, budget_bytes, session_bytes, window_bytes)


# The functions below are the formulas of vLLM.

_VLLM_SOURCES = (
    "vLLM 0.33: vllm/platforms/interface.py (_align_hybrid_block_size), vllm/v1/core/kv_cache_utils.py "
    "(_get_kv_cache_groups_uniform_page_size, get_max_concurrency_for_kv_cache_config), vllm/v1/kv_cache_interface.py "
    "(MambaSpec.max_memory_usage_bytes, mode none: 1 + draft tokens blocks)",
)
VLLM_BLOCK_TOKENS = 16


def vllm_block_tokens(token_bytes: int, state_bytes: int) -> int:
    """Return the tokens of an attention block: at least 16, and enough that a page holds a layer's state.

    All bytes are those of one layer.
    """
    return max(VLLM_BLOCK_TOKENS, _up(ceil_div(state_bytes, token_bytes), VLLM_BLOCK_TOKENS))


def vllm_group_layers(*counts: int) -> int:
    """Return how many layers a group has, given the number of layers of each kind.

    It is the least of the counts, or the largest if that is less than one and a half times the least.
    """
    present = [n for n in counts if n]
    return max(present) if max(present) < 1.5 * min(present) else min(present)


def vllm(model: Model, budget_bytes: int, context_tokens: int, window_tokens: int) -> PeerPlan:
    if any(model.windows) or len(set(model.token_elements)) > 1 or len(set(model.state_bytes)) > 1:
        return PeerPlan(
            "vLLM",
            _VLLM_SOURCES,
            why_not="layers of several sizes, or windows; its documented formula is for one of each kind",
        )
    n_attention, n_states = len(model.token_elements), len(model.state_bytes)
    group = vllm_group_layers(n_attention, n_states)
    state_bytes = model.state_bytes[0] if n_states else 0
    notes, block_bytes, n_blocks = [], group * state_bytes, 0
    if n_attention:
        token_bytes = model.token_elements[0] * model.itemsize
        block_tokens = vllm_block_tokens(token_bytes, state_bytes)
        block_bytes = group * block_tokens * token_bytes
        n_blocks = ceil_div(n_attention, group) * ceil_div(context_tokens, block_tokens)
        notes.append(f"vLLM's blocks hold {block_tokens:,} tokens of {group} layers, and one state of as many")
    n_groups = ceil_div(n_states, group)
    if n_groups:
        notes.append("vLLM takes back draft tokens of one step, for a block each")
    sessions = [(n_blocks + n_groups * (1 + n)) * block_bytes for n in (0, window_tokens)]
    return _plan("vLLM", _VLLM_SOURCES, notes, budget_bytes // block_bytes * block_bytes, *sessions)


# The functions below are the formulas of SGLang.

_SGLANG_SOURCES = (
    "SGLang 0.5.23: srt/mem_cache/memory_pool.py (HybridReqToTokenPool, MambaPool.SpeculativeState), "
    "_calculate_mamba_ratio (3 state slots a running request with the radix cache), --mamba-full-memory-ratio 0.9; "
    "sgl-project/sglang#29678 (--enable-unified-memory)",
)
SGLANG_SLOTS = 3
SGLANG_RATIO = Fraction(9, 10)


def sglang_draft_bytes(model: Model, n_drafts: int) -> int:
    """Return the bytes that a running request takes for drafts: a state for each draft token.

    Convolution windows overlap.
    """
    if not n_drafts:
        return 0
    windows = sum((n_drafts + n - 1) * column_bytes for n, column_bytes in model.row_bytes if n)
    return n_drafts * sum(model.fixed_bytes) + windows


def sglang(model: Model, budget_bytes: int, context_tokens: int, window_tokens: int) -> PeerPlan:
    if any(model.windows) or not model.token_elements:
        return PeerPlan(
            "SGLang", _SGLANG_SOURCES, why_not="windows, or no attention; its documented formula is for neither"
        )
    kv_bytes, slot_bytes = context_tokens * model.token_bytes, SGLANG_SLOTS * sum(model.state_bytes)
    if not slot_bytes:
        return _plan("SGLang", _SGLANG_SOURCES, [], budget_bytes, kv_bytes, kv_bytes)
    for_kv, for_slots = 1 / (1 + SGLANG_RATIO), SGLANG_RATIO / (1 + SGLANG_RATIO)
    sessions, counts = [], []
    for n_drafts in (0, window_tokens):
        draft_bytes = sglang_draft_bytes(model, n_drafts)
        # The drafts are subtracted first, and the rest is divided once. n sessions fit if each part suffices: share *
        # (budget - n * drafts) >= n * part.
        parts = ((for_kv, kv_bytes), (for_slots, slot_bytes))
        counts.append(min(int(budget_bytes * share // (part + share * draft_bytes)) for share, part in parts))
        sessions.append(kv_bytes + slot_bytes + draft_bytes)
    shared = " and ".join(dict.fromkeys(f"{budget_bytes // n:,}" for n in sessions))
    notes = (
        "SGLang divides memory between attention and states when it starts; with --enable-unified-memory both share "
        f"one buffer, as here: up to {shared} sessions",
        "SGLang takes back draft tokens of one step, a state each",
    )
    return PeerPlan("SGLang", _SGLANG_SOURCES, notes, sessions[0], counts[0], sessions[1], counts[1])


def _plan(
    name: str,
    sources: tuple[str, ...],
    notes: list[str],
    budget_bytes: int,
    session_bytes: int,
    window_bytes: int | None,
) -> PeerPlan:
    n_window = None if window_bytes is None else budget_bytes // window_bytes
    return PeerPlan(name, sources, tuple(notes), session_bytes, budget_bytes // session_bytes, window_bytes, n_window)


def _up(n: int, multiple: int) -> int:
    return ceil_div(n, multiple) * multiple
