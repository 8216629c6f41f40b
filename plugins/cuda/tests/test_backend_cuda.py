"""The CUDA backend over a device that exists only as books; the kernels have tests of their own."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import enginecore_triton.parts as parts
import pytest
from enginecore.device import BackendContext, Capabilities, GraphSupport
from enginecore.errors import DriverMissingError, OutOfDeviceMemory
from enginecore.ops.torch_backend import TORCH_CAPABILITIES
from enginecore.testing.fake_runtime import FakeRuntime
from enginecore_cuda.backend import CONTEXT_BYTES, CudaBackend
from enginecore_cuda.capabilities import Gpu, capabilities_of
from enginecore_cuda.nvml import ProcessBooks, _ProcessInfo
from enginecore_triton.parts import Kernels

GIB = 2**30
H200 = Gpu(name="NVIDIA H200", capability=(9, 0), multiprocessors=132)


def backend(runtime: FakeRuntime, gpu: Gpu = H200, index: int = 0) -> CudaBackend:
    """With torch's references: Triton is not loaded here."""
    return CudaBackend(BackendContext(device="cuda", index=index, options={"kernels": "torch"}), runtime, gpu)


@pytest.mark.parametrize(("capability", "bfloat16"), [((7, 5), False), ((8, 0), True), ((8, 9), True)])
def test_capabilities_follow_the_hardware(capability: tuple[int, int], bfloat16: bool) -> None:
    gpu = Gpu(name="a GPU", capability=capability, multiprocessors=8)
    kernels = Capabilities(
        dtypes=frozenset({"float32", "float16", "bfloat16"}),
        kv_dtypes=frozenset({"float16", "bfloat16", "float8_e4m3fn"}),
        quantizations=frozenset({"fp8"}),
    )
    found = capabilities_of(gpu, kernels, graphs=True, world_size=4)
    assert ("bfloat16" in found.dtypes, "bfloat16" in found.kv_dtypes) == (bfloat16, bfloat16)
    assert "fp8" in found.quantizations and "float8_e4m3fn" in found.kv_dtypes, "kernels unpack where hardware does not"
    assert found.graph_support is GraphSupport.UNIFORM_SINGLE_TOKEN_DECODE and found.max_world_size == 4


def test_an_index_that_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,x")
    with pytest.raises(DriverMissingError, match=r"cuda:2 does not exist: cuda:0 to cuda:1 .*'x' does not count"):
        backend(FakeRuntime(count=2), index=2)
    runtime = FakeRuntime(count=2)
    assert backend(runtime, index=1).name == "cuda" and runtime.index == 1


def test_a_slice_is_a_device_of_its_own() -> None:
    gpu = Gpu(name="NVIDIA H100 80GB HBM3 MIG 1g.10gb", capability=(9, 0), multiprocessors=16)
    info = backend(FakeRuntime(10 * GIB), gpu).memory.memory_info()
    assert (info.usable_bytes, info.source) == (10 * GIB, "MIG slice 1g.10gb")


def test_memory_that_the_host_shares_has_the_containers_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    from enginecore.device.limits import Limit

    monkeypatch.setattr("enginecore.device.accelerator.memory.memory_limit", lambda: Limit(3.0 * GIB, "memory.max"))
    gpu = Gpu(name="Orin", capability=(8, 7), multiprocessors=16, integrated=True)
    found = backend(FakeRuntime(8 * GIB), gpu)
    assert found.memory.memory_info().usable_bytes == 3 * GIB and found.capabilities.unified_memory


def test_another_process_holding_the_memory() -> None:
    memory = backend(FakeRuntime(8 * GIB, others=7 * GIB)).memory
    layout = backend(FakeRuntime()).attention.kv_cache_layout(_spec())
    with pytest.raises(OutOfDeviceMemory, match="are free; this process holds"):
        memory.allocate_kv(layout, 2 * GIB // layout.page_bytes, 1)
    assert memory.memory_info().usable_bytes == 8 * GIB


def _spec() -> Any:
    from enginecore.device import KVCacheSpec

    return KVCacheSpec(num_layers=1, num_kv_heads=2, head_size=64, dtype="float16", block_size=16)


def test_without_kernels_everything_is_the_reference_and_says_so() -> None:
    found = backend(FakeRuntime())
    assert found.attention.reference_reason() == "the option kernels says so"
    assert found.graphs is None and found.capabilities.graph_support is GraphSupport.NEVER
    assert found.capabilities.head_size_range == TORCH_CAPABILITIES.head_size_range


def test_without_a_compiler_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "load_kernels", lambda *_: Kernels(reason="Triton is not installed"))
    found = CudaBackend(BackendContext(device="cuda"), FakeRuntime(), H200)
    assert found.attention.reference_reason() == "Triton is not installed"


def test_a_triton_without_a_driver_for_the_device_is_a_reason_too() -> None:
    """As where Triton was installed for another vendor's GPU."""
    pytest.importorskip("triton")
    code = (
        "import torch; from enginecore_triton import DeviceDescription\n"
        "from enginecore_triton.parts import load_kernels\n"
        "print(load_kernels(DeviceDescription(architecture='here'), lambda claims: claims, torch.device('cpu')).reason)"
    )
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=200)
    assert done.stdout.startswith("Triton cannot build for here: "), done.stderr[-2000:]
    assert "driver" in done.stdout


def test_shutdown_gives_graphs_and_cached_memory_back() -> None:
    runtime = FakeRuntime()
    found = backend(runtime)
    runtime.cached = 1000
    found.manual_seed(3)
    found.shutdown()
    assert runtime.cached == 0 and runtime.seeds == [3]


class Library:
    """libnvidia-ml.so: `processes` of the device whose UUID is `uuid`."""

    def __init__(self, uuid: str, processes: dict[int, int]) -> None:
        self.uuid, self.processes = uuid, processes
        self.nvmlInit_v2 = lambda: 0
        self.nvmlDeviceGetHandleByUUID = lambda uuid, handle: 0 if uuid.decode() == self.uuid else 6
        self.nvmlDeviceGetComputeRunningProcesses_v3 = self._processes

    def _processes(self, handle: Any, count: Any, infos: Any) -> int:
        room, count._obj.value = count._obj.value, len(self.processes)
        if len(self.processes) > room:
            return 7
        for i, (pid, used) in enumerate(self.processes.items()):
            infos[i] = _ProcessInfo(pid, used, 0, 0)
        return 0


MANY = {1000 + i: 5 for i in range(100)}


@pytest.mark.parametrize(
    ("uuid", "processes", "found"),
    [
        ("GPU-abc", {7: 500, 8: 70}, 500),
        ("MIG-abc", {7: 500}, 500),
        ("GPU-other", {7: 500}, None),
        ("GPU-abc", {8: 70}, None),  # numbers of another namespace
        ("GPU-abc", {7: ctypes.c_ulonglong(-1).value}, None),  # the driver has no figure
        ("GPU-abc", {**MANY, 7: 9}, 9),
    ],
)
def test_books_of_the_driver(uuid: str, processes: dict[int, int], found: int | None) -> None:
    assert ProcessBooks("abc", Library(uuid, processes)).bytes_of(7) == found


def test_the_base_is_what_the_driver_says_or_an_allowance(monkeypatch: pytest.MonkeyPatch) -> None:
    assert backend(FakeRuntime()).memory.process_used_bytes() == CONTEXT_BYTES
    monkeypatch.setattr(ProcessBooks, "bytes_of", lambda self, pid=None: 700)
    runtime = FakeRuntime()
    memory = backend(runtime).memory
    tensor = runtime.allocate(300)
    assert memory.process_used_bytes() == 700
    runtime.resize(tensor, 600)
    assert memory.process_used_bytes() == 700, "what torch holds is part of what the driver counts"


def run_interpreted(folder: Path, script: Callable[[Path], list[str]]) -> dict[str, Any]:
    environ = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "2"}
    done = subprocess.run(script(folder), env=environ, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "result.json").read_text())


def test_the_engine_over_interpreted_kernels_answers_as_transformers_does(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    program = Path(__file__).with_name("interpreted_engine.py")
    result = run_interpreted(tmp_path, lambda folder: [sys.executable, str(program), str(folder)])
    engine = result["engine"]
    assert engine["answers"] == result["expected"] and len(result["expected"][0]) > 2
    assert engine["reference_ops"] == [], "the kernels computed all of it"
    ledger = engine["ledger"]
    assert ledger["process_base"] == CONTEXT_BYTES and ledger["budget"] == int(0.9 * ledger["usable"])
    assert "activations" in ledger and ledger["kv_cache"] > 0


def test_quantised_checkpoints_over_interpreted_kernels(tmp_path: Path) -> None:
    """Kept as they are, without a reference in the way, and every log-probability as transformers has it."""
    pytest.importorskip("triton")
    program = Path(__file__).with_name("interpreted_quantized.py")
    found = run_interpreted(tmp_path, lambda folder: [sys.executable, str(program), str(folder)])
    assert list(found) == ["awq", "gptq", "fp8", "fp8, blocks", "int8"]
    for kind, engine in found.items():
        assert engine["answers"] == engine["expected"], kind
        for mine, theirs in zip(engine["logprobs"], engine["expected_logprobs"], strict=True):
            assert mine == pytest.approx(theirs, abs=1e-4), kind
        assert engine["reference_ops"] == [], kind
        assert engine["ledger"]["weights"] < 0.4 * engine["plain_bytes"], f"{kind}: weights were unpacked"


def test_a_cache_in_fp8_uses_the_checkpoints_scales(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    program = Path(__file__).with_name("interpreted_kv_scales.py")
    found = run_interpreted(tmp_path, lambda folder: [sys.executable, str(program), str(folder)])
    expected = [value for answer in found["expected_logprobs"] for value in answer]
    assert expected != pytest.approx([value for answer in found["unrounded_logprobs"] for value in answer], abs=0.05)
    for path in ("fused", "unfused"):
        engine = found[path]
        assert engine["answers"] == found["expected"] and engine["reference_ops"] == []
        assert [value for answer in engine["logprobs"] for value in answer] == pytest.approx(expected, abs=1e-3)
        assert ["kv_cache_scales", "the checkpoint's, of 2 layers", "read beside the weights"] in engine["choices"]


def test_latent_attention_over_interpreted_kernels(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    program = Path(__file__).with_name("interpreted_latent.py")
    found = run_interpreted(tmp_path, lambda folder: [sys.executable, str(program), str(folder)])
    assert found["answers"] == found["expected"] and found["reference_ops"] == []
    for mine, theirs in zip(found["logprobs"], found["expected_logprobs"], strict=True):
        assert mine == pytest.approx(theirs, abs=1e-4)
    assert found["ledger"]["kv_cache"] == 16 * 16 * 2 * (32 + 16) * 4, "latents are all that is cached"


def test_experts_stay_packed_over_interpreted_kernels(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    program = Path(__file__).with_name("interpreted_experts.py")
    result = run_interpreted(tmp_path, lambda folder: [sys.executable, str(program), str(folder)])
    assert list(result) == ["plain", "awq", "fp8, blocks"]
    for kind, found in result.items():
        assert found["answers"] == found["expected"] and found["reference_ops"] == [], kind
        for mine, theirs in zip(found["logprobs"], found["expected_logprobs"], strict=True):
            assert mine == pytest.approx(theirs, abs=1e-4), kind
        share = {"plain": 1.0, "awq": 0.17}.get(kind, 0.27)  # of the bytes of float32, scales included
        inner = found["ledger"]["weights"] - found["outer_bytes"]
        assert inner <= share * (found["plain_bytes"] - found["outer_bytes"]), f"{kind}: experts were unpacked"
