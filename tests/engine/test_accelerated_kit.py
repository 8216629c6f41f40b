"""The parts that accelerators share, through the conformance kit: contract, memory and graphs."""

from __future__ import annotations

from pathlib import Path

from enginecore.testing import run

BACKEND = Path(__file__).with_name("accelerated.py")


def test_the_shared_parts_conform() -> None:
    report = run(f"{BACKEND}:create", level="2,3", only="memory,graphs", timeout=120)
    assert report.ok, [f"{result.case_id}: {result.message}" for result in report.failures()]
    passed = {result.case_id for result in report.results if result.outcome.value == "pass"}
    assert {"L2/memory/two_processes", "L2/memory/shrink_keeps_content", "L3/graphs/attention_replays"} <= passed
