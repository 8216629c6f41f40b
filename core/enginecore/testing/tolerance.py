"""How far a result may be from the float64 reference: normalised mean squared error, per dtype.

NMSE is mean((x - ref)^2) / mean(ref^2). It has no unit, does not depend on the scale of the inputs and does not trip
over single elements near zero, as element-wise relative error does. One wrong row among many would drown in the mean,
so each row is held to a looser bound of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

#: Largest NMSE of an op whose inputs and outputs have this dtype. A result that is exact but for rounding its output
#: lies near 1e-15 (float32), 3e-8 (float16), 2e-6 (bfloat16) and 5e-4 (float8_e4m3fn): these leave room for
#: intermediate rounding and nothing else.
TOLERANCES: dict[str, float] = {
    "float64": 1e-20,
    "float32": 1e-10,
    "float16": 1e-6,
    "bfloat16": 5e-5,
    "float8_e4m3fn": 5e-3,
    "float8_e5m2": 2e-2,
    "int8": 1e-3,
}

#: A single row may be this many times worse than the whole.
ROW_FACTOR = 50.0


@dataclass(frozen=True)
class Deviation:
    """`total` and `worst_row` are NMSEs (the latter against the mean power of the whole), `row` is where that was;
    `not_finite` counts elements that are NaN or infinite where the reference is not."""

    total: float
    worst_row: float
    row: int
    not_finite: int

    def within(self, tolerance: float) -> bool:
        return not self.not_finite and self.total <= tolerance and self.worst_row <= ROW_FACTOR * tolerance

    def describe(self, tolerance: float) -> str:
        if self.not_finite:
            return f"{self.not_finite} elements are NaN or infinite, the first in row {self.row}"
        return (
            f"NMSE {self.total:.3g} (allowed {tolerance:.3g}), worst row {self.row}: {self.worst_row:.3g} "
            f"(allowed {ROW_FACTOR * tolerance:.3g})"
        )


def deviation(actual: torch.Tensor, expected: torch.Tensor) -> Deviation:
    """Compare in float64 on the host. Rows are the first dimension. Raises ValueError when the shapes differ."""
    import torch

    if actual.shape != expected.shape:
        raise ValueError(f"shape {tuple(actual.shape)} where {tuple(expected.shape)} was expected")
    got = actual.detach().cpu().to(torch.float64)
    want = expected.detach().cpu().to(torch.float64)
    if got.numel() == 0:
        return Deviation(0.0, 0.0, 0, 0)
    got, want = got.reshape(got.shape[0] if got.dim() else 1, -1), want.reshape(want.shape[0] if want.dim() else 1, -1)
    bad = ~torch.isfinite(got)
    if bad.any():
        return Deviation(float("inf"), float("inf"), int(bad.any(dim=1).nonzero()[0]), int(bad.sum()))
    power = max(float((want**2).mean()), 1e-60)
    rows = ((got - want) ** 2).mean(dim=1) / power
    worst = int(rows.argmax())
    return Deviation(float(rows.mean()), float(rows[worst]), worst, 0)


def nmse(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The normalised mean squared error alone; infinite when `actual` holds NaN or infinity."""
    return deviation(actual, expected).total
