"""Changes the scores of many rows at once. Each row has options of its own, and is changed as if it were alone.

Shapes: S rows, V tokens of the vocabulary. Options that a row does not use have the value that changes nothing. The
results are those of transformers' logits processors and warpers, row by row.
"""

from __future__ import annotations

import torch
from torch import Tensor


def penalise_repetition_(scores_SV: Tensor, rows: Tensor, ids: Tensor, penalties: Tensor) -> None:
    """Divide positive scores at (rows, ids) by the penalties, and multiply negative ones, in place."""
    at = scores_SV[rows, ids]
    scores_SV[rows, ids] = torch.where(at < 0, at * penalties, at / penalties)


def favour_ends_(scores_SV: Tensor, rows: Tensor, ids: Tensor, powers: Tensor) -> None:
    """Raise the scores at (rows, ids) by their absolute value times (power - 1), in place."""
    at = scores_SV[rows, ids]
    scores_SV[rows, ids] = at + at.abs() * (powers - 1)


def keep_top_k_(scores_SV: Tensor, k_S: list[int]) -> None:
    """Keep the k highest scores of each row, and those equal to the lowest of them.

    The others become -inf, in place.
    """
    n_vocab = scores_SV.shape[1]
    k = torch.tensor([min(k, n_vocab) for k in k_S], device=scores_SV.device)
    highest_SK = scores_SV.topk(int(k.max()), dim=-1).values
    least_S1 = highest_SK.gather(1, (k - 1)[:, None])
    scores_SV.masked_fill_(scores_SV < least_S1, -torch.inf)


def keep_top_p_(scores_SV: Tensor, p_S: list[float]) -> None:
    """Keep the highest scores of each row whose probabilities sum to p, at least one. The others become -inf, in place.

    Cost: a sort.
    """
    ascending_SV, order_SV = scores_SV.sort(dim=-1)
    rest_S1 = 1 - torch.tensor(p_S, dtype=torch.float64, device=scores_SV.device)[:, None]
    drop_SV = ascending_SV.softmax(-1).cumsum(-1) <= rest_S1.to(scores_SV.dtype)
    drop_SV[:, -1] = False
    scores_SV.masked_fill_(torch.zeros_like(drop_SV).scatter_(1, order_SV, drop_SV), -torch.inf)


def keep_min_p_(scores_SV: Tensor, p_S: list[float]) -> None:
    """Keep the tokens of each row that are at least p times as likely as its likeliest.

    The others become -inf, in place.
    """
    p_S1 = torch.tensor(p_S, dtype=scores_SV.dtype, device=scores_SV.device)[:, None]
    chances_SV = scores_SV.softmax(-1)
    drop_SV = chances_SV < p_S1 * chances_SV.amax(-1, keepdim=True)
    scores_SV.masked_fill_(drop_SV, -torch.inf)


def draw_rows(scores_SV: Tensor, uniforms: list[float]) -> list[int]:
    """Draw a token for each row by the row's probabilities.

    The row's number in `uniforms`, in [0, 1), decides which.
    """
    cumulative_SV = scores_SV.softmax(-1).double().cumsum(-1)
    total_S = cumulative_SV[:, -1]
    # The drawn token is the first whose cumulative probability exceeds the point. The point must be less than the sum
    # of all probabilities. Otherwise a token that was ruled out could be drawn.
    points_S = torch.tensor(uniforms, dtype=torch.float64, device=scores_SV.device) * total_S
    points_S = torch.minimum(points_S, total_S.nextafter(torch.zeros_like(total_S)))
    drawn: list[int] = torch.searchsorted(cumulative_SV, points_S[:, None], right=True)[:, 0].tolist()
    return drawn
