"""Medians, percentiles and what a report carries."""

from __future__ import annotations

import json

import pytest
from enginecore.cli.bench_report import machine_facts, medians, peak_rss_bytes, percentiles, print_report, versions


def test_percentiles_are_nearest_ranks() -> None:
    assert percentiles([]) is None
    assert percentiles([3.0]) == {"p50": 3.0, "p90": 3.0, "p99": 3.0}
    assert percentiles(list(range(101, 0, -1))) == {"p50": 51, "p90": 91, "p99": 100}


def test_medians_go_key_by_key_and_inwards() -> None:
    runs = [
        {"a": 1, "b": {"c": 2.0}, "d": "same", "e": None},
        {"a": 3, "b": {"c": 8.0}, "d": "same", "e": 1.0},
        {"a": 2, "b": {"c": 4.0}, "d": "same", "e": 1.0},
    ]
    assert medians(runs) == {"a": 2, "b": {"c": 4.0}, "d": "same", "e": None}
    assert medians(runs[:1]) == runs[0]


def test_facts() -> None:
    facts = machine_facts()
    assert facts["cores"] >= 1 and facts["processor"] and facts["memory_bytes"] > 2**20
    known = versions()
    assert {"enginecore", "python", "torch", "enginecore-sim"} <= set(known)
    assert (peak_rss_bytes() or 0) > 2**20


def test_a_report_for_people_and_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    report = {
        "benchmark": "x",
        "ttft_ms": {"p50": 12.34},
        "rate": 0.01234,
        "errors": ["a", "b"],
        "runs": [{}],
        "none": None,
    }
    print_report(report, as_json=False)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines == [["benchmark", "x"], ["ttft_ms.p50", "12.3"], ["rate", "0.01234"], ["errors", "a;", "b"]]
    print_report(report, as_json=True)
    shown = json.loads(capsys.readouterr().out)
    assert shown["rate"] == 0.01234 and {"versions", "machine", "command"} <= set(shown)
