"""The CUDA plugin on planted machines: what its probe says of each, in the order in which things can be missing."""

from __future__ import annotations

import subprocess
import sys

import pytest
from enginecore.device import BackendContext, DoctorContext, ProbeCause, ProbeContext, ProbeStatus
from enginecore.errors import DriverMissingError
from enginecore_cuda import plugin
from enginecore_cuda.hardware import read_facts
from enginecore_cuda.probe import check_torch, driver_minimum, probe
from machine_cuda import Machine

VERSION = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (dvs-builder)\nGCC version: 12\n"
H200 = {"count": 1, "devices": [{"name": "NVIDIA H200", "memory": 1, "capability": "9.0"}]}


def gpu(machine: Machine, *, driver: str | None = "nvidia") -> None:
    machine.pci("0000:01:00.0", 0x10DE, 0x2335, 0x030200, driver)


def whole(machine: Machine, driver: str = "580.82.07") -> None:
    gpu(machine)
    machine.write("proc/driver/nvidia/version", VERSION.format(driver))
    machine.write("dev/nvidia0")
    machine.write("usr/lib/x86_64-linux-gnu/libcuda.so.1")


def ask(machine: Machine, build: str | None = "2.13.0+cu130", environ: dict[str, str] | None = None, found=H200):
    def use_torch():
        assert found is not None, "torch was loaded too early"
        return dict(found)

    ctx = ProbeContext(device="cuda", torch_build=build)
    return probe(ctx, plugin.MANIFEST, root=machine.root, environ=environ or {}, use_torch=use_torch)


def test_absent_on_a_machine_without_the_hardware(machine: Machine) -> None:
    machine.pci("0000:00:02.0", 0x1002, 0x744C, 0x030000, "amdgpu")
    machine.pci("0000:00:03.0", 0x10DE, 0x10F0, 0x040300, "snd_hda_intel")  # a sound chip is no GPU
    result = ask(machine, build="2.13.0+cpu", found=None)
    assert (result.status, result.cause) == (ProbeStatus.ABSENT, ProbeCause.NO_DEVICE)


def test_a_gpu_for_virtual_machines_or_hidden_by_the_user_is_absent(machine: Machine) -> None:
    gpu(machine, driver="vfio-pci")
    assert ask(machine, found=None).status is ProbeStatus.ABSENT
    machine.write("dev/nvidia0")
    hidden = ask(machine, environ={"CUDA_VISIBLE_DEVICES": ""}, found=None)
    assert hidden.status is ProbeStatus.ABSENT and hidden.fix == "unset CUDA_VISIBLE_DEVICES"


def test_driver_missing(machine: Machine) -> None:
    gpu(machine, driver="nouveau")
    result = ask(machine, found=None)
    assert (result.status, result.cause) == (ProbeStatus.BROKEN, ProbeCause.DRIVER_MISSING)
    assert "nouveau" in result.reason and "install NVIDIA's driver" in result.fix


def test_not_passed_into_the_container(machine: Machine) -> None:
    gpu(machine)
    machine.write("proc/driver/nvidia/version", VERSION.format("580.82.07"))
    result = ask(machine, found=None)
    assert result.cause is ProbeCause.DRIVER_MISSING and "--gpus all" in result.fix


def test_driver_library_missing(machine: Machine) -> None:
    whole(machine)
    (machine.root / "usr/lib/x86_64-linux-gnu/libcuda.so.1").unlink()
    result = ask(machine, found=None)
    assert result.cause is ProbeCause.DRIVER_MISSING and "libcuda.so.1" in result.reason
    machine.write("etc/ld.so.cache", "glibc-ld.so.cache1.1\0libcuda.so.1\0/opt/lib/libcuda.so.1\0")
    assert ask(machine).status is ProbeStatus.AVAILABLE


@pytest.mark.parametrize(
    ("driver", "build", "broken"),
    [("570.86.15", "2.13.0+cu130", True), ("570.86.15", "2.11.0+cu128", False), ("525.50.1", "2.11.0+cu126", True)],
)
def test_driver_too_old_for_the_toolkit(machine: Machine, driver: str, build: str, broken: bool) -> None:
    whole(machine, driver)
    result = ask(machine, build=build)
    assert (result.cause is ProbeCause.DRIVER_MISSING) is broken
    assert not broken or (driver in result.reason and str(driver_minimum(build)) in result.reason)


@pytest.mark.parametrize("build", ["2.13.0+cpu", "2.13.0+rocm7.2", "2.10.0+cu128", None])
def test_wrong_torch_is_told_before_torch_is_loaded(machine: Machine, build: str | None) -> None:
    whole(machine)
    result = ask(machine, build=build, found=None)
    assert (result.status, result.cause) == (ProbeStatus.BROKEN, ProbeCause.WRONG_TORCH)
    assert "install the CUDA build of torch" in result.fix


def test_available_and_unusable(machine: Machine) -> None:
    whole(machine)
    result = ask(machine)
    assert result.status is ProbeStatus.AVAILABLE and result.details["driver"] == "580.82.07"
    assert "NVIDIA H200" in result.reason
    result = ask(machine, found={"count": 0, "error": "no kernel image"})
    assert (result.status, result.cause) == (ProbeStatus.BROKEN, ProbeCause.FAILED)
    assert "no kernel image" in result.reason


def test_a_gpu_without_a_compiler_for_kernels_is_available_and_told(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "")
    monkeypatch.setattr("shutil.which", lambda name: None)
    whole(machine)
    result = ask(machine)
    assert result.status is ProbeStatus.AVAILABLE and "runs as torch references" in result.reason
    assert "C compiler for Triton" in result.reason and "gcc" in result.fix


def test_gpus_that_are_not_on_a_pci_bus(machine: Machine) -> None:
    machine.write("dev/dxg")
    machine.write("usr/lib/wsl/lib/libcuda.so.1")
    assert read_facts(machine.root, {}).integrated == "a GPU lent by Windows"
    assert ask(machine).status is ProbeStatus.AVAILABLE


def test_torch_without_a_gpu_gives_its_reason() -> None:
    pytest.importorskip("torch")
    found = check_torch()
    assert found["count"] > 0 or found["error"]


def test_a_backend_without_a_gpu_is_refused_clearly() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.device_count():
        pytest.skip("there is one")
    with pytest.raises(DriverMissingError, match="cuda:0 does not exist") as error:
        plugin.enginecore_create_backend(BackendContext(device="cuda"))
    assert error.value.exit_code == 5 and "enginecore devices" in str(error.value)


def test_doctor_says_something_true_of_this_machine() -> None:
    findings = plugin.enginecore_doctor(DoctorContext(device="cuda", torch_build="2.13.0+cpu"))
    assert findings[0].name == "NVIDIA GPUs"
    assert all(finding.ok or finding.fix for finding in findings)


def test_manifest_and_probe_load_neither_torch_nor_kernels() -> None:
    code = (
        "import sys, enginecore_cuda.plugin as p; from enginecore.device import ProbeContext\n"
        "p.enginecore_manifest(); p.enginecore_probe(ProbeContext(device='cuda', torch_build='2.13.0+cpu'))\n"
        "assert not {'torch', 'triton'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
