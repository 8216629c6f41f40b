"""docs/support.md and the reports that it is written from, and what its cells say of planted reports."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from enginecore.testing.cases import all_cases

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import write_support_docs as docs  # noqa: E402


@pytest.fixture
def report() -> dict[str, Any]:
    [found] = [report for report in docs.read_reports(docs.REPORTS) if report["target"].startswith("enginecore-cpu")]
    return copy.deepcopy(found)


def row(report: dict[str, Any], name: str) -> str:
    [line] = [line for line in docs.support_docs([report], []).splitlines() if line.startswith(f"| `{name}` |")]
    return line


def test_the_page_is_in_step_with_the_reports() -> None:
    script = [sys.executable, str(ROOT / "tools" / "write_support_docs.py"), "--check"]
    done = subprocess.run(script, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_reports_are_of_whole_runs_and_name_no_place_of_a_machine() -> None:
    known = {case.id for case in all_cases()}
    for path in docs.REPORTS.glob("*.json"):
        text = path.read_text()
        found = json.loads(text)
        assert path.stem == found["target"].split(":")[1]
        ids = {case["id"] for case in found["cases"]}
        assert len(ids) > 400 and ids <= known, "cases have gone: run the kit again"
        assert "/root" not in text and "/home" not in text


def test_what_passed_is_native_and_what_is_not_claimed_is_no(report: dict[str, Any]) -> None:
    assert row(report, "rms_norm") == "| `rms_norm` | **native**: float32, bfloat16 |"
    assert row(report, "mla") == "| `mla` | no |"


def test_a_failed_case_takes_the_word_away(report: dict[str, Any]) -> None:
    for case in report["cases"]:
        if case["id"].startswith("L1/attention/window_15[bfloat16]"):
            case["outcome"] = "crash"
    assert row(report, "sliding_window") == "| `sliding_window` | **native**: float32; FAILED: bfloat16 |"
    assert "**native**" in row(report, "plain") and "FAILED" not in row(report, "plain")


def test_a_claim_that_nothing_tried_is_unverified(report: dict[str, Any]) -> None:
    report["cases"] = [case for case in report["cases"] if "/silu_and_mul/" not in case["id"]]
    assert row(report, "silu_and_mul") == "| `silu_and_mul` | unverified: float32, bfloat16 |"


def test_references_and_refusals_are_told_apart(report: dict[str, Any]) -> None:
    ops = report["backend"]["support"]["ops"]
    ops["sample"] = {dtype: {"state": "reference", "reasons": []} for dtype in docs.DTYPES}
    ops["rms_norm"]["bfloat16"] = {"state": "refused", "reasons": ["no"]}
    assert row(report, "sample") == "| `sample` | reference |"
    assert row(report, "rms_norm") == "| `rms_norm` | **native**: float32; reference (refused): bfloat16 |"
    assert "| `cuda` | enginecore-cuda | unverified: no report |" in docs.support_docs([report], ["cuda"])
