"""The conformance kit that vendors import: does a backend compute what the contract says, and does it tell the truth?

    enginecore conformance --device acme_npu                    on the command line
    enginecore.testing.run("acme_npu")                          from Python: a Report
    @enginecore.testing.pytest_cases("acme_npu")                over a test, in the vendor's own suite

Names here are imported on first use: a plugin's `enginecore_conformance_profile` must not wait for torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from enginecore.testing.case import Case, CaseResult, Outcome
    from enginecore.testing.cases import all_cases
    from enginecore.testing.profile import ConformanceProfile, DeclaredGap, PerformanceFloor
    from enginecore.testing.pytest_entry import pytest_cases
    from enginecore.testing.report import Report
    from enginecore.testing.runner import run
    from enginecore.testing.source import BackendSource
    from enginecore.testing.tolerance import nmse

__all__ = [
    "BackendSource",
    "Case",
    "CaseResult",
    "ConformanceProfile",
    "DeclaredGap",
    "Outcome",
    "PerformanceFloor",
    "Report",
    "all_cases",
    "nmse",
    "pytest_cases",
    "run",
]

_HOMES = {
    "BackendSource": "source",
    "Case": "case",
    "CaseResult": "case",
    "ConformanceProfile": "profile",
    "DeclaredGap": "profile",
    "Outcome": "case",
    "PerformanceFloor": "profile",
    "Report": "report",
    "all_cases": "cases",
    "nmse": "tolerance",
    "pytest_cases": "pytest_entry",
    "run": "runner",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'enginecore.testing' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"enginecore.testing.{_HOMES[name]}"), name)
