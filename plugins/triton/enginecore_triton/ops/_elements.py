"""An element of a row of logits as one 64-bit number: the logit's bits made orderable, then the falling id.

Elements compare as (logit, falling id), so that of two equal logits the one with the lower id is the larger element.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def order(x):
    """float32 as int32 that compares alike; both zeros are one."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def element(x, ids):
    """One number for (x, id) that rises with x and falls with id."""
    return (order(x).to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64)


@triton.jit
def logit_of(element):
    """The logit in an element."""
    key = (element >> 32).to(tl.int32)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def id_of(element):
    return 0x7FFFFFFF - (element & 0x7FFFFFFF).to(tl.int32)
