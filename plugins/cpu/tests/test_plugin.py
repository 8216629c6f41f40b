"""The hooks, and that they stay light."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from enginecore.device import (
    AttentionQuery,
    BackendContext,
    ConfigContext,
    DoctorContext,
    OpQuery,
    ProbeContext,
    ProbeStatus,
)
from enginecore.errors import DriverMissingError
from enginecore_cpu import native, plugin, system


def test_manifest_and_probe_need_no_torch():
    code = (
        "import sys; from enginecore_cpu import plugin; from enginecore.device.manifest import ProbeContext;"
        "m = plugin.enginecore_manifest(); assert m.devices == ('cpu',) and not m.accelerator;"
        "r = plugin.enginecore_probe(ProbeContext(device='cpu', torch_build='2.13.0'));"
        "assert r.status == 'available', r; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_probe_without_torch():
    result = plugin.enginecore_probe(ProbeContext(device="cpu", torch_build=None))
    assert result.status is ProbeStatus.BROKEN and "pip install" in result.fix


def test_probe_and_doctor_say_when_torch_does_the_work(monkeypatch):
    monkeypatch.setattr(native, "load", lambda: None)
    result = plugin.enginecore_probe(ProbeContext(device="cpu", torch_build="2.13.0"))
    assert result.status is ProbeStatus.AVAILABLE and "without a C++ compiler" in result.reason and result.fix
    findings = {f.name: f for f in plugin.enginecore_doctor(DoctorContext(device="cpu", torch_build="2.13.0"))}
    assert not findings["native kernels"].ok and "compiler" in findings["native kernels"].fix
    assert findings["threads"].ok and findings["memory limit"].ok
    with pytest.raises(DriverMissingError):
        plugin.enginecore_create_backend(BackendContext(device="cpu", options={"kernels": "native"}))


def test_doctor(backend):
    findings = {f.name: f for f in plugin.enginecore_doctor(DoctorContext(device="cpu", torch_build="2.13.0"))}
    assert set(findings) == {"native kernels", "C++ compiler", "instruction sets", "threads", "memory limit"}


def test_defaults():
    ctx = ConfigContext(device="cpu", model_type="llama", hidden_size=576, num_layers=30, unset=())
    defaults = plugin.enginecore_config_defaults(ctx)
    assert defaults["dtype"] == ("bfloat16" if system.has_bfloat16() else "float32")
    assert 0 < defaults["memory_utilization"] < 1


def test_backend(backend):
    assert backend.torch_device() == torch.device("cpu")
    assert backend.num_threads == 3
    backend.synchronize()
    with backend.stream():
        event = backend.event()
        event.record()
        event.synchronize()
    assert event.query()
    backend.manual_seed(1)
    with pytest.raises(DriverMissingError, match="cpu:1"):
        backend.set_device(1)


def test_verdicts(backend):
    def ask(**changes):
        shape = {"head_size": 64, "num_heads": 9, "num_kv_heads": 3, "block_size": 16}
        query = {"dtype": "bfloat16", "kv_dtype": "bfloat16", **shape, **changes}
        return backend.attention.supports(AttentionQuery(**query))

    assert ask() and ask(head_size=46) and ask(features=frozenset({"sliding_window", "sinks"}))
    assert not ask(block_size=24)
    assert not ask(features=frozenset({"mla"}))
    assert not ask(num_heads=10)


def test_native_verdicts(native_backend):
    query = AttentionQuery(
        dtype="bfloat16", kv_dtype="float32", head_size=64, num_heads=9, num_kv_heads=3, block_size=16
    )
    assert not native_backend.attention.supports(query)
    linear = native_backend.ops.get("pack_linear")
    assert linear.supports(OpQuery(op="pack_linear", dtype="bfloat16"))
    assert not linear.supports(OpQuery(op="pack_linear", dtype="float16"))
    assert native_backend.ops.get("no_such_op") is None
    assert native_backend.capabilities.batch_invariant and native_backend.capabilities.isa


def test_unknown_instruction_set_is_refused():
    if native.load() is None:
        pytest.skip("no compiled kernels")
    with pytest.raises(ValueError, match="no kernels named"):
        native.load().Kernels(1, "avx1024")
