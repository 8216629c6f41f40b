"""References of the low-rank adapters' products, each token with an adapter of its own.

Sources: Hu et al. 2021 (LoRA), Chen et al. 2023 (Punica).

Shape suffixes: T tokens, I inputs, O outputs of all slices, P outputs of one slice, S slices, N adapters, R rank.
"""

from __future__ import annotations

import torch


def lora_shrink(x_TI: torch.Tensor, a_SNRI: torch.Tensor, adapter_T: torch.Tensor) -> torch.Tensor:
    exact = torch.float64 if x_TI.dtype == torch.float64 else torch.float32
    out_STR = torch.zeros((a_SNRI.shape[0], x_TI.shape[0], a_SNRI.shape[2]), dtype=exact, device=x_TI.device)
    for adapter in adapter_T.unique().tolist():
        if adapter >= 0:
            rows = adapter_T == adapter
            out_STR[:, rows] = torch.einsum("ti,sri->str", x_TI[rows].to(exact), a_SNRI[:, adapter].to(exact))
    return out_STR


def lora_expand(
    h_STR: torch.Tensor, b: list[torch.Tensor], adapter_T: torch.Tensor, y_TO: torch.Tensor
) -> torch.Tensor:
    exact = torch.float64 if h_STR.dtype == torch.float64 else torch.float32
    start = 0
    for h_TR, b_NPR in zip(h_STR, b, strict=True):
        y_TP = y_TO[:, start : start + b_NPR.shape[1]]
        start += b_NPR.shape[1]
        for adapter in adapter_T.unique().tolist():
            if adapter >= 0:
                rows = adapter_T == adapter
                y_TP[rows] = (y_TP[rows].to(exact) + h_TR[rows].to(exact) @ b_NPR[adapter].to(exact).t()).to(y_TO.dtype)
    return y_TO
