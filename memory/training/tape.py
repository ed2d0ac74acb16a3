"""Records forwards of a model over texts of any length, and goes back through them chunk by chunk.

Forward keeps no activations: of each chunk, only what later chunks read of it, which are the rows of attention and the
states after its last token. Backward computes one chunk at a time again, newest first, now with its activations (Chen
et al. 2016, "Training Deep Nets with Sublinear Memory Cost"), and hands the gradients of what it read to the chunks
that wrote it. torch's own engine orders the chunks, so a prefix that several texts share waits for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridmem.defaults import ROLLBACK_WINDOW
from hybridmem.memory.blocks.arguments import is_integer, read_count
from hybridmem.memory.errors import BatchError, RollbackError, SequenceError, SpecError
from hybridmem.memory.eviction import EvictionPolicy
from hybridmem.memory.specs import AttentionSpec, CrossAttentionSpec, MemorySpec
from hybridmem.memory.training.boundaries import Boundaries
from hybridmem.memory.training.chunk import Chunk, Head, Record, logprobs_of, no_values
from hybridmem.memory.training.kept import with_own_policies
from hybridmem.memory.training.pieces import Piece


class _Link(NamedTuple):
    """Joins a piece with the tensor that stands for its chunk in autograd, and with the link before it."""

    piece: Piece
    done: Tensor
    before: _Link | None


class Branch:
    """Is a handle of one text on a tape. `Tape.open` and `Tape.fork` make it.

    Attributes:
        last_logits: (vocabulary,) of the newest token, for losses; None at the beginning and after a rollback.
    """

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._link: _Link | None = None
        self._pending: list[int] = []
        self.last_logits: Tensor | None = None

    @property
    def length(self) -> int:
        """Return the number of tokens."""
        return (0 if self._link is None else self._link.piece.end) + len(self._pending)

    @property
    def tokens(self) -> list[int]:
        """Return the ids of all tokens."""
        path = [] if self._link is None else [*self._link.piece.path()][::-1]
        return [token for piece in path for token in piece.tokens.tolist()] + self._pending

    def __repr__(self) -> str:
        return f"Branch(length={self.length})"


class Tape:
    """Records a model's forward over texts, so that `backward()` of a loss goes back through texts of any length.

    `tape.run` gives values of each token, of which torch may make any loss. Its `backward()` adds the gradients of the
    model's weights to their `.grad`, as usual. torch.autograd.grad for these weights does not work, because they are no
    inputs of the values. A tape records forwards of one set of weights, and one backward goes through it.

    Args:
        model: a model whose weights take gradients and are multiplied by torch, as `models.Trainable` makes it.
        chunk_tokens: the most tokens of which activations are in memory at once, over all texts.
        budget: bytes for the rows of attention and the states that chunks leave behind, and the gradients of rows, such
            as "2GiB". None: no limit. What does not fit goes to host memory, then to files; if there is neither, states
            are left out, and forward computes them again when backward needs them.
        host_budget: bytes of host memory, for models on other devices; None for none.
        folder: where files may be made. None: there are none.
        rollback_window: the rollback window of the memory that the model is trained for. It matters only where
            attention has an eviction policy, because the newest rows do not fold.
    Raises:
        SpecError: the model reads an encoder's output, or its memory reads only some rows, or quantises rows.
    `run`, and backward, raise CapacityError if rows fit nowhere.
    """

    def __init__(
        self, model: Any, *, chunk_tokens: int = 1024, budget: float | str | None = None,
        host_budget: float | str | None = None, folder: str | Path | None = None,
        rollback_window: int = ROLLBACK_WINDOW,
    ) -> None:  # fmt: skip
        self.chunk_tokens = read_count("chunk_tokens", chunk_tokens, 1, "token")
        self._rollback_window = read_count("rollback_window", rollback_window, 0, "tokens")
        self._spec: MemorySpec = model.memory_spec
        _check_spec(self._spec)
        self._spec = with_own_policies(self._spec)
        self._model = model
        specs = [memory for memories in self._spec.layers for memory in memories]
        self._has_policies = any(isinstance(spec, AttentionSpec) and spec.policy is not None for spec in specs)
        self._boundaries = Boundaries(self._spec.device, budget, host_budget, None if folder is None else Path(folder))
        # A function of autograd is recorded only if some input takes gradients.
        self._root = torch.zeros((), device=self._spec.device, requires_grad=True)

    def open(self) -> Branch:
        """Return a new text without tokens."""
        return Branch(self)

    def usage(self) -> dict[str, int]:
        """Return how many bytes of rows, states and gradients are on the device, in host memory and in files now.

        "computed again" counts chunks whose states were left out, and computed again.
        """
        return dict(self._boundaries.used) | {"computed again": self._boundaries.n_computed_again}

    def fork(self, branch: Branch) -> Branch:
        """Return a text that continues from the end of another one. Gradients of both meet in their common part."""
        self._check_own(branch)
        twin = Branch(self)
        twin._link, twin._pending, twin.last_logits = branch._link, list(branch._pending), branch.last_logits
        return twin

    def rollback(self, branch: Branch, *, to: int) -> None:
        """Shorten a text to `to` tokens. A loss of dropped tokens keeps its gradients.

        It computes nothing now. Tokens of the chunk in which `to` lies are computed again together with the next ones.
        """
        self._check_own(branch)
        if not is_integer(to, 0) or to > branch.length:
            raise RollbackError(
                f"rollback to {to!r} of a text of {branch.length} tokens; give a position from 0 to {branch.length}",
                to=to, horizon=0, resume_at=0,
            )  # fmt: skip
        if to == branch.length:
            return
        tokens, link = branch.tokens, branch._link
        # The token before `to` is always computed again, because the next one is predicted from its logits.
        while link is not None and link.piece.end >= to:
            link = link.before
        start = 0 if link is None else link.piece.end
        branch._link, branch._pending, branch.last_logits = link, tokens[start:to], None

    def feed(self, requests: Mapping[Branch, Sequence[int]]) -> None:
        """Feed tokens to texts, as `run` does, but compute no values for them: only later tokens have a loss."""
        self.run(requests, head=no_values)

    def run(self, requests: Mapping[Branch, Sequence[int]], *, head: Head = logprobs_of) -> dict[Branch, Tensor]:
        """Feed tokens to texts, all or nothing, and return values for each text: one row for each of its new tokens.

        The values of a token are made from the logits of the token before it. The first token of a text has no such
        token, and so no row.

        Args:
            requests: the new tokens of each text. Texts share chunks, so many short ones are computed together.
            head: makes values (n, ...) from logits (n, vocabulary) and the ids of the tokens that came next, (n,). The
                default gives the logarithm of the token's probability. It is called again in backward, and must not
                read gradients of tensors other than the model's weights.
        Returns values that can be differentiated. Raises BatchError and SequenceError as `HybridMemory.step` does.
        """
        texts = [_Text(self._checked(branch), self._read(branch, tokens), head) for branch, tokens in requests.items()]
        if not texts:
            raise BatchError("no requests; give tokens for at least one text")
        pieces = list[Piece]()
        try:
            while left := [text for text in texts if text.n_left]:
                room, parts = self.chunk_tokens, []
                for text in left:
                    if n_tokens := self._n_next(text, room):
                        parts.append(text.cut(n_tokens, self._spec.device, self._boundaries))
                        room -= n_tokens
                pieces += [part.piece for part in parts]
                self._compute(parts, head)
        except BaseException:
            for piece in pieces:
                piece.release()
            raise
        for text in texts:
            text.finish()
        return {text.branch: torch.cat(text.values) for text in texts}

    def _n_next(self, text: _Text, room: int) -> int:
        """Return how many tokens of a text the next chunk takes, if it has room for that many.

        With a policy, the rows that a token reads depend on where its chunk begins. So other texts must not move cuts.
        """
        if not self._has_policies:
            return min(room, text.n_left)
        n_tokens = min(text.n_left, self.chunk_tokens - text.length % self.chunk_tokens)
        if text.n_pending:
            n_tokens = min(n_tokens, text.n_pending)
        return n_tokens if n_tokens <= room else 0

    def _compute(self, parts: list[_Part], head: Head) -> None:
        """Compute one chunk, and give its outputs to the texts."""
        chunk = Chunk(
            self._model, self._spec, [part.piece for part in parts], [part.value_rows for part in parts],
            [part.targets for part in parts], [part.is_end for part in parts], head, self._rollback_window,
        )  # fmt: skip
        before = {id(part.text.link): part.text.link for part in parts}
        dones = [self._root if link is None else link.done for link in before.values()]
        done, values, last_logits = Record.apply(chunk, *dones)  # type: ignore[no-untyped-call]
        ends = iter(last_logits)
        for part, own in zip(parts, values.split([len(part.targets) for part in parts]), strict=True):
            part.text.link = _Link(part.piece, done, part.text.link)
            part.text.values.append(own)
            if part.is_end:
                part.text.last_logits = next(ends)

    def _read(self, branch: Branch, tokens: Sequence[int]) -> list[int]:
        try:
            found = torch.as_tensor(tokens)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            found = torch.empty(0)
        if found.dim() != 1 or not len(found) or found.is_floating_point() or found.dtype == torch.bool:
            raise BatchError(f"{tokens!r} for {branch!r} cannot be fed; give one or more token ids")
        ids: list[int] = found.tolist()
        if wrong := [token for token in ids if not 0 <= token < self._spec.vocab_size]:
            raise BatchError(f"token {wrong[0]} for {branch!r} is not below vocab_size={self._spec.vocab_size}")
        return ids

    def _checked(self, branch: Branch) -> Branch:
        self._check_own(branch)
        return branch

    def _check_own(self, branch: object) -> None:
        if not isinstance(branch, Branch) or branch._tape is not self:
            raise SequenceError(f"{branch!r} is no text of this tape; open it with tape.open()")


class _Part(NamedTuple):
    """Is what a chunk computes of one text.

    Attributes:
        value_rows: the rows of the piece that predict `targets`.
        is_end: True if the text's last token is in it.
    """

    text: _Text
    piece: Piece
    value_rows: range
    targets: Tensor
    is_end: bool


class _Text:
    """Is a text while `Tape.run` feeds it. Its branch changes only when all chunks have been computed."""

    def __init__(self, branch: Branch, tokens: list[int], head: Head) -> None:
        self.branch, self.link, self.last_logits = branch, branch._link, branch.last_logits
        self._fed = [*branch._pending, *tokens]
        self._at, self._first_value = 0, len(self._fed) if head is no_values else max(0, len(branch._pending) - 1)
        self.values: list[Tensor] = []
        if branch.last_logits is not None and head is not no_values:
            self.values.append(head(branch.last_logits[None], branch.last_logits.new_tensor(tokens[:1]).long()))

    @property
    def n_left(self) -> int:
        return len(self._fed) - self._at

    @property
    def length(self) -> int:
        """Return the number of tokens that have been computed."""
        return 0 if self.link is None else self.link.piece.end

    @property
    def n_pending(self) -> int:
        """Return how many of the next tokens were computed before this call, and are computed again."""
        return max(0, len(self.branch._pending) - self._at)

    def cut(self, n_tokens: int, device: torch.device, boundaries: Boundaries) -> _Part:
        """Take the next tokens."""
        begin, end = self._at, self._at + n_tokens
        self._at = end
        tokens = torch.tensor(self._fed[begin:end], device=device)
        piece = Piece(None if self.link is None else self.link.piece, tokens, boundaries)
        first, last = min(max(self._first_value, begin), end), min(end, len(self._fed) - 1)
        rows = range(first - begin, max(first, last) - begin)
        targets = torch.tensor(self._fed[begin + rows.start + 1 : begin + rows.stop + 1], device=device).long()
        return _Part(self, piece, rows, targets, end == len(self._fed))

    def finish(self) -> None:
        self.branch._link, self.branch._pending, self.branch.last_logits = self.link, [], self.last_logits


def _check_spec(spec: MemorySpec) -> None:
    """Raise SpecError for memories through which a tape computes no gradients."""
    for layer, memories in enumerate(spec.layers):
        for memory in memories:
            if isinstance(memory, CrossAttentionSpec):
                raise SpecError(
                    f"layer {layer} of {spec.model} reads an encoder's output; gradients go through decoders alone"
                )
            if isinstance(memory, AttentionSpec) and memory.storage is not None:
                raise SpecError(
                    f"layer {layer} of {spec.model} has {memory.storage}; gradients go through rows that are kept as "
                    "they are: leave the storage out with spec.with_storage(None)"
                )
            if isinstance(memory, AttentionSpec) and not isinstance(memory.policy, EvictionPolicy | None):
                raise SpecError(
                    f"layer {layer} of {spec.model} has {memory.policy.label}, which evicts no row and chooses pages "
                    "for each query; gradients go through policies that evict: leave it out with spec.with_policy(None)"
                )
