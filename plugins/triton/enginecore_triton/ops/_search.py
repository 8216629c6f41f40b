"""The rows whose cut no short list holds: found by halving its interval, a read of the row for each half.

What a cut is says `ops/sample.py`. Shape suffixes: R rows, V vocabulary.
"""

from __future__ import annotations

import triton
import triton.language as tl

from enginecore_triton.ops._elements import element, logit_of, order


@triton.jit
def _reach(logits, key, largest, temperature, V, BLOCK: tl.constexpr):
    """Of the elements whose key is at least `key`: number, mass, smallest key; and the largest key below."""
    lane = tl.arange(0, BLOCK)
    count = tl.full((), 0, tl.int64)
    mass = tl.full((), 0.0, tl.float64)
    above = tl.full((), 0x7FFFFFFF, tl.int64)
    below = tl.full((), -0x80000000, tl.int64)
    for start in range(0, V, BLOCK):
        ids = start + lane
        x = tl.load(logits + ids, mask=ids < V, other=float("-inf")).to(tl.float32)
        keys = order(x).to(tl.int64)
        reached = (ids < V) & (keys >= key)
        count += tl.sum(reached.to(tl.int64), 0)
        mass += tl.sum(tl.where(reached, tl.exp((x - largest) / temperature), 0.0), 0).to(tl.float64)
        above = tl.minimum(above, tl.min(tl.where(reached, keys, 0x7FFFFFFF), 0))
        below = tl.maximum(below, tl.max(tl.where((ids < V) & (keys < key), keys, -0x80000000), 0))
    return count, mass, above, below


@triton.jit
def _largest_key(logits, by_mass: tl.constexpr, wanted, low, high, largest, temperature, V, BLOCK: tl.constexpr):
    """The largest key of the row such that those that reach it number (or weigh) at least `wanted`."""
    while low < high:
        middle = low + (high - low + 1) // 2
        count, mass, above, below = _reach(logits, middle, largest, temperature, V, BLOCK)
        enough = (mass >= wanted) if by_mass else (count >= wanted)
        # Each end moves on to a key that the row has, so that few halvings are needed among few elements.
        low = tl.where(enough, above, low)
        high = tl.where(enough, high, tl.maximum(below, low))
    return low


@triton.jit
def find_cut(logits, largest, temperature, total, top_k, top_p, min_p, V, BLOCK: tl.constexpr):
    """The cut of a row: from the number of elements, then their mass, then their least likelihood."""
    lane = tl.arange(0, BLOCK)
    key = order(tl.full((), float("-inf"), tl.float32)).to(tl.int64)
    high = order(largest).to(tl.int64)
    ties = tl.full((), 0x7FFFFFFF, tl.int64)
    if (top_k > 0) & (top_k < V):
        key = _largest_key(logits, False, top_k, key, high, largest, temperature, V, BLOCK)
        count, mass, _above, _below = _reach(logits, key + 1, largest, temperature, V, BLOCK)
        ties = top_k - count
        total = mass + ties * tl.exp((logit_of(key << 32) - largest) / temperature).to(tl.float64)
    if top_p < 1:
        wanted = top_p.to(tl.float64) * total
        found = _largest_key(logits, True, wanted, key, high, largest, temperature, V, BLOCK)
        count, mass, _above, _below = _reach(logits, found + 1, largest, temperature, V, BLOCK)
        each = tl.exp((logit_of(found << 32) - largest) / temperature).to(tl.float64)
        needed = tl.ceil(tl.minimum((wanted - mass) / tl.maximum(each, 1e-300), 2147483647.0)).to(tl.int64)
        ties = tl.minimum(tl.where(found > key, 0x7FFFFFFF, ties), tl.maximum(needed, 1))
        key = found
    cut = tl.full((), 0x7FFFFFFFFFFFFFFF, tl.int64)
    seen = tl.full((), 0, tl.int64)
    for start in range(0, V, BLOCK):
        ids = start + lane
        x = tl.load(logits + ids, mask=ids < V, other=float("-inf")).to(tl.float32)
        keys = order(x).to(tl.int64)
        tied = (ids < V) & (keys == key)
        rank = seen + tl.cumsum(tied.to(tl.int64), 0)
        seen += tl.sum(tied.to(tl.int64), 0)
        kept = (ids < V) & ((keys > key) | (tied & (rank <= ties)))
        kept &= tl.exp((x - largest) / temperature) >= min_p
        cut = tl.minimum(cut, tl.min(tl.where(kept, element(x, ids), 0x7FFFFFFFFFFFFFFF), 0))
    return cut


@triton.jit
def search(
    logits_RV, stride, temperature_R, top_k_R, top_p_R, min_p_R, uniform_R,
    ids_R, status_R, largest_R, total_R, cut_R,
    V, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    status = tl.load(status_R + row)
    if status != 0:
        logits = logits_RV + row * stride
        lane = tl.arange(0, BLOCK)
        largest, temperature = tl.load(largest_R + row), tl.load(temperature_R + row)
        total = tl.load(total_R + row)
        cut = tl.full((), -0x7FFFFFFFFFFFFFFF, tl.int64)
        if status == 1:
            top_k, top_p, min_p = tl.load(top_k_R + row), tl.load(top_p_R + row), tl.load(min_p_R + row)
            cut = find_cut(logits, largest, temperature, total, top_k, top_p, min_p, V, BLOCK)
            total = tl.full((), 0.0, tl.float64)
            for start in range(0, V, BLOCK):
                ids = start + lane
                x = tl.load(logits + ids, mask=ids < V, other=float("-inf")).to(tl.float32)
                kept = (ids < V) & (element(x, ids) >= cut)
                total += tl.sum(tl.where(kept, tl.exp((x - largest) / temperature), 0.0), 0).to(tl.float64)
        target = tl.load(uniform_R + row) * total
        drawn = tl.full((), 0x7FFFFFFF, tl.int32)
        last = tl.full((), 0, tl.int32)
        passed = tl.full((), 0.0, tl.float64)
        start = tl.full((), 0, tl.int32)
        while (start < V) & (drawn == 0x7FFFFFFF):
            ids = start + lane
            x = tl.load(logits + ids, mask=ids < V, other=float("-inf")).to(tl.float32)
            kept = (ids < V) & (element(x, ids) >= cut)
            p = tl.where(kept, tl.exp((x - largest) / temperature), 0.0)
            mass = tl.sum(p, 0).to(tl.float64)
            last = tl.maximum(last, tl.max(tl.where(p > 0, ids, 0), 0))
            if passed + mass > target:
                cumulative = passed + tl.cumsum(p.to(tl.float64), 0)
                drawn = tl.min(tl.where((p > 0) & (cumulative > target), ids, 0x7FFFFFFF), 0)
                drawn = tl.where(drawn == 0x7FFFFFFF, last, drawn)
            passed += mass
            start += BLOCK
        tl.store(ids_R + row, tl.where(drawn == 0x7FFFFFFF, last, drawn).to(tl.int64))
        tl.store(cut_R + row, cut)
        tl.store(total_R + row, total)
