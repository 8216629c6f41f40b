"""Masks of visible devices and partitions of a GPU (MIG), read from their text.

Which devices a process sees is the driver's business; what is read here only makes messages and books right.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

_PROFILE = re.compile(r"MIG (\d+)[cg]?(?:\.(\d+)g)?\.(\d+)gb")


@dataclass(frozen=True)
class Visible:
    """One entry of CUDA_VISIBLE_DEVICES: `kind` is "index", "gpu" (a UUID or the beginning of one) or "mig"."""

    kind: str
    value: str


def parse_mask(text: str) -> list[Visible]:
    """The devices that a mask shows, in order. As the driver reads it, it ends at the first entry that is none."""
    found: list[Visible] = []
    for entry in (part.strip() for part in text.split(",")):
        if re.fullmatch(r"\d+", entry):
            visible = Visible("index", str(int(entry)))
        elif re.fullmatch(r"GPU-[0-9a-fA-F-]+", entry):
            visible = Visible("gpu", entry)
        elif re.fullmatch(r"MIG-[0-9a-fA-F-]+|MIG-GPU-[0-9a-fA-F-]+/\d+/\d+", entry):
            visible = Visible("mig", entry)
        else:
            break
        if visible in found:
            return []  # the driver shows nothing when a device stands there twice
        found.append(visible)
    return found


def mask_hint(environ: Mapping[str, str] = os.environ) -> str:
    """What to say of CUDA_VISIBLE_DEVICES beside a device that cannot be seen; empty when there is no mask."""
    text = environ.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return ""
    devices = parse_mask(text)
    told = f"CUDA_VISIBLE_DEVICES={text!r} names {len(devices)} device(s)"
    entries = [part.strip() for part in text.split(",")]
    if len(devices) < len(entries):
        if len(set(entries)) < len(entries):
            return f"{told}: one stands there twice, which hides all"
        return f"{told}: what follows {entries[len(devices)]!r} does not count, for that is no device"
    if sum(device.kind == "mig" for device in devices) > 1:
        return f"{told}; a process can use one MIG slice only"
    return told


def slice_of(name: str) -> str | None:
    """The MIG profile in a device's name ("NVIDIA H100 80GB HBM3 MIG 1g.10gb"), None for a whole GPU."""
    match = _PROFILE.search(name)
    return match.group().removeprefix("MIG ") if match else None
