"""Facts of this machine for `enginecore doctor`: memory and its limits, processors, their instructions, the cache."""

from __future__ import annotations

import os
import platform
import sys
import tempfile
from pathlib import Path

from enginecore.device.limits import memory_limit, processor_limit, read_text
from enginecore.device.manifest import DoctorFinding

MIN_PYTHON, MAX_PYTHON = (3, 10), (3, 13)

#: A small model in bfloat16 with a little cache; less free memory than this is worth a word.
LOW_MEMORY_BYTES = 2**30

_INSTRUCTION_SETS = (
    "avx2", "avx512f", "avx512_bf16", "avx512_fp16", "avx512_vnni", "amx_tile", "amx_bf16",
    "asimd", "bf16", "sve", "sve2",
)  # fmt: skip


def machine_checks(root: Path = Path("/")) -> list[DoctorFinding]:
    """`root` stands for "/", so that tests can plant a machine."""
    return [_python(), _memory(root), _processors(root), _instruction_sets(root), _model_cache()]


def _python() -> DoctorFinding:
    fits = MIN_PYTHON <= sys.version_info[:2] <= MAX_PYTHON
    wanted = f"Python {'.'.join(map(str, MIN_PYTHON))} to {'.'.join(map(str, MAX_PYTHON))}"
    return DoctorFinding(
        name="python",
        ok=fits,
        detail=f"{platform.python_version()} at {sys.executable}",
        fix="" if fits else f"make an environment with {wanted}",
    )


def _memory(root: Path) -> DoctorFinding:
    facts = _meminfo(root)
    total, free = facts.get("MemTotal", 0), facts.get("MemAvailable", 0)
    limit = memory_limit(root)
    parts = [f"{_gib(total)} in the machine", f"{_gib(free)} available"]
    room = free
    if limit is not None:
        parts.append(f"limited to {_gib(limit.value)} by {limit.source}")
        room = min(free, int(limit.value))
    enough = room >= LOW_MEMORY_BYTES
    fix = "" if enough else "end other programs, or give the container more memory"
    return DoctorFinding(name="memory", ok=enough, detail=", ".join(parts), fix=fix)


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"


def _meminfo(root: Path) -> dict[str, int]:
    """/proc/meminfo in bytes; empty where there is none."""
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return {}
    fields = (line.split() for line in lines)
    return {field[0].rstrip(":"): int(field[1]) * 1024 for field in fields if len(field) >= 2}


def _processors(root: Path) -> DoctorFinding:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = processor_limit(root)
    quota = f", limited to {limit.value:g} by {limit.source}" if limit else ""
    detail = f"{usable} usable of {os.cpu_count()}{quota}"
    return DoctorFinding(name="processors", ok=True, detail=detail)


def _instruction_sets(root: Path) -> DoctorFinding:
    flags: set[str] = set()
    for line in read_text(root / "proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            flags.update(value.split())
            break
    known = [name for name in _INSTRUCTION_SETS if name in flags]
    detail = f"{platform.machine()}: {', '.join(known) or 'baseline only'}"
    return DoctorFinding(name="instruction sets", ok=True, detail=detail)


def _model_cache() -> DoctorFinding:
    from enginecore.models.aliases import cache_dir

    folder = cache_dir()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    fix = "set ENGINECORE_CACHE to a writable directory"
    try:
        with tempfile.NamedTemporaryFile(dir=existing, prefix=".enginecore-"):
            pass
        space = os.statvfs(existing)
    except OSError as error:
        return DoctorFinding(
            name="model cache", ok=False, detail=f"{folder} is not writable: {error.strerror}", fix=fix
        )
    return DoctorFinding(name="model cache", ok=True, detail=f"{folder}, {_gib(space.f_bavail * space.f_frsize)} free")
