"""`enginecore bench throughput` and `latency`: what is reported is what happened."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from enginecore.cli.bench_latency import parse_batch_sizes
from enginecore.cli.bench_throughput import StepTally
from enginecore.cli.main import main
from enginecore.errors import ParameterError
from enginecore.request import EngineStats

SIM = ["--device", "sim", "--max-model-len", "512"]


def run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    code = main(["bench", *arguments, "--json"])
    shown = capsys.readouterr()
    assert code == 0, shown.err
    report: dict[str, Any] = json.loads(shown.out)
    return report


def test_throughput_on_the_simulated_device(smollm2: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    work = tmp_path / "work.json"
    work.write_text(json.dumps([{"prompt_token_ids": [7] * 20, "output_tokens": 13}] * 3))
    line = ["throughput", smollm2, *SIM, "--num-blocks", "64", "--workload", str(work), "--repeat", "2"]
    report = run([*line, "--num-requests", "3"], capsys)
    assert (report["input_tokens"], report["output_tokens"], report["num_requests"]) == (60, 39, 3)
    assert report["total_tok_per_s"] == pytest.approx(report["output_tok_per_s"] * 99 / 39, rel=0.5)
    assert len(report["runs"]) == 2
    assert all(one["num_steps"] == report["runs"][0]["num_steps"] for one in report["runs"])
    assert report["peak_rss_bytes"] > 0 and report["settings"]["device"] == "sim"
    assert {"versions", "machine"} <= set(report)
    assert report["fingerprint"]["id"] == report["system_fingerprint"]


def test_throughput_counts_preemptions_and_waste(
    smollm2: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    work = tmp_path / "work.json"
    work.write_text(json.dumps([{"prompt_token_ids": [n] * 8, "output_tokens": 56} for n in range(1, 9)]))
    line = [
        "throughput",
        smollm2,
        "--device",
        "sim",
        "--max-model-len",
        "64",
        "--num-blocks",
        "16",
        "--block-size",
        "8",
    ]
    report = run([*line, "--workload", str(work), "--num-requests", "8"], capsys)
    assert report["output_tokens"] == 8 * 56
    assert report["num_preemptions"] > 0
    assert 0 < report["kv_waste"] < 0.5
    assert report["peak_running"] > 1


@pytest.mark.model
def test_throughput_on_the_real_model(smollm2: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    work = tmp_path / "work.json"
    work.write_text(json.dumps([{"prompt": "The capital of France is", "output_tokens": 12}] * 2))
    line = ["throughput", smollm2, "--device", "cpu", "--max-model-len", "64", "--num-blocks", "16"]
    report = run([*line, "--dtype", "float32", "--workload", str(work), "--num-requests", "2"], capsys)
    assert (report["input_tokens"], report["output_tokens"]) == (10, 24)
    assert 0 < report["kv_waste"] < 1
    assert report["settings"]["dtype"] == "float32"


def test_latency_on_the_simulated_device(smollm2: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["latency", smollm2, *SIM, "--batch-sizes", "1,3", "--input-len", "40", "--output-len", "4"]
    report = run([*line, "--device-option", "step_time_s=0.001", "--repeat", "2", "--num-requests", "2"], capsys)
    assert list(report["batch"]) == ["1", "3"]
    for figures in report["batch"].values():
        assert figures["prefill_s"] > 0 and figures["decode_s"] >= 0.003
        assert figures["e2e_ms"] >= figures["ttft_ms"] > 0


def test_batch_sizes() -> None:
    assert parse_batch_sizes("1,4, 16") == [1, 4, 16]
    for text in ("", ",", "1,", "0", "-1", "1,x", "9" * 20, "5000"):
        with pytest.raises(ParameterError, match="batch_sizes"):
            parse_batch_sizes(text)


def test_waste_is_weighted_by_slots() -> None:
    tally = StepTally()
    assert tally.kv_waste is None
    tally.count(EngineStats(kv_slots_held=100, kv_tokens_held=100, num_running=2))
    tally.count(EngineStats(kv_slots_held=300, kv_tokens_held=200, num_running=1))
    assert tally.kv_waste == pytest.approx(0.25) and tally.peak_running == 2
