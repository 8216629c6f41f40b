"""A planted machine: a root directory with the files that a real one would show."""

from __future__ import annotations

from pathlib import Path


class Machine:
    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, text: str = "") -> Path:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        return target

    def pci(self, address: str, vendor: int, device: int, class_code: int, driver: str | None = None) -> None:
        folder = f"sys/bus/pci/devices/{address}"
        for name, value in (("vendor", vendor), ("device", device), ("class", class_code)):
            self.write(f"{folder}/{name}", f"{value:#x}\n")
        if driver:
            self.write(f"sys/bus/pci/drivers/{driver}/module")
            (self.root / folder / "driver").symlink_to(f"../../../../bus/pci/drivers/{driver}")
