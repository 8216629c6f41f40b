"""The toy backend's ops: the core's references, until they are asked for a planted fault."""

from __future__ import annotations

from typing import Any

import torch
from enginecore.device import Impl, OpTable
from enginecore.ops.reference import REFERENCE, PackedLinear


class OneByOne(PackedLinear):
    """Rows are multiplied one by one: torch rounds a row otherwise beside others; the toy claims that nothing does."""

    def __call__(self, x_TI: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        rows = [super(OneByOne, self).__call__(x, out_dtype) for x in x_TI.contiguous().split(1)]
        return torch.cat(rows) if rows else super().__call__(x_TI, out_dtype)


def one_by_one(weight: Any, bias_O: torch.Tensor | None) -> OneByOne:
    return OneByOne(REFERENCE["pack_linear"](weight, bias_O).weight_OI, bias_O)


class ToyOps(OpTable):
    def __init__(self, fault: str) -> None:
        self.fault = fault

    def get(self, op: str) -> Impl | None:
        if op == "sample" and self.fault == "sample_ignores_top_p":
            sample = REFERENCE["sample"]
            return Impl(lambda logits, t, k, p, m, u: sample(logits, t, k, torch.ones_like(p), m, u))
        if op == "rms_norm" and self.fault == "norm_without_eps":
            return Impl(lambda x, w, eps: REFERENCE["rms_norm"](x, w, 0.0))
        if op == "rotary_embedding" and self.fault == "rotary_not_in_place":
            rotate = REFERENCE["rotary_embedding"]
            return Impl(lambda positions, q, k, table, pairs: rotate(positions, q.clone(), k.clone(), table, pairs))
        if op == "moe_experts" and self.fault == "expert_minus_one_wraps":
            experts = REFERENCE["moe_experts"]
            return Impl(lambda x, ids, w, gate_up, down, act: experts(x, ids % len(down), w, gate_up, down, act))
        if op == "lora_expand" and self.fault == "adapter_minus_one_wraps":
            expand = REFERENCE["lora_expand"]
            return Impl(lambda h, b, adapter, y: expand(h, b, adapter % len(b[0]), y))
        if op == "latent_cache" and self.fault == "padding_is_a_latent":
            write = REFERENCE["latent_cache"]
            return Impl(lambda rows, cache, slots: write(rows, cache, slots % cache[:, :, 0].numel()))
        if op == "ssd_scan" and self.fault == "padding_keeps_a_state":
            scan = REFERENCE["ssd_scan"]
            return Impl(lambda *args: scan(*args[:11], args[11] % len(args[9]), *args[12:]))
        if op == "rejection_sample" and self.fault == "drafts_taken_at_random":
            reject = REFERENCE["rejection_sample"]
            return Impl(lambda ids, starts, p, q, *rest: reject(ids, starts, p, p if q is not None else None, *rest))
        if op == "pack_linear" and self.fault != "rows_rounded_together":
            return Impl(one_by_one)
        return Impl(REFERENCE[op]) if op in REFERENCE else None
