"""What a GPU can do, by its compute capability."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from enginecore.device import Capabilities, GraphSupport

#: Compute capabilities from which on the hardware computes in a format (CUDA C++ programming guide, "arithmetic
#: instructions" and "warp matrix functions").
BFLOAT16, FLOAT8 = (8, 0), (8, 9)


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """What is asked of a GPU when a backend is made. `integrated`: it shares the host's memory."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    integrated: bool = False
    uuid: str = ""

    @classmethod
    def of(cls, properties: Any) -> Gpu:
        """From torch's properties of a device."""
        return cls(
            name=properties.name,
            capability=(properties.major, properties.minor),
            multiprocessors=properties.multi_processor_count,
            integrated=bool(getattr(properties, "is_integrated", False)),
            uuid=str(getattr(properties, "uuid", "")),
        )

    @property
    def architecture(self) -> str:
        return f"sm_{self.capability[0]}{self.capability[1]}"


def capabilities_of(gpu: Gpu, kernels: Capabilities, *, graphs: bool, world_size: int) -> Capabilities:
    """`kernels` is what attention and ops compute on any GPU; the hardware takes from it and adds its own."""
    dtypes = kernels.dtypes if gpu.capability >= BFLOAT16 else kernels.dtypes - {"bfloat16"}
    return replace(
        kernels,
        dtypes=dtypes,
        kv_dtypes=kernels.kv_dtypes - (kernels.dtypes - dtypes),
        graph_support=GraphSupport.UNIFORM_SINGLE_TOKEN_DECODE if graphs else GraphSupport.NEVER,
        pinned_host=True,
        asynchronous=True,
        unified_memory=gpu.integrated,
        per_process_accounting=True,
        max_world_size=max(1, world_size),
        isa=(gpu.architecture,),
    )
