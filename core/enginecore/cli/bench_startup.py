"""How long a server takes from launch to its first healthy answer, and to its first token."""

from __future__ import annotations

import contextlib
import os
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from enginecore.cli.bench_progress import Begin, silent
from enginecore.cli.bench_report import aligned, medians, stamp
from enginecore.cli.common import engine_argv
from enginecore.cli.local_server import LocalServer, local_server
from enginecore.config import EngineArgs
from enginecore.errors import EngineCoreError, ParameterError
from enginecore.models.store import resolve_model

#: Small files that a cold start must not find in memory either are those of Python's own packages.
_SUFFIXES = frozenset({".py", ".pyc", ".so", ".json"})


def measure_startup(engine: EngineArgs, repeat: int, *, cold: bool, begin: Begin = silent) -> dict[str, Any]:
    """Medians over `repeat` launches, one after the other; with `cold` the system's cache of files is emptied before
    each of what a launch reads. `load_average` is the machine's before each: other work makes starts longer."""
    files = list(_read_at_start(engine)) if cold else []
    advance = begin("launches, cold" if cold else "launches", repeat)
    runs: list[dict[str, Any]] = []
    told = None
    for _ in range(repeat):
        for file in files:
            _forget(file)
        load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
        with local_server(engine) as server:
            first_s, told = _first_token(server)
            runs.append({"healthy_s": server.startup_s, "first_token_s": first_s, "load_average": load})
        advance()
    times = [run["healthy_s"] for run in runs]
    return {
        "benchmark": "startup",
        "cold": cold,
        "repeat": repeat,
        **medians(runs),
        "fastest_s": min(times),
        "slowest_s": max(times),
        "runs": runs,
        "settings": {"serve": engine_argv(engine)},
        **stamp(told),
    }


def startup_table(report: dict[str, Any]) -> list[str]:
    """For people: a row a launch, then the medians."""
    rows = [["launch", "healthy, s", "first token, s", "load before"]]
    named = [*((str(number), run) for number, run in enumerate(report["runs"], 1)), ("median", report)]
    for name, run in named:
        load = run["load_average"]
        rows.append(
            [name, f"{run['healthy_s']:.2f}", f"{run['first_token_s']:.2f}", "-" if load is None else f"{load:.1f}"]
        )
    return aligned(rows)


def _first_token(server: LocalServer) -> tuple[float, dict[str, Any] | None]:
    """Seconds from launch to the end of an answer of one token, and the server's fingerprint."""
    headers = {"Authorization": f"Bearer {server.api_key}"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=600) as client:
        begun = time.monotonic()
        model = client.get("/v1/models").json()["data"][0]["id"]
        body = {"model": model, "prompt": "Good morning", "max_tokens": 1}
        answer = client.post("/v1/completions", json=body)
        if answer.status_code != 200:
            raise EngineCoreError(f"the server's first answer was {answer.status_code}: {answer.text[:300]}")
        passed = time.monotonic() - begun
        told = client.get("/v1/fingerprint")
        return server.startup_s + passed, told.json() if told.status_code == 200 else None


def _read_at_start(engine: EngineArgs) -> Iterator[Path]:
    """The files of Python, of every package and of the model."""
    if not hasattr(os, "posix_fadvise"):
        raise ParameterError(
            "this system cannot empty its cache of files: only warm starts can be measured", param="cold"
        )
    folders = {sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")}
    folders |= {path for path in sys.path if os.path.isdir(path)}
    for folder in folders:
        for place, _, names in os.walk(folder):
            yield from (Path(place, name) for name in names if Path(name).suffix in _SUFFIXES or ".so." in name)
    with contextlib.suppress(EngineCoreError):  # what is wrong with the model is the server's to say
        model = resolve_model(engine.model)
        yield from (Path(weights) for weights in model.weights)


def _forget(file: Path) -> None:
    """Ask the system to drop what it keeps of a file in memory. What a running program has mapped stays."""
    with contextlib.suppress(OSError):
        handle = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)
