"""What a run of the kit found, as data, as JSON and as text."""

from __future__ import annotations

import datetime
import json
import platform
from collections import Counter
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any
from xml.etree import ElementTree

from enginecore._version import __version__
from enginecore.device import contract_version
from enginecore.testing.case import CaseResult, Outcome

#: Raised when a field of the JSON changes its meaning; new fields do not raise it.
SCHEMA_VERSION = 1


def versions(about: dict[str, Any] | None = None) -> dict[str, str]:
    """Everything whose version may change a result."""
    found = {"enginecore": __version__, "contract": contract_version(), "python": platform.python_version()}
    found |= {name: _version(name) for name in ("torch", "transformers", "numpy", "hypothesis")}
    found["platform"] = platform.platform()
    if about and "distribution" in about:
        found[about["distribution"]] = about["version"]
    return found


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


@dataclass(frozen=True, kw_only=True)
class Report:
    """`about` describes the backend as it described itself: distribution, version, class, capabilities."""

    target: str
    results: list[CaseResult]
    about: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Every case passed or was declared unsupported, and at least one passed."""
        counts = self.counts()
        return bool(counts[Outcome.PASS]) and all(result.outcome.ok for result in self.results)

    def counts(self) -> Counter[Outcome]:
        return Counter(result.outcome for result in self.results)

    def by_group(self) -> dict[tuple[str, str], Counter[Outcome]]:
        """Counts for each (level, op), in the order of the run."""
        groups: dict[tuple[str, str], Counter[Outcome]] = {}
        for result in self.results:
            level, op, _ = result.case_id.split("/", 2)
            groups.setdefault((level, op), Counter())[result.outcome] += 1
        return groups

    def failures(self) -> list[CaseResult]:
        return [result for result in self.results if not result.outcome.ok]

    def to_dict(self) -> dict[str, Any]:
        counts = self.counts()
        return {
            "schema": SCHEMA_VERSION,
            "target": self.target,
            "ok": self.ok,
            "seconds": round(self.seconds, 3),
            "finished": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "versions": versions(self.about),
            "backend": self.about,
            "summary": {outcome.value: counts[outcome] for outcome in Outcome},
            "cases": [
                {
                    "id": result.case_id,
                    "outcome": result.outcome.value,
                    "message": result.message,
                    "seconds": round(result.seconds, 4),
                    "gap": result.gap,
                    "expires": result.expires,
                    **({"metrics": result.metrics} if result.metrics else {}),
                }
                for result in self.results
            ],
        }

    def to_junit(self) -> str:
        """JUnit's XML, as CI systems read it: one suite for each level and op, one test for each case."""
        root = ElementTree.Element("testsuites", name=f"enginecore conformance {self.target}")
        suites: dict[str, list[CaseResult]] = {}
        for result in self.results:
            suites.setdefault(result.case_id.rpartition("/")[0], []).append(result)
        for name, results in suites.items():
            suite = ElementTree.SubElement(root, "testsuite", name=name, tests=str(len(results)))
            for kind, outcomes in _JUNIT.items():
                suite.set(_PLURAL[kind], str(sum(result.outcome in outcomes for result in results)))
            suite.set("time", f"{sum(result.seconds for result in results):.3f}")
            for result in results:
                _junit_case(ElementTree.SubElement(suite, "testcase"), result)
        ElementTree.indent(root)
        return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1)


#: Elements of JUnit and the outcomes that they stand for; a pass has none.
_JUNIT = {
    "failure": (Outcome.FAIL, Outcome.FALSE_CLAIM),
    "error": (Outcome.CRASH, Outcome.HANG),
    "skipped": (Outcome.DECLARED_UNSUPPORTED,),
}
_PLURAL = {"failure": "failures", "error": "errors", "skipped": "skipped"}


def _junit_case(element: ElementTree.Element, result: CaseResult) -> None:
    suite, _, name = result.case_id.rpartition("/")
    element.attrib |= {"classname": suite.replace("/", "."), "name": name, "time": f"{result.seconds:.3f}"}
    if result.metrics:
        properties = ElementTree.SubElement(element, "properties")
        for metric, value in result.metrics.items():
            ElementTree.SubElement(properties, "property", name=metric, value=f"{value:.6g}")
    for kind, outcomes in _JUNIT.items():
        if result.outcome in outcomes:
            # XML holds no control characters, and what a dying process printed may.
            message = "".join(c if c.isprintable() or c == "\n" else "?" for c in result.excuse)
            told = ElementTree.SubElement(element, kind, type=result.outcome.value, message=message.split("\n")[0])
            told.text = message if "\n" in message else None
