"""What the kernels need to know of a device: a few numbers, no names of vendors."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class DeviceDescription:
    """`architecture` keys the tuning configs ("sm_90", "gfx942"); one that has none of its own gets the default.

    `multiprocessors` (streaming multiprocessors, compute units, Xe cores) decides into how many pieces work is cut.
    `warp_size` is 32 or 64. `native_fp8`: the compiler converts OCP e4m3 in hardware; elsewhere the kernels unpack it.
    """

    architecture: str = "default"
    multiprocessors: int = 64
    warp_size: int = 32
    native_fp8: bool = False
