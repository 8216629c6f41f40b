"""What an AMD GPU can do, by its target ("gfx942"). The table is data; a target that it lacks gets the cautious row."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from enginecore.device import Capabilities, GraphSupport


@dataclass(frozen=True, kw_only=True)
class Target:
    """`float8` is the encoding that the matrix units compute in: "ocp" (as files have it), "fnuz" (bias one higher, no
    negative zero, no infinity) or None. Sources: AMD's instruction set guides for CDNA 2, 3 and 4 and RDNA 3 and 4."""

    wave: int
    bfloat16: bool = True
    float8: str | None = None


TARGETS = {
    "gfx90a": Target(wave=64),
    "gfx942": Target(wave=64, float8="fnuz"),
    "gfx950": Target(wave=64, float8="ocp"),
    "gfx1100": Target(wave=32),
    "gfx1101": Target(wave=32),
    "gfx1102": Target(wave=32),
    "gfx1200": Target(wave=32, float8="ocp"),
    "gfx1201": Target(wave=32, float8="ocp"),
}


def target_row(target: str) -> Target:
    """CDNA and older GCN parts run waves of 64, RDNA of 32."""
    if target in TARGETS:
        return TARGETS[target]
    return Target(wave=64 if target.startswith("gfx9") else 32, bfloat16=not target.startswith(("gfx900", "gfx906")))


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """What is asked of a GPU when a backend is made."""

    name: str
    target: str
    multiprocessors: int
    wave: int
    integrated: bool = False

    @classmethod
    def of(cls, properties: Any) -> Gpu:
        """From torch's properties. The target comes with features behind it ("gfx942:sramecc+:xnack-")."""
        target = str(getattr(properties, "gcnArchName", "")).partition(":")[0]
        return cls(
            name=properties.name,
            target=target,
            multiprocessors=properties.multi_processor_count,
            wave=int(getattr(properties, "warp_size", 0)) or target_row(target).wave,
            integrated=bool(getattr(properties, "is_integrated", False)),
        )

    @property
    def row(self) -> Target:
        return target_row(self.target)


def capabilities_of(gpu: Gpu, kernels: Capabilities, *, graphs: bool, world_size: int) -> Capabilities:
    """`kernels` is what attention and ops compute on any GPU; the hardware takes from it and adds its own."""
    lost = frozenset() if gpu.row.bfloat16 else frozenset({"bfloat16"})
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
        isa=(gpu.target,),
    )
