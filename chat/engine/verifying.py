"""Verifies drafts. It chooses the next tokens of each generation as if each came from a step of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hybridmem.chat.engine.choose import Choice, Choose, Plan
from hybridmem.chat.engine.requests import Job
from hybridmem.chat.engine.token_trees import TokenTree, next_nodes, right_nodes
from hybridmem.chat.sampling.logprobs import Chosen


def choose_verified(
    choose: Choose, firsts: Tensor, plan: Plan, rows: Sequence[Tensor], drafts: Mapping[Job, list[int]],
    end_ids: tuple[int, ...],
) -> list[list[Choice]]:  # fmt: skip
    """Return the choices of each job: the tokens that agree with its draft, and one more. No job changes.

    Each choice is made by `choose` for a copy of the job that has taken the tokens before it, so whatever a choice
    depends on (penalties, the number of a draw, a grammar) is as it would be without drafts. A choice that ends the
    reply is the last.

    Where a draft is a tree, the choices follow one of its paths. A token is drawn as it would be without drafts, and
    then looked for among the children. So replies have the same distribution, and even the same tokens. Recursive
    rejection sampling (SpecInfer, Miao 2024) would accept no more: it accepts one of k given tokens with the sum of
    their probabilities, and so does this.

    Args:
        firsts: (S, V) the logits from which each job of the plan chooses its first token.
        rows: the logits of each job, (1 + its drafted tokens, vocab) if it has a draft.
        end_ids: the engine's end tokens.
    """
    going = [(i, job.ahead() if job in drafts else job, n_tokens) for i, (job, n_tokens) in enumerate(plan)]
    chosen: list[list[Choice]] = [[] for _ in plan]
    following = {i: next_nodes(drafts[job]) for i, (job, _) in enumerate(plan) if job in drafts}
    at, logits_SV = [-1] * len(plan), firsts  # `at` is the drafted token after which each job chooses.
    while going:
        picked = choose(logits_SV, [(job, n_tokens) for _, job, n_tokens in going])
        agreeing = []
        for (i, job, _), choice in zip(going, picked, strict=True):
            chosen[i].append(choice)
            if not isinstance(choice, Chosen) or i not in following:
                continue
            node = following[i].get((at[i], choice.token_id))
            if node is not None:
                job.take(choice, end_ids, 0.0)
                job.n_fed += 1
                if job.ending is None:
                    agreeing.append((i, job, 1))
                    at[i] = node
        going = agreeing
        if going:
            logits_SV = torch.stack([rows[i][1 + at[i]] for i, _, _ in going])
    return chosen


def accepted_of(draft: list[int], choices: Sequence[Choice]) -> int | list[int]:
    """Return which of the tokens that were fed to a job its sequence keeps: the newest token of the text, and the right
    ones of the draft, without a token that has ended the reply.

    It is their number, or for a tree the list of their indices.
    """
    if not isinstance(draft, TokenTree):
        return len(choices)
    right = right_nodes(draft, (choice.token_id for choice in choices if isinstance(choice, Chosen)))
    return [0, *(1 + node for node in right)][: len(choices)]
