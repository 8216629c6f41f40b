"""The backend around the simulated model, taken through the core's own door."""

from __future__ import annotations

import subprocess
import sys

import pytest
from batches import spec
from enginecore.device import KVCacheLayout
from enginecore.device.discovery import discover
from enginecore.device.select import create_backend, select_device
from enginecore.errors import DriverMissingError, ParameterError


def test_selected_by_name_and_checked_by_the_core() -> None:
    selected = select_device("sim")
    backend = create_backend(selected, options={"memory_bytes": 2**20})
    assert selected.full_name == "enginecore-sim:sim:0"
    assert backend.runtime is not None and backend.attention is None
    assert backend.capabilities.block_sizes >= {8, 16, 32, 64, 128}
    assert backend.torch_device().type == "cpu"
    with backend.stream():
        backend.event().record()
    backend.synchronize()
    backend.shutdown()


def test_memory_is_modelled() -> None:
    backend = create_backend(select_device("enginecore-sim:sim"), options={"memory_bytes": 2**20})
    backend.runtime.load(spec(num_blocks=64), None)
    info = backend.memory.memory_info()
    assert (info.total_bytes, info.free_bytes, info.source) == (2**20, 2**20 - 64 * 16 * 8, "modelled")
    caches = backend.memory.allocate_kv(KVCacheLayout(shape=(-1, 4), dtype="float32", page_bytes=16), 8, 2)
    assert backend.memory.process_used_bytes() == 64 * 16 * 8 + 2 * 8 * 16
    backend.memory.release_kv(caches)
    assert backend.memory.peak_bytes() == 64 * 16 * 8 + 2 * 8 * 16
    backend.memory.reset_peak()
    assert backend.memory.peak_bytes() == 64 * 16 * 8


def test_never_chosen_by_auto() -> None:
    plugin = next(plugin for plugin in discover() if plugin.distribution == "enginecore-sim")
    with pytest.raises(Exception, match="no installed plugin offers a device"):
        select_device("auto", plugins=[plugin])


@pytest.mark.parametrize(
    "options", [{"speed": 1}, {"output": "text"}, {"step_time_s": -1.0}, {"memory_bytes": 0}], ids=str
)
def test_bad_options_are_refused_by_name(options: dict[str, object]) -> None:
    with pytest.raises(ParameterError, match=next(iter(options))):
        create_backend(select_device("sim"), options=options)


def test_there_is_one_simulated_device() -> None:
    with pytest.raises(DriverMissingError, match="index 1"):
        select_device("sim:1")


def test_manifest_and_tokens_need_no_torch() -> None:
    code = "import enginecore_sim.plugin as p, sys; p.enginecore_manifest(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
