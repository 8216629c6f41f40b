"""Drawing one id from each row of logits, filtered by top-k, top-p and min-p, without sorting the vocabulary.

What the three filters keep is always a prefix of the row in the order (logit falling, id rising), so that all there is
to find is where the prefix ends: its last element, "the cut". An element is one 64-bit number here (`_elements.py`);
what is kept is not less than the cut.

    _scan     reads the row twice. First the largest logit, and the largest in each of BLOCK lanes; the n-th largest of
              those is a bound that at least n elements reach and few more. Then the mass of the row, and the elements
              that reach the bound, into a short list.
    _choose   finds the cut in the list (CAPACITY elements, in registers) when it must lie there, by halving.
    search    the rows that are left (`_search.py`): without filters there is no cut; of flat ones (top-p over thousands
              of ids) it halves the interval of the cut, a read of the row each time.

So a row costs two reads of its logits in the common case. The draw is the inverse of the cumulative mass in id order by
a number that the caller gives, as in the core's reference: the same seeds give the same ids.

Shape suffixes: R rows, V vocabulary, C candidates.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from enginecore.device.optable import OpQuery

from enginecore_triton import configs
from enginecore_triton.aot_case import AotCase
from enginecore_triton.device import DeviceDescription
from enginecore_triton.launch import cdiv, launch
from enginecore_triton.ops._elements import element, id_of, logit_of, order
from enginecore_triton.ops._search import search

#: Elements of a row's short list.
CAPACITY = 1024
#: How many elements the list should have where only top-p bounds the row.
_WANTED = 384

#: Of `status_R`: 0 the row is decided, 1 its cut is open, 2 it has no filters.


@triton.jit
def _bound(keys, valid, wanted):
    """The largest key that at least `wanted` of the valid `keys` reach; all of them do where they are fewer."""
    low = tl.full((), -0x80000000, tl.int64)
    high = tl.max(tl.where(valid, keys, -0x80000000), 0).to(tl.int64)
    while low < high:
        middle = low + (high - low + 1) // 2
        reached = tl.sum((valid & (keys >= middle)).to(tl.int32), 0)
        enough = reached >= wanted
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    return low


@triton.jit
def _scan(
    logits_RV, stride, temperature_R, top_k_R, top_p_R, min_p_R,
    ids_R, status_R, count_R, largest_R, total_R, cut_R, list_RC,
    V, WANTED: tl.constexpr, CAPACITY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits = logits_RV + row * stride
    lane = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    where = tl.full((BLOCK,), 0x7FFFFFFF, tl.int32)
    broken = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, V, BLOCK):
        ids = start + lane
        x = tl.load(logits + ids, mask=ids < V, other=float("-inf")).to(tl.float32)
        broken |= ((x != x) | (x == float("inf"))).to(tl.int32)
        where = tl.where(x > best, ids, where)
        best = tl.maximum(best, x)
    largest = tl.max(best, 0)
    greedy = tl.min(tl.where(best == largest, where, 0x7FFFFFFF), 0)
    unusable = (tl.max(broken, 0) > 0) | (largest == float("-inf"))
    tl.store(ids_R + row, tl.where(unusable, -1, greedy).to(tl.int64))
    tl.store(largest_R + row, largest)
    tl.store(count_R + row, 0)
    tl.store(cut_R + row, element(largest, greedy))
    tl.store(total_R + row, tl.full((), 1.0, tl.float64))
    temperature = tl.load(temperature_R + row)
    status = tl.full((), 0, tl.int32)
    if (temperature > 0) & (unusable == 0):
        top_k, top_p, min_p = tl.load(top_k_R + row), tl.load(top_p_R + row), tl.load(min_p_R + row)
        limited = (top_k > 0) & (top_k < V)
        listed = limited | (top_p < 1)
        wanted = tl.where(limited, top_k, WANTED)
        bound = tl.full((), -0x80000000, tl.int64)
        if listed & (wanted <= BLOCK):
            bound = _bound(order(best), lane < V, wanted)
        count = tl.full((), 0, tl.int32)
        total = tl.full((), 0.0, tl.float64)
        for start in range(0, V, BLOCK):
            ids = start + lane
            x = tl.load(logits + ids, mask=ids < V, other=float("-inf")).to(tl.float32)
            total += tl.sum(tl.exp((x - largest) / temperature), 0).to(tl.float64)
            if listed & (count <= CAPACITY):
                # Ids that a grammar forbids would fill the list where it leaves few.
                chosen = (x > float("-inf")) & (order(x).to(tl.int64) >= bound)
                place = count + tl.cumsum(chosen.to(tl.int32), 0) - 1
                tl.store(list_RC + row * CAPACITY + place, element(x, ids), mask=chosen & (place < CAPACITY))
                count += tl.sum(chosen.to(tl.int32), 0)
        tl.store(total_R + row, total)
        tl.store(count_R + row, count)
        status = tl.where(listed | (min_p > 0), 1, 2).to(tl.int32)
    tl.store(status_R + row, status)


@triton.jit
def _prefix(elements, weights, wanted, low, high):
    """The largest of `elements` such that those not below it weigh at least `wanted`; `low` where that holds for it."""
    while low < high:
        middle = (low | high) - ((low ^ high) >> 1)  # the mean, rounded up, without a sum that overflows
        reached = elements >= middle
        enough = tl.sum(tl.where(reached, weights, 0.0), 0) >= wanted
        # Each end moves on to an element that there is, so that few halvings are needed.
        above = tl.min(tl.where(reached, elements, 0x7FFFFFFFFFFFFFFF), 0)
        below = tl.max(tl.where(reached, -0x7FFFFFFFFFFFFFFF, elements), 0)
        low = tl.where(enough, above, low)
        high = tl.where(enough, high, tl.maximum(below, low))
    return low


@triton.jit
def _choose(
    temperature_R, top_k_R, top_p_R, min_p_R, uniform_R,
    ids_R, status_R, count_R, largest_R, total_R, cut_R, list_RC,
    V, CAPACITY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    status, count = tl.load(status_R + row), tl.load(count_R + row)
    if (status == 1) & (count > 0) & (count <= CAPACITY):
        place = tl.arange(0, CAPACITY)
        valid = place < count
        elements = tl.load(list_RC + row * CAPACITY + place, mask=valid, other=-0x7FFFFFFFFFFFFFFF)
        temperature = tl.load(temperature_R + row).to(tl.float64)
        largest = tl.load(largest_R + row).to(tl.float64)
        p = tl.where(valid, tl.exp((logit_of(elements).to(tl.float64) - largest) / temperature), 0.0)
        top_k, top_p = tl.load(top_k_R + row), tl.load(top_p_R + row).to(tl.float64)
        limited = (top_k > 0) & (top_k < V)
        first = tl.max(elements, 0)
        lowest = tl.min(tl.where(valid, elements, first), 0)
        cut, mass = lowest, tl.load(total_R + row)
        if limited:
            cut = _prefix(elements, tl.where(valid, 1.0, 0.0), top_k, cut, first)
            mass = tl.sum(tl.where(elements >= cut, p, 0.0), 0)
        # With top-k the list holds all there is; without, the cut is known only where it leaves something of the list.
        known = limited | (count == V)
        if top_p < 1:
            known = known | (tl.sum(p, 0) >= top_p * mass)
            cut = _prefix(elements, p, top_p * mass, cut, first)
        likely = valid & (p >= tl.load(min_p_R + row).to(tl.float64))
        likely_cut = tl.min(tl.where(likely, elements, first), 0)
        known = known | (likely_cut > lowest)
        cut = tl.maximum(cut, likely_cut)
        if known:
            p = tl.where(elements >= cut, p, 0.0)
            total = tl.sum(p, 0)
            ids = id_of(elements)
            passed = (p > 0) & (tl.cumsum(p, 0) > tl.load(uniform_R + row) * total)
            drawn = tl.min(tl.where(passed, ids, 0x7FFFFFFF), 0)
            drawn = tl.where(drawn == 0x7FFFFFFF, tl.max(tl.where(p > 0, ids, 0), 0), drawn)
            tl.store(ids_R + row, drawn.to(tl.int64))
            tl.store(cut_R + row, cut)
            tl.store(total_R + row, total)
            tl.store(status_R + row, 0)


@triton.jit
def _write_probabilities(
    logits_RV, stride, temperature_R, ids_R, largest_R, total_R, cut_R, out_RV, V, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_RV + row * stride + ids, mask=ids < V, other=float("-inf")).to(tl.float32)
    temperature = tl.load(temperature_R + row)
    scale = tl.where(temperature > 0, temperature, 1.0)
    kept = (element(x, ids) >= tl.load(cut_R + row)) & (tl.load(ids_R + row) >= 0)
    p = tl.exp((x - tl.load(largest_R + row)) / scale) / tl.load(total_R + row).to(tl.float32)
    tl.store(out_RV + row * V + ids, tl.where(kept, p, 0.0), mask=ids < V)


class _Workspace:
    """What the kernels hand on, on the device of the logits."""

    def __init__(self, rows: int, device: torch.device) -> None:
        def empty(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.empty((rows, *shape), dtype=dtype, device=device)

        self.ids, self.status, self.count = empty(torch.int64), empty(torch.int32), empty(torch.int32)
        self.largest, self.total, self.cut = empty(torch.float32), empty(torch.float64), empty(torch.int64)
        self.list = empty(torch.int64, CAPACITY)


def _run(logits_RV: torch.Tensor, filters: tuple[torch.Tensor, ...], uniform_R: torch.Tensor, arch: str) -> _Workspace:
    rows, vocabulary = logits_RV.shape
    work = _Workspace(rows, logits_RV.device)
    config, size = configs.pick("sample", arch, vocabulary=vocabulary), logits_RV.stride(0)
    choose = configs.pick("sample_choose", arch)
    state = (work.ids, work.status, work.count, work.largest, work.total, work.cut, work.list)
    launch(_scan, (rows,), logits_RV, size, *filters, *state, vocabulary,
           WANTED=_WANTED, CAPACITY=CAPACITY, config=config)  # fmt: skip
    launch(_choose, (rows,), *filters, uniform_R, *state, vocabulary, CAPACITY=CAPACITY, config=choose)
    launch(search, (rows,), logits_RV, size, *filters, uniform_R, work.ids, work.status, work.largest, work.total,
           work.cut, vocabulary, config=configs.pick("sample_search", arch, vocabulary=vocabulary))  # fmt: skip
    return work


def sample(
    logits_RV: torch.Tensor,
    temperature_R: torch.Tensor,
    top_k_R: torch.Tensor,
    top_p_R: torch.Tensor,
    min_p_R: torch.Tensor,
    uniform_R: torch.Tensor,
    *,
    device: DeviceDescription,
) -> torch.Tensor:
    """The core's op `sample`. Rows of logits may be strided; nothing is overwritten and the host waits for nothing."""
    filters = (temperature_R, top_k_R, top_p_R, min_p_R)
    return _run(logits_RV, filters, uniform_R, device.architecture).ids


def sampling_probabilities(
    logits_RV: torch.Tensor,
    temperature_R: torch.Tensor,
    top_k_R: torch.Tensor,
    top_p_R: torch.Tensor,
    min_p_R: torch.Tensor,
    *,
    device: DeviceDescription,
) -> torch.Tensor:
    """The core's op `sampling_probabilities`: what `sample` draws from, float32 [R, V]."""
    filters = (temperature_R, top_k_R, top_p_R, min_p_R)
    nothing_R = torch.zeros(logits_RV.shape[0], dtype=torch.float64, device=logits_RV.device)
    work = _run(logits_RV, filters, nothing_R, device.architecture)
    out_RV = torch.empty(logits_RV.shape, dtype=torch.float32, device=logits_RV.device)
    rows, vocabulary = logits_RV.shape
    grid = (rows, cdiv(vocabulary, 1024))
    launch(_write_probabilities, grid, logits_RV, logits_RV.stride(0), temperature_R, work.ids, work.largest,
           work.total, work.cut, out_RV, vocabulary, BLOCK=1024)  # fmt: skip
    return out_RV


def supports(query: OpQuery, device: DeviceDescription) -> list[str]:
    """Any vocabulary below 2^31, and logits of any of the float dtypes."""
    return []


def aot_cases() -> list[AotCase]:
    row: dict[str, Any] = {"logits_RV": "*fp32:16", "stride": "i32:16", "temperature_R": "*fp32:16"}
    filters = {"top_k_R": "*i64:16", "top_p_R": "*fp32:16", "min_p_R": "*fp32:16"}
    uniform, ids = {"uniform_R": "*fp64:16"}, {"ids_R": "*i64:16"}
    found = {"largest_R": "*fp32:16", "total_R": "*fp64:16", "cut_R": "*i64:16"}
    state = {**ids, "status_R": "*i32:16", "count_R": "*i32:16", **found, "list_RC": "*i64:16"}
    size, large = {"V": "i32:16"}, {"vocabulary": 128256}
    scan = {"WANTED": _WANTED, "CAPACITY": CAPACITY}
    searched = {**row, **filters, **uniform, **ids, "status_R": "*i32:16", **found, **size}
    chosen = {"temperature_R": "*fp32:16", **filters, **uniform, **state, **size}
    written = {**row, **ids, **found, "out_RV": "*fp32:16", **size}
    first = AotCase(name="scan", kernel=_scan, signature={**row, **filters, **state, **size}, constants=scan,
                    sizes=large, config="sample")  # fmt: skip
    last = AotCase(name="search", kernel=search, signature=searched, sizes=large, config="sample_search")
    return [
        first,
        replace(first, name="scan, small", sizes={"vocabulary": 2000}),
        AotCase(name="choose", kernel=_choose, signature=chosen, constants={"CAPACITY": CAPACITY},
                config="sample_choose"),
        last,
        replace(last, name="search, small", sizes={"vocabulary": 2000}),
        AotCase(name="probabilities", kernel=_write_probabilities, signature=written,
                constants={"BLOCK": 1024}, options={"num_warps": 4}),
    ]  # fmt: skip
