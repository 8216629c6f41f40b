"""write_support_docs.py [--check]: docs/support.md from the kit's reports in docs/conformance/*.json.

A report is written with `enginecore conformance --device DEVICE --out docs/conformance/DEVICE.json`. What a backend
claims and no report proves is not called supported.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
REPORTS = ROOT / "docs" / "conformance"
TARGET = ROOT / "docs" / "support.md"

HEAD = """# What runs where

Written from the conformance kit's reports in [conformance/](conformance) by `make docs`; a test keeps it in step.
**native**: the backend's own, and every case of the kit passed. reference: enginecore's torch reference runs on that
device. no: not claimed, so refused before any weights are read. FAILED: claimed, and the kit found it wrong.
"""

DTYPES = ("float32", "bfloat16", "float16")
LEVELS = ("contract", "ops", "memory", "graphs", "collectives", "models", "performance")


def support_docs(reports: list[dict[str, Any]], others: list[str]) -> str:
    """The page for `reports`; `others` are backends of this repository without one."""
    parts = [HEAD, _backends(reports, others), "## Ops\n\n" + _matrix(reports, "ops")]
    parts += ["## Attention\n\n" + _matrix(reports, "attention"), "## Levels of the kit\n\n" + _levels(reports)]
    return "\n".join(parts)


def _name(report: dict[str, Any]) -> str:
    return str(report["backend"]["device"]).split(":")[1]


def _table(headings: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(headings) + " |", "|" + "---|" * len(headings)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows]) + "\n"


def _backends(reports: list[dict[str, Any]], others: list[str]) -> str:
    rows = []
    for report in reports:
        about, summary = report["backend"], report["summary"]
        failed = sum(summary[outcome] for outcome in ("fail", "crash", "hang", "false-claim"))
        verdict = "conforms" if report["ok"] else "does not conform"
        counts = f"{summary['pass']} passed, {failed} failed, {summary['declared-unsupported']} not claimed"
        until = min((case["expires"] for case in report["cases"] if case.get("expires")), default="")
        counts += f" (accepted until {until})" if until else ""
        versions = f"enginecore {report['versions']['enginecore']}, torch {report['versions']['torch']}"
        rows.append(
            [f"`{_name(report)}`", f"{about['distribution']} {about['version']}", f"{verdict}: {counts}",
             f"{report['finished'][:10]}, {versions}, {', '.join(about['capabilities']['isa']) or 'one device'}"]
        )  # fmt: skip
    rows += [[f"`{name}`", f"enginecore-{name}", "unverified: no report", ""] for name in others]
    return _table(["device", "plugin", "kit", "run"], rows)


def _matrix(reports: list[dict[str, Any]], part: str) -> str:
    """Rows of `part` by backend. A cell says the state for each dtype, or once where all dtypes have the same."""
    rows = dict.fromkeys(row for report in reports for row in report["backend"]["support"][part])
    cells = [[f"`{row}`", *(_cell(report, part, row) for report in reports)] for row in rows]
    return _table(["op" if part == "ops" else "feature", *(f"`{_name(report)}`" for report in reports)], cells)


def _cell(report: dict[str, Any], part: str, row: str) -> str:
    support = report["backend"]["support"]
    if support["runtime"]:
        return "whole models"
    states: dict[str, list[str]] = {}
    for dtype in DTYPES:
        state = support[part].get(row, {}).get(dtype, {}).get("state", "unsupported")
        states.setdefault(_proved(report, part, row, dtype, state), []).append(dtype)
    if len(states) == 1:
        return next(iter(states))
    return "; ".join(f"{state}: {', '.join(dtypes)}" for state, dtypes in states.items() if state != "no")


#: Words of the case ids in which a feature of attention is tried.
FEATURE_CASES = {
    "sliding_window": "window", "soft_cap": "soft_cap", "sinks": "sinks", "alibi": "alibi", "non_causal": "non_causal",
}  # fmt: skip


def _proved(report: dict[str, Any], part: str, row: str, dtype: str, state: str) -> str:
    """What may be said of `state`, given the outcomes of the cases that try it."""
    if state in ("unsupported", "reference", "refused"):
        return {"unsupported": "no", "reference": "reference", "refused": "reference (refused)"}[state]
    outcomes = [case["outcome"] for case in report["cases"] if _tries(case["id"], part, row, dtype)]
    tried = [outcome for outcome in outcomes if outcome != "declared-unsupported"]
    if any(outcome != "pass" for outcome in tried):
        return "FAILED"
    return "**native**" if tried else "unverified"


def _tries(case_id: str, part: str, row: str, dtype: str) -> bool:
    level, op, name = case_id.split("/", 2)
    base, _, suffix = name.partition("[")
    if level != "L1" or (suffix and suffix != f"{dtype}]"):
        return False
    if part == "ops":
        return op == row
    if op != "attention":
        return False
    used = [base] if base.startswith("kv_") else [feature for feature, word in FEATURE_CASES.items() if word in base]
    return bool(suffix) and (row in used if row != "plain" else not used)


def _levels(reports: list[dict[str, Any]]) -> str:
    rows = []
    for level, title in enumerate(LEVELS):
        cells = []
        for report in reports:
            found = [case["outcome"] for case in report["cases"] if case["id"].startswith(f"L{level}/")]
            counted = {outcome: found.count(outcome) for outcome in dict.fromkeys(found)}
            cells.append(", ".join(f"{count} {outcome}" for outcome, count in sorted(counted.items())) or "not run")
        rows.append([f"{level} {title}", *cells])
    return _table(["level", *(f"`{_name(report)}`" for report in reports)], rows)


def read_reports(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]


def page() -> str:
    reports = read_reports(REPORTS)
    projects = (ROOT / "plugins").glob("*/pyproject.toml")
    here = sorted(path.parent.name for path in projects if "enginecore.backends" in path.read_text(encoding="utf-8"))
    return support_docs(reports, [name for name in here if name not in map(_name, reports)])


def main() -> int:
    text = page()
    if "--check" in sys.argv[1:]:
        in_step = TARGET.is_file() and TARGET.read_text(encoding="utf-8") == text
        print(f"{TARGET.name} is {'in step' if in_step else 'out of step: run make docs'}")
        return 0 if in_step else 1
    TARGET.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
