"""The architectures that kernels are compiled for ahead of time, and what each gives one program."""

from __future__ import annotations

from dataclasses import dataclass

KIB = 1024


@dataclass(frozen=True, kw_only=True)
class Target:
    """`backend` and `arch` are Triton's; `shared_bytes` is the most that one program may take.

    Figures: CUDA C++ programming guide, table "technical specifications per compute capability" (less 1 KiB a block
    that the driver keeps); LDS sizes from AMD's instruction set guides for CDNA 2, 3 and 4 and RDNA 3.
    """

    name: str
    backend: str
    arch: int | str
    warp_size: int
    shared_bytes: int
    native_fp8: bool = False


TARGETS = {
    target.name: target
    for target in (
        Target(name="sm_80", backend="cuda", arch=80, warp_size=32, shared_bytes=163 * KIB),
        Target(name="sm_86", backend="cuda", arch=86, warp_size=32, shared_bytes=99 * KIB),
        Target(name="sm_89", backend="cuda", arch=89, warp_size=32, shared_bytes=99 * KIB, native_fp8=True),
        Target(name="sm_90", backend="cuda", arch=90, warp_size=32, shared_bytes=227 * KIB, native_fp8=True),
        Target(name="sm_100", backend="cuda", arch=100, warp_size=32, shared_bytes=227 * KIB, native_fp8=True),
        Target(name="gfx90a", backend="hip", arch="gfx90a", warp_size=64, shared_bytes=64 * KIB),
        Target(name="gfx942", backend="hip", arch="gfx942", warp_size=64, shared_bytes=64 * KIB),
        Target(name="gfx950", backend="hip", arch="gfx950", warp_size=64, shared_bytes=160 * KIB, native_fp8=True),
        Target(name="gfx1100", backend="hip", arch="gfx1100", warp_size=32, shared_bytes=64 * KIB),
    )
}

#: The parts with the least shared memory, one a vendor: no op's configs name them, so that they compile the default.
SMALLEST = ("sm_86", "gfx90a")
