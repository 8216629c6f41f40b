"""Times on whatever accelerator torch finds; where there is none, for a trial under the interpreter, by the clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from enginecore_triton import DeviceDescription


def device() -> torch.device:
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return found or torch.device("cpu")


def description(where: torch.device) -> DeviceDescription:
    """Of the device that torch runs on, for the benches only: plugins read it more carefully."""
    if where.type == "cpu":
        return DeviceDescription()
    properties: Any = torch.get_device_module(where).get_device_properties(0)
    name = getattr(properties, "gcnArchName", "").split(":")[0]
    if not name and hasattr(properties, "major"):
        name = f"sm_{properties.major}{properties.minor}"
    return DeviceDescription(
        architecture=name or "default",
        multiprocessors=getattr(properties, "multi_processor_count", 64),
        warp_size=getattr(properties, "warp_size", 32),
        native_fp8=name in ("sm_89", "sm_90", "sm_100", "sm_120", "gfx950"),
    )


def seconds(runs: list[Callable[[], object]], repeat: int = 30) -> float:
    """Median time of a call. `runs` do the same work on different memory in turn, so that no cache keeps its answer."""
    where = device()
    for run in runs:
        run()
    if where.type == "cpu":
        started = time.perf_counter()
        runs[0]()
        return time.perf_counter() - started
    module, times = torch.get_device_module(where), []
    for i in range(repeat):
        before, after = (torch.Event(where, enable_timing=True) for _ in range(2))
        before.record()
        runs[i % len(runs)]()
        after.record()
        times.append((before, after))
    module.synchronize()
    return median(before.elapsed_time(after) for before, after in times) / 1e3


def copy_bandwidth(num_bytes: int = 2**30) -> float:
    """Bytes a second that a copy reads and writes."""
    where = device()
    if where.type == "cpu":
        num_bytes = 2**20
    source = torch.empty(num_bytes, dtype=torch.uint8, device=where)
    target = torch.empty_like(source)
    return 2 * num_bytes / seconds([lambda: target.copy_(source)])
