"""Modules over packed weights behave as the torch modules they replace."""

from __future__ import annotations

import pytest
import torch
from enginecore.layers.linear import PackedEmbedding, PackedLinear
from enginecore.ops.reference import pack_linear
from torch import nn


@pytest.mark.parametrize("shape", [(5,), (3, 5), (1, 4, 5), (2, 3, 4, 5), (0, 5)])
@pytest.mark.parametrize("bias", [True, False])
def test_linear(shape: tuple[int, ...], bias: bool) -> None:
    linear = nn.Linear(5, 7, bias=bias)
    packed = PackedLinear(pack_linear(linear.weight.detach(), linear.bias.detach() if bias else None))
    x = torch.randn(shape)
    torch.testing.assert_close(packed(x), linear(x).detach())
    assert (packed.in_features, packed.out_features) == (5, 7)
    assert list(packed.parameters()) == []


@pytest.mark.parametrize("shape", [(4,), (1, 4), (2, 2)])
def test_embedding(shape: tuple[int, ...]) -> None:
    embedding = nn.Embedding(9, 5)
    packed = PackedEmbedding(pack_linear(embedding.weight.detach(), None))
    ids = torch.tensor([8, 0, 3, 3]).view(shape)
    assert torch.equal(packed(ids), embedding(ids))
    assert (packed.num_embeddings, packed.embedding_dim) == (9, 5)
