"""The kit under pytest, in a vendor's own repository:

from enginecore.testing import pytest_cases

@pytest_cases("acme_npu")
def test_conformance(case): case.check()
"""

from __future__ import annotations

import weakref
from typing import Any

from enginecore.errors import EngineCoreError
from enginecore.testing.case import Case, CaseResult, Outcome
from enginecore.testing.cases import all_cases, select
from enginecore.testing.runner import Runner
from enginecore.testing.source import BackendSource


class _Session:
    """Results of one parametrised test: a group runs when the first of its cases is asked for."""

    def __init__(self, target: str | BackendSource, chosen: list[Case], settings: dict[str, Any]) -> None:
        self._target = target
        self._settings = settings
        self._groups: dict[str, list[Case]] = {}
        for case in chosen:
            self._groups.setdefault(case.group, []).append(case)
        self._results: dict[str, CaseResult] = {}
        self._runner: Runner | None = None
        self._failure: EngineCoreError | None = None

    def result(self, case: Case) -> CaseResult:
        if case.id not in self._results:
            for result in self._started().run_group(self._groups[case.group]):
                self._results[result.case_id] = result
        return self._results[case.id]

    def _started(self) -> Runner:
        """The runner, made once; a device that is not there is probed once and told to every case."""
        if self._failure is not None:
            raise self._failure
        if self._runner is None:
            try:
                self._runner = Runner(self._target, **self._settings)
            except EngineCoreError as error:
                self._failure = error
                raise
            weakref.finalize(self, self._runner.close)
        return self._runner


class PytestCase:
    """One case of the kit as a test parameter."""

    def __init__(self, session: _Session, case: Case) -> None:
        self._session = session
        self._case = case
        self.id = case.id

    def check(self) -> None:
        """Pass, skip (declared unsupported, with its reasons) or fail (anything else, with its outcome)."""
        import pytest

        try:
            result = self._session.result(self._case)
        except EngineCoreError as error:
            pytest.fail(str(error), pytrace=False)
        if result.outcome is Outcome.DECLARED_UNSUPPORTED:
            pytest.skip(result.excuse)
        if not result.outcome.ok:
            pytest.fail(f"{result.outcome.value}: {result.message}", pytrace=False)


def pytest_cases(
    target: str | BackendSource, *, level: str | int | None = None, only: str | None = None, **settings: Any
) -> Any:
    """A decorator that parametrises a test over the chosen cases, as `case`, with their ids.

    `settings` are those of `Runner` (`timeout`, `options`). Collecting runs nothing and touches no device.
    """
    import pytest

    chosen = select(all_cases(), level, only)
    session = _Session(target, chosen, settings)
    return pytest.mark.parametrize("case", [pytest.param(PytestCase(session, case), id=case.id) for case in chosen])
