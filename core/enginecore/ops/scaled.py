"""Weights of eight bits with scales: fp8 (e4m3 as OCP has it) and signed bytes, a scale for each row or each block.

Shape suffixes: O output features, I input features, A blocks of outputs, B blocks of inputs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from enginecore.errors import ModelError

#: scheme -> dtype of its values.
VALUES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}


@dataclass(frozen=True)
class ScaledWeight:
    """What `pack_linear` takes in place of a weight [O, I]: values times the float32 scale of their block.

    A block is `block[0]` outputs by `block[1]` inputs, the last ones may be smaller; a scale for each output is the
    block (1, I). Products take activations in the same eight bits, with a scale for each token (and each block of
    inputs) that the device finds, or as they are. `dtype` is that of activations.
    """

    scheme: str
    values_OI: torch.Tensor
    scales_AB: torch.Tensor
    block: tuple[int, int]
    dtype: torch.dtype

    @property
    def out_features(self) -> int:
        return int(self.values_OI.shape[0])

    @property
    def in_features(self) -> int:
        return int(self.values_OI.shape[1])

    @property
    def nbytes(self) -> int:
        return int(self.values_OI.nbytes + self.scales_AB.nbytes)

    def to(self, device: torch.device) -> ScaledWeight:
        return replace(self, values_OI=self.values_OI.to(device), scales_AB=self.scales_AB.to(device))

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The weight [O, I] in `dtype` (None: the weight's own), worked out in float32 (float64 for float64)."""
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        scales = self.scales_AB.to(exact).repeat_interleave(self.block[0], 0)[: self.out_features]
        if self.scales_AB.shape[1] > 1:
            scales = scales.repeat_interleave(self.block[1], 1)[:, : self.in_features]
        return (self.values_OI.to(exact) * scales).to(dtype or self.dtype)


def scaled(
    scheme: str, values_OI: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype, block: tuple[int, int] | None = None
) -> ScaledWeight:
    """Out of a checkpoint's tensors: `scales` holds one number, one for each output, or one for each `block`."""
    outputs, inputs = values_OI.shape
    if values_OI.dtype != VALUES[scheme]:
        raise ModelError(f"a weight of {scheme} is in {values_OI.dtype}, not {VALUES[scheme]}")
    if block is not None:
        wanted = (-(-outputs // block[0]), -(-inputs // block[1]))
        if tuple(scales.shape) != wanted:
            raise ModelError(f"blocks of {block} of a weight {outputs} x {inputs} need scales {wanted}, not "
                             f"{tuple(scales.shape)}")  # fmt: skip
        return ScaledWeight(scheme, values_OI, scales.float().contiguous(), block, dtype)
    if scales.numel() not in (1, outputs):
        raise ModelError(f"{scales.numel()} scales fit neither a weight nor its {outputs} outputs")
    scales_O1 = scales.float().reshape(-1, 1).expand(outputs, 1).contiguous()
    return ScaledWeight(scheme, values_OI, scales_O1, (1, inputs), dtype)


def join(parts: list[ScaledWeight]) -> ScaledWeight | None:
    """The rows of several layers over the same inputs as one weight, or None where their blocks do not meet."""
    first = parts[0]
    if any((part.scheme, part.block) != (first.scheme, first.block) for part in parts):
        return None
    if any(part.out_features % first.block[0] for part in parts[:-1]):
        return None
    # torch has no `cat` for float8 on every device; bytes are bytes.
    values = torch.cat([part.values_OI.view(torch.int8) for part in parts]).view(first.values_OI.dtype)
    return replace(first, values_OI=values, scales_AB=torch.cat([part.scales_AB for part in parts]))
