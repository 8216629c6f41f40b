"""What an Intel GPU can do, by what torch tells of it."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from enginecore.device import Capabilities, GraphSupport

#: Names of GPUs with memory of their own: "Intel(R) Arc(TM) B580 Graphics", but not "Intel(R) Arc(TM) Graphics".
_DISCRETE = re.compile(r"\b[AB]\d{2,3}\b|Data Center|Max|Flex")


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """What is asked of a GPU when a backend is made. `float64`: it has such arithmetic, or emulates it."""

    name: str
    total_bytes: int
    cores: int = 64
    float16: bool = True
    float64: bool = True
    integrated: bool = False

    @classmethod
    def of(cls, properties: Any) -> Gpu:
        """From torch's properties. Eight vector engines make an Xe core."""
        return cls(
            name=properties.name,
            total_bytes=int(properties.total_memory),
            cores=max(1, int(getattr(properties, "gpu_eu_count", 512)) // 8),
            float16=bool(getattr(properties, "has_fp16", True)),
            float64=bool(getattr(properties, "has_fp64", True)),
            integrated=bool(getattr(properties, "is_integrated", not _DISCRETE.search(properties.name))),
        )


def capabilities_of(gpu: Gpu, kernels: Capabilities, *, graphs: bool, world_size: int) -> Capabilities:
    """`kernels` is what attention and ops compute on any GPU; the hardware takes from it and adds its own."""
    lost = frozenset() if gpu.float16 else frozenset({"float16"})
    return replace(
        kernels,
        dtypes=kernels.dtypes - lost,
        kv_dtypes=kernels.kv_dtypes - lost,
        graph_support=GraphSupport.UNIFORM_SINGLE_TOKEN_DECODE if graphs else GraphSupport.NEVER,
        pinned_host=True,
        asynchronous=True,
        unified_memory=gpu.integrated,
        per_process_accounting=True,
        max_world_size=max(1, world_size),
        isa=(gpu.name,),
    )
