"""Devices as a roofline sees them: peak rates by dtype, memory, the cost of a launch, the link to their like.

Every constant is one that the vendor publishes, dense (vendors quote twice as much for 2:4 sparsity) and per direction
(they quote the sum of both). A peak is a bound that no kernel reaches: `compute_efficiency` and
`bandwidth_efficiency` of `SimOptions` scale it to what was measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from enginecore.errors import ParameterError

TERA, GIGA = 1e12, 1e9

#: NVIDIA, "Getting Started with CUDA Graphs" (developer.nvidia.com/blog/cuda-graphs, 2019; V100, CUDA 10.1): kernels of
#: 2.9 us take 3.4 us each when replayed from a graph (and 3.8 us when launched one by one, without waiting).
GRAPH_LAUNCH_S = (3.4 - 2.9) * 1e-6


@dataclass(frozen=True, kw_only=True)
class DeviceProfile:
    """`flops` maps a dtype to peak matrix operations a second; `link_bytes_per_s` is one device's rate to the others of
    a tensor-parallel group in one direction, None where there is no such link; `launch_s` is what each kernel costs
    beside its own time."""

    name: str
    flops: dict[str, float]
    memory_bytes: int
    bytes_per_s: float
    launch_s: float
    link_bytes_per_s: float | None
    source: str


_HOPPER_FLOPS = {"bfloat16": 989.4 * TERA, "float16": 989.4 * TERA, "float32": 67 * TERA}

_ALL = (
    DeviceProfile(
        name="a100-40g",
        flops={"bfloat16": 312 * TERA, "float16": 312 * TERA, "float32": 19.5 * TERA},
        memory_bytes=40 * 10**9,
        bytes_per_s=1555 * GIGA,
        launch_s=GRAPH_LAUNCH_S,
        link_bytes_per_s=600 * GIGA / 2,
        source="NVIDIA A100 Tensor Core GPU datasheet, column A100 40GB: BF16 and FP16 312 TFLOPS, FP32 19.5 TFLOPS, "
        "40 GB, 1,555 GB/s, NVLink 600 GB/s",
    ),
    DeviceProfile(
        name="h100",
        flops=_HOPPER_FLOPS,
        memory_bytes=80 * 10**9,
        bytes_per_s=3.35 * TERA,
        launch_s=GRAPH_LAUNCH_S,
        link_bytes_per_s=900 * GIGA / 2,
        source="NVIDIA H100 Tensor Core GPU datasheet, column H100 SXM: BF16 and FP16 1,979 TFLOPS with sparsity "
        "(989.4 dense), FP32 67 TFLOPS, 80 GB, 3.35 TB/s, NVLink 900 GB/s",
    ),
    DeviceProfile(
        name="h200",
        flops=_HOPPER_FLOPS,
        memory_bytes=141 * 10**9,
        bytes_per_s=4.8 * TERA,
        launch_s=GRAPH_LAUNCH_S,
        link_bytes_per_s=900 * GIGA / 2,
        source="NVIDIA H200 Tensor Core GPU datasheet, column H200 SXM: BF16 and FP16 1,979 TFLOPS with sparsity "
        "(989.4 dense), FP32 67 TFLOPS, 141 GB, 4.8 TB/s, NVLink 900 GB/s",
    ),
    DeviceProfile(
        name="mi300x",
        flops={"bfloat16": 1307.4 * TERA, "float16": 1307.4 * TERA, "float32": 163.4 * TERA},
        memory_bytes=192 * 10**9,
        bytes_per_s=5.3 * TERA,
        launch_s=GRAPH_LAUNCH_S,  # no figure of AMD's is known to us: NVIDIA's stands in
        link_bytes_per_s=7 * 128 * GIGA / 2,
        source="AMD Instinct MI300X Accelerator data sheet: peak BF16 and FP16 matrix 1,307.4 TFLOPS, FP32 matrix "
        "163.4 TFLOPS, 192 GB HBM3, 5.3 TB/s, seven Infinity Fabric links of 128 GB/s",
    ),
    DeviceProfile(
        name="cpu-2core",
        flops={"bfloat16": 378 * GIGA},
        memory_bytes=16 * 10**9,
        bytes_per_s=29 * GIGA,
        launch_s=0.0,  # a call of a function, not a launch
        link_bytes_per_s=None,
        source="measured by us on a two-core virtual machine with AVX-512 and bfloat16 instructions: 29 GB/s memory "
        "read, 378 GFLOP/s in a bfloat16 product of 1024x1024; 16 GB is a round figure for such machines",
    ),
)

PROFILES = {profile.name: profile for profile in _ALL}


def find_profile(name: Any) -> DeviceProfile:
    """The profile of that name; ParameterError, listing all, when there is none."""
    profile = PROFILES.get(name) if isinstance(name, str) else None
    if profile is None:
        raise ParameterError(f"sim has no profile {name!r}; it has {', '.join(PROFILES)}", param="profile")
    return profile
