"""Products of few rows cut along the inputs, so that they fill the device: how many parts, and their sum in order.

The sum is taken by a second kernel rather than by atomic additions: results repeat to the last bit.
Shape suffixes: N parts, M rows, O outputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from enginecore_triton.device import DeviceDescription
from enginecore_triton.launch import cdiv, launch

#: More parts than this cost more in their sum than they gain.
_MOST = 16
BLOCK = 256


@triton.jit
def sum_parts(parts_NMO, bias_O, out_MO, rows, outputs, number, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < outputs
    total = tl.zeros((BLOCK,), tl.float32)
    for part in range(0, number):
        total += tl.load(parts_NMO + (part * rows + row) * outputs + column, mask=inside, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias_O + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_MO + row * outputs + column, total.to(out_MO.dtype.element_ty), mask=inside)


def number_of_parts(programs: int, steps: int, device: DeviceDescription) -> int:
    """Into how many parts to cut `steps` of a loop that `programs` programs run, two programs a multiprocessor."""
    return max(1, min(2 * device.multiprocessors // max(programs, 1), steps // 2, _MOST))


def reduce(parts_NMO: torch.Tensor, bias_O: torch.Tensor | None, out_MO: torch.Tensor) -> None:
    number, rows, outputs = parts_NMO.shape
    launch(sum_parts, (rows, cdiv(outputs, BLOCK)), parts_NMO, parts_NMO if bias_O is None else bias_O, out_MO, rows,
           outputs, number, HAS_BIAS=bias_O is not None, BLOCK=BLOCK, num_warps=2)  # fmt: skip
