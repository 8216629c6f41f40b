"""Recurrences over sequences end to end against the core's references in float64, whole and in pieces."""

from __future__ import annotations

import pytest
import torch
from enginecore.ops import recurrent as reference
from enginecore_triton import DeviceDescription
from enginecore_triton.ops.selective_scan import selective_scan
from enginecore_triton.ops.ssd_scan import ssd_scan

DEVICE = DeviceDescription()
NEAR = {torch.float32: {"atol": 2e-5, "rtol": 1e-4}, torch.float16: {"atol": 2e-2, "rtol": 1e-2}}


class Inputs:
    """Random inputs in a dtype, and the same in float64."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self.generator, self.dtype = torch.Generator().manual_seed(seed), dtype

    def rand(self, *shape: int, wide: bool = False) -> torch.Tensor:
        x = torch.randn(shape, generator=self.generator)
        return x if wide else x.to(self.dtype)

    def decay(self, *shape: int) -> torch.Tensor:
        return -torch.rand(shape, generator=self.generator) - 0.1


def places(lengths: list[int]) -> tuple[torch.Tensor, ...]:
    slots = torch.arange(len(lengths)).flip(0) + 1
    slots[-1] = -1 if len(lengths) > 1 else 1
    return torch.tensor([0, *lengths]).cumsum(0), slots, torch.arange(len(lengths)) % 2 == 0


def double(arguments: list) -> list:
    return [part.double() if torch.is_tensor(part) and part.is_floating_point() else part for part in arguments]


def check(kernel, exact, arguments: list, at: int, dtype: torch.dtype) -> None:
    """`at` is the place of the states, which are compared too."""
    wide = double(arguments)
    expected = exact(*wide)
    got = kernel(*arguments, device=DEVICE)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), expected, **NEAR[dtype])
    torch.testing.assert_close(arguments[at].double(), wide[at], **NEAR[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("lengths", "full"), [([1, 1, 1], True), ([5, 0, 9, 2], True), ([3], False)])
def test_selective_scan(lengths, full, dtype):
    make, tokens, channels, size = Inputs(len(lengths), dtype), sum(lengths), 40, 16
    b_and_c = make.rand(tokens, 2 * size)  # two halves of one product, as models have them
    arguments = [
        make.rand(tokens, channels), make.rand(tokens, channels), make.decay(channels, size), b_and_c[:, :size],
        b_and_c[:, size:], make.rand(channels, wide=True) if full else None,
        make.rand(tokens, channels) if full else None, make.rand(channels, wide=True) if full else None, True,
        make.rand(6, channels, size, wide=True), *places(lengths), max(lengths),
    ]  # fmt: skip
    check(selective_scan, reference.selective_scan, arguments, 9, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("lengths", "full", "size"), [([1, 1, 1], True, 16), ([5, 0, 70, 2], True, 16), ([33], False, 24)]
)
def test_ssd_scan(lengths, full, size, dtype):
    make, tokens, heads, head_size, groups = Inputs(len(lengths), dtype), sum(lengths), 4, 20, 2
    arguments = [
        make.rand(tokens, heads, head_size), make.rand(tokens, heads), make.decay(heads),
        make.rand(tokens, groups, size) / size**0.5, make.rand(tokens, groups, size),
        make.rand(heads, wide=True) if full else None, make.rand(tokens, heads, head_size) if full else None,
        make.rand(heads, wide=True) if full else None, True, make.rand(6, heads, head_size, size, wide=True),
        *places(lengths), max(lengths),
    ]  # fmt: skip
    check(ssd_scan, reference.ssd_scan, arguments, 9, dtype)


def test_a_prompt_in_pieces_ends_as_the_whole():
    make, tokens, heads, head_size, size = Inputs(0, torch.float32), 40, 2, 16, 16
    x, dt, a = make.rand(tokens, heads, head_size), make.rand(tokens, heads), make.decay(heads)
    b, c = make.rand(tokens, 1, size), make.rand(tokens, 1, size)

    def run(states: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        cut = [part[begin:end] for part in (x, dt)], [part[begin:end] for part in (b, c)]
        where = torch.tensor([0, end - begin]), torch.tensor([1]), torch.tensor([begin > 0])
        return ssd_scan(*cut[0], a, *cut[1], None, None, None, True, states, *where, end - begin, device=DEVICE)

    whole, pieces = torch.full((2, heads, head_size, size), 7.0), torch.full((2, heads, head_size, size), 7.0)
    expected = run(whole, 0, tokens)
    got = torch.cat([run(pieces, begin, end) for begin, end in ((0, 37), (37, 38), (38, 40))])
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(pieces, whole, atol=1e-4, rtol=1e-4)


def test_states_that_cannot_be_changed_in_place_are_refused():
    with pytest.raises(ValueError, match="dense"):
        selective_scan(
            *[torch.zeros(1, 8)] * 2, torch.zeros(8, 4), *[torch.zeros(1, 4)] * 2, None, None, None, True,
            torch.zeros(2, 4, 8).transpose(1, 2), *places([1]), 1, device=DEVICE,
        )  # fmt: skip
