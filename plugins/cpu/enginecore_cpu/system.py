"""What this process may use of the machine: processors, instruction sets and memory, containers' limits included.

Standard library only. Limits are those of the process, not of the host: affinity masks, cgroup (v1 and v2) quotas and
limits of every ancestor, and resource limits.
"""

from __future__ import annotations

import math
import os
import platform
import shutil
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

if sys.platform != "win32":
    import resource

#: Names that /proc/cpuinfo uses (x86 "flags", ARM "Features") for what the kernels can use.
_ISA = ("avx2", "fma", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8", "asimd", "bf16", "i8mm", "sve")

#: cgroup v1 writes "no limit" as a number of about 2^63.
_UNLIMITED = 1 << 60


@dataclass(frozen=True)
class CpuBudget:
    """`threads` to run, why (`source`), and how many processors the host has. `cpus`, where there are any, are the
    processors to keep to."""

    threads: int
    source: str
    host: int
    cpus: tuple[int, ...] = ()


@dataclass(frozen=True)
class MemoryLimit:
    """The most bytes this process may ever hold, where that comes from, and what of it is free now."""

    bytes: int
    source: str
    total: int
    free: int


def _read(path: Path | str) -> str | None:
    try:
        return Path(path).read_text()
    except OSError:
        return None


def _read_int(path: Path) -> int | None:
    text = (_read(path) or "").strip()
    return int(text) if text.lstrip("-").isdigit() else None


@lru_cache(maxsize=1)
def _cpuinfo() -> dict[str, str]:
    """The first processor of /proc/cpuinfo."""
    first = (_read("/proc/cpuinfo") or "").split("\n\n", 1)[0]
    pairs = (line.split(":", 1) for line in first.splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, value in pairs}


def cpu_model() -> str:
    return _cpuinfo().get("model name") or platform.processor() or platform.machine()


def isa_flags() -> tuple[str, ...]:
    """Instruction sets of this processor that matter here, by their names in /proc/cpuinfo."""
    info = _cpuinfo()
    have = set((info.get("flags") or info.get("Features") or "").split())
    return tuple(name for name in _ISA if name in have)


def has_bfloat16() -> bool:
    return bool({"avx512_bf16", "amx_bf16"} & set(isa_flags()))


def find_compiler() -> str | None:
    for name in (os.environ.get("CXX"), "g++", "clang++", "c++"):
        if name and (path := shutil.which(name)):
            return path
    return None


def _cgroup_dirs(controller: str) -> list[tuple[str, Path]]:
    """(version, directory) of this process's cgroups for `controller`, from the innermost to the root of the mount."""
    found: list[tuple[str, Path]] = []
    groups = [line.split(":", 2) for line in (_read("/proc/self/cgroup") or "").splitlines() if line.count(":") >= 2]
    for line in (_read("/proc/self/mountinfo") or "").splitlines():
        left, _, right = line.partition(" - ")
        fields, kind = left.split(), right.split()
        if len(fields) < 5 or not kind or kind[0] not in ("cgroup", "cgroup2"):
            continue
        version = "v2" if kind[0] == "cgroup2" else "v1"
        if version == "v1" and controller not in kind[-1].split(","):
            continue
        root, mount = fields[3], Path(fields[4])
        for _, names, inner in groups:
            if (version == "v2") == (names == "") and (version == "v2" or controller in names.split(",")):
                # Inside a container the mount's root is the container's own group: strip it from the path.
                relative = os.path.relpath(inner, root) if inner.startswith(root) else inner.lstrip("/")
                place = Path(os.path.normpath(mount / relative))
                while place != mount and mount in place.parents:
                    found.append((version, place))
                    place = place.parent
                found.append((version, mount))
    return found


def _cpu_quota() -> float | None:
    quotas = []
    for version, place in _cgroup_dirs("cpu"):
        if version == "v2":
            parts = (_read(place / "cpu.max") or "").split()
            if len(parts) == 2 and parts[0].isdigit():
                quotas.append(int(parts[0]) / int(parts[1]))
        else:
            quota, period = _read_int(place / "cpu.cfs_quota_us"), _read_int(place / "cpu.cfs_period_us")
            if quota and period and quota > 0:
                quotas.append(quota / period)
    return min(quotas, default=None)


def _physical_cores(cpus: set[int]) -> int:
    """Cores among `cpus`: the matrix units of a core are shared by its hardware threads."""
    cores = set()
    for cpu in cpus:
        siblings = _read(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.add(siblings.strip() if siblings else str(cpu))
    return len(cores)


def _cpu_list(text: str | None) -> set[int]:
    """{0, 1, 2, 8} from "0-2,8", as files of /sys list processors and nodes."""
    found: set[int] = set()
    for part in (text or "").strip().split(","):
        first, _, last = part.partition("-")
        if first.isdigit() and (last or first).isdigit():
            found |= set(range(int(first), int(last or first) + 1))
    return found


def _memory_nodes(cpus: set[int]) -> list[set[int]]:
    """Those of `cpus` that are near each part of the memory (NUMA), without parts that have none of them."""
    root = "/sys/devices/system/node"
    nodes = [
        _cpu_list(_read(f"{root}/node{node}/cpulist")) & cpus for node in sorted(_cpu_list(_read(f"{root}/online")))
    ]
    return [node for node in nodes if node]


def cpu_budget(wanted: int | None = None) -> CpuBudget:
    """How many compute threads to run, and where: physical cores of the affinity mask, of one NUMA node if there are
    several, capped by the cgroup's quota. Decoding reads all weights for each token, and another node's memory is slow
    to read. `wanted` threads, when the user names a number, stay on one node as long as it has so many cores."""
    host = os.cpu_count() or 1
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(host))
    threads = _physical_cores(cpus)
    source = "physical cores" if len(cpus) == host else "affinity mask"
    nodes, near = _memory_nodes(cpus), set[int]()
    if len(nodes) > 1:
        largest = max(nodes, key=lambda node: (_physical_cores(node), -min(node)))
        cores = _physical_cores(largest)
        if wanted is None or wanted <= cores:
            threads, near, source = cores, largest, f"cores of one of {len(nodes)} NUMA nodes"
    quota = _cpu_quota()
    if quota is not None and quota < threads:
        threads, source = max(1, math.floor(quota)), f"cgroup quota of {quota:g} processors"
    if wanted is not None:
        threads, source = wanted, "as asked for"
    return CpuBudget(max(1, threads), source, host, tuple(sorted(near)))


def _cgroup_memory() -> tuple[int, int, str] | None:
    """(limit, used, source) of the tightest memory cgroup; page cache that can be dropped does not count as used."""
    tightest = None
    for version, place in _cgroup_dirs("memory"):
        names = (
            ("memory.max", "memory.current") if version == "v2" else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        )
        limit, used = _read_int(place / names[0]), _read_int(place / names[1])
        if limit is None or used is None or limit >= _UNLIMITED:
            continue
        stat = dict(line.split()[:2] for line in (_read(place / "memory.stat") or "").splitlines() if " " in line)
        used -= int(stat.get("inactive_file", stat.get("total_inactive_file", 0)))
        if tightest is None or limit < tightest[0]:
            tightest = (limit, max(0, used), f"cgroup {version}")
    return tightest


def _physical_memory() -> tuple[int, int]:
    """(total, available) bytes of the machine."""
    info = {}
    for line in (_read("/proc/meminfo") or "").splitlines():
        key, _, rest = line.partition(":")
        if rest.split():
            info[key] = int(rest.split()[0]) * 1024
    if "MemTotal" in info:
        return info["MemTotal"], info.get("MemAvailable", info.get("MemFree", 0))
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 8 << 30
    return total, total // 2


def memory_limit() -> MemoryLimit:
    """The tightest of physical memory, the cgroup's limit and the address-space limit of this process."""
    total, free = _physical_memory()
    best, source = total, "physical memory"
    group = _cgroup_memory()
    if group is not None and group[0] < best:
        best, source = group[0], group[2]
        free = min(free, max(0, group[0] - group[1]))
    if sys.platform != "win32":
        for name, label in (("RLIMIT_AS", "address space limit"), ("RLIMIT_DATA", "data segment limit")):
            soft = resource.getrlimit(getattr(resource, name))[0]
            if soft != resource.RLIM_INFINITY and 0 < soft < best:
                best, source = soft, label
    return MemoryLimit(best, source, total, min(free, best))
