"""`enginecore bench serve` against a scripted server, and once against our own."""

from __future__ import annotations

import json
from typing import Any

import pytest
from enginecore.cli.bench_client import Record
from enginecore.cli.bench_figures import Objectives, figures
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
    assert len(stub.bodies) == 7  # and the probe and the warm-up
    assert all(body["model"] == "stub" and body["stream"] and body["ignore_eos"] for body in stub.bodies)
    assert "cache_salt" not in stub.bodies[-1] and not stub.bodies[0]["prompt"].startswith(stub.bodies[2]["prompt"][:4])


def test_open_loop_and_repeats_do_not_share_prefixes(capsys: pytest.CaptureFixture[str]) -> None:
    with StubServer(["a", "b"]) as stub:
        line = ["--url", stub.url, "--served-model", "mine", "--num-requests", "3", "--rate", "500", "--repeat", "2"]
        report = bench(line, capsys)
    assert len(report["runs"]) == 2 and report["num_failed"] == 0
    assert {body["model"] for body in stub.bodies} == {"mine"}
    assert len({body["cache_salt"] for body in stub.bodies[1:]}) == 2


def test_a_sweep_has_a_row_for_each_load_and_says_who_was_served_in_time(capsys: pytest.CaptureFixture[str]) -> None:
    with StubServer(["a", "b"]) as stub:
        line = ["--url", stub.url, "--num-requests", "3", "--sweep-concurrency", "1,2"]
        report = bench([*line, "--ttft-slo", "60000", "--tpot-slo", "0.001"], capsys)
        assert main(["bench", "serve", *line[:-2], "--sweep-rate", "100,200", "--ttft-slo", "60000"]) == 0
        table = capsys.readouterr().out.splitlines()
    assert [point["concurrency"] for point in report["points"]] == [1, 2] and report["sweep"] == "concurrency"
    assert all(point["num_requests"] == 3 for point in report["points"])
    assert [point["goodput"]["share"] for point in report["points"]] == [0, 0]
    assert [row.split()[0] for row in table[:3]] == ["rate", "100", "200"] and table[1].split()[-2] == "100%"
    assert len({body["cache_salt"] for body in stub.bodies}) == 1 + 2 + 1 + 2 - 1, "two probes have one between them"


def test_who_meets_objectives() -> None:
    def record(stamps: list[float], error: str | None = None) -> Record:
        return Record(begun=1.0, asked_tokens=3, stamps=stamps, error=error)

    quick, late, slow = record([1.1, 1.2, 1.3]), record([1.6, 1.7, 1.8]), record([1.1, 2.1, 3.1])
    alone, failed = record([1.1]), record([1.1, 1.2, 1.3], error="cut")
    both = Objectives(ttft_ms=500, tpot_ms=200)
    assert [both.met_by(each) for each in (quick, late, slow, alone, failed)] == [True, False, False, True, False]
    assert [Objectives(ttft_ms=500).met_by(each) for each in (late, slow)] == [False, True]
    found = figures([quick, late, slow, alone, failed], 2.0, both)["goodput"]
    assert found == {"ttft_slo_ms": 500, "tpot_slo_ms": 200, "share": 0.4, "requests_per_s": 1.0}
    assert "goodput" not in figures([quick], 1.0)


@pytest.mark.parametrize(
    "line",
    [("--sweep-rate", "1,x"), ("--sweep-rate", "0"), ("--sweep-concurrency", "1.5"), ("--sweep-concurrency", "")],
)
def test_loads_that_mean_nothing(line: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--url", "http://127.0.0.1:9", *line]) == 2
    assert line[0][2:].replace("-", "_") in capsys.readouterr().err
    assert main(["bench", "serve", "--sweep-rate", "1", "--sweep-concurrency", "1"]) == 2
    assert "exclude" in capsys.readouterr().err


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
