"""The ROCm plugin on planted machines: what its probe says of each, in the order in which things can be missing."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from enginecore.device import BackendContext, DoctorContext, ProbeCause, ProbeContext, ProbeStatus
from enginecore.errors import DriverMissingError
from enginecore_rocm import plugin
from enginecore_rocm.hardware import Facts, read_facts
from enginecore_rocm.probe import driver_problem, probe
from machine_rocm import Machine

MI300X = {"count": 1, "devices": [{"name": "AMD Instinct MI300X", "memory": 1, "target": "gfx942"}]}


def gpu(machine: Machine, *, target: int = 90402, driver: str | None = "amdgpu") -> None:
    machine.pci("0000:01:00.0", 0x1002, 0x74A1, 0x120000, driver)
    nodes = "sys/class/kfd/kfd/topology/nodes"
    machine.write(f"{nodes}/0/properties", "cpu_cores_count 64\nsimd_count 0\ngfx_target_version 0\n")
    if driver == "amdgpu":
        machine.write(f"{nodes}/1/properties", f"cpu_cores_count 0\nsimd_count 1216\ngfx_target_version {target}\n")


def ask(machine: Machine, build: str | None = "2.13.0+rocm7.2", environ: dict[str, str] | None = None, found=MI300X):
    def use_torch():
        assert found is not None, "torch was loaded too early"
        return dict(found)

    ctx = ProbeContext(device="rocm", torch_build=build)
    return probe(ctx, plugin.MANIFEST, root=machine.root, environ=environ or {}, use_torch=use_torch)


def test_absent_on_a_machine_without_the_hardware(machine: Machine) -> None:
    machine.pci("0000:00:02.0", 0x10DE, 0x2335, 0x030200, "nvidia")
    machine.pci("0000:00:03.0", 0x1002, 0xAB38, 0x040300, "snd_hda_intel")  # a sound chip is no GPU
    result = ask(machine, build="2.13.0+cpu", found=None)
    assert (result.status, result.cause) == (ProbeStatus.ABSENT, ProbeCause.NO_DEVICE)


def test_a_gpu_for_virtual_machines_or_hidden_by_the_user_is_absent(machine: Machine) -> None:
    gpu(machine, driver="vfio-pci")
    assert ask(machine, found=None).status is ProbeStatus.ABSENT
    gpu_machine = Machine(machine.root / "other")
    gpu(gpu_machine)
    hidden = ask(gpu_machine, environ={"HIP_VISIBLE_DEVICES": "-1"}, found=None)
    assert hidden.status is ProbeStatus.ABSENT and hidden.fix == "unset HIP_VISIBLE_DEVICES"


@pytest.mark.parametrize(("version", "name"), [(90402, "gfx942"), (90010, "gfx90a"), (110000, "gfx1100")])
def test_targets_are_named_as_the_compiler_names_them(machine: Machine, version: int, name: str) -> None:
    gpu(machine, target=version)
    assert read_facts(machine.root, {}).targets == (name,)


def test_integrated_graphics_that_torch_has_no_code_for_are_absent(machine: Machine) -> None:
    gpu(machine, target=100306)
    machine.write("dev/kfd")
    result = ask(machine, build="2.13.0+cpu", found=None)
    assert result.status is ProbeStatus.ABSENT and "gfx1036" in result.reason
    assert ask(machine, environ={"HSA_OVERRIDE_GFX_VERSION": "10.3.0"}).status is ProbeStatus.AVAILABLE


def test_driver_missing(machine: Machine) -> None:
    gpu(machine, driver=None)
    result = ask(machine, found=None)
    assert (result.status, result.cause) == (ProbeStatus.BROKEN, ProbeCause.DRIVER_MISSING)
    assert "not loaded" in result.reason and "modprobe amdgpu" in result.fix


def test_not_passed_into_the_container(machine: Machine) -> None:
    gpu(machine)
    machine.write("sys/module/amdgpu/version", "6.12.12\n")
    result = ask(machine, found=None)
    assert result.cause is ProbeCause.DRIVER_MISSING
    assert "amdgpu 6.12.12 is loaded" in result.reason and "--device /dev/kfd" in result.fix


def test_no_leave_to_open_the_device() -> None:
    result = driver_problem(Facts(targets=("gfx942",), kfd="/dev/kfd", writable=False))
    assert result is not None and result.cause is ProbeCause.DRIVER_MISSING and "render" in result.fix


@pytest.mark.skipif(os.geteuid() == 0, reason="root may open everything")
def test_permission_is_read_from_the_device_file(machine: Machine) -> None:
    gpu(machine)
    machine.write("dev/kfd").chmod(0)
    assert "may not open" in ask(machine, found=None).reason


@pytest.mark.parametrize("build", ["2.13.0+cpu", "2.13.0+cu130", "2.10.0+rocm7.1", None])
def test_wrong_torch_is_told_before_torch_is_loaded(machine: Machine, build: str | None) -> None:
    gpu(machine)
    machine.write("dev/kfd")
    result = ask(machine, build=build, found=None)
    assert (result.status, result.cause) == (ProbeStatus.BROKEN, ProbeCause.WRONG_TORCH)
    assert "install the ROCm build of torch" in result.fix


def test_available_and_unusable(machine: Machine) -> None:
    gpu(machine)
    machine.write("dev/kfd")
    result = ask(machine)
    assert result.status is ProbeStatus.AVAILABLE and result.details["targets"] == ["gfx942"]
    result = ask(machine, found={"count": 0, "error": "no HIP devices"})
    assert (result.status, result.cause) == (ProbeStatus.BROKEN, ProbeCause.FAILED)
    assert "no HIP devices" in result.reason


def test_a_backend_without_a_gpu_is_refused_clearly() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.device_count():
        pytest.skip("there is one")
    with pytest.raises(DriverMissingError, match="rocm:0 does not exist") as error:
        plugin.enginecore_create_backend(BackendContext(device="rocm"))
    assert error.value.exit_code == 5 and "enginecore devices" in str(error.value)


def test_doctor_says_something_true_of_this_machine() -> None:
    findings = plugin.enginecore_doctor(DoctorContext(device="rocm", torch_build="2.13.0+cpu"))
    assert findings[0].name == "AMD GPUs"
    assert all(finding.ok or finding.fix for finding in findings)


def test_manifest_needs_no_torch() -> None:
    code = "import enginecore_rocm.plugin as p, sys; p.enginecore_manifest(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
