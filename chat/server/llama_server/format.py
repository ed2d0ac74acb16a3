"""Writes completions in the form of llama.cpp's server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hybridmem.chat.engine.engine import Generation
from hybridmem.chat.sampling.logprobs import Chosen
from hybridmem.chat.sampling.token_bytes import TokenBytes
from hybridmem.chat.server.errors import ApiError
from hybridmem.chat.server.formats import as_event
from hybridmem.chat.server.logprobs import token_text
from hybridmem.chat.server.replies import Piece
from hybridmem.chat.server.streams import Usage


@dataclass
class LlamaFormat:
    """Writes the completion of one prompt.

    Attributes:
        prompt: the text of the prompt.
        has_probs: whether the likeliest tokens are sent.
        slot: the number by which the client can later save the prefix.
        has_timings: whether each event has the times so far.
        note: is called with the tokens of the reply at its end.
    """

    model: str
    tokens: TokenBytes
    prompt: str
    end_ids: tuple[int, ...]
    has_probs: bool = False
    slot: int = 0
    has_timings: bool = False
    note: Callable[[list[int]], None] = lambda _: None
    _last: Generation | None = None
    _n_told: int = 0

    def whole(self, generations: list[Generation], usage: dict[str, Any]) -> dict[str, Any]:
        (generation,) = generations
        told = {"index": 0, "content": generation.text, "tokens": self._own(generation.token_ids)}
        return told | self._end(generation, usage) | self._probs(generation.logprobs)

    def begin(self) -> str:
        return ""

    def wait(self) -> str:
        return ": the prompt is being computed\n\n"

    def add(self, piece: Piece, usage: Usage) -> str:
        if piece.is_last:
            self._last = piece.generation
        if piece.progress is not None:
            return as_event({"index": 0, "content": "", "stop": False, "prompt_progress": piece.progress})
        new = self._own(piece.generation.token_ids[self._n_told :])
        self._n_told = len(piece.generation.token_ids)
        if not (piece.text or new):
            return ""
        about = {"index": 0, "content": piece.text, "tokens": new, "stop": False, "id_slot": self.slot}
        counts = {"tokens_predicted": self._n_told, "tokens_evaluated": piece.generation.n_prompt}
        timings = {"timings": _timings_so_far(piece, usage())} if self.has_timings else {}
        return as_event(about | counts | timings | self._probs(list(piece.logprobs)))

    def end(self, usage: Usage) -> str:
        assert self._last is not None, "its last piece has come"
        return as_event({"index": 0, "content": "", "tokens": []} | self._end(self._last, usage()))

    def fail(self, error: ApiError) -> str:
        return as_event(error.body)

    def _own(self, token_ids: list[int]) -> list[int]:
        return [token for token in token_ids if token not in self.end_ids]

    def _probs(self, chosen: list[Chosen]) -> dict[str, Any]:
        if not self.has_probs or not chosen:
            return {}
        told = [
            self._prob(c.token_id, c.logprob) | {"top_logprobs": [self._prob(*pair) for pair in c.top]} for c in chosen
        ]
        return {"completion_probabilities": told}

    def _prob(self, token_id: int, logprob: float | None) -> dict[str, Any]:
        raw = self.tokens.of(token_id)
        return {"id": token_id, "token": token_text(self.tokens, token_id), "bytes": list(raw), "logprob": logprob}

    def _end(self, generation: Generation, usage: dict[str, Any]) -> dict[str, Any]:
        self.note(generation.token_ids)
        kind = "word" if generation.stopped_by is not None else "eos"
        spent, n_cached = usage["hybrid_memory"], usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "id_slot": self.slot, "stop": True, "model": self.model, "prompt": self.prompt, "truncated": False,
            "tokens_predicted": usage["completion_tokens"], "tokens_evaluated": usage["prompt_tokens"],
            "tokens_cached": n_cached, "has_new_line": "\n" in generation.text,
            "stop_type": kind if generation.finish_reason == "stop" else "limit",
            "stopping_word": generation.stopped_by or "",
            "timings": timings_of(usage["prompt_tokens"] - n_cached, n_cached, usage["completion_tokens"], spent),
        }  # fmt: skip


def _timings_so_far(piece: Piece, usage: dict[str, Any]) -> dict[str, Any]:
    """Return the times of a reply that goes on."""
    n_cached, first = usage["prompt_tokens_details"]["cached_tokens"], piece.generation.first_token_at
    spent = usage["hybrid_memory"] | {"decode_seconds": 0.0 if first is None else max(0.0, piece.heard_at - first)}
    return timings_of(usage["prompt_tokens"] - n_cached, n_cached, usage["completion_tokens"], spent)


def timings_of(n_prompt: int, n_cached: int, n_predicted: int, spent: dict[str, Any]) -> dict[str, Any]:
    """Return the times of a request. The prompt's times are for the tokens that were computed."""
    prompt, predicted = spent["prefill_seconds"], spent["decode_seconds"]
    return {
        "cache_n": n_cached,
        "prompt_n": n_prompt,
        "prompt_ms": 1000 * prompt,
        "prompt_per_token_ms": 1000 * prompt / max(1, n_prompt),
        "prompt_per_second": n_prompt / prompt if prompt else 0.0,
        "predicted_n": n_predicted,
        "predicted_ms": 1000 * predicted,
        "predicted_per_token_ms": 1000 * predicted / max(1, n_predicted),
        "predicted_per_second": n_predicted / predicted if predicted else 0.0,
    }
