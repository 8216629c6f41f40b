"""What the files of this machine say about NVIDIA GPUs, without opening a device or loading a library."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from enginecore.device import PciDevice, find_library, pci_devices

NVIDIA = 0x10DE
DRIVER_LIBRARY = "libcuda.so.1"

_DISPLAY_CLASSES = (0x0300, 0x0302)
_LIBRARY_DIRS = ("usr/local/nvidia/lib64", "usr/lib/wsl/lib", "usr/lib/aarch64-linux-gnu/tegra")


@dataclass(frozen=True, kw_only=True)
class Facts:
    """`gpus`: on the PCI bus; `nodes`: device files of GPUs; `driver`: version of the loaded kernel driver.

    `integrated` is a GPU that is not on a PCI bus (a Tegra module) or that a host lends (WSL).
    """

    gpus: tuple[PciDevice, ...] = ()
    nodes: tuple[str, ...] = ()
    integrated: str | None = None
    driver: str | None = None
    library: str | None = None
    hidden: str | None = None

    @property
    def present(self) -> bool:
        return bool(self.gpus or self.nodes or self.integrated)


def read_facts(root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> Facts:
    gpus = [gpu for gpu in pci_devices(root) if gpu.vendor_id == NVIDIA and gpu.class_code >> 8 in _DISPLAY_CLASSES]
    nodes = [str(path) for path in sorted((root / "dev").glob("nvidia[0-9]*"))]
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    return Facts(
        # A GPU that is handed to a virtual machine is not this system's to use.
        gpus=tuple(gpu for gpu in gpus if gpu.driver != "vfio-pci"),
        nodes=tuple(nodes),
        integrated=_integrated(root),
        driver=_driver_version(root),
        library=find_library(DRIVER_LIBRARY, root=root, extra_dirs=_LIBRARY_DIRS),
        hidden=visible if visible is not None and visible.strip() in ("", "-1") else None,
    )


def _integrated(root: Path) -> str | None:
    if (root / "dev/nvhost-gpu").exists() or (root / "dev/nvgpu").exists():
        return "a Tegra GPU"
    if (root / "dev/dxg").exists() and (root / "usr/lib/wsl/lib" / DRIVER_LIBRARY).exists():
        return "a GPU lent by Windows"
    return None


def _driver_version(root: Path) -> str | None:
    """From a line such as "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build"."""
    try:
        text = (root / "proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    match = re.search(r"NVRM version:.*?\s(\d+\.\d+(?:\.\d+)?)\s", text)
    return match.group(1) if match else "unknown"
