"""Linear modules with low-rank adapters beside them, several at once: y = W x + B A x, each token with its own A and B.

All adapters on the device lie in slots of two tensors a module, so that one call serves a batch that mixes them. Rows
without an adapter keep what the base module gave, bit for bit: nothing is added to them, not even zero.

Shape suffixes: T tokens, R rank, I inputs, O outputs of all slices, P outputs of one slice, S slices, N slots.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch

from enginecore.ops.dispatch import Ops


class RowSlots:
    """Which slot each row of the step has, -1 for none. `rows` finds it by the number of rows that a module is given:
    all tokens of the step or, where the model drops the others on the way, those whose logits are wanted."""

    def __init__(self) -> None:
        self._by_count: dict[int, torch.Tensor] | None = None

    @property
    def active(self) -> bool:
        """Whether any row of the step has an adapter."""
        return self._by_count is not None

    def use(self, slots_T: torch.Tensor, logits_indices_R: torch.Tensor) -> None:
        """For the step that comes. Both int64, on the device."""
        found = {logits_indices_R.shape[0]: slots_T[logits_indices_R]}
        found[slots_T.shape[0]] = slots_T  # where the numbers agree, no row was dropped
        self._by_count = found

    def clear(self) -> None:
        """The step has no adapters."""
        self._by_count = None

    def rows(self, count: int) -> torch.Tensor | None:
        """int64 [count], None where the step has no adapters."""
        return None if self._by_count is None else self._by_count[count]


class SlotsOfRows(Protocol):
    def rows(self, count: int) -> torch.Tensor | None:
        """int64 [count], None where the step has no adapters."""


class AdaptedLinear:
    """In place of a packed linear whose outputs are those of `sizes` modules side by side."""

    def __init__(
        self,
        base: Any,
        sizes: list[int],
        rows: SlotsOfRows,
        *,
        slots: int,
        rank: int,
        dtype: torch.dtype,
        device: torch.device,
        shrink: Callable[..., torch.Tensor],
        expand: Callable[..., torch.Tensor],
    ) -> None:
        self.base, self.nbytes = base, base.nbytes
        self.in_features, self.out_features = base.in_features, base.out_features
        self.rows: SlotsOfRows = rows
        self._shrink, self._expand = shrink, expand
        self._a_SNRI = torch.zeros((len(sizes), slots, rank, base.in_features), dtype=dtype, device=device)
        self._b = [torch.zeros((slots, size, rank), dtype=dtype, device=device) for size in sizes]

    @property
    def adapter_bytes(self) -> int:
        return int(self._a_SNRI.nbytes) + sum(int(b_NPR.nbytes) for b_NPR in self._b)

    def __call__(self, x_TI: torch.Tensor, **options: Any) -> torch.Tensor:
        y_TO: torch.Tensor = self.base(x_TI, **options)
        slots_T = self.rows.rows(x_TI.shape[0])
        if slots_T is None:
            return y_TO
        h_STR = self._shrink(x_TI, self._a_SNRI, slots_T)
        return self._expand(h_STR, self._b, slots_T, y_TO)

    def fill(self, slice_number: int, slot: int, weights: tuple[torch.Tensor, torch.Tensor] | None) -> None:
        """Put A and B of one of the modules into a slot, with zeros up to the slot's rank; None empties it."""
        a_RI, b_PR = self._a_SNRI[slice_number, slot], self._b[slice_number][slot]
        rank = 0
        if weights is not None:
            rank = weights[0].shape[0]
            a_RI[:rank].copy_(weights[0])
            b_PR[:, :rank].copy_(weights[1])
        a_RI[rank:].zero_()
        b_PR[:, rank:].zero_()


class AdaptedPreparingLinear(AdaptedLinear):
    """Around a linear that has the norm or the activation before it as a part of itself (`layers/prepared.py`). Steps
    without adapters keep that; in others the rows are needed between the two."""

    def __init__(self, base: Any, sizes: list[int], rows: SlotsOfRows, *, ops: Ops, **settings: Any) -> None:
        super().__init__(base, sizes, rows, **settings)
        self._op = partial(ops.get, dtype=str(settings["dtype"]).removeprefix("torch."))

    def normed(
        self, x_TI: torch.Tensor, residual_TI: torch.Tensor | None, weight_I: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.rows.rows(x_TI.shape[0]) is None:
            done: tuple[torch.Tensor, torch.Tensor] = self.base.normed(x_TI, residual_TI, weight_I, eps)
            return done
        if residual_TI is None:
            return self(self._op("rms_norm")(x_TI, weight_I, eps)), x_TI
        normed_TI, sum_TI = self._op("fused_add_rms_norm")(x_TI, residual_TI, weight_I, eps)
        return self(normed_TI), sum_TI

    def activated(self, x_T2I: torch.Tensor, activation: str) -> torch.Tensor:
        if self.rows.rows(x_T2I.shape[0]) is None:
            done: torch.Tensor = self.base.activated(x_T2I, activation)
            return done
        return self(self._op(activation)(x_T2I))
