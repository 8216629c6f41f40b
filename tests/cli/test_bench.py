"""`enginecore bench throughput` and `latency`: what is reported is what happened."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from enginecore.cli import bench_latency
from enginecore.cli.bench_latency import parse_batch_sizes
from enginecore.cli.bench_throughput import StepTally
from enginecore.cli.common import open_llm
from enginecore.cli.main import main
from enginecore.config import EngineArgs
from enginecore.errors import ParameterError
from enginecore.frontend.llm import LLM
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


def test_growth_over_batch_context_and_threads(
    smollm2: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    opened: list[EngineArgs] = []

    def noted(engine: EngineArgs) -> LLM:
        opened.append(engine)
        return open_llm(engine)

    monkeypatch.setattr(bench_latency, "open_llm", noted)
    target = tmp_path / "grow.svg"
    line = ["latency", smollm2, *SIM, "--num-blocks", "64", "--batch-sizes", "1,2,40", "--contexts", "16,100"]
    line += ["--threads", "1,2", "--output-len", "6", "--repeat", "1", "--device-option", "step_time_s=0.001"]
    report = run([*line, "--num-requests", "4", "--plot", str(target)], capsys)
    points = [(row["threads"], row["batch"], row["context"]) for row in report["curves"]]
    assert points == [(n, *pair) for n in (1, 2) for pair in ((1, 16), (2, 16), (40, 16), (1, 100))]
    for row in report["curves"]:
        assert row["decode_step_ms"] is None or row["decode_step_ms"] >= 1
    assert any(row["decode_step_ms"] for row in report["curves"] if row["batch"] == 2)
    assert [engine.num_threads for engine in opened] == [1, 2]
    assert b"<svg" in target.read_bytes()


def test_growth_that_does_not_fit(smollm2: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["latency", smollm2, *SIM, "--num-blocks", "40", "--repeat", "1", "--num-requests", "2", "--output-len", "2"]
    assert main(["bench", *line, "--contexts", "16,511"]) == 2
    assert "511 tokens and 2 output tokens are more than max_model_len 512" in capsys.readouterr().err
    assert main(["bench", *line, "--batch-sizes", "1,200", "--contexts", "16,32"]) == 0
    shown = capsys.readouterr().out
    assert "200 sequences of 16 tokens do not fit the KV cache of 640 tokens: left out" in shown
    for bad in (["--contexts", "0"], ["--threads", "x"]):
        assert main(["bench", *line, *bad]) == 2
        assert bad[0][2:] in capsys.readouterr().err


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
