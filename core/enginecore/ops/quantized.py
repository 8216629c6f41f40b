"""Weights that stay in blocks of small integers, and how they come about.

Shape suffixes: O output features, I input features, B bytes of a row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from enginecore.ops.blocks import UNPACKED, unpack_blocks

#: scheme -> (ggml's number of the format, inputs in a block, bytes of a block). The bytes are those of GGUF files.
SCHEMES = {
    "q4_0": (2, 32, 18), "q4_1": (3, 32, 20), "q5_0": (6, 32, 22), "q5_1": (7, 32, 24), "q8_0": (8, 32, 34),
    "q2_k": (10, 256, 84), "q3_k": (11, 256, 110), "q4_k": (12, 256, 144), "q5_k": (13, 256, 176),
    "q6_k": (14, 256, 210),
}  # fmt: skip

#: Rows of a float32 scale, then a signed byte for each input.
INT8 = "int8"
_INT8_HEAD = 4

#: Rows that are quantised at a time: it bounds the memory that takes.
_ROWS = 4096


@dataclass(frozen=True)
class QuantizedWeight:
    """What `pack_linear` takes in place of a weight: rows of blocks, as a GGUF file has them, or ("int8") of a scale
    and bytes.

    `data_OB` is contiguous uint8; `dtype` is what activations have and what looked-up rows shall have.
    """

    scheme: str
    data_OB: torch.Tensor
    in_features: int
    dtype: torch.dtype

    @property
    def out_features(self) -> int:
        return int(self.data_OB.shape[0])

    def to(self, device: torch.device) -> QuantizedWeight:
        return replace(self, data_OB=self.data_OB.to(device))

    def parts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Of scheme "int8": the bytes as int8 [O, I] and the float32 scales [O, 1]."""
        scale_O1 = self.data_OB[:, :_INT8_HEAD].contiguous().view(torch.float32)
        return self.data_OB[:, _INT8_HEAD:].contiguous().view(torch.int8), scale_O1

    def dequantize(self) -> torch.Tensor:
        """The weight [O, I] in `dtype`, on the device of `data_OB`."""
        if self.scheme == INT8:
            values_OI, scale_O1 = self.parts()
            return (values_OI.float() * scale_O1).to(self.dtype)
        if self.scheme in UNPACKED:
            blocks_SB = self.data_OB.view(-1, SCHEMES[self.scheme][2])
            return unpack_blocks(self.scheme, blocks_SB).view(-1, self.in_features).to(self.dtype)
        from gguf.quants import dequantize

        values = dequantize(self.data_OB.cpu().numpy(), SCHEMES[self.scheme][0])  # type: ignore[arg-type]
        return torch.from_numpy(values).to(device=self.data_OB.device, dtype=self.dtype)


def can_quantize_int8(in_features: int) -> bool:
    return in_features % 32 == 0


def quantize_int8(weight_OI: torch.Tensor) -> QuantizedWeight:
    """Signed bytes, symmetric, a scale for each output (scheme "int8"): the nearest code of each value.

    I must be a multiple of 32 (`can_quantize_int8`).
    """
    rows, inputs = weight_OI.shape
    data_OB = torch.empty(rows, _INT8_HEAD + inputs, dtype=torch.uint8, device=weight_OI.device)
    for start in range(0, rows, _ROWS):
        part = weight_OI[start : start + _ROWS].float()
        scale = part.abs().amax(-1, keepdim=True) / 127
        codes = torch.where(scale > 0, part / scale, torch.zeros_like(part)).round_().clamp_(-127, 127)
        data_OB[start : start + _ROWS, :_INT8_HEAD] = scale.view(torch.uint8)
        data_OB[start : start + _ROWS, _INT8_HEAD:] = codes.to(torch.int8).view(torch.uint8)
    return QuantizedWeight(INT8, data_OB, inputs, weight_OI.dtype)


def int8_weight(values_OI: torch.Tensor, scales_O1: torch.Tensor, dtype: torch.dtype) -> QuantizedWeight:
    """Signed bytes and float32 scales that a checkpoint brings, as scheme "int8"."""
    parts = (scales_O1.float().contiguous().view(torch.uint8), values_OI.contiguous().view(torch.uint8))
    return QuantizedWeight(INT8, torch.cat(parts, 1), values_OI.shape[1], dtype)
