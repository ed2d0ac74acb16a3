"""Verifies drafts. It chooses the next tokens of each generation as if each came from a step of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hybridmem.chat.engine.choose import Choice, Choose, Plan
from hybridmem.chat.engine.requests import Job
from hybridmem.chat.sampling.logprobs import Chosen


def choose_verified(
    choose: Choose, firsts: Tensor, plan: Plan, rows: Sequence[Tensor], drafts: Mapping[Job, list[int]],
    end_ids: tuple[int, ...],
) -> list[list[Choice]]:  # fmt: skip
    """Return the choices of each job: those that agree with its draft, and one token more. No job changes.

    Each choice is made by `choose` for a copy of the job that has taken the tokens before it, so whatever a choice
    depends on (penalties, the number of a draw, a grammar) is as it would be without drafts. A choice that ends the
    reply is the last.

    Args:
        firsts: (S, V) the logits from which each job of the plan chooses its first token.
        rows: the logits of each job, (1 + its drafted tokens, vocab) if it has a draft.
        end_ids: the engine's end tokens.
    """
    going = [(i, job.ahead() if job in drafts else job, n_tokens) for i, (job, n_tokens) in enumerate(plan)]
    chosen: list[list[Choice]] = [[] for _ in plan]
    at, logits_SV = 0, firsts
    while going:
        picked = choose(logits_SV, [(job, n_tokens) for _, job, n_tokens in going])
        agreeing = []
        for (i, job, _), choice in zip(going, picked, strict=True):
            chosen[i].append(choice)
            draft = drafts.get(plan[i][0], [])
            if at < len(draft) and isinstance(choice, Chosen) and choice.token_id == draft[at]:
                job.take(choice, end_ids, 0.0)
                job.n_fed += 1
                if job.ending is None:
                    agreeing.append((i, job, 1))
        going, at = agreeing, at + 1
        if going:
            logits_SV = torch.stack([rows[i][at] for i, _, _ in going])
    return chosen
