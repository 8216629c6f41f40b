"""References of the ops that choose tokens: drawing from filtered logits, and verifying drafts of them.

Shape suffixes: R rows of logits, V vocabulary, D draft tokens of all rows, S places of a row's answer.
"""

from __future__ import annotations

from itertools import pairwise

import torch


def _filtered(
    logits_RV: torch.Tensor,
    temperature_R: torch.Tensor,
    top_k_R: torch.Tensor,
    top_p_R: torch.Tensor,
    min_p_R: torch.Tensor,
) -> torch.Tensor:
    """What the three filters keep of each row's likelihoods, in float64 and without a norm; temperatures above 0.

    Sorts each row. Ties keep the order of ids: a stable sort makes "the k most likely" the same set on every device.
    """
    # The largest logit goes first: a tiny temperature would overflow the exponential otherwise.
    shifted_RV = logits_RV.double() - logits_RV.max(dim=-1, keepdim=True).values.double()
    p_RV = torch.softmax(shifted_RV / temperature_R.double().unsqueeze(1), dim=-1)
    sorted_RV, order_RV = p_RV.sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(p_RV.shape[1], device=p_RV.device)
    top_k_R1 = torch.where(top_k_R > 0, top_k_R, torch.full_like(top_k_R, p_RV.shape[1])).unsqueeze(1)
    sorted_RV = sorted_RV.masked_fill(rank_V >= top_k_R1, 0.0)
    total_R1 = sorted_RV.sum(dim=-1, keepdim=True)
    before_RV = sorted_RV.cumsum(dim=-1) - sorted_RV
    # A token is needed as long as the mass before it falls short of top_p; the first always is.
    needed_RV = (before_RV < top_p_R.double().unsqueeze(1) * total_R1) | (rank_V == 0)
    likely_RV = sorted_RV >= min_p_R.double().unsqueeze(1) * sorted_RV[:, :1]
    kept_RV = sorted_RV.masked_fill(~(needed_RV & likely_RV), 0.0)
    return torch.zeros_like(p_RV).scatter_(1, order_RV, kept_RV)


def _draw(mass_RV: torch.Tensor, uniform_R: torch.Tensor) -> torch.Tensor:
    """The first id, in id order, at which the cumulative mass passes uniform times the total."""
    sum_RV = mass_RV.cumsum(dim=-1)
    drawn_R = (sum_RV <= uniform_R.double().unsqueeze(1) * sum_RV[:, -1:]).sum(dim=-1)
    # Rounding can leave the target at the very end: the last id with any mass is the answer then.
    last_R = mass_RV.shape[1] - 1 - (mass_RV.flip(-1) > 0).int().argmax(dim=-1)
    return torch.minimum(drawn_R, last_R)


def _greedy(logits_RV: torch.Tensor) -> torch.Tensor:
    best_R, greedy_R = logits_RV.max(dim=-1)  # a NaN counts as the largest
    return greedy_R.masked_fill(~torch.isfinite(best_R), -1)


def sample(
    logits_RV: torch.Tensor,
    temperature_R: torch.Tensor,
    top_k_R: torch.Tensor,
    top_p_R: torch.Tensor,
    min_p_R: torch.Tensor,
    uniform_R: torch.Tensor,
) -> torch.Tensor:
    greedy_R = _greedy(logits_RV)
    random_R = (temperature_R > 0) & (greedy_R >= 0)
    if not bool(random_R.any()):
        return greedy_R
    scale_R = torch.where(random_R, temperature_R, torch.ones_like(temperature_R))
    kept_RV = _filtered(logits_RV, scale_R, top_k_R, top_p_R, min_p_R)
    return torch.where(random_R, _draw(kept_RV, uniform_R), greedy_R)


def sampling_probabilities(
    logits_RV: torch.Tensor,
    temperature_R: torch.Tensor,
    top_k_R: torch.Tensor,
    top_p_R: torch.Tensor,
    min_p_R: torch.Tensor,
) -> torch.Tensor:
    greedy_R = _greedy(logits_RV)
    random_R = (temperature_R > 0) & (greedy_R >= 0)
    scale_R = torch.where(random_R, temperature_R, torch.ones_like(temperature_R))
    kept_RV = _filtered(logits_RV, scale_R, top_k_R, top_p_R, min_p_R)
    p_RV = kept_RV / kept_RV.sum(dim=-1, keepdim=True)
    one_RV = torch.zeros_like(p_RV).scatter_(1, greedy_R.clamp(min=0).unsqueeze(1), 1.0)
    p_RV = torch.where(random_R.unsqueeze(1), p_RV, one_RV)
    return p_RV.masked_fill((greedy_R < 0).unsqueeze(1), 0.0).float()


def rejection_sample(
    draft_ids_D: torch.Tensor,
    starts_R1: torch.Tensor,
    target_DV: torch.Tensor,
    draft_DV: torch.Tensor | None,
    bonus_R: torch.Tensor,
    accept_D: torch.Tensor,
    redraw_R: torch.Tensor,
    width: int,
) -> torch.Tensor:
    """Speculative sampling (Leviathan et al. 2023; Chen et al. 2023): answers are distributed as the target is."""
    out_RS = torch.full((bonus_R.shape[0], width), -1, dtype=torch.int64, device=bonus_R.device)
    starts = starts_R1.tolist()
    for row, (start, end) in enumerate(pairwise(starts)):
        for place, at in enumerate(range(start, end)):
            token = int(draft_ids_D[at])
            p_V = target_DV[at].double()
            known = 0 <= token < p_V.shape[0]
            q_V = torch.zeros_like(p_V) if draft_DV is None else draft_DV[at].double()
            if known and draft_DV is None:
                q_V[token] = 1.0
            if known and float(accept_D[at]) * float(q_V[token]) < float(p_V[token]):
                out_RS[row, place] = token
                continue
            rest_V = (p_V - q_V).clamp(min=0.0) if known else p_V
            # The two agree to the last bit only where rounding rejected what it should not have.
            rest_V = rest_V if bool(rest_V.sum() > 0) else p_V
            out_RS[row, place] = _draw(rest_V.unsqueeze(0), redraw_R[row : row + 1])[0]
            break
        else:
            out_RS[row, end - start] = bonus_R[row]
    return out_RS
