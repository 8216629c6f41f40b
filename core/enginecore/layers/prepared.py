"""A product together with what goes right before it, as one call where the packed weight has that, else as two.

Shape suffixes: T tokens, I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

#: (x_TI, residual_TI or None) -> (y_TO, s_TI): s = x + residual, y the product of the normalised s. May overwrite both.
NormedLinear = Callable[[torch.Tensor, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor]]


def normed_linear(
    packed: Any,
    weight_I: torch.Tensor,
    eps: float,
    rms_norm: Callable[..., torch.Tensor],
    add_rms_norm: Callable[..., tuple[torch.Tensor, torch.Tensor]],
) -> NormedLinear:
    """`packed` after a norm with `weight_I`; the two ops serve where `packed` has no `normed`."""
    fused = getattr(packed, "normed", None)
    if fused is not None:
        return lambda x_TI, residual_TI: fused(x_TI, residual_TI, weight_I, eps)

    def call(x_TI: torch.Tensor, residual_TI: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        if residual_TI is None:
            return packed(rms_norm(x_TI, weight_I, eps)), x_TI
        normed_TI, sum_TI = add_rms_norm(x_TI, residual_TI, weight_I, eps)
        return packed(normed_TI), sum_TI

    return call


def activated_linear(
    packed: Any, activation: str, run: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[torch.Tensor], torch.Tensor]:
    """`packed` after the op `activation`, which `run` is."""
    fused = getattr(packed, "activated", None)
    if fused is not None:
        return lambda x_T2I: fused(x_T2I, activation)
    return lambda x_T2I: packed(run(x_T2I))
