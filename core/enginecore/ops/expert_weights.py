"""The weights of all experts of a layer in a scheme of few bits: what one weight has, with one more side in front.

Shape suffixes: X experts, O output features, I input features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from enginecore.errors import ModelError
from enginecore.ops.int4 import Int4Weight
from enginecore.ops.quantized import INT8, QuantizedWeight
from enginecore.ops.scaled import ScaledWeight, scaled


@dataclass(frozen=True)
class ExpertWeights:
    """`stacked` is an Int4Weight or a ScaledWeight whose tensors have X in front of their own sides; its properties
    that look at sides do not hold. `shape` is that of the weights unpacked, [X, O, I]."""

    stacked: Int4Weight | ScaledWeight
    shape: tuple[int, int, int]

    @property
    def scheme(self) -> str:
        return self.stacked.scheme

    @property
    def nbytes(self) -> int:
        return sum(int(part.nbytes) for part in _tensors(self.stacked).values())

    def expert(self, number: int) -> Int4Weight | ScaledWeight:
        """One expert's weight; views of its part."""
        return replace(self.stacked, **{name: part[number] for name, part in _tensors(self.stacked).items()})

    def to(self, device: torch.device) -> ExpertWeights:
        return replace(self, stacked=self.stacked.to(device))

    def attributes(self) -> dict[str, Any]:
        """What an implementation is asked about: `scheme`, `group` (inputs that share a scale), `blocked` (eight bits
        with several scales an output) and `ordered` (inputs lie in an order of their own)."""
        weight, inputs = self.stacked, self.shape[2]
        if isinstance(weight, Int4Weight):
            ordered = weight.permutation_I is not None
            return {"scheme": self.scheme, "group": weight.group_size, "blocked": False, "ordered": ordered}
        group, blocked = min(weight.block[1], inputs), weight.block != (1, inputs)
        return {"scheme": self.scheme, "group": group, "blocked": blocked, "ordered": False}


def stack_experts(parts: Sequence[Int4Weight | ScaledWeight | QuantizedWeight]) -> ExpertWeights | None:
    """One weight for each expert, all of one shape; None where they are of different kinds. Raises ModelError where
    their sides differ."""
    weights = [weight for weight in map(_plain, parts) if weight is not None]
    if len(weights) < len(parts):
        return None
    first: Any = weights[0]
    kinds = {(type(weight), *((k, v) for k, v in vars(weight).items() if _is_plain(v))) for weight in weights}
    names = set(_tensors(first))
    if len(kinds) > 1 or any(set(_tensors(weight)) != names for weight in weights):
        return None
    sides = {(weight.out_features, weight.in_features) for weight in weights}
    if len(sides) > 1:
        raise ModelError(f"experts of one layer have weights of different sizes: {sorted(sides)}")
    made = {}
    for name in names:
        tensors = [getattr(weight, name) for weight in weights]
        if len({tensor.shape for tensor in tensors}) > 1 or len({tensor.dtype for tensor in tensors}) > 1:
            return None
        # torch cannot stack float8 on every device; bytes are bytes.
        made[name] = torch.stack([tensor.contiguous().view(torch.uint8) for tensor in tensors]).view(tensors[0].dtype)
    return ExpertWeights(replace(first, **made), (len(weights), first.out_features, first.in_features))


def expert_weight(weights: torch.Tensor | ExpertWeights, number: int, dtype: torch.dtype) -> torch.Tensor:
    """The weight [O, I] of one expert in `dtype`."""
    if isinstance(weights, torch.Tensor):
        return weights[number].to(dtype)
    return weights.expert(number).dequantize(dtype)


def _plain(part: Int4Weight | ScaledWeight | QuantizedWeight) -> Int4Weight | ScaledWeight | None:
    if not isinstance(part, QuantizedWeight):
        return part
    return scaled(INT8, *part.parts(), part.dtype) if part.scheme == INT8 else None


def _is_plain(value: Any) -> bool:
    return not isinstance(value, torch.Tensor)


def _tensors(weight: Int4Weight | ScaledWeight) -> dict[str, torch.Tensor]:
    values = {field.name: getattr(weight, field.name) for field in fields(weight)}
    return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
