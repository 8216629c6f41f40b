"""Backends under test: the native kernels (where compiled) and the torch path."""

from __future__ import annotations

import pytest
from enginecore.device import BackendContext
from enginecore_cpu import native
from enginecore_cpu.backend import CpuBackend


def pytest_generate_tests(metafunc):
    if "backend" in metafunc.fixturenames:
        kinds = ["torch"] + (["native"] if native.load() is not None else [])
        metafunc.parametrize("backend", kinds, indirect=True, scope="session")


@pytest.fixture(scope="session")
def backend(request):
    made = CpuBackend(BackendContext(device="cpu", options={"kernels": request.param}))
    yield made
    made.shutdown()
