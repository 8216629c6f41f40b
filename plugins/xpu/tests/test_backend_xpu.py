"""The XPU backend over a device that exists only as books, and torch.xpu as far as it can be told from here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from enginecore.device import BackendContext, GraphSupport
from enginecore.device.accelerator import TorchRuntime
from enginecore.errors import UnsupportedError
from enginecore.ops.torch_backend import TORCH_CAPABILITIES
from enginecore.testing.fake_runtime import FakeRuntime
from enginecore_xpu.backend import CONTEXT_BYTES, XpuBackend, XpuRuntime
from enginecore_xpu.capabilities import Gpu, capabilities_of

B580 = Gpu(name="Intel(R) Arc(TM) B580 Graphics", total_bytes=12 * 2**30, cores=20)


def backend(runtime: FakeRuntime, gpu: Gpu = B580) -> XpuBackend:
    """With torch's references: Triton is not loaded here."""
    return XpuBackend(BackendContext(device="xpu", options={"kernels": "torch"}), runtime, gpu)


@pytest.mark.parametrize(
    ("name", "integrated"),
    [
        ("Intel(R) Arc(TM) B580 Graphics", False),
        ("Intel(R) Data Center GPU Max 1550", False),
        ("Intel(R) Arc(TM) Graphics", True),
        ("Intel(R) Graphics [0x64a0]", True),
    ],
)
def test_whose_memory_it_is(name: str, integrated: bool) -> None:
    properties = SimpleNamespace(name=name, total_memory=2**30, gpu_eu_count=160, has_fp16=True, has_fp64=True)
    gpu = Gpu.of(properties)
    assert (gpu.integrated, gpu.cores) == (integrated, 20)


def test_graphs_are_claimed_only_where_this_torch_has_them() -> None:
    with_graphs = SimpleNamespace(XPUGraph=object, graph=object, graph_pool_handle=object)
    assert TorchRuntime(with_graphs, "xpu", "XPUGraph").can_capture()
    assert not TorchRuntime(SimpleNamespace(graph=object), "xpu", "XPUGraph").can_capture()
    found = capabilities_of(B580, TORCH_CAPABILITIES, graphs=False, world_size=1)
    assert found.graph_support is GraphSupport.NEVER


def test_free_memory_where_the_driver_does_not_say_it() -> None:
    def unknown(index: int) -> Any:
        raise RuntimeError("The device doesn't support querying the available free memory.")

    module = SimpleNamespace(
        mem_get_info=unknown,
        memory_reserved=lambda index: 300,
        get_device_properties=lambda index: SimpleNamespace(total_memory=1000),
    )
    assert XpuRuntime(module, "xpu", "XPUGraph").memory_info() == (700, 1000)


def test_no_double_precision_is_refused_with_the_way_out() -> None:
    gpu = Gpu(name="Intel(R) Arc(TM) A770 Graphics", total_bytes=2**30, float64=False)
    with pytest.raises(UnsupportedError, match=r"no double precision.*OverrideDefaultFP64Settings=1") as error:
        backend(FakeRuntime(), gpu)
    assert error.value.exit_code == 8


def test_a_backend_of_references() -> None:
    found = backend(FakeRuntime())
    assert found.memory.process_used_bytes() == CONTEXT_BYTES and found.attention.reference_reason()
    assert found.memory.memory_info().source == f"memory of {B580.name}"
