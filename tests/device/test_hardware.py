"""Evidence from files of a planted machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from enginecore.device import PciDevice, find_library, pci_devices
from enginecore.device.hardware import drm_process_bytes


def plant(root: Path, address: str, **files: str) -> Path:
    folder = root / "sys/bus/pci/devices" / address
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name.rstrip("_")).write_text(text)
    return folder


def test_pci_devices(tmp_path: Path) -> None:
    card = plant(tmp_path, "0000:02:00.0", vendor="0x10de\n", device="0x2335\n", class_="0x030200\n")
    (card / "driver").symlink_to("../../../../bus/pci/drivers/acme")
    plant(tmp_path, "0000:01:00.0", vendor="0x8086\n", device="0x1234\n", class_="0x060000\n")
    plant(tmp_path, "0000:03:00.0", vendor="garbage", device="0x1", class_="0x1")
    plant(tmp_path, "0000:04:00.0")
    assert pci_devices(tmp_path) == [
        PciDevice(address="0000:01:00.0", vendor_id=0x8086, device_id=0x1234, class_code=0x060000, driver=None),
        PciDevice(address="0000:02:00.0", vendor_id=0x10DE, device_id=0x2335, class_code=0x030200, driver="acme"),
    ]


def test_no_pci_bus(tmp_path: Path) -> None:
    assert pci_devices(tmp_path) == []


def test_find_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    assert find_library("libacme.so.1", root=tmp_path) is None
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/ld.so.cache").write_bytes(b"\0libacme.so.12\0/x/libacme.so.12\0")
    assert find_library("libacme.so.1", root=tmp_path) is None, "a longer name is another library"
    (tmp_path / "etc/ld.so.cache").write_bytes(b"\0libacme.so.1\0/x/libacme.so.1\0")
    assert find_library("libacme.so.1", root=tmp_path) == "the loader's cache"
    (tmp_path / "opt/acme").mkdir(parents=True)
    (tmp_path / "opt/acme/libacme.so.1").touch()
    found = find_library("libacme.so.1", root=tmp_path, extra_dirs=("opt/acme",))
    assert found == str(tmp_path / "opt/acme/libacme.so.1")
    (tmp_path / "own").mkdir()
    (tmp_path / "own/libacme.so.1").touch()
    monkeypatch.setenv("LD_LIBRARY_PATH", f":{tmp_path / 'own'}")
    assert find_library("libacme.so.1", root=tmp_path) == str(tmp_path / "own/libacme.so.1")


def test_what_a_process_holds_of_a_gpu_is_counted_once_a_client(tmp_path: Path) -> None:
    assert drm_process_bytes(root=tmp_path) is None
    folder = tmp_path / "proc/self/fdinfo"
    folder.mkdir(parents=True)
    (folder / "3").write_text("pos:\t0\nflags:\t02\n")
    assert drm_process_bytes(root=tmp_path) is None
    client = "drm-driver:\txe\ndrm-client-id:\t5\ndrm-pdev:\t0000:03:00.0\ndrm-resident-vram0:\t{} KiB\n"
    (folder / "4").write_text(client.format(2048) + "drm-resident-system:\t99 KiB\n")
    (folder / "5").write_text(client.format(2048))
    (folder / "6").write_text(client.replace("\t5", "\t6").format(1))
    assert drm_process_bytes(root=tmp_path) == 2049 * 1024
