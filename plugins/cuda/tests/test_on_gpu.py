"""The script that proves the plugin on a GPU, tried here on the CPU: its logic, its limits, and what it measures."""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("enginecore_cpu")
BENCH = Path(__file__).parents[1] / "bench"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    import gpu_stages

    return gpu_stages


def play(bench: ModuleType, name: str, work: Path) -> dict[str, Any]:
    options = Namespace(device="cpu", tiny=True, work=str(work), seconds=200.0)
    code = bench.run(name, options)
    found: dict[str, Any] = json.loads((work / f"{name}.json").read_text())
    assert code == 0, found
    return found


def test_a_stage_that_fails_is_reported_and_the_rest_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = [sys.executable, str(BENCH / "on_gpu.py"), "--device", "cpu", "--tiny", "--out", str(out)]
    code = "import json,sys; sys.argv=sys.argv[1:]; import runpy; sys.path.insert(0, sys.argv[0].rpartition('/')[0]); "
    code += "import on_gpu; on_gpu.STAGES |= {'nothing': 30}; sys.exit(on_gpu.main())"
    command = [sys.executable, "-c", code, *command[1:], "--stages", "nothing,machine"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    results = json.loads(out.read_text())
    assert done.returncode == 1 and "FAILED  stage nothing: 1 part(s) failed" in done.stdout
    assert "KeyError" in results["nothing"]["failures"]["nothing"]
    machine = results["machine"]
    assert "error" not in machine and machine["copy_gb_s"] > 0 and machine["versions"]["torch"]
    assert machine["backend"] == "CpuBackend" and results["missing_packages"] == []


def test_a_stage_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    import on_gpu

    options = Namespace(device="cpu", tiny=True, work=str(tmp_path))
    found = on_gpu.run_stage("machine", 0.3, options, dict(on_gpu.os.environ))
    assert found["error"] == "took longer than 0 s"
    lines = on_gpu.summary({"machine": found, "attention": {"decode_share": 0.9, "prefill_ratio": 0.5}})
    assert any("ok" in line and "decode" in line for line in lines)
    assert any("MISSED" in line and "prefill" in line for line in lines)


def test_the_engine_is_compared_and_measured_beside_transformers(bench: ModuleType, tmp_path: Path) -> None:
    parity = play(bench, "parity", tmp_path)
    assert parity["compared"] == 8 and parity["different"] == 0
    steps = play(bench, "steps", tmp_path)
    assert set(steps["eager_ms"]) == {"1", "4"} and 0.5 < steps["kv_utilisation"] <= 1
    throughput = play(bench, "throughput", tmp_path)
    assert all(row["enginecore"] > 0 and row["transformers"] > 0 for row in throughput["batches"].values())


def test_attention_is_measured_and_right(bench: ModuleType, tmp_path: Path) -> None:
    found = play(bench, "attention", tmp_path)
    assert found["decode_share"] > 0 and found["prefill_ratio"] > 0
    assert found["decode"]["4x64"]["max_error"] < 0.05 and found["prefill"]["2x64of64"]["max_error"] < 0.05


def test_the_kit_runs_in_several_processes(bench: ModuleType, tmp_path: Path) -> None:
    found = play(bench, "kit", tmp_path)
    assert found["failed"] == 0 and found["passed"] > 30 and found["not_reached"] == []
    assert found["report"]["backend"]["backend"] == "CpuBackend" and found["report"]["ok"]
