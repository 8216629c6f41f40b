"""Reference of the expert product.

Shape suffixes: T tokens, K experts of a token, X experts, E hidden size, F inner size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from enginecore.ops.expert_weights import ExpertWeights, expert_weight

#: What an expert does with the product of its first matrix; gate and up lie side by side.
ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


def activate(x_T2F: torch.Tensor, activation: str) -> torch.Tensor:
    gate, up = x_T2F.chunk(2, dim=-1)
    if activation == "silu":
        return F.silu(gate) * up
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r} is not one of {', '.join(ACTIVATIONS)}")
    return F.gelu(gate, approximate="none" if activation == "gelu" else "tanh") * up


def moe_experts(
    x_TE: torch.Tensor,
    expert_ids_TK: torch.Tensor,
    expert_weights_TK: torch.Tensor,
    gate_up_X2FE: torch.Tensor | ExpertWeights,
    down_XEF: torch.Tensor | ExpertWeights,
    activation: str,
) -> torch.Tensor:
    """One expert after another, in float32 (float64 for float64); of packed weights one is unpacked at a time."""
    exact = torch.float64 if x_TE.dtype == torch.float64 else torch.float32
    out_TE = torch.zeros(x_TE.shape, dtype=exact, device=x_TE.device)
    for expert in range(gate_up_X2FE.shape[0]):
        token, place = (expert_ids_TK == expert).nonzero(as_tuple=True)
        if len(token):
            inner = activate(x_TE[token].to(exact) @ expert_weight(gate_up_X2FE, expert, exact).t(), activation)
            part = inner @ expert_weight(down_XEF, expert, exact).t()
            out_TE.index_add_(0, token, part * expert_weights_TK[token, place].to(exact).unsqueeze(1))
    return out_TE.to(x_TE.dtype)
