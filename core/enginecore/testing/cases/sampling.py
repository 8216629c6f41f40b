"""L1: sampling. The set that may be chosen is exact, and so is the choice for a given uniform number."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from enginecore.testing import references
from enginecore.testing.case import Case, CaseContext


@dataclass(frozen=True)
class Rule:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


RULES = {
    "greedy": Rule(temperature=0.0),
    "temperature_1": Rule(),
    "temperature_low": Rule(temperature=0.05),
    "temperature_high": Rule(temperature=40.0),
    "top_k_1": Rule(top_k=1),
    "top_k_5": Rule(top_k=5),
    "top_k_above_vocab": Rule(top_k=10**6),
    "top_p": Rule(top_p=0.713),
    "top_p_tiny": Rule(top_p=1e-6),
    "min_p": Rule(min_p=0.1003),
    "min_p_1": Rule(min_p=1.0),
    "top_k_then_top_p": Rule(top_k=7, top_p=0.617),
    "all": Rule(temperature=0.8, top_k=20, top_p=0.907, min_p=0.0203),
}
VOCABULARIES = (2, 46, 1000, 32003)


def logits_of(ctx: CaseContext, rows: int, vocab: int) -> torch.Tensor:
    """Distinct logits in random order, spaced so that no truncation falls on a tie; the best stand out."""
    steps = torch.linspace(0, 1, vocab)
    ladder = -3 * torch.log1p(20 * steps) - 4 * steps
    return torch.stack([ladder[torch.randperm(vocab, generator=ctx.rng)] for _ in range(rows)])


def _call(ctx: CaseContext, logits: torch.Tensor, rules: list[Rule], uniform: torch.Tensor) -> list[int]:
    op = ctx.require_op("sample", "float32")
    device = ctx.device
    settings = (
        torch.tensor([rule.temperature for rule in rules], dtype=torch.float32),
        torch.tensor([rule.top_k for rule in rules], dtype=torch.int64),
        torch.tensor([rule.top_p for rule in rules], dtype=torch.float32),
        torch.tensor([rule.min_p for rule in rules], dtype=torch.float32),
    )
    ids = op(logits.clone().to(device), *(s.to(device) for s in settings), uniform.to(device))
    ctx.backend.synchronize()
    ctx.check(ids.dtype == torch.int64, f"ids must be int64, got {ids.dtype}")
    ctx.check(ids.shape == (len(rules),), f"{len(rules)} rows gave ids of shape {tuple(ids.shape)}")
    right = references.sample(logits, *settings, uniform)
    found: list[int] = ids.tolist()
    for row, (got, allowed) in enumerate(zip(found, right, strict=True)):
        told = f"row {row} ({rules[row]}, uniform {float(uniform[row]):.6f})"
        kept = references.kept_ids(logits[row], *vars(rules[row]).values()) if rules[row].temperature else allowed
        ctx.check(got in kept, f"{told}: id {got} is not one of the {len(kept)} that are kept")
        ctx.check(got in allowed, f"{told}: id {got}, the inverse transform gives {sorted(allowed)}")
    return found


def ladder(name: str, vocab: int) -> Case:
    """Evenly spread uniform numbers reach every part of the distribution, both ends included."""

    def run(ctx: CaseContext) -> None:
        rule, rows = RULES[name], 24
        ctx.require_op("sample", "float32")
        uniform = torch.linspace(0, 1, rows, dtype=torch.float64)
        uniform[-1] = 1 - 2**-53
        logits = logits_of(ctx, rows, vocab)
        _call(ctx, logits, [rule] * rows, uniform)

    return Case(1, "sample", f"{name}_v{vocab}", run)


def mixed_rows(ctx: CaseContext) -> None:
    """Every row has its own settings; the result does not depend on the neighbours."""
    rules = list(RULES.values())
    logits, uniform = logits_of(ctx, len(rules), 513), ctx.uniform(len(rules))
    together = _call(ctx, logits, rules, uniform)
    for row, rule in enumerate(rules):
        alone = _call(ctx, logits[row : row + 1], [rule], uniform[row : row + 1])
        told = f"row {row} ({rule}) gives {alone[0]} alone and {together[row]} in a batch"
        ctx.check(alone[0] == together[row], told)


def masked_logits(ctx: CaseContext) -> None:
    """Ids with a logit of -inf (forbidden by the request) are never chosen, even when one id is left."""
    rules = [Rule(), Rule(top_k=4), Rule(top_p=0.5), Rule(temperature=30.0), Rule(temperature=0.0), Rule(min_p=0.3)]
    logits = logits_of(ctx, len(rules), 301)
    allowed = [ctx.integer(0, 300) for _ in rules]
    for row, token in enumerate(allowed):
        logits[row] = torch.where(torch.arange(301) == token, logits[row], torch.tensor(-torch.inf))
    for share in (0.0, 0.5, 1 - 2**-53):
        ids = _call(ctx, logits, rules, torch.full((len(rules),), share, dtype=torch.float64))
        ctx.check(ids == allowed, f"{ids} were chosen where only {allowed} are allowed")


def flat_logits(ctx: CaseContext) -> None:
    """All ids equally likely: the id is uniform * vocabulary."""
    rows = 16
    uniform = (torch.arange(rows, dtype=torch.float64) + 0.5) / rows
    _call(ctx, torch.zeros(rows, 1024), [Rule()] * rows, uniform)


def cases() -> list[Case]:
    found = [ladder(name, vocab) for name in RULES for vocab in VOCABULARIES]
    extra = (mixed_rows, masked_logits, flat_logits)
    return found + [Case(1, "sample", check.__name__, check) for check in extra]
