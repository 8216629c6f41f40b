"""Modules that stand in for torch's own where the device has packed the weight.

Shape suffixes: T tokens, I input features, O output features. Inputs may have any leading shape.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class JoinedLinear:
    """Several packed linears over the same input, their outputs side by side: parts that cannot be packed as one."""

    def __init__(self, parts: list[Any]) -> None:
        self.parts = parts
        self.in_features = parts[0].in_features
        self.out_features = sum(part.out_features for part in parts)
        self.nbytes = sum(part.nbytes for part in parts)

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        return torch.cat([part(x_TI) for part in self.parts], dim=-1)


class PackedLinear(nn.Module):  # type: ignore[misc]
    """In place of nn.Linear: `packed` is what the `pack_linear` op returned."""

    def __init__(self, packed: Any) -> None:
        super().__init__()
        self.packed = packed
        self.in_features, self.out_features = packed.in_features, packed.out_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y_TO = self.packed(x.reshape(-1, self.in_features))
        return y_TO.view(*x.shape[:-1], self.out_features)


class PackedEmbedding(nn.Module):  # type: ignore[misc]
    """In place of nn.Embedding where its weight is tied to a packed linear, so that only one copy exists."""

    def __init__(self, packed: Any) -> None:
        super().__init__()
        self.packed = packed
        self.num_embeddings, self.embedding_dim = packed.out_features, packed.in_features

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.packed.rows(ids.reshape(-1)).view(*ids.shape, self.embedding_dim)
