"""A product and what goes before it: one call where the weight has that, else the ops one after the other."""

from __future__ import annotations

import torch
from enginecore.layers.prepared import activated_linear, normed_linear
from enginecore.ops.reference import REFERENCE, PackedLinear

EPS = 1e-5


class Whole(PackedLinear):
    """A weight that takes its norm and its activation along."""

    def __init__(self, weight_OI, bias_O):
        super().__init__(weight_OI, bias_O)
        self.seen = []

    def normed(self, x_TI, residual_TI, weight_I, eps):
        self.seen.append("normed")
        total_TI = x_TI if residual_TI is None else x_TI + residual_TI
        return self(REFERENCE["rms_norm"](total_TI, weight_I, eps)), total_TI

    def activated(self, x_T2I, activation):
        self.seen.append(activation)
        return self(REFERENCE[activation](x_T2I))


def results(packed):
    torch.manual_seed(1)
    x, residual, weight, pairs = torch.randn(3, 8), torch.randn(3, 8), torch.rand(8), torch.randn(3, 16)
    normed = normed_linear(packed, weight, EPS, REFERENCE["rms_norm"], REFERENCE["fused_add_rms_norm"])
    activated = activated_linear(packed, "silu_and_mul", REFERENCE["silu_and_mul"])
    return [*normed(x.clone(), None), *normed(x, residual), activated(pairs)]


def test_both_ways_give_the_same():
    weight, bias = torch.randn(5, 8), torch.randn(5)
    whole = Whole(weight, bias)
    apart, together = results(PackedLinear(weight, bias)), results(whole)
    assert whole.seen == ["normed", "normed", "silu_and_mul"]
    for one, other in zip(apart, together, strict=True):
        assert torch.equal(one, other)
