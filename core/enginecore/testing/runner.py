"""Runs cases in processes of their own and decides what each outcome is.

Cases of one op share a process, because making a backend may take seconds. When that process dies, the case that ran is
tried again alone, and so is every case that had not run: one crash never hides the others.
"""

from __future__ import annotations

import datetime
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from enginecore.errors import BrokenPluginError
from enginecore.testing.case import Case, CaseResult, Outcome
from enginecore.testing.cases import all_cases, select
from enginecore.testing.process import Ending, JobResult, Worker
from enginecore.testing.profile import DeclaredGap
from enginecore.testing.report import Report
from enginecore.testing.source import BackendSource

#: After so many hangs in one group the rest of it is not tried: each costs its whole time limit.
MAX_HANGS = 2

Listener = Callable[[CaseResult], None]


class Runner:
    """Runs groups of cases of one backend. `timeout` (seconds) replaces every case's own limit.

    `worker` is one to share with other runners. Raises DeviceError kinds or ParameterError when the device is not there
    to be tested.
    """

    def __init__(
        self,
        target: str | BackendSource,
        *,
        timeout: float | None = None,
        options: dict[str, Any] | None = None,
        fork: bool = hasattr(os, "fork"),
        today: datetime.date | None = None,
        worker: Worker | None = None,
    ) -> None:
        self.source = BackendSource.of(target).resolved()
        self.about: dict[str, Any] = {}
        self._options = options or {}
        self._timeout = timeout
        self._owns_worker = worker is None
        self._worker = worker or Worker(fork=fork)
        self._scratch = tempfile.TemporaryDirectory(prefix="enginecore-conformance-")
        self._today = today or datetime.date.today()
        self._setup: tuple[Outcome, str] | None = None

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._owns_worker:
            self._worker.close()
        self._scratch.cleanup()

    def describe(self) -> dict[str, Any]:
        """Make the backend and ask it, without running a case: distribution, capabilities, support by op and dtype.

        Raises BrokenPluginError when the backend cannot be made.
        """
        played = self._play([])
        if played.about is None:
            death = played.death.message if played.death else ""
            raise BrokenPluginError(f"{self.source.label}: {played.setup_error or death}")
        return self.about

    def run_group(self, cases: Sequence[Case]) -> list[CaseResult]:
        """Results of `cases`, which share a process as long as it lives, in the same order."""
        if self._setup is not None:  # nothing can be said of a backend that cannot be made: do not try 400 times
            outcome, message = self._setup
            return [CaseResult(case_id=case.id, outcome=outcome, message="not run: " + message) for case in cases]
        played = self._play(cases)
        found = self._results(played)
        if played.death is None and played.setup_error is None:
            return [self._excused(found[case.id]) for case in cases]
        if played.about is None:
            return self._setup_failed(cases, played)
        found.update(self._one_by_one(cases, found, played.death))
        return [self._excused(found[case.id]) for case in cases]

    def _play(self, cases: Sequence[Case]) -> JobResult:
        job = {
            "source": vars(self.source),
            "cases": [case.id for case in cases],
            "options": {**self._options, "source": vars(self.source), "scratch": self._scratch.name},
            "timeout": self._timeout,
            "clean_exit": any(case.op == "shutdown" for case in cases),
        }
        played = self._worker.run(job)
        if played.about is not None:
            self.about = played.about
        return played

    @staticmethod
    def _results(played: JobResult) -> dict[str, CaseResult]:
        return {
            case_id: CaseResult(
                case_id=case_id,
                outcome=Outcome(end["outcome"]),
                message=end["message"],
                seconds=end["seconds"],
                metrics=end["metrics"],
            )
            for case_id, end in played.ended.items()
        }

    def _setup_failed(self, cases: Sequence[Case], played: JobResult) -> list[CaseResult]:
        if played.death is not None:
            outcome = Outcome.HANG if played.death.kind == "hang" else Outcome.CRASH
            message = f"the backend could not be created: {played.death.message}"
        else:
            outcome, message = Outcome.FAIL, played.setup_error or "the backend could not be created"
        self._setup = outcome, message
        return [CaseResult(case_id=case.id, outcome=outcome, message=message) for case in cases]

    def _one_by_one(
        self, cases: Sequence[Case], found: dict[str, CaseResult], death: Ending | None
    ) -> dict[str, CaseResult]:
        """The case that the process died in, and those that it had not come to, each in a process of its own."""
        again = {case.id for case in cases if case.id not in found} | ({death.case_id} if death else set())
        results: dict[str, CaseResult] = {}
        hangs = 0
        for case in cases:
            if case.id not in again:
                continue
            died_here = death is not None and case.id == death.case_id
            if len(cases) == 1 and death is not None:
                results[case.id] = self._dead(case.id, death)
            elif hangs >= MAX_HANGS:
                message = f"not run: {hangs} cases of {case.group} hung before it"
                results[case.id] = CaseResult(case_id=case.id, outcome=Outcome.HANG, message=message)
            else:
                results[case.id] = self._alone(case, death if died_here else None)
                hangs += results[case.id].outcome is Outcome.HANG
        return results

    def _alone(self, case: Case, before: Ending | None) -> CaseResult:
        played = self._play([case])
        if played.death is not None:
            return self._dead(case.id, played.death)
        result = self._results(played).get(case.id)
        if result is None:
            return CaseResult(case_id=case.id, outcome=Outcome.FAIL, message=played.setup_error or "no result")
        if before is None or result.outcome is not Outcome.PASS:
            return result
        message = f"passes alone; in one process with the cases of {case.group} before it: {before.message}"
        return CaseResult(case_id=case.id, outcome=Outcome(before.kind), message=message)

    @staticmethod
    def _dead(case_id: str, death: Ending) -> CaseResult:
        return CaseResult(case_id=case_id, outcome=Outcome(death.kind), message=death.message)

    def _excused(self, result: CaseResult) -> CaseResult:
        """Apply the gaps that the plugin declares."""
        gaps = [DeclaredGap(**gap) for gap in self.about.get("gaps", [])]
        gap = next((gap for gap in gaps if gap.covers(result.case_id)), None)
        if gap is None:
            return self._dated(result)
        outcome: Outcome = result.outcome
        message = result.message
        if outcome is Outcome.PASS:
            message = f"passes: the gap declared for {gap.cases!r} can be removed"
        elif gap.expired(self._today):
            # Not claiming it is no way out: it was promised by that day.
            outcome = Outcome.FAIL if outcome is Outcome.DECLARED_UNSUPPORTED else outcome
            message = f"{message} (the gap declared for it expired on {gap.expires})"
        else:
            message = f"declared gap until {gap.expires}: {gap.reason} ({outcome.value}: {message})"
            outcome = Outcome.DECLARED_UNSUPPORTED
        return replace(result, outcome=outcome, message=message, gap=gap.reason, expires=gap.expires)

    def _dated(self, result: CaseResult) -> CaseResult:
        """A skip is good until a day; nobody looks again at one that is good for ever."""
        if result.outcome is not Outcome.DECLARED_UNSUPPORTED:
            return result
        expires = self.about.get("skips_expire") or None
        if expires is None:
            if _contract(self.about) < SKIPS_ARE_DATED:
                return result
            message = f"skipped without an expiry date: {result.message} ({NAME_A_DATE})"
            return replace(result, outcome=Outcome.FAIL, message=message)
        if self._today > datetime.date.fromisoformat(expires):
            message = f"{result.message} (what is skipped expired on {expires}: claim it, or look again and renew it)"
            return replace(result, outcome=Outcome.FAIL, message=message, expires=expires)
        return replace(result, expires=expires)


#: Plugins from this contract on name a date for what they skip; older ones could not.
SKIPS_ARE_DATED = (1, 1)
NAME_A_DATE = "name one for all that is not claimed, ConformanceProfile.skips_expire, or for this with a DeclaredGap"


def _contract(about: dict[str, Any]) -> tuple[int, ...]:
    """The contract that the backend's manifest names; that of a bare factory, which has none, is the oldest."""
    return tuple(int(part) for part in about.get("contract", "1.0").split("."))


def groups(cases: Sequence[Case]) -> list[list[Case]]:
    """Cases that may share a process, in order."""
    found: dict[str, list[Case]] = {}
    for case in cases:
        found.setdefault(case.group, []).append(case)
    return list(found.values())


def run(
    target: str | BackendSource,
    *,
    level: str | int | None = None,
    only: str | None = None,
    timeout: float | None = None,
    options: dict[str, Any] | None = None,
    on_result: Listener | None = None,
    fork: bool = hasattr(os, "fork"),
    today: datetime.date | None = None,
) -> Report:
    """Run the kit on a device ("cpu"), a factory ("module:function", "file.py:function") or a BackendSource.

    `level` and `only` choose cases as in `enginecore.testing.cases.select`; `options` go to the cases ("models": names
    of real models for level 5); `on_result` hears each result as it is known. Raises ValueError when no case is chosen.
    """
    chosen = select(all_cases(), level, only)
    if not chosen:
        raise ValueError(f"no case matches level {level!r} and pattern {only!r}")
    started = time.monotonic()
    results: list[CaseResult] = []
    with Runner(target, timeout=timeout, options=options, fork=fork, today=today) as runner:
        for group in groups(chosen):
            found = runner.run_group(group)
            for result in found if on_result else ():
                assert on_result is not None
                on_result(result)
            results += found
    seconds = time.monotonic() - started
    return Report(target=runner.source.label, results=results, about=runner.about, seconds=seconds)
