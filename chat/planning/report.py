"""Computes the figures of a capacity plan, which `chat.planning.view` shows.

This library's figures are measured in memories that allocate no bytes (dry runs).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from hybridmem.chat.planning.peers import Model, PeerPlan, plan_peers
from hybridmem.memory import MemorySpec, SpecError
from hybridmem.memory.capacity import SequencePlan, checkpoint_bytes, plan_sequence
from hybridmem.memory.eviction import (
    H2O,
    TOVA,
    Budget,
    ExpectedAttention,
    KNorm,
    PyramidKV,
    Quest,
    Recent,
    Scissorhands,
    SnapKV,
)
from hybridmem.memory.quantization import Float8, Quantized, Storage

POLICIES: tuple[type[Budget], ...] = (
    Recent,
    KNorm,
    H2O,
    Scissorhands,
    TOVA,
    SnapKV,
    PyramidKV,
    ExpectedAttention,
    Quest,
)
STORAGES: tuple[Storage, ...] = (Quantized(8), Float8(), Quantized(4), Quantized(2))


@dataclass(frozen=True)
class Question:
    """Holds the inputs of a capacity plan.

    Attributes:
        drafting: the spec of the memory of a draft model or head, which holds as many sessions. `weight_bytes` includes
            the weights of what drafts.
        own_context_tokens: the most tokens for which the model was made. None: its config names no limit.
    """

    spec: MemorySpec
    architecture: str
    whole_bytes: int
    context_tokens: int
    window_tokens: int = 64
    keep: float = 0.2
    encoder_tokens: int = 0
    weight_bytes: int = 0
    has_weights: bool = True
    drafting: MemorySpec | None = None
    own_context_tokens: int | None = None

    @property
    def exceeds_context(self) -> bool:
        """True if sessions are longer than those for which the model was made."""
        return self.own_context_tokens is not None and self.context_tokens > self.own_context_tokens

    @property
    def budget_bytes(self) -> int:
        """Return the bytes that are left for memories. They are 0 if the weights alone do not fit."""
        return max(0, self.whole_bytes - self.weight_bytes) if self.has_weights else self.whole_bytes

    @property
    def model_fits(self) -> bool:
        return not self.has_weights or self.weight_bytes <= self.whole_bytes

    def measure(self, spec: MemorySpec) -> SequencePlan:
        """Measure a session in a memory of this spec. The spec may have another policy or storage than the model's."""
        return plan_sequence(
            spec, self.context_tokens, encoder_tokens=self.encoder_tokens, rollback_window=self.window_tokens
        )

    @cached_property
    def draft_session(self) -> SequencePlan | None:
        """Return what a session holds in the memory of the draft model or head, if there is one."""
        if self.drafting is None:
            return None
        return plan_sequence(self.drafting, self.context_tokens, rollback_window=self.window_tokens)

    def fit(self, session: SequencePlan) -> int:
        """Return how many such sessions fit into the budget at once, each with its own in the memory of what drafts."""
        n_alone, drafts = session.fit_into(self.budget_bytes), self.draft_session
        if drafts is None or not n_alone:
            return n_alone
        share = session.most_bytes / (session.most_bytes + drafts.most_bytes)
        own = int(self.budget_bytes * share)
        return min(session.fit_into(own), drafts.fit_into(self.budget_bytes - own))

    def measure_checkpoint(self, *, holds_tail: bool) -> int:
        """Return the bytes that a checkpoint of such a session adds."""
        return checkpoint_bytes(
            self.spec, holds_tail=holds_tail, encoder_tokens=self.encoder_tokens, rollback_window=self.window_tokens
        )


@dataclass(frozen=True)
class Choice:
    """Holds what a policy or a storage saves. If it does not suit the model, `why_not` holds the reason."""

    names: tuple[str, ...]
    session_bytes: int = 0
    n_sessions: int = 0
    why_not: str = ""


@dataclass(frozen=True)
class Report:
    """Holds the figures of a plan; see `Question` and `SequencePlan`.

    Attributes:
        attention_token_bytes: the bytes that a token adds to K/V pages that keep all tokens. None: there are no such
            pages.
        checkpoint_bytes: the bytes that a checkpoint adds once the session has gone on, first without its tail and then
            with it.
        overtakes_at: the number of tokens from which on the K/V pages hold more bytes than a session's states and
            tails. None: the model lacks one of the two.
    """

    question: Question
    session: SequencePlan
    n_sessions: int
    attention_token_bytes: int | None
    overtakes_at: int | None
    checkpoint_bytes: tuple[int, int]
    policies: tuple[Choice, ...]
    storages: tuple[Choice, ...]
    peers: tuple[PeerPlan, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the report as values that JSON can hold."""
        question, session = self.question, self.session
        return {
            "model": question.spec.model, "device": str(question.spec.device),
            "dtype": str(question.spec.dtype).removeprefix("torch."), "weight_bytes": question.weight_bytes,
            "model_fits": question.model_fits, "budget_bytes": question.budget_bytes,
            "context_tokens": question.context_tokens, "own_context_tokens": question.own_context_tokens,
            "rollback_window": question.window_tokens, "n_sessions": self.n_sessions, "session": asdict(session),
            "draft_session": question.draft_session and asdict(question.draft_session),
            "attention_token_bytes": self.attention_token_bytes, "attention_overtakes_states_at": self.overtakes_at,
            "checkpoint_bytes": self.checkpoint_bytes[0], "checkpoint_bytes_with_tail": self.checkpoint_bytes[1],
            "policies": [asdict(choice) for choice in self.policies],
            "storages": [asdict(choice) for choice in self.storages], "peers": [asdict(peer) for peer in self.peers],
        }  # fmt: skip


def make_report(question: Question) -> Report:
    """Compute the figures that answer a question. Raises SpecError if options cannot work."""
    session = question.measure(question.spec)
    sizes = (question.budget_bytes, question.context_tokens, question.window_tokens)
    page_bytes, page_tokens = session.block_bytes.get("pages", 0), session.page_tokens
    recurrent_bytes = session.by_kind.get("states", 0) + session.by_kind.get("tails", 0)
    policies = [(kind.__name__, _with_policy(question, kind)) for kind in POLICIES] if page_bytes else []
    storages = [(storage.label, _with_storage(question, storage)) for storage in STORAGES] if page_bytes else []
    # The formulas do not describe encoders, whose rows are kept for the decoder.
    peers = (
        ()
        if question.spec.of_kind("cross-attention")
        else plan_peers(Model.of(question.spec, question.architecture), *sizes)
    )
    return Report(
        question, session, question.fit(session),
        attention_token_bytes=page_bytes // page_tokens if page_bytes else None,
        overtakes_at=recurrent_bytes // page_bytes * page_tokens + 1 if page_bytes and recurrent_bytes else None,
        checkpoint_bytes=(question.measure_checkpoint(holds_tail=False), question.measure_checkpoint(holds_tail=True)),
        policies=_choices(question, policies), storages=_choices(question, storages), peers=peers,
    )  # fmt: skip


def _with_policy(question: Question, kind: type[Budget]) -> Callable[[], MemorySpec]:
    return lambda: question.spec.with_policy(kind.of_ratio(question.keep, max_tokens=question.context_tokens))


def _with_storage(question: Question, storage: Storage) -> Callable[[], MemorySpec]:
    return lambda: question.spec.with_storage(storage)


def _choices(question: Question, specs: list[tuple[str, Callable[[], MemorySpec]]]) -> tuple[Choice, ...]:
    """Measure each policy and storage. Choices that save the same number of bytes share a row of the table."""
    names: dict[Choice, list[str]] = {}
    for name, make_spec in specs:
        try:
            session = question.measure(make_spec())
            choice = Choice((), session.most_bytes, question.fit(session))
        except SpecError as error:
            choice = Choice((), why_not=str(error))
        names.setdefault(choice, []).append(name)
    return tuple(replace(choice, names=tuple(own)) for choice, own in names.items())
