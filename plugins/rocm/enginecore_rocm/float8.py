"""Weights in OCP's e4m3, as files have them, for matrix units that compute in the "fnuz" encoding (gfx942).

    e4m3fn    bias 7: 0x80 is -0, 0x7F and 0xFF are NaN
    e4m3fnuz  bias 8: 0x80 is NaN, all other patterns are numbers

So the same bits mean half the value, except for -0: the bits stay, the scale doubles. (The Open Compute Project's
"8-bit floating point specification", and the chapter on data types in AMD's CDNA 3 instruction set guide.)
"""

from __future__ import annotations

import torch


def ocp_to_fnuz(weight: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(weight as float8_e4m3fnuz, its scale) for a float8_e4m3fn weight and the factor that its values stand for.

    Exact for every number. Raises ValueError for a weight that holds a NaN, which fnuz bits would turn into a number.
    """
    if weight.dtype != torch.float8_e4m3fn:
        raise ValueError(f"an OCP e4m3 weight is float8_e4m3fn, not {weight.dtype}")
    bits = weight.view(torch.uint8)
    if bool(((bits & 0x7F) == 0x7F).any()):
        raise ValueError("the weight holds values that are not numbers")
    bits = torch.where(bits == 0x80, torch.zeros_like(bits), bits)
    return bits.view(torch.float8_e4m3fnuz), scale * 2
