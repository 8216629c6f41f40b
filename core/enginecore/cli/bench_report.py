"""Reports: figures with what is needed to compare them, as a table for people or JSON for programs."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Any

from enginecore._version import __version__

PERCENTILES = (50, 90, 99)


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """p50, p90 and p99 (nearest rank); None without values."""
    if not values:
        return None
    ordered = sorted(values)
    last = len(ordered) - 1
    return {f"p{q}": ordered[round(q / 100 * last)] for q in PERCENTILES}


def medians(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Key by key the median over runs with the same keys; nested dicts too, None where a run has none."""
    result: dict[str, Any] = {}
    for key, first in runs[0].items():
        values = [run[key] for run in runs]
        if isinstance(first, dict) and all(isinstance(value, dict) for value in values):
            result[key] = medians(values)
        elif all(isinstance(value, (int, float)) for value in values):
            middle = statistics.median(values)
            result[key] = round(middle) if all(isinstance(value, int) for value in values) else middle
        else:
            result[key] = first if all(value == first for value in values) else None
    return result


def stamp(fingerprint: dict[str, Any] | None) -> dict[str, Any]:
    """What was measured, for a report: the name of everything that can change a result, and all of it."""
    if not fingerprint or not isinstance(fingerprint.get("id"), str):  # a server of another make
        return {"system_fingerprint": None}
    return {"system_fingerprint": fingerprint["id"], "fingerprint": fingerprint}


def machine_facts() -> dict[str, Any]:
    """The processor, its cores that this process may use, memory and system."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else None
    return {
        "processor": _processor(),
        "cores": cores,
        "memory_bytes": pages,
        "system": f"{platform.system()} {platform.release()}",
        "architecture": platform.machine(),
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """enginecore, Python, the libraries that decide speed, and every installed plugin."""
    found = {"enginecore": __version__, "python": platform.python_version()}
    plugins = {entry.dist.name for entry in metadata.entry_points(group="enginecore.backends") if entry.dist}
    names = ("torch", "transformers", "tokenizers", "numpy", *sorted(plugins))
    found.update((name, metadata.version(name)) for name in names)
    return found


def peak_rss_bytes() -> int | None:
    """The most memory that this process has had resident; None where the system does not say."""
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def print_report(report: dict[str, Any], *, as_json: bool, lines: Sequence[str] | None = None) -> None:
    """`report` as JSON, or `lines`: without them its figures one a line."""
    if as_json:
        facts = {"versions": versions(), "machine": machine_facts(), "command": sys.argv[1:]}
        print(json.dumps({**report, **facts}, indent=1))
        return
    for line in lines if lines is not None else _lines(report, ""):
        print(line)


def short(value: float | None) -> str:
    """A figure as people read it: three or four digits."""
    if value is None:
        return "-"
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of a table as lines: the first column to the left, the others to the right."""
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells[1:]]).rstrip())
    return lines


def _lines(report: dict[str, Any], prefix: str) -> list[str]:
    lines = []
    for key, value in report.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and key not in ("settings", "fingerprint"):
            lines += _lines(value, f"{name}.")
        elif isinstance(value, float):
            lines.append(f"{name:<32} {value:.4g}" if abs(value) < 1 else f"{name:<32} {value:.1f}")
        elif isinstance(value, (int, str)):
            lines.append(f"{name:<32} {value}")
        elif isinstance(value, list) and value and isinstance(value[0], str):
            lines.append(f"{name:<32} {'; '.join(value)}")
    return lines
