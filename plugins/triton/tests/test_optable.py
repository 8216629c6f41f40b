"""The op table: what it has runs and says what it can; importing the package loads no Triton."""

from __future__ import annotations

import subprocess
import sys

import torch
from enginecore.device import OpQuery, VerdictStatus
from enginecore.ops.dispatch import Ops
from enginecore.ops.reference import REFERENCE
from enginecore.ops.schema import OPS
from enginecore_triton import DeviceDescription
from enginecore_triton.optable import MODULES, TritonOps

DEVICE = DeviceDescription()


def test_every_op_is_the_schemas() -> None:
    assert set(MODULES) <= set(OPS)
    for op in MODULES:
        impl = TritonOps(DEVICE).get(op)
        assert impl is not None and callable(impl.run) and impl.name == "triton"
        assert impl.supports(OpQuery(op=op, dtype="float16")).status is VerdictStatus.UNVERIFIED
        assert "float64" in impl.supports(OpQuery(op=op, dtype="float64")).reasons[0]
    verified = TritonOps(DEVICE, verified=True).get("rms_norm")
    assert verified is not None
    assert verified.supports(OpQuery(op="rms_norm", dtype="float16")).status is VerdictStatus.SUPPORTED
    assert TritonOps(DEVICE).get("no_such_op") is None


def test_the_core_takes_them() -> None:
    ops = Ops(TritonOps(DEVICE), strict=True, dtype="float32")
    x, weight = torch.randn(3, 32), torch.randn(32)
    assert torch.allclose(ops.rms_norm(x, weight, 1e-6), REFERENCE["rms_norm"](x, weight, 1e-6), atol=1e-6)
    assert torch.allclose(ops.silu_and_mul(x), REFERENCE["silu_and_mul"](x), atol=1e-6)
    assert ops.fallbacks == {}


def test_a_hidden_size_beyond_registers_is_refused() -> None:
    impl = TritonOps(DEVICE).get("rms_norm")
    assert impl is not None
    verdict = impl.supports(OpQuery(op="rms_norm", dtype="float16", attributes={"size": 65536}))
    assert not verdict and "65536" in verdict.reasons[0]


def test_importing_the_package_loads_neither_torch_nor_triton() -> None:
    code = "import enginecore_triton, sys; assert not {'torch', 'triton'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
