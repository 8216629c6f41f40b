"""The experts of a layer through the op table, in place of transformers' modules: as they are, or in few bits.

Shape suffixes: T tokens, K experts of a token, X experts, E hidden size, F inner size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from enginecore.ops.expert_weights import ExpertWeights

#: transformers' names of activations -> those of the ops.
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}


class Experts(nn.Module):  # type: ignore[misc]
    """Called as transformers calls its experts. `op` is `moe_experts` or `quantized_experts`."""

    def __init__(
        self,
        op: Callable[..., torch.Tensor],
        gate_up_X2FE: torch.Tensor | ExpertWeights,
        down_XEF: torch.Tensor | ExpertWeights,
        activation: str,
    ) -> None:
        super().__init__()
        self._op, self._activation = op, activation
        self.gate_up_X2FE, self.down_XEF = gate_up_X2FE, down_XEF

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        x_TE = hidden_states.reshape(-1, hidden_states.shape[-1])
        weights_TK = top_k_weights.float()
        out_TE = self._op(x_TE, top_k_index, weights_TK, self.gate_up_X2FE, self.down_XEF, self._activation)
        return out_TE.view(hidden_states.shape)


def activation_of(module: nn.Module) -> str | None:
    """The ops' name of what a module of experts does between its two products; None where it is not the plain layer
    of gate, up and down: with biases, transposed or interleaved weights, a gate of its own."""
    from transformers.integrations import moe

    kind: Any = type(module)
    plain = {"has_gate": True, "has_bias": False, "is_transposed": False, "is_concatenated": True,
             "has_post_expert_norm": False}  # fmt: skip
    if not isinstance(getattr(module, "has_gate", None), bool):  # not one of the library's experts
        return None
    if any(getattr(module, name, wanted) is not wanted for name, wanted in plain.items()):
        return None
    if getattr(kind, "_apply_gate", None) is not getattr(moe, "_default_apply_gate", object()):
        return None
    sides = [getattr(module, name, None) for name in ("gate_up_proj", "down_proj")]
    if not all(isinstance(side, nn.Parameter) and side.dim() == 3 for side in sides):
        return None
    config: Any = getattr(module, "config", None)
    return ACTIVATIONS.get(str(getattr(config, "hidden_act", None)))
