"""Verifying drafts: what comes out is distributed as the target, whatever the drafts were."""

from __future__ import annotations

import torch
from enginecore.ops.sampling import rejection_sample, sample, sampling_probabilities

TARGET = torch.tensor([0.45, 0.05, 0.3, 0.2])
DRAFT = torch.tensor([0.1, 0.5, 0.2, 0.2])


def verify(rows: int, with_draft: bool, seed: int = 0) -> torch.Tensor:
    gen = torch.Generator().manual_seed(seed)
    drafts = torch.multinomial(DRAFT, rows, replacement=True, generator=gen)
    accept, redraw = (torch.rand(rows, generator=gen, dtype=torch.float64) for _ in range(2))
    bonus = torch.full((rows,), 9)
    return rejection_sample(
        drafts,
        torch.arange(rows + 1),
        TARGET.expand(rows, 4),
        DRAFT.expand(rows, 4) if with_draft else None,
        bonus,
        accept,
        redraw,
        2,
    )


def test_first_tokens_are_distributed_as_the_target() -> None:
    for with_draft in (True, False):
        ids = verify(2000, with_draft)
        frequency = torch.bincount(ids[:, 0], minlength=4) / len(ids)
        assert torch.all((frequency - TARGET).abs() < 4 * (TARGET * (1 - TARGET) / len(ids)).sqrt())
        taken = (ids[:, 1] == 9).float().mean().item()
        expected = torch.minimum(TARGET, DRAFT).sum() if with_draft else (TARGET * DRAFT).sum()
        assert abs(taken - expected) < 0.05
        assert set(ids[:, 1].tolist()) == {-1, 9}


def test_greedy_rows_take_what_agrees() -> None:
    target = torch.eye(5)[[1, 2, 3, 4, 0]]
    half = torch.full((5,), 0.999999, dtype=torch.float64)
    ids = rejection_sample(
        torch.tensor([1, 2, 0, 4, -1]), torch.tensor([0, 2, 4, 4, 5]), target, None, torch.arange(10, 14), half, half, 3
    )
    assert ids.tolist() == [[1, 2, 10], [3, -1, -1], [12, -1, -1], [0, -1, -1]]


def test_probabilities_are_what_is_drawn_from() -> None:
    logits = torch.randn(3, 30, generator=torch.Generator().manual_seed(0)) * 3
    logits[2] = float("nan")
    filters = torch.tensor([0.8, 0.0, 1.0]), torch.tensor([9, 0, 0]), torch.tensor([0.9, 1.0, 1.0]), torch.zeros(3)
    p = sampling_probabilities(logits, *filters)
    assert p[2].sum() == 0 and p[1].max() == 1 and int(p[1].argmax()) == int(logits[1].argmax())
    rows = 4000
    uniform = (torch.arange(rows, dtype=torch.float64) + 0.5) / rows
    ids = sample(logits[:1].expand(rows, 30).clone(), *(part[:1].expand(rows) for part in filters), uniform)
    torch.testing.assert_close(torch.bincount(ids, minlength=30) / rows, p[0], atol=1e-3, rtol=0)
    assert 1 < int((p[0] > 0).sum()) <= 9
