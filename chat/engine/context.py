"""Finds the context of a model: the most tokens that a prompt and its reply may have together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridmem.memory import BatchError


def named_context_tokens(config: Any) -> int | None:
    """Return the most tokens for which a model was made, by its config; None if the config names no limit.

    Recurrent models often name none. Where rotary positions are scaled, the limit is the larger of
    `max_position_embeddings` and the original limit times the factor, because configs give either.
    """
    text = config.get_text_config() if callable(getattr(config, "get_text_config", None)) else config
    named = getattr(text, "max_position_embeddings", None)
    if not isinstance(named, int) or named < 1:
        return None
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None)
    kinds = [rope, *rope.values()] if isinstance(rope, Mapping) else []
    return max(named, *(_scaled_tokens(kind, named) for kind in kinds if isinstance(kind, Mapping)), 1)


def _scaled_tokens(rope: Mapping[str, Any], named: int) -> int:
    factor, original = rope.get("factor"), rope.get("original_max_position_embeddings")
    if not isinstance(factor, int | float) or not isinstance(original, int) or rope.get("rope_type") != "yarn":
        return 0
    return int(factor * original)


def fit_reply(n_prompt: int, max_tokens: int, context_tokens: int | None) -> int:
    """Return how many tokens a reply may have beside a prompt: `max_tokens`, or what is left of the context.

    Raises BatchError if nothing is left.
    """
    if context_tokens is None:
        return max_tokens
    left = context_tokens - n_prompt
    if left < min(max_tokens, 1):
        raise BatchError(
            f"This model's maximum context length is {context_tokens} tokens. However, the prompt has {n_prompt}. "
            "Shorten it, begin anew, or give Engine(context_tokens=...) if the model can do more than its config says."
        )
    return min(max_tokens, left)
