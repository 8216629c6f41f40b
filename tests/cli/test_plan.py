"""`enginecore plan`, beside what an engine then really takes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from enginecore.cli.main import main
from enginecore.config import EngineArgs
from enginecore.engine.client import InprocClient


def plan(capfd: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    assert main(["plan", *options, "--json"]) == 0
    report: dict[str, Any] = json.loads(capfd.readouterr().out)
    return report


def test_a_simulated_card_that_nobody_has(capfd: pytest.CaptureFixture[str]) -> None:
    report = plan(capfd, "llama-3-8b", "--device", "sim", "--device-option", "profile=h100")
    ledger, kv = report["ledger"], report["kv_cache"]
    assert ledger["weights"] == pytest.approx(16.06e9, rel=0.001)
    assert kv["block_bytes"] == 2 * 32 * 8 * 128 * 2 * 16 and kv["num_blocks"] * kv["block_bytes"] == ledger["kv_cache"]
    assert sum(ledger[name] for name in ("process_base", "weights", "activations", "kv_cache")) <= ledger["budget"]
    assert "memory_utilization" in {choice["setting"] for choice in report["choices"]}


def test_the_prediction_is_what_an_engine_takes(capfd: pytest.CaptureFixture[str]) -> None:
    report = plan(capfd, "--device", "cpu", "--max-model-len", "1024", "--num-blocks", "100", "--dtype", "float32")
    client = InprocClient(EngineArgs(device="cpu", max_model_len=1024, num_blocks=100, dtype="float32"))
    ready = client.ready
    client.shutdown()
    assert report["kv_cache"]["num_blocks"] == ready.config.num_blocks == 100
    assert report["ledger"]["kv_cache"] == ready.ledger["kv_cache"]
    assert report["ledger"]["weights"] == pytest.approx(ready.ledger["weights"], rel=0.02)
    assert report["ledger"]["activations"] == ready.ledger["activations"]


def test_for_people(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "opt-13b", "--device", "sim", "--device-option", "profile=a100-40g"]) == 0
    assert "KV blocks of 16 tokens" in capfd.readouterr().out


def test_what_cannot_fit_is_said_before_anything_is_loaded(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--device", "cpu", "--max-model-len", "2048", "--num-blocks", "10"]) != 0
    assert "the KV cache cannot hold one sequence of 2048 tokens" in capfd.readouterr().err
