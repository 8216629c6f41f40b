"""`enginecore bench startup`: launches are real, and a cold one reads from disk what it needs."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest
from enginecore.cli import bench_startup
from enginecore.cli.main import main
from enginecore.config import EngineArgs
from enginecore.models.store import resolve_model


def test_a_launch_is_timed_to_health_and_to_the_first_token(
    smollm2: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    forgotten: list[Path] = []
    monkeypatch.setattr(bench_startup, "_read_at_start", lambda engine: [Path(engine.model), Path("/nowhere/at all")])
    monkeypatch.setattr(bench_startup, "_forget", forgotten.append)
    line = ["bench", "startup", smollm2, "--device", "sim", "--max-model-len", "512", "--num-blocks", "256"]
    assert main([*line, "--repeat", "1", "--cold", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert len(report["runs"]) == 1 and forgotten[0] == Path(smollm2)
    assert 0 < report["healthy_s"] == report["fastest_s"] == report["slowest_s"] < report["first_token_s"]
    assert report["cold"] is True and report["settings"]["serve"] and report["system_fingerprint"]
    table = bench_startup.startup_table(report)
    assert len(table) == 3 and table[-1].startswith("median")


def test_what_a_cold_launch_must_not_find_in_memory(smollm2: str, tmp_path: Path) -> None:
    files = list(bench_startup._read_at_start(EngineArgs(model=smollm2)))
    assert {Path(path) for path in resolve_model(smollm2).weights} <= set(files)
    names = {file.name for file in files}
    assert {"libtorch_cpu.so", "argparse.py"} & names and "serve.py" in names
    file = tmp_path / "data"
    file.write_bytes(b"kept")
    for each in (file, tmp_path / "missing", *islice(files, 1)):
        bench_startup._forget(each)
    assert file.read_bytes() == b"kept"
