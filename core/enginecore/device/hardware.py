"""Evidence of hardware from files alone: what is on the PCI bus, whether a library is there to be loaded, what a
process holds of a GPU.

For probes: nothing here opens a device file or loads a native library. `root` stands for "/", so that tests can plant
a machine of their own.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_LIBRARY_DIRS = (
    "usr/lib",
    "usr/lib64",
    "usr/local/lib",
    "lib64",
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
)


@dataclass(frozen=True, kw_only=True)
class PciDevice:
    """One function on the PCI bus. `driver` is the kernel driver it is bound to, None when there is none."""

    address: str
    vendor_id: int
    device_id: int
    class_code: int
    driver: str | None


def pci_devices(root: Path = Path("/")) -> list[PciDevice]:
    """All of them, by address; empty where the system shows no PCI bus."""
    try:
        paths = sorted((root / "sys/bus/pci/devices").iterdir())
    except OSError:
        return []
    return [device for path in paths if (device := _read_device(path)) is not None]


def _read_device(path: Path) -> PciDevice | None:
    try:
        vendor_id, device_id, class_code = (
            int((path / name).read_text().strip(), 16) for name in ("vendor", "device", "class")
        )
    except (OSError, ValueError):
        return None
    try:
        driver = os.path.basename(os.readlink(path / "driver"))
    except OSError:
        driver = None
    return PciDevice(address=path.name, vendor_id=vendor_id, device_id=device_id, class_code=class_code, driver=driver)


def find_library(name: str, *, root: Path = Path("/"), extra_dirs: tuple[str, ...] = ()) -> str | None:
    """Where the loader would find `name` ("libfoo.so.1"): a path, or the loader's cache; None when it would not."""
    searched = [path for path in os.environ.get("LD_LIBRARY_PATH", "").split(":") if path]
    for folder in (*searched, *(str(root / path) for path in (*extra_dirs, *_LIBRARY_DIRS))):
        if os.path.exists(os.path.join(folder, name)):
            return os.path.join(folder, name)
    try:
        # The cache is a table of NUL-terminated names and paths, so a name in it is found as bytes.
        cached = b"\0" + name.encode() + b"\0" in (root / "etc/ld.so.cache").read_bytes()
    except OSError:
        return None
    return "the loader's cache" if cached else None


def drm_process_bytes(*, root: Path = Path("/"), pid: str = "self") -> int | None:
    """Bytes of GPUs' own memory that a process (this one) holds, as kernel drivers tell it of its open device files
    (Linux, Documentation/gpu/drm-usage-stats.rst); None when no driver does."""
    clients: dict[tuple[str, str], int] = {}
    try:
        files = sorted((root / "proc" / pid / "fdinfo").iterdir())
    except OSError:
        return None
    for file in files:
        try:
            fields = dict(line.split(":", 1) for line in file.read_text().splitlines() if line.startswith("drm-"))
        except OSError:  # closed meanwhile
            continue
        client = fields.get("drm-client-id", "").strip()
        sizes = [_kib(text) for name, text in fields.items() if name.startswith("drm-resident-vram")]
        if client and sizes:  # several files may belong to one client
            clients[fields.get("drm-pdev", "").strip(), client] = sum(sizes)
    return sum(clients.values()) if clients else None


def _kib(text: str) -> int:
    """A figure such as "1024 KiB", in bytes."""
    number, _, unit = text.strip().partition(" ")
    return int(number) * {"": 1, "KiB": 2**10, "MiB": 2**20}.get(unit.strip(), 0)
