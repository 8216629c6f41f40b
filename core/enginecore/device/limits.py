"""Limits that control groups put on this process: bytes of memory, a share of the processors. Read from files alone.

`root` stands for "/", so that tests can plant a machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Limit:
    """A limit of a control group: bytes of memory or a number of processors, and the file that says so."""

    value: float
    source: str


def _groups(root: Path, controller: str) -> list[Path]:
    """Directories of this process's control group and its ancestors, innermost first, for version 2 and version 1."""
    base, found = root / "sys/fs/cgroup", []
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and controller not in controllers.split(","):
            continue
        top = base / controller if controllers else base
        inner = top / path.lstrip("/")
        # Inside a container the path is the host's and does not exist; the top is then the container's own group.
        found += [folder for folder in (inner, *inner.parents) if folder == top or top in folder.parents]
    return list(dict.fromkeys(found))


def memory_limit(root: Path = Path("/")) -> Limit | None:
    """The smallest memory limit of any control group that this process is in; None when there is none."""
    limits = []
    for folder in _groups(root, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = read_text(folder / name)
            # Version 1 says "no limit" as a number near 2^63.
            if text.isdigit() and int(text) < 2**60:
                limits.append(Limit(float(text), f"{folder / name}"))
    return min(limits, key=lambda limit: limit.value, default=None)


def processor_limit(root: Path = Path("/")) -> Limit | None:
    """The smallest processor quota of any control group that this process is in; None when there is none."""
    limits = []
    for folder in _groups(root, "cpu"):
        quota, _, period = read_text(folder / "cpu.max").partition(" ")
        if quota.isdigit() and period.isdigit():
            limits.append(Limit(int(quota) / int(period), f"{folder / 'cpu.max'}"))
        quota, period = read_text(folder / "cpu.cfs_quota_us"), read_text(folder / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit():
            limits.append(Limit(int(quota) / int(period), f"{folder / 'cpu.cfs_quota_us'}"))
    return min(limits, key=lambda limit: limit.value, default=None)


def read_text(path: Path) -> str:
    """The file's text without surrounding space; empty when it cannot be read."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
