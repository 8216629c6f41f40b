"""`enginecore bench serve` against a scripted server, and once against our own."""

from __future__ import annotations

import json
from typing import Any

import pytest
from enginecore.cli.main import main

from tests.cli.stub_server import StubServer


def bench(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    code = main(["bench", "serve", *arguments, "--json"])
    shown = capsys.readouterr()
    assert code == 0, shown.err
    report: dict[str, Any] = json.loads(shown.out)
    return report


def test_closed_loop(capsys: pytest.CaptureFixture[str]) -> None:
    with StubServer(["a", "b", "c"], api_key="key") as stub:
        line = ["--url", f"{stub.url}/v1/", "--api-key", "key", "--num-requests", "5", "--concurrency", "2"]
        report = bench(line, capsys)
    assert (report["num_requests"], report["num_failed"]) == (5, 0)
    assert (report["input_tokens"], report["output_tokens"]) == (15, 15)
    for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"):
        assert 0 < report[name]["p50"] <= report[name]["p99"]
    assert len(stub.bodies) == 6  # and the warm-up
    assert all(body["model"] == "stub" and body["stream"] and body["ignore_eos"] for body in stub.bodies)
    assert "cache_salt" not in stub.bodies[-1]


def test_open_loop_and_repeats_do_not_share_prefixes(capsys: pytest.CaptureFixture[str]) -> None:
    with StubServer(["a", "b"]) as stub:
        line = ["--url", stub.url, "--served-model", "mine", "--num-requests", "3", "--rate", "500", "--repeat", "2"]
        report = bench(line, capsys)
    assert len(report["runs"]) == 2 and report["num_failed"] == 0
    assert {body["model"] for body in stub.bodies} == {"mine"}
    assert len({body["cache_salt"] for body in stub.bodies}) == 2


@pytest.mark.parametrize(
    ("stub", "said"),
    [
        (StubServer([], status=429, message="queue full"), "429: queue full"),
        (StubServer(["a"], cut=True), "without saying so"),
        (StubServer([]), "held no tokens"),
        (StubServer(["a"], api_key="other"), "401: bad key"),
    ],
)
def test_a_server_that_fails(stub: StubServer, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with stub:
        assert main(["bench", "serve", "--url", stub.url, "--num-requests", "2"]) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("error: ") and said in shown


def test_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--url", "http://127.0.0.1:9"]) == 1
    assert "no answer from" in capsys.readouterr().err


def test_a_server_of_our_own(smollm2: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = [smollm2, "--device", "sim", "--max-model-len", "512", "--num-blocks", "256", "--num-requests", "3"]
    report = bench([*line, "--concurrency", "3"], capsys)
    assert report["num_failed"] == 0 and report["output_tokens"] == 116 + 190 + 35
    assert report["startup_s"] > 0 and report["ttft_ms"]["p50"] > 0


def test_a_server_of_our_own_that_cannot_start(smollm2: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", smollm2, "--device", "warp"]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error: ") and "warp" in shown and "fix: " in shown and "Traceback" not in shown
