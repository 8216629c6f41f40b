"""Verifying the drafts of speculative decoding. One program a row of the batch; it stops at the first draft not taken.

Only there the vocabulary is read at all (twice: the mass of what is left of the target, then the draw from it), so a
row whose drafts are all taken costs a few numbers. The rule is that of Leviathan et al. 2023 and Chen et al. 2023; the
numbers it needs are given, so that seeded requests repeat.

Shape suffixes: R rows, D drafts of all rows, S places of a row's answer, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from enginecore.device.optable import OpQuery

from enginecore_triton import configs
from enginecore_triton.aot_case import AotCase
from enginecore_triton.device import DeviceDescription
from enginecore_triton.launch import launch


@triton.jit
def _rest(p, q, ids, draft, part, HAS_DRAFT: tl.constexpr):
    """What of the target the drafts do not cover. All of it is left by `part` 0.0, or by a draft of -1 without q."""
    if HAS_DRAFT:
        return tl.maximum(p - part * q, 0.0)
    return tl.where(ids == draft, 0.0, p)


@triton.jit
def _verify(
    draft_ids_D, starts_R1, target_DV, draft_DV, bonus_R, accept_D, redraw_R, out_RS,
    target_stride, draft_stride, V, width, HAS_DRAFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    start, end = tl.load(starts_R1 + row).to(tl.int64), tl.load(starts_R1 + row + 1).to(tl.int64)
    at = start
    draft = tl.full((), -1, tl.int64)
    taken = tl.full((), 1, tl.int32)
    while (at < end) & (taken > 0):
        draft = tl.load(draft_ids_D + at).to(tl.int64)
        known = (draft >= 0) & (draft < V)
        p = tl.load(target_DV + at * target_stride + draft, mask=known, other=0.0).to(tl.float64)
        q = tl.full((), 1.0, tl.float64)
        if HAS_DRAFT:
            q = tl.load(draft_DV + at * draft_stride + draft, mask=known, other=1.0).to(tl.float64)
        taken = (known & (tl.load(accept_D + at) * q < p)).to(tl.int32)
        tl.store(out_RS + row * width + (at - start), draft, mask=taken > 0)
        at += taken
    if taken > 0:
        tl.store(out_RS + row * width + (at - start), tl.load(bonus_R + row).to(tl.int64))
    else:
        lane = tl.arange(0, BLOCK)
        target, drafted = target_DV + at * target_stride, draft_DV
        if HAS_DRAFT:
            drafted = draft_DV + at * draft_stride
        part = tl.where((draft >= 0) & (draft < V), 1.0, 0.0).to(tl.float32)
        rest = tl.full((), 0.0, tl.float64)
        whole = tl.full((), 0.0, tl.float64)
        for first in range(0, V, BLOCK):
            ids = first + lane
            p = tl.load(target + ids, mask=ids < V, other=0.0).to(tl.float32)
            q = p
            if HAS_DRAFT:
                q = tl.load(drafted + ids, mask=ids < V, other=0.0).to(tl.float32)
            rest += tl.sum(_rest(p, q, ids, draft, part, HAS_DRAFT), 0).to(tl.float64)
            whole += tl.sum(p, 0).to(tl.float64)
        # The two agree to the last bit only where rounding rejected what it should not have: then all of the target.
        part = tl.where(rest > 0, part, 0.0)
        draft = tl.where(rest > 0, draft, -1)
        goal = tl.load(redraw_R + row) * tl.where(rest > 0, rest, whole)
        drawn = tl.full((), 0x7FFFFFFF, tl.int32)
        last = tl.full((), 0, tl.int32)
        passed = tl.full((), 0.0, tl.float64)
        first = tl.full((), 0, tl.int32)
        while (first < V) & (drawn == 0x7FFFFFFF):
            ids = first + lane
            p = tl.load(target + ids, mask=ids < V, other=0.0).to(tl.float32)
            q = p
            if HAS_DRAFT:
                q = tl.load(drafted + ids, mask=ids < V, other=0.0).to(tl.float32)
            mass = _rest(p, q, ids, draft, part, HAS_DRAFT)
            total = tl.sum(mass, 0).to(tl.float64)
            last = tl.maximum(last, tl.max(tl.where(mass > 0, ids, 0), 0))
            if passed + total > goal:
                cumulative = passed + tl.cumsum(mass.to(tl.float64), 0)
                drawn = tl.min(tl.where((mass > 0) & (cumulative > goal), ids, 0x7FFFFFFF), 0)
                drawn = tl.where(drawn == 0x7FFFFFFF, last, drawn)
            passed += total
            first += BLOCK
        tl.store(out_RS + row * width + (at - start), tl.where(drawn == 0x7FFFFFFF, last, drawn).to(tl.int64))


def rejection_sample(
    draft_ids_D: torch.Tensor,
    starts_R1: torch.Tensor,
    target_DV: torch.Tensor,
    draft_DV: torch.Tensor | None,
    bonus_R: torch.Tensor,
    accept_D: torch.Tensor,
    redraw_R: torch.Tensor,
    width: int,
    *,
    device: DeviceDescription,
) -> torch.Tensor:
    """The core's op `rejection_sample`. Rows of target and draft may be strided; the host waits for nothing."""
    rows, vocabulary = bonus_R.shape[0], target_DV.shape[1]
    out_RS = torch.full((rows, width), -1, dtype=torch.int64, device=bonus_R.device)
    drafted = target_DV if draft_DV is None else draft_DV
    config = configs.pick("rejection_sample", device.architecture, vocabulary=vocabulary)
    launch(_verify, (rows,), draft_ids_D, starts_R1, target_DV, drafted, bonus_R, accept_D, redraw_R, out_RS,
           target_DV.stride(0), drafted.stride(0), vocabulary, width, HAS_DRAFT=draft_DV is not None,
           config=config)  # fmt: skip
    return out_RS


def supports(query: OpQuery, device: DeviceDescription) -> list[str]:
    """Any vocabulary below 2^31 and any number of drafts."""
    return []


def aot_cases() -> list[AotCase]:
    signature = {
        "draft_ids_D": "*i64:16", "starts_R1": "*i32:16", "target_DV": "*fp32:16", "draft_DV": "*fp32:16",
        "bonus_R": "*i64:16", "accept_D": "*fp64:16", "redraw_R": "*fp64:16", "out_RS": "*i64:16",
        "target_stride": "i32:16", "draft_stride": "i32:16", "V": "i32:16", "width": "i32",
    }  # fmt: skip
    return [
        AotCase(name=name, kernel=_verify, signature=signature, constants={"HAS_DRAFT": has_draft},
                config="rejection_sample", sizes={"vocabulary": 128256})
        for name, has_draft in (("draft model", True), ("certain drafts", False))
    ]  # fmt: skip
