"""Limits of containers, read from planted files, and the books of memory."""

from __future__ import annotations

import os

import pytest
import torch
from enginecore.device import BackendContext, KVCacheSpec
from enginecore_cpu import system
from enginecore_cpu.backend import CpuBackend
from enginecore_cpu.memory import CpuMemory


@pytest.fixture
def planted(monkeypatch, tmp_path):
    """Redirect the files that `system` reads: planted({"/proc/self/cgroup": "..."}); anything else does not exist."""
    files: dict[str, str] = {}
    monkeypatch.setattr(system, "_read", lambda path: files.get(str(path)))
    monkeypatch.setattr(system.os, "cpu_count", lambda: 8)
    monkeypatch.setattr(system.os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    files["/proc/meminfo"] = "MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\n"
    return files


def test_no_container(planted):
    limit = system.memory_limit()
    assert (limit.bytes, limit.free, limit.source) == (16 << 30, 8 << 30, "physical memory")
    assert system.cpu_budget() == system.CpuBudget(8, "physical cores", 8)


def test_cgroup_v2_limits_of_every_ancestor(planted):
    planted["/proc/self/cgroup"] = "0::/pod/box\n"
    planted["/proc/self/mountinfo"] = "30 23 0:26 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw\n"
    planted["/sys/fs/cgroup/pod/memory.max"] = "4294967296\n"
    planted["/sys/fs/cgroup/pod/memory.current"] = "3221225472\n"
    planted["/sys/fs/cgroup/pod/memory.stat"] = "anon 1\ninactive_file 1073741824\n"
    planted["/sys/fs/cgroup/pod/box/memory.max"] = "max\n"
    planted["/sys/fs/cgroup/pod/box/memory.current"] = "1\n"
    planted["/sys/fs/cgroup/pod/box/cpu.max"] = "250000 100000\n"
    planted["/sys/fs/cgroup/pod/cpu.max"] = "max 100000\n"
    limit = system.memory_limit()
    assert (limit.bytes, limit.free, limit.source) == (4 << 30, 2 << 30, "cgroup v2")
    assert system.cpu_budget() == system.CpuBudget(2, "cgroup quota of 2.5 processors", 8)


def test_cgroup_v1_inside_a_container(planted):
    planted["/proc/self/cgroup"] = "5:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n"
    planted["/proc/self/mountinfo"] = (
        "40 30 0:30 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"
        "41 30 0:31 /docker/abc /sys/fs/cgroup/cpu ro - cgroup cgroup rw,cpu,cpuacct\n"
    )
    planted["/sys/fs/cgroup/memory/memory.limit_in_bytes"] = "2147483648\n"
    planted["/sys/fs/cgroup/memory/memory.usage_in_bytes"] = "1073741824\n"
    planted["/sys/fs/cgroup/cpu/cpu.cfs_quota_us"] = "50000\n"
    planted["/sys/fs/cgroup/cpu/cpu.cfs_period_us"] = "100000\n"
    limit = system.memory_limit()
    assert (limit.bytes, limit.free, limit.source) == (2 << 30, 1 << 30, "cgroup v1")
    assert system.cpu_budget().threads == 1


def test_cgroup_v1_without_a_limit(planted):
    planted["/proc/self/cgroup"] = "5:memory:/\n"
    planted["/proc/self/mountinfo"] = "40 30 0:30 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    planted["/sys/fs/cgroup/memory/memory.limit_in_bytes"] = "9223372036854771712\n"
    planted["/sys/fs/cgroup/memory/memory.usage_in_bytes"] = "100\n"
    assert system.memory_limit().source == "physical memory"


def test_hardware_threads_share_a_core(planted):
    for cpu in range(8):
        planted[f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"] = f"{cpu % 4},{cpu % 4 + 4}\n"
    assert system.cpu_budget().threads == 4


def two_nodes(planted):
    planted["/sys/devices/system/node/online"] = "0-1\n"
    planted["/sys/devices/system/node/node0/cpulist"] = "0-2\n"
    planted["/sys/devices/system/node/node1/cpulist"] = "3-5,6,7\n"


def test_one_memory_node_of_several(planted, monkeypatch):
    two_nodes(planted)
    here = system.CpuBudget(5, "cores of one of 2 NUMA nodes", 8, (3, 4, 5, 6, 7))
    assert system.cpu_budget() == here
    assert system.cpu_budget(4) == system.CpuBudget(4, "as asked for", 8, (3, 4, 5, 6, 7))
    assert system.cpu_budget(6) == system.CpuBudget(6, "as asked for", 8)  # more than a node has
    monkeypatch.setattr(system.os, "sched_getaffinity", lambda pid: {0, 1, 7}, raising=False)
    assert system.cpu_budget().cpus == (0, 1)
    monkeypatch.setattr(system.os, "sched_getaffinity", lambda pid: {3, 7}, raising=False)
    assert system.cpu_budget() == system.CpuBudget(2, "affinity mask", 8)


def test_a_quota_keeps_to_the_node(planted):
    two_nodes(planted)
    planted["/proc/self/cgroup"] = "0::/box\n"
    planted["/proc/self/mountinfo"] = "30 23 0:26 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw\n"
    planted["/sys/fs/cgroup/box/cpu.max"] = "200000 100000\n"
    assert system.cpu_budget() == system.CpuBudget(2, "cgroup quota of 2 processors", 8, (3, 4, 5, 6, 7))


def test_hardware_threads_count_once_in_a_node(planted):
    two_nodes(planted)
    for cpu in range(8):
        planted[f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"] = (
            f"{cpu // 2 * 2}-{cpu // 2 * 2 + 1}\n"
        )
    assert system.cpu_budget().threads == 3  # 3, 4 with 5, 6 with 7
    planted["/sys/devices/system/node/node1/cpulist"] = "broken\n"
    assert system.cpu_budget() == system.CpuBudget(4, "physical cores", 8)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system binds no threads")
def test_a_backend_keeps_to_its_node_until_it_is_shut_down(monkeypatch):
    before = os.sched_getaffinity(0)
    one = min(before)
    monkeypatch.setattr(system, "cpu_budget", lambda wanted=None: system.CpuBudget(1, "planted", 2, (one,)))
    made = CpuBackend(BackendContext(device="cpu"))
    try:
        assert os.sched_getaffinity(0) == {one}
    finally:
        made.shutdown()
    assert os.sched_getaffinity(0) == before
    made.shutdown()


def test_affinity(planted, monkeypatch):
    monkeypatch.setattr(system.os, "sched_getaffinity", lambda pid: {1, 3}, raising=False)
    assert system.cpu_budget() == system.CpuBudget(2, "affinity mask", 8)


def test_the_machine_itself():
    limit, budget = system.memory_limit(), system.cpu_budget()
    assert 0 < limit.free <= limit.bytes <= limit.total
    assert 1 <= budget.threads <= (os.cpu_count() or 1)


def test_the_cache_is_not_touched_before_it_is_written(backend):
    if not os.path.exists("/proc/self/status"):
        pytest.skip("resident memory is read from /proc")
    spec = KVCacheSpec(num_layers=2, num_kv_heads=4, head_size=64, dtype="bfloat16", block_size=16)
    layout = backend.attention.kv_cache_layout(spec)
    assert layout.page_bytes == 2 * 4 * 64 * 16 * 2
    memory = CpuMemory()  # none that fetches the first pages ahead
    before = memory.process_used_bytes()
    caches = memory.allocate_kv(layout, (256 << 20) // layout.page_bytes, 2)
    assert sum(cache.nbytes for cache in caches) == 512 << 20
    assert memory.process_used_bytes() - before < 64 << 20
    memory.release_kv(caches)
    assert caches == []


def test_memory_info(backend):
    info = backend.memory.memory_info()
    assert 0 < info.free_bytes <= info.usable_bytes <= info.total_bytes and info.source
    assert backend.memory.process_used_bytes() > 0
    backend.memory.reset_peak()
    assert backend.memory.peak_bytes() > 0
    backend.memory.empty_cache()
    assert backend.memory.host_alloc_pinned((2, 3), torch.float32).shape == (2, 3)
    with pytest.raises(ValueError, match="at least one"):
        spec = KVCacheSpec(num_layers=1, num_kv_heads=1, head_size=64, dtype="float32", block_size=16)
        backend.memory.allocate_kv(backend.attention.kv_cache_layout(spec), 0, 1)
