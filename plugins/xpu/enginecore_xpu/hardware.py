"""What the files of this machine say about Intel GPUs, without opening a device or loading a library."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from enginecore.device import PciDevice, find_library, pci_devices

INTEL = 0x8086
DRIVER_LIBRARIES = ("libze_loader.so.1", "libze_intel_gpu.so.1")

_DISPLAY_CLASSES = (0x0300, 0x0380)

#: Inclusive ranges of PCI device ids of the GPUs that torch's XPU builds run on (Linux, include/drm/intel/pciids.h).
#: Older integrated graphics, which most Intel desktops have, do not count.
FAMILIES = {
    "Data Center GPU Max (Ponte Vecchio)": ((0x0B69, 0x0B6E), (0x0BD0, 0x0BDB)),
    "Arc A series and Data Center GPU Flex (Alchemist)": ((0x4F80, 0x4F88), (0x5690, 0x5698), (0x56A0, 0x56C2)),
    "Arc B series (Battlemage)": ((0xE202, 0xE223),),
    "Core Ultra (Meteor Lake, Arrow Lake)": ((0x7D40, 0x7D67), (0x7DD1, 0x7DD5)),
    "Core Ultra (Lunar Lake)": ((0x6420, 0x6420), (0x64A0, 0x64B0)),
    "Core Ultra (Panther Lake)": ((0xB080, 0xB0BF),),
}


def family(device_id: int) -> str | None:
    """The family that torch's XPU builds support, None for any other GPU."""
    for name, ranges in FAMILIES.items():
        if any(low <= device_id <= high for low, high in ranges):
            return name
    return None


@dataclass(frozen=True, kw_only=True)
class Facts:
    """`gpus` are supported ones, `others` the rest of Intel's; `nodes`: render device files of Intel GPUs here;
    `writable`: whether this user may open one; `missing`: driver libraries that are not installed."""

    gpus: tuple[PciDevice, ...] = ()
    others: tuple[PciDevice, ...] = ()
    nodes: tuple[str, ...] = ()
    writable: bool = False
    missing: tuple[str, ...] = ()


def read_facts(root: Path = Path("/")) -> Facts:
    intel = [
        gpu
        for gpu in pci_devices(root)
        # A GPU that is handed to a virtual machine is not this system's to use.
        if gpu.vendor_id == INTEL and gpu.class_code >> 8 in _DISPLAY_CLASSES and gpu.driver != "vfio-pci"
    ]
    nodes = [path for path in sorted((root / "dev/dri").glob("renderD*")) if _vendor(root, path.name) == INTEL]
    return Facts(
        gpus=tuple(gpu for gpu in intel if family(gpu.device_id)),
        others=tuple(gpu for gpu in intel if not family(gpu.device_id)),
        nodes=tuple(str(path) for path in nodes),
        writable=any(os.access(path, os.R_OK | os.W_OK) for path in nodes),
        missing=tuple(name for name in DRIVER_LIBRARIES if find_library(name, root=root) is None),
    )


def _vendor(root: Path, node: str) -> int | None:
    try:
        return int((root / "sys/class/drm" / node / "device/vendor").read_text().strip(), 16)
    except (OSError, ValueError):
        return None
