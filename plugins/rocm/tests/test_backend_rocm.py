"""The ROCm backend over a device that exists only as books, and the encodings of fp8."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from enginecore.device import BackendContext, Capabilities, GraphSupport
from enginecore.errors import DriverMissingError
from enginecore.testing.fake_runtime import FakeRuntime
from enginecore_rocm.backend import CONTEXT_BYTES, RocmBackend, driver_bytes
from enginecore_rocm.capabilities import Gpu, capabilities_of, target_row
from enginecore_rocm.float8 import ocp_to_fnuz

MI300 = Gpu(name="AMD Instinct MI300X", target="gfx942", multiprocessors=304, wave=64)


def backend(runtime: FakeRuntime, index: int = 0) -> RocmBackend:
    """With torch's references: Triton is not loaded here."""
    return RocmBackend(BackendContext(device="rocm", index=index, options={"kernels": "torch"}), runtime, MI300)


@pytest.mark.parametrize(
    ("target", "wave", "float8", "bfloat16"),
    [
        ("gfx90a", 64, None, True),
        ("gfx942", 64, "fnuz", True),
        ("gfx950", 64, "ocp", True),
        ("gfx1100", 32, None, True),
        ("gfx1201", 32, "ocp", True),
        ("gfx1030", 32, None, True),
        ("gfx906", 64, None, False),
    ],
)
def test_targets(target: str, wave: int, float8: str | None, bfloat16: bool) -> None:
    row = target_row(target)
    assert (row.wave, row.float8, row.bfloat16) == (wave, float8, bfloat16)


def test_a_target_comes_with_features_behind_it() -> None:
    properties = SimpleNamespace(name="MI300X", gcnArchName="gfx942:sramecc+:xnack-", multi_processor_count=304)
    gpu = Gpu.of(properties)
    assert (gpu.target, gpu.wave) == ("gfx942", 64)


def test_capabilities() -> None:
    kernels = Capabilities(
        dtypes=frozenset({"float16", "bfloat16"}), kv_dtypes=frozenset({"float8_e4m3fn"}),
        quantizations=frozenset({"fp8"}),
    )  # fmt: skip
    plain = Gpu(name="MI210", target="gfx90a", multiprocessors=104, wave=64)
    assert capabilities_of(MI300, kernels, graphs=True, world_size=8).max_world_size == 8
    found = capabilities_of(plain, kernels, graphs=False, world_size=0)
    assert found.quantizations == {"fp8"} and found.kv_dtypes == {"float8_e4m3fn"}
    assert found.graph_support is GraphSupport.NEVER and found.max_world_size == 1


def test_every_ocp_number_keeps_its_value_as_fnuz() -> None:
    bits = torch.arange(256, dtype=torch.uint8)
    numbers = bits[(bits & 0x7F) != 0x7F]
    weight = numbers.view(torch.float8_e4m3fn)
    turned, scale = ocp_to_fnuz(weight, torch.tensor(0.25))
    assert turned.dtype == torch.float8_e4m3fnuz
    assert torch.equal(turned.float() * scale, weight.float() * 0.25)
    with pytest.raises(ValueError, match="not numbers"):
        ocp_to_fnuz(bits.view(torch.float8_e4m3fn), torch.tensor(1.0))
    with pytest.raises(ValueError, match="float8_e5m2"):
        ocp_to_fnuz(bits.view(torch.float8_e5m2), torch.tensor(1.0))


def test_books_of_the_driver(tmp_path: Path) -> None:
    assert driver_bytes(tmp_path, 7) is None
    folder = tmp_path / "sys/class/kfd/kfd/proc/7"
    folder.mkdir(parents=True)
    for gpu, size in ((41, 0), (42, 900)):
        (folder / f"vram_{gpu}").write_text(f"{size}\n")
    assert driver_bytes(tmp_path, 7) == 900


def test_masks_are_the_runtimes_and_are_named_when_an_index_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "3")
    with pytest.raises(DriverMissingError, match=r"only rocm:0 can be seen.*HIP_VISIBLE_DEVICES='3'"):
        backend(FakeRuntime(), index=3)
    found = backend(FakeRuntime())
    assert found.memory.process_used_bytes() == CONTEXT_BYTES
    assert found.attention.reference_reason() and found.capabilities.isa == ("gfx942",)
