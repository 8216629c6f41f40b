"""The causal convolution over sequences end to end against the core's reference in float64."""

from __future__ import annotations

import pytest
import torch
from enginecore.ops.recurrent import causal_conv as reference
from enginecore_triton import DeviceDescription
from enginecore_triton.ops.causal_conv import causal_conv

DEVICE = DeviceDescription()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("lengths", "taps", "silu", "bias"),
    [
        ([1, 1, 1, 1], 4, True, True),
        ([5, 1, 40, 2, 0], 4, False, True),
        ([3, 2], 2, True, False),
        ([1, 0, 1], 3, False, False),
    ],
)
def test_sequences_end_to_end(lengths, taps, silu, bias, dtype):
    generator = torch.Generator().manual_seed(len(lengths))

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    channels, number = 300, len(lengths)
    wide = rand(sum(lengths), channels + 8)
    x, weight, offset = wide[:, 4 : channels + 4], rand(channels, taps), rand(channels) if bias else None
    states = rand(number + 2, channels, taps - 1)
    slots = torch.arange(number).flip(0) + 1
    slots[-1] = -1
    has_state = torch.tensor([True, False, True, True, True])[:number]
    places = torch.tensor([0, *lengths]).cumsum(0), slots, has_state
    expected_states = states.double()
    expected = reference(
        x.double(), weight.double(), None if offset is None else offset.double(), expected_states, *places, silu,
        max(lengths),
    )  # fmt: skip
    got = causal_conv(x, weight, offset, states, *places, silu, max(lengths), device=DEVICE)
    near = {"atol": 1e-5 if dtype == torch.float32 else 4e-3, "rtol": 4e-3}
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), expected, **near)
    torch.testing.assert_close(states.double(), expected_states, atol=0, rtol=0)


def test_states_that_cannot_be_changed_in_place_are_refused():
    states = torch.zeros(2, 3, 8).transpose(1, 2)
    places = torch.tensor([0, 1]), torch.tensor([0]), torch.tensor([True])
    with pytest.raises(ValueError, match="dense"):
        causal_conv(torch.zeros(1, 8), torch.zeros(8, 4), None, states, *places, True, 1, device=DEVICE)
    with pytest.raises(ValueError, match="9 taps"):
        causal_conv(torch.zeros(1, 8), torch.zeros(8, 9), None, states, *places, True, 1, device=DEVICE)
