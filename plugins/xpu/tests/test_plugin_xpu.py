"""The XPU plugin on planted machines: what its probe says of each, in the order in which things can be missing."""

from __future__ import annotations

import subprocess
import sys

import pytest
from enginecore.device import BackendContext, DoctorContext, PciDevice, ProbeCause, ProbeContext, ProbeStatus
from enginecore.errors import DriverMissingError
from enginecore_xpu import plugin
from enginecore_xpu.hardware import DRIVER_LIBRARIES, Facts, family
from enginecore_xpu.probe import driver_problem, probe
from machine_xpu import Machine

B580 = {"count": 1, "devices": [{"name": "Intel Arc B580", "memory": 1}]}


def gpu(machine: Machine, *, device: int = 0xE20B, driver: str | None = "xe") -> None:
    machine.pci("0000:03:00.0", 0x8086, device, 0x030000, driver)


def whole(machine: Machine) -> None:
    gpu(machine)
    machine.write("dev/dri/renderD128")
    machine.write("sys/class/drm/renderD128/device/vendor", "0x8086\n")
    for name in DRIVER_LIBRARIES:
        machine.write(f"usr/lib/x86_64-linux-gnu/{name}")


def ask(machine: Machine, build: str | None = "2.13.0+xpu", found=B580):
    def use_torch():
        assert found is not None, "torch was loaded too early"
        return dict(found)

    ctx = ProbeContext(device="xpu", torch_build=build)
    return probe(ctx, plugin.MANIFEST, root=machine.root, use_torch=use_torch)


@pytest.mark.parametrize(
    ("device", "known"),
    [(0x0BD5, True), (0x56A0, True), (0xE20B, True), (0x7D55, True), (0x64A0, True), (0x3E92, False), (0x4680, False)],
)
def test_families(device: int, known: bool) -> None:
    assert bool(family(device)) is known


def test_absent_without_hardware_or_with_older_integrated_graphics(machine: Machine) -> None:
    result = ask(machine, build="2.13.0+cpu", found=None)
    assert (result.status, result.cause) == (ProbeStatus.ABSENT, ProbeCause.NO_DEVICE)
    gpu(machine, device=0x3E92, driver="i915")
    result = ask(machine, build="2.13.0+cpu", found=None)
    assert result.status is ProbeStatus.ABSENT and "3e92" in result.reason


def test_a_gpu_for_virtual_machines_is_absent(machine: Machine) -> None:
    gpu(machine, driver="vfio-pci")
    assert ask(machine, found=None).status is ProbeStatus.ABSENT


def test_driver_missing_or_not_passed_into_the_container(machine: Machine) -> None:
    gpu(machine, driver=None)
    machine.write("dev/dri/renderD129")
    machine.write("sys/class/drm/renderD129/device/vendor", "0x1002\n")  # another vendor's
    result = ask(machine, found=None)
    assert (result.status, result.cause) == (ProbeStatus.BROKEN, ProbeCause.DRIVER_MISSING)
    assert "bound to no driver" in result.reason and "modprobe xe" in result.fix


def test_no_leave_to_open_the_device() -> None:
    card = PciDevice(address="0", vendor_id=0x8086, device_id=0xE20B, class_code=0x030000, driver="xe")
    result = driver_problem(Facts(gpus=(card,), nodes=("/dev/dri/renderD128",), writable=False))
    assert result is not None and result.cause is ProbeCause.DRIVER_MISSING and "render" in result.fix


def test_driver_library_missing(machine: Machine) -> None:
    whole(machine)
    (machine.root / "usr/lib/x86_64-linux-gnu/libze_intel_gpu.so.1").unlink()
    result = ask(machine, found=None)
    assert result.cause is ProbeCause.DRIVER_MISSING
    assert "libze_intel_gpu.so.1" in result.reason and "libze-intel-gpu1" in result.fix


@pytest.mark.parametrize("build", ["2.13.0+cpu", "2.13.0+cu130", "2.10.0+xpu", None])
def test_wrong_torch_is_told_before_torch_is_loaded(machine: Machine, build: str | None) -> None:
    whole(machine)
    result = ask(machine, build=build, found=None)
    assert (result.status, result.cause) == (ProbeStatus.BROKEN, ProbeCause.WRONG_TORCH)
    assert "install the XPU build of torch" in result.fix


def test_available_and_unusable(machine: Machine) -> None:
    whole(machine)
    assert ask(machine).status is ProbeStatus.AVAILABLE
    result = ask(machine, found={"count": 0, "error": "no SYCL device"})
    assert (result.status, result.cause) == (ProbeStatus.BROKEN, ProbeCause.FAILED)
    assert "no SYCL device" in result.reason


def test_a_backend_without_a_gpu_is_refused_clearly() -> None:
    torch = pytest.importorskip("torch")
    if torch.xpu.device_count():
        pytest.skip("there is one")
    with pytest.raises(DriverMissingError, match="xpu:0 does not exist") as error:
        plugin.enginecore_create_backend(BackendContext(device="xpu"))
    assert error.value.exit_code == 5 and "enginecore devices" in str(error.value)


def test_doctor_says_something_true_of_this_machine() -> None:
    findings = plugin.enginecore_doctor(DoctorContext(device="xpu", torch_build="2.13.0+cpu"))
    assert findings[0].name == "Intel GPUs"
    assert all(finding.ok or finding.fix for finding in findings)


def test_manifest_needs_no_torch() -> None:
    code = "import enginecore_xpu.plugin as p, sys; p.enginecore_manifest(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
