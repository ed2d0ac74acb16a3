"""Writes the `usage` of a reply, which says why each token was computed, and the progress of its prompt."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hybridmem.chat.engine.requests import Generation

_NO_CACHE = "this server keeps no prefixes"
_GOES_ON = "the conversation's own sequence goes on"


def usage_of(prompts: list[Generation], generations: Iterable[Generation]) -> dict[str, Any]:
    """Return the `usage` of a reply, with the extension field "hybrid_memory".

    Args:
        prompts: the first generation of each prompt. A prompt's tokens count once, however many choices it has.
        generations: the generations of all choices.
    """
    replies = list(generations)
    n_prompt = sum(g.n_base + g.n_prompt for g in prompts)
    n_completion = sum(len(g.token_ids) for g in replies)
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_completion,
        "total_tokens": n_prompt + n_completion,
        "completion_tokens_details": {
            "accepted_prediction_tokens": sum(g.n_accepted for g in replies),
            "rejected_prediction_tokens": sum(g.n_drafted - g.n_accepted for g in replies),
        },
        "prompt_tokens_details": {"cached_tokens": sum(map(reused_tokens, prompts))},
        "hybrid_memory": explain(prompts, replies),
    }


def explain(prompts: list[Generation], replies: list[Generation]) -> dict[str, Any]:
    """Return which tokens were reused and from where, which were computed and why, and the times of a request.

    The reason is that of the first prompt. Times are the longest among all choices.
    """
    n_reused = sum(map(reused_tokens, prompts))
    return {
        "reused_tokens": n_reused,
        "replayed_tokens": sum(g.lookup.replayed for g in prompts if g.lookup is not None),
        "computed_tokens": sum(g.n_base + g.n_prompt for g in prompts) - n_reused,
        "calls_taken_back": sum(g.n_taken_back for g in replies),
        "tokens_taken_back": sum(g.n_discarded for g in replies),
        "drafts": sum(g.n_drafts for g in replies),
        "drafted_tokens": sum(g.n_drafted for g in replies),
        "accepted_tokens": sum(g.n_accepted for g in replies),
        "saved_seconds": round(sum(g.saved_seconds for g in replies), 6),
        "from": _source(prompts[0]),
        "why": _why(prompts[0]),
        "queue_seconds": _longest((g.submitted_at, g.admitted_at) for g in replies),
        "prefill_seconds": _longest((g.admitted_at, g.first_token_at or g.finished_at) for g in replies),
        "decode_seconds": _longest((g.first_token_at, g.finished_at) for g in replies),
    }


def reused_tokens(generation: Generation) -> int:
    """Return the tokens of a prompt that were reused and not computed."""
    return generation.n_base + (0 if generation.lookup is None else generation.lookup.reused)


def progress_of(generation: Generation, now: float) -> dict[str, int]:
    """Return the progress of a prompt, in the form of llama.cpp's server. `processed` counts cached tokens as well."""
    n_base = generation.n_base
    started = generation.submitted_at if generation.admitted_at is None else generation.admitted_at
    return {
        "total": n_base + generation.n_prompt,
        "cache": reused_tokens(generation),
        "processed": n_base + generation.n_prefilled,
        "time_ms": round(1000 * (now - started)),
    }


def _source(generation: Generation) -> str:
    if generation.lookup is not None:
        return generation.lookup.source
    return "window" if generation.n_base else "nothing"


def _why(generation: Generation) -> str:
    if generation.lookup is not None:
        return generation.lookup.why
    return _GOES_ON if generation.n_base else _NO_CACHE


def _longest(spans: Iterable[tuple[float | None, float | None]]) -> float:
    """Return the seconds of the longest span that has begun and ended, rounded to microseconds."""
    return round(max((end - begin for begin, end in spans if begin is not None and end is not None), default=0.0), 6)
