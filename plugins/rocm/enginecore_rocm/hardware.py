"""What the files of this machine say about AMD GPUs, without opening a device or loading a library."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from enginecore.device import PciDevice, pci_devices

AMD = 0x1002
KFD = "dev/kfd"

#: Display controllers, and the "processing accelerator" that an MI300 says it is.
_CLASSES = (0x0300, 0x0302, 0x0380, 0x1200)


@dataclass(frozen=True, kw_only=True)
class Facts:
    """`gpus`: on the PCI bus; `targets`: of the GPUs that the compute driver shows ("gfx942"); `kfd`: its device file,
    None when missing; `writable`: whether this user may open it."""

    gpus: tuple[PciDevice, ...] = ()
    targets: tuple[str, ...] = ()
    kfd: str | None = None
    writable: bool = False
    module: str | None = None
    hidden: str | None = None
    override: str | None = None

    @property
    def present(self) -> bool:
        return bool(self.gpus or self.targets)


def read_facts(root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> Facts:
    gpus = [gpu for gpu in pci_devices(root) if gpu.vendor_id == AMD and gpu.class_code >> 8 in _CLASSES]
    kfd = root / KFD
    masks = {name: environ[name] for name in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES") if name in environ}
    hidden = [f"{name}={value!r}" for name, value in masks.items() if value.strip() in ("", "-1")]
    return Facts(
        # A GPU that is handed to a virtual machine is not this system's to use.
        gpus=tuple(gpu for gpu in gpus if gpu.driver != "vfio-pci"),
        targets=tuple(_targets(root)),
        kfd=str(kfd) if kfd.exists() else None,
        writable=os.access(kfd, os.R_OK | os.W_OK),
        module=_module_version(root),
        hidden=hidden[0] if hidden else None,
        override=environ.get("HSA_OVERRIDE_GFX_VERSION"),
    )


def _module_version(root: Path) -> str | None:
    module = root / "sys/module/amdgpu"
    try:
        return (module / "version").read_text().strip()
    except OSError:
        return "of the kernel" if module.exists() else None


def _targets(root: Path) -> list[str]:
    """The compute driver's nodes that are GPUs. Version 90402 is gfx942, 90010 is gfx90a (the step is hexadecimal)."""
    found = []
    for path in sorted((root / "sys/class/kfd/kfd/topology/nodes").glob("*/properties")):
        try:
            properties = dict(line.split(maxsplit=1) for line in path.read_text().splitlines() if " " in line)
            version = int(properties.get("gfx_target_version", "0"))
        except (OSError, ValueError):
            continue
        if version:
            found.append(f"gfx{version // 10000}{version // 100 % 100}{version % 100:x}")
    return found
