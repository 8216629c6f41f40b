"""Verifying drafts on the device: the reference's answers, and a distribution that is the target's."""

from __future__ import annotations

import pytest
import torch
from enginecore.ops.sampling import rejection_sample as reference
from enginecore_triton import DeviceDescription
from enginecore_triton.ops.rejection_sample import rejection_sample

DEVICE = DeviceDescription()


def make(vocabulary: int, counts: list[int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(vocabulary)
    drafts = sum(counts)
    target, draft = (torch.softmax(torch.randn(drafts, vocabulary, generator=generator) * 2, -1) for _ in range(2))
    draft[:drafts:2] = target[:drafts:2]  # taken for certain
    ids = torch.multinomial(draft, 1, generator=generator)[:, 0]
    uniform = torch.rand(drafts, generator=generator, dtype=torch.float64)
    redraw = torch.rand(len(counts), generator=generator, dtype=torch.float64)
    starts = torch.tensor([0, *counts]).cumsum(0)
    return [ids, starts, target, draft, torch.arange(len(counts)) + vocabulary, uniform, redraw]


@pytest.mark.parametrize("certain", [False, True])
@pytest.mark.parametrize("vocabulary", [5, 3000])
def test_same_answers_as_the_reference(vocabulary, certain):
    arguments = make(vocabulary, [3, 0, 1, 2, 5, 4])
    arguments[0][4] = -1  # a draft that is none
    if certain:
        arguments[3] = None
        arguments[2][6:9] = torch.eye(vocabulary)[arguments[0][6:9]]
    ids = rejection_sample(*arguments, 7, device=DEVICE)
    assert torch.equal(ids, reference(*arguments, 7))
    lengths = (ids >= 0).sum(1)
    assert lengths[1] == 1 and lengths.max() > 2 and ids.shape == (6, 7)


def test_first_tokens_are_distributed_as_the_target():
    target, draft, rows = torch.tensor([0.45, 0.05, 0.3, 0.2]), torch.tensor([0.1, 0.5, 0.2, 0.2]), 300
    generator = torch.Generator().manual_seed(1)
    ids = torch.multinomial(draft, rows, replacement=True, generator=generator)
    # Numbers spread evenly make the spread of the frequencies smaller than chance would.
    accept = (torch.randperm(rows, generator=generator).double() + 0.5) / rows
    redraw = (torch.randperm(rows, generator=generator).double() + 0.5) / rows
    answer = rejection_sample(
        ids, torch.arange(rows + 1), target.expand(rows, 4), draft.expand(rows, 4), torch.full((rows,), 9), accept,
        redraw, 2, device=DEVICE,
    )  # fmt: skip
    frequency = torch.bincount(answer[:, 0], minlength=4) / rows
    assert torch.all((frequency - target).abs() < 4 * (target * (1 - target) / rows).sqrt())
    taken = (answer[:, 1] == 9).float().mean()
    assert abs(taken - torch.minimum(target, draft).sum()) < 0.1


def test_drafts_equal_to_the_target_but_for_rounding_are_drawn_from_the_target():
    target = torch.tensor([[0.25, 0.75]])
    answer = rejection_sample(
        torch.tensor([0]), torch.tensor([0, 1]), target, target.clone(), torch.tensor([9]),
        torch.ones(1, dtype=torch.float64), torch.tensor([0.5], dtype=torch.float64), 2, device=DEVICE,
    )  # fmt: skip
    assert answer.tolist() == [[1, -1]]
