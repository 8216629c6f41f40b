"""Facts of a planted machine: memory, control groups, instruction sets, the model cache."""

from __future__ import annotations

from pathlib import Path

import pytest
from enginecore.cli.machine import machine_checks, memory_limit, processor_limit
from enginecore.device import DoctorFinding

GIB = 2**30


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def checks(root: Path) -> dict[str, DoctorFinding]:
    return {check.name: check for check in machine_checks(root)}


def test_version_2_limits_come_from_the_innermost_or_any_ancestor(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/a/b\n")
    write(tmp_path, "sys/fs/cgroup/a/b/memory.max", "max\n")
    write(tmp_path, "sys/fs/cgroup/a/memory.max", f"{2 * GIB}\n")
    write(tmp_path, "sys/fs/cgroup/a/b/cpu.max", "150000 100000\n")
    write(tmp_path, "sys/fs/cgroup/a/cpu.max", "max 100000\n")
    memory, processors = memory_limit(tmp_path), processor_limit(tmp_path)
    assert memory is not None and memory.value == 2 * GIB and memory.source.endswith("a/memory.max")
    assert processors is not None and processors.value == 1.5


def test_in_a_container_the_top_is_the_containers_own(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/docker/0123\n")
    write(tmp_path, "sys/fs/cgroup/memory.max", f"{GIB}\n")
    limit = memory_limit(tmp_path)
    assert limit is not None and limit.value == GIB


def test_version_1(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "4:memory:/x\n3:cpu,cpuacct:/x\n")
    write(tmp_path, "sys/fs/cgroup/memory/x/memory.limit_in_bytes", f"{3 * GIB}\n")
    write(tmp_path, "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    write(tmp_path, "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us", "50000\n")
    write(tmp_path, "sys/fs/cgroup/cpu/x/cpu.cfs_period_us", "100000\n")
    memory, processors = memory_limit(tmp_path), processor_limit(tmp_path)
    assert memory is not None and memory.value == 3 * GIB
    assert processors is not None and processors.value == 0.5


def test_no_limits(tmp_path: Path) -> None:
    assert memory_limit(tmp_path) is None and processor_limit(tmp_path) is None


@pytest.mark.parametrize(("limit", "ok"), [(8 * GIB, True), (GIB // 2, False)])
def test_little_memory_is_a_problem_with_a_fix(tmp_path: Path, limit: int, ok: bool) -> None:
    write(
        tmp_path, "proc/meminfo", "MemTotal:       16777216 kB\nMemAvailable:    8388608 kB\nHugePages_Total:       0\n"
    )
    write(tmp_path, "proc/self/cgroup", "0::/\n")
    write(tmp_path, "sys/fs/cgroup/memory.max", str(limit))
    memory = checks(tmp_path)["memory"]
    assert memory.ok is ok and "16.0 GiB in the machine, 8.0 GiB available, limited to" in memory.detail
    assert ok or "more memory" in memory.fix


def test_instruction_sets(tmp_path: Path) -> None:
    write(tmp_path, "proc/cpuinfo", "processor : 0\nflags\t\t: fpu sse avx2 avx512f\n")
    assert checks(tmp_path)["instruction sets"].detail.endswith(": avx2, avx512f")


def test_the_model_cache_must_be_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINECORE_CACHE", str(tmp_path / "not/yet/there"))
    assert checks(tmp_path)["model cache"].ok
    assert not (tmp_path / "not").exists(), "a check leaves nothing behind"
    (tmp_path / "a_file").touch()
    monkeypatch.setenv("ENGINECORE_CACHE", str(tmp_path / "a_file"))
    cache = checks(tmp_path)["model cache"]
    assert not cache.ok and "ENGINECORE_CACHE" in cache.fix
