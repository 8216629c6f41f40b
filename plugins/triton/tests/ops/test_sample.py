"""Sampling without a sort against the core's reference, which sorts, with the same numbers drawn."""

from __future__ import annotations

import pytest
import torch
from enginecore.ops.reference import sample as reference
from enginecore_triton import DeviceDescription
from enginecore_triton.ops import sample as op

DEVICE = DeviceDescription()
#: temperature, top_k, top_p, min_p
SETTINGS = [
    (1.0, 0, 1.0, 0.0),
    (0.7, 50, 1.0, 0.0),
    (1.0, 0, 0.9, 0.0),
    (0.8, 40, 0.95, 0.05),
    (1.3, 0, 1.0, 0.1),
    (1.0, 1, 1.0, 0.0),
    (2.0, 1100, 0.5, 0.0),
    (1.0, 0, 1e-6, 0.0),
    (0.3, 5, 0.3, 0.9),
    (5.0, 0, 0.999, 0.0),
    (0.0, 7, 0.5, 0.5),
    (4.0, 2000, 0.97, 0.3),
]


def columns(settings, uniform) -> list[torch.Tensor]:
    temperature, top_k, top_p, min_p = zip(*settings, strict=True)
    floats = [torch.tensor(column, dtype=torch.float32) for column in (temperature, top_p, min_p)]
    return [floats[0], torch.tensor(top_k), *floats[1:], torch.as_tensor(uniform, dtype=torch.float64)]


def make(vocabulary: int, spread: float, ties: bool) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(len(SETTINGS), vocabulary, generator=generator) * spread
    if ties:
        logits = (logits * 2).round() / 2
    return logits, torch.rand(len(SETTINGS), generator=generator, dtype=torch.float64)


@pytest.mark.parametrize(
    ("vocabulary", "spread", "ties"),
    [(1, 1.0, False), (400, 6.0, True), (2500, 0.01, False), (4500, 3.0, True)],
)
def test_same_ids_as_the_reference(vocabulary, spread, ties):
    logits, uniform = make(vocabulary, spread, ties)
    settings = SETTINGS if vocabulary == 400 else SETTINGS[vocabulary % 7 % 3 :: 3]
    logits, uniform = logits[: len(settings)], uniform[: len(settings)]
    arguments = columns(settings, uniform)
    ids = op.sample(logits, *arguments, device=DEVICE).tolist()
    near = [reference(logits.clone(), *arguments[:-1], arguments[-1] + shift).tolist() for shift in (-1e-6, 0, 1e-6)]
    for row, token in enumerate(ids):
        assert token in [answer[row] for answer in near], settings[row]


def kept_by_reference(logits: torch.Tensor, setting: tuple[float, int, float, float]) -> torch.Tensor:
    temperature, top_k, top_p, min_p = setting
    order = torch.sort(logits.double(), descending=True, stable=True).indices
    p = torch.softmax(logits.double() / temperature, 0)
    if top_k:
        order = order[:top_k]
    mass = p[order].cumsum(0)
    order = order[(mass - p[order] < top_p * mass[-1]) | (torch.arange(len(order)) == 0)]
    kept = order[p[order] >= min_p * p.max()]
    out = torch.zeros_like(p)
    out[kept] = p[kept] / p[kept].sum()
    return out


@pytest.mark.parametrize(("vocabulary", "spread", "ties"), [(300, 3.0, False), (2500, 2.0, True)])
def test_probabilities_are_those_of_the_filters(vocabulary, spread, ties):
    logits, uniform = make(vocabulary, spread, ties)
    settings = [setting for setting in SETTINGS if setting[0] > 0][vocabulary % 2 :: 2]
    got = op.sampling_probabilities(logits[: len(settings)], *columns(settings, uniform)[:-1], device=DEVICE)
    for row, setting in enumerate(settings):
        expected = kept_by_reference(logits[row], setting)
        torch.testing.assert_close(got[row].double(), expected, rtol=2e-5, atol=1e-9)
        assert abs(int((got[row] > 0).sum()) - int((expected > 0).sum())) <= 1
    greedy = op.sampling_probabilities(logits[:1], *columns([(0.0, 0, 1.0, 0.0)], [0.0])[:-1], device=DEVICE)
    assert greedy[0, logits[0].argmax()] == 1 and greedy.sum() == 1


def test_short_lists_and_searches_both_decide(monkeypatch):
    """Peaked rows end with the short list; flat ones, and a list too short, are searched, to the same ids."""
    logits, uniform = make(2000, 2.0, False)
    logits, uniform = logits[:4], uniform[:4]
    logits[3] *= 0.01
    settings = [(1.0, 20, 0.9, 0.0), (1.0, 0, 0.5, 0.0), (1.0, 30, 1.0, 0.1), (1.0, 0, 0.5, 0.0)]
    arguments = columns(settings, uniform)
    work = op._run(logits, tuple(arguments[:4]), arguments[4], "default")
    assert work.status.tolist() == [0, 0, 0, 1]
    monkeypatch.setattr(op, "CAPACITY", 2)
    searched = op._run(logits, tuple(arguments[:4]), arguments[4], "default")
    assert searched.status[:3].tolist() == [1, 1, 1]
    assert searched.ids.tolist() == work.ids.tolist() == reference(logits.clone(), *arguments).tolist()


def test_few_ids_that_are_allowed_need_no_search():
    logits, uniform = make(2000, 2.0, False)
    logits, uniform = logits[:3], uniform[:3]
    allowed = torch.tensor([3, 700, 1999])
    logits[:, [i for i in range(2000) if i not in allowed]] = float("-inf")
    arguments = columns([(1.0, 50, 1.0, 0.0), (1.0, 0, 0.7, 0.0), (1.0, 2, 0.9, 0.0)], uniform)
    work = op._run(logits, tuple(arguments[:4]), arguments[4], "default")
    assert work.status.tolist() == [0, 0, 0] and work.count.tolist() == [3, 3, 2]
    assert work.ids.tolist() == reference(logits.clone(), *arguments).tolist()


def test_edges_of_the_draw():
    def run(setting, uniform):
        logits = torch.tensor([[0.0, float("-inf"), 1.0, 1.0]])
        return op.sample(logits, *columns([setting], [uniform]), device=DEVICE).tolist()[0]

    assert run((1.0, 0, 1.0, 0.0), 0.0) == 0
    assert run((1.0, 0, 1.0, 0.0), 0.99999999) == 3
    assert run((0.0, 0, 1.0, 0.0), 0.9) == 2
    assert run((1.0, 1, 1.0, 0.0), 0.9) == 2  # of two equals the lower id goes first
    assert run((1.0, 2, 1.0, 0.0), 0.9) == 3
    assert run((1.0, 3, 1.0, 0.0), 0.0) == 0
    assert run((1.0, 4, 1.0, 0.0), 0.3) == 2
    assert run((1e-30, 0, 1.0, 0.0), 0.0) == 2


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), None])
def test_a_row_with_nothing_to_choose_from_gives_minus_one(temperature, bad):
    logits = torch.randn(3, 1500)
    if bad is None:
        logits[1] = float("-inf")
    else:
        logits[1, 1200] = bad
    settings = [(temperature, 0, 1.0, 0.0), (temperature, 5, 1.0, 0.0), (temperature, 5, 0.5, 0.0)]
    ids = op.sample(logits, *columns(settings, [0.5] * 3), device=DEVICE).tolist()
    assert ids[1] == -1 and ids[0] >= 0 and ids[2] >= 0


def test_strided_rows_and_half_precision():
    logits = torch.randn(3, 400, dtype=torch.float16)
    arguments = columns([(0.0, 0, 1.0, 0.0)] * 3, [0.0] * 3)
    assert op.sample(logits[:, :200], *arguments, device=DEVICE).tolist() == logits[:, :200].argmax(-1).tolist()
