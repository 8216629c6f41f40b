"""Backends under test: the native kernels (where compiled) and the torch path."""

from __future__ import annotations

import pytest
from enginecore.device import BackendContext
from enginecore_cpu import native
from enginecore_cpu.backend import CpuBackend


def pytest_generate_tests(metafunc):
    if "backend" in metafunc.fixturenames:
        metafunc.parametrize("backend", ["torch", *instruction_sets()], indirect=True, scope="session")
    if "native_backend" in metafunc.fixturenames:
        metafunc.parametrize("native_backend", instruction_sets(), indirect=True, scope="session")


def instruction_sets() -> list[str]:
    """Those compiled here that this processor can run."""
    module, found = native.load(), []
    for name in ("avx512_bf16", "avx512_vnni", "avx512", "avx2", "generic") if module is not None else ():
        try:
            module.Kernels(1, name)
        except ValueError:
            continue
        found.append(name)
    return found


def make(kind: str) -> CpuBackend:
    options = {"kernels": "torch"} if kind == "torch" else {"kernels": "native", "isa": kind}
    return CpuBackend(BackendContext(device="cpu", num_threads=3, options=options))


@pytest.fixture(scope="session")
def backend(request):
    made = make(request.param)
    yield made
    made.shutdown()


@pytest.fixture(scope="session")
def native_backend(request):
    made = make(request.param)
    yield made
    made.shutdown()
