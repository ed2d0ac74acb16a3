"""Limits the tokens of a request."""

from __future__ import annotations

from hybridmem.chat.engine.engine import Engine
from hybridmem.chat.server.bodies import count_longest_list
from hybridmem.chat.server.errors import ContextError
from hybridmem.memory import CapacityError, HybridMemory

_MOST_TOKENS = 1 << 20
_DRY_STEPS = 64


def find_context_tokens(engine: Engine, wanted: int | None) -> int:
    """Return the tokens of the longest possible sequence: the least of `wanted`, the config's limit and the budget's.

    Cost: a dry run of about 64 steps.
    """
    limit = min(n for n in (wanted, engine.context_tokens, _MOST_TOKENS) if n is not None)
    memory = engine.memory
    dry = HybridMemory(
        memory.spec, memory.budget_bytes, device="meta",
        rollback_window=memory.rollback_window, page_tokens=memory.page_tokens, fold=memory.fold,
    )  # fmt: skip
    sequence, chunk = dry.open(), max(engine.step_tokens, limit // _DRY_STEPS)
    while sequence.length < limit:
        try:
            with dry.step({sequence: [0] * min(chunk, limit - sequence.length)}):
                pass
        except CapacityError:
            if chunk == 1:
                break
            chunk = max(1, chunk // 4)
    return sequence.length


def check_length(
    n_prompt: int, wanted: int | None, default: int | None, limit: int, *, param: str, is_cut: bool = True
) -> int:
    """Return how many tokens a reply may have. Raises ContextError if a prompt of this length does not fit.

    Args:
        wanted: the number in the request. None: `default`, and if that is None as well, as many tokens as fit.
        is_cut: whether a number that is too large for the prompt is lowered, as in OpenAI's chats and responses. Its
            plain completions refuse such a number.
    """
    left = limit - n_prompt
    most = wanted if wanted is not None else max(left, 1) if default is None else default
    if left >= (most if wanted is not None and not is_cut else min(most, 1)):
        return min(most, left)
    raise ContextError(n_prompt, limit, wanted=None if is_cut else wanted, param=param)


def check_lists(body: bytes, limit: int, *, param: str) -> None:
    """Refuse a list of too many token ids before it is parsed. Raises ContextError.

    No other list of numbers may be as long, so a body that is refused here would be refused later as well. The only
    exception is a body that gives a key twice, first with such a list.
    """
    n_listed = count_longest_list(body, limit + 1)
    if n_listed:
        raise ContextError(n_listed, limit, param=param, is_counted=False)
