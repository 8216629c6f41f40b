"""What the last run of the kit found, kept in the cache for `enginecore devices` and `doctor`."""

from __future__ import annotations

import contextlib
import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from enginecore.testing.report import Report


def result_path(full_name: str) -> Path:
    """Where the last result of `DIST:DEVICE` is kept; an index of the device does not matter."""
    from enginecore.models.aliases import cache_dir

    distribution, device = full_name.split(":")[:2]
    return cache_dir() / "conformance" / f"{re.sub(r'[^A-Za-z0-9._-]', '_', distribution)}--{device}.json"


def remember(report: Report, levels: str) -> None:
    """Keep the outcome of a run over whole levels of an installed device, if the cache can be written."""
    full_name = report.about.get("device")
    if not full_name:
        return
    found = report.to_dict()
    kept = {name: found[name] for name in ("ok", "finished", "seconds", "versions", "summary")}
    kept |= {
        "version": report.about["version"],
        "levels": levels,
        "failures": [result.case_id for result in report.failures()],
    }
    path = result_path(full_name)
    part = path.with_suffix(f".{os.getpid()}.part")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(kept, indent=1))
        part.replace(path)


def last_result(full_name: str) -> dict[str, Any] | None:
    """What `remember` kept; None when there is nothing, or nothing that can be read."""
    try:
        found = json.loads(result_path(full_name).read_text())
        return found if isinstance(found, dict) and "summary" in found else None
    except (OSError, ValueError):
        return None


def told(result: dict[str, Any] | None, version: str) -> str:
    """One line about a kept result, for a plugin of `version`."""
    if result is None:
        return "never run here: enginecore conformance --device DEVICE"
    counts = ", ".join(f"{count} {outcome}" for outcome, count in result["summary"].items() if count)
    verdict = "conforms" if result["ok"] else "does not conform"
    stale = "" if result["version"] == version else f"; of version {result['version']}, {version} is installed"
    return f"{verdict}: {counts} (levels {result['levels']}, {result['finished']}{stale})"
