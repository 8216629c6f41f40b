"""Weights that stay in blocks of small integers, and how they come about.

Shape suffixes: O output features, I input features, B bytes of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

#: scheme -> (ggml's number of the format, inputs in a block, bytes of a block). The bytes are those of GGUF files.
SCHEMES = {
    "q4_0": (2, 32, 18), "q4_1": (3, 32, 20), "q5_0": (6, 32, 22), "q5_1": (7, 32, 24), "q8_0": (8, 32, 34),
    "q2_k": (10, 256, 84), "q3_k": (11, 256, 110), "q4_k": (12, 256, 144), "q5_k": (13, 256, 176),
    "q6_k": (14, 256, 210),
}  # fmt: skip

#: Rows that are quantised at a time: it bounds the memory that takes.
_ROWS = 4096


@dataclass(frozen=True)
class QuantizedWeight:
    """What `pack_linear` takes in place of a weight: rows of blocks, as a GGUF file has them.

    `data_OB` is contiguous uint8; `dtype` is what activations have and what looked-up rows shall have.
    """

    scheme: str
    data_OB: torch.Tensor
    in_features: int
    dtype: torch.dtype

    @property
    def out_features(self) -> int:
        return int(self.data_OB.shape[0])

    def dequantize(self) -> torch.Tensor:
        """The weight [O, I] in `dtype`, on the device of `data_OB`."""
        from gguf.quants import dequantize

        values = dequantize(self.data_OB.cpu().numpy(), SCHEMES[self.scheme][0])  # type: ignore[arg-type]
        return torch.from_numpy(values).to(device=self.data_OB.device, dtype=self.dtype)


def can_quantize_int8(in_features: int) -> bool:
    return in_features % SCHEMES["q8_0"][1] == 0


def quantize_int8(weight_OI: torch.Tensor) -> QuantizedWeight:
    """Signed bytes, symmetric, a half-precision scale for each 32 inputs ("q8_0"): the nearest code of each value.

    I must be a multiple of 32 (`can_quantize_int8`).
    """
    blocks, rows = weight_OI.shape[1] // 32, weight_OI.shape[0]
    data = torch.empty(rows, blocks, 34, dtype=torch.uint8, device=weight_OI.device)
    for start in range(0, rows, _ROWS):
        part = weight_OI[start : start + _ROWS].reshape(-1, blocks, 32).float()
        scale = (part.abs().amax(-1, keepdim=True) / 127).half()
        step = scale.float()
        codes = torch.where(step > 0, part / step, torch.zeros_like(part)).round_().clamp_(-127, 127)
        data[start : start + _ROWS, :, :2] = scale.view(torch.uint8)
        data[start : start + _ROWS, :, 2:] = codes.to(torch.int8).view(torch.uint8)
    return QuantizedWeight("q8_0", data.view(rows, -1), weight_OI.shape[1], weight_OI.dtype)
