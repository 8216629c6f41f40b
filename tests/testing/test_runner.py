"""Runner, profile, report, sources and the pytest entry."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
from enginecore.errors import BrokenPluginError, ParameterError
from enginecore.ops.schema import OPS
from enginecore.testing import ConformanceProfile, DeclaredGap, Outcome, run
from enginecore.testing.case import CaseResult
from enginecore.testing.cases import all_cases, select
from enginecore.testing.process import Worker
from enginecore.testing.report import Report
from enginecore.testing.runner import Runner
from enginecore.testing.source import BackendSource, as_profile

FOLDER = Path(__file__).parent
TOY = f"{FOLDER / 'toy_backend.py'}:create"
GAP = f"{FOLDER / 'toy_backend.py'}:gap_profile"
ONE = "L1/attention/wild_table_entries"


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker() as shared:
        yield shared


def test_case_ids_are_unique_and_select_takes_levels_and_patterns() -> None:
    cases = all_cases()
    assert len({case.id for case in cases}) == len(cases) > 400
    assert {case.level for case in select(cases, "0-2,4")} == {0, 1, 2, 4}
    assert set(OPS) <= {case.op for case in select(cases, 1)}, "every op of the schema is tried"
    assert {case.level for case in select(cases, "L3")} == {3}
    assert [case.id for case in select(cases, None, ONE)] == [ONE]
    assert {case.op for case in select(cases, 1, "L1/rms_norm/*, gqa_7")} == {"rms_norm", "attention"}
    for wrong in ("7", "x", "2-9"):
        with pytest.raises(ValueError, match="level"):
            select(cases, wrong)


def test_sources() -> None:
    assert BackendSource.of("cuda:1").device == "cuda:1"
    assert BackendSource.of("enginecore-cpu:cpu").device == "enginecore-cpu:cpu"
    assert BackendSource.of("acme.backend:make").factory == "acme.backend:make"
    assert BackendSource.of("a/b.py:make").factory == "a/b.py:make"
    with pytest.raises(ValueError, match="not both"):
        BackendSource()
    assert as_profile(None) == ConformanceProfile()
    with pytest.raises(TypeError, match="dict"):
        as_profile({})


def test_profile_tolerances_and_gaps() -> None:
    profile = ConformanceProfile(
        tolerances={"bfloat16": 1e-3, "attention:bfloat16": 2e-3},
        gaps=(DeclaredGap(cases="L1/*alibi*", reason="no kernel yet", expires="2027-01-31"),),
    )
    assert profile.tolerance("attention", "bfloat16") == 2e-3
    assert profile.tolerance("rms_norm", "bfloat16") == 1e-3
    assert profile.tolerance("rms_norm", "float32") == 1e-10
    gap = profile.gap_for("L1/attention/alibi[float32]")
    assert gap and not gap.expired(datetime.date(2027, 1, 31)) and gap.expired(datetime.date(2027, 2, 1))
    with pytest.raises(ValueError, match="reason"):
        DeclaredGap(cases="*", reason=" ", expires="2027-01-31")
    with pytest.raises(ValueError, match="isoformat"):
        DeclaredGap(cases="*", reason="x", expires="soon")


@pytest.mark.parametrize(
    ("fault", "today", "outcome", "words"),
    [
        ("follows_whole_table", "2030-01-01", Outcome.DECLARED_UNSUPPORTED, "known since"),
        ("follows_whole_table", "2031-01-01", Outcome.FAIL, "expired on 2030-12-31"),
        ("", "2030-01-01", Outcome.PASS, "can be removed"),
    ],
)
def test_a_gap_excuses_until_it_expires(worker: Worker, fault: str, today: str, outcome: Outcome, words: str) -> None:
    source = BackendSource(factory=TOY, profile=GAP, options={"fault": fault})
    with Runner(source, worker=worker, today=datetime.date.fromisoformat(today)) as runner:
        [result] = runner.run_group(select(all_cases(), only=ONE))
    assert result.outcome is outcome
    assert words in result.message


@pytest.mark.parametrize(
    ("today", "outcome", "words"),
    [
        ("2030-06-30", Outcome.DECLARED_UNSUPPORTED, "declared gap until 2030-06-30: in summer"),
        ("2030-07-01", Outcome.FAIL, "expired on 2030-06-30"),
    ],
)
def test_a_gap_over_what_is_not_claimed_is_a_promise(worker: Worker, today: str, outcome: Outcome, words: str) -> None:
    source = BackendSource(factory=TOY, profile=f"{FOLDER / 'toy_backend.py'}:promise_profile")
    with Runner(source, worker=worker, today=datetime.date.fromisoformat(today)) as runner:
        [result] = runner.run_group(select(all_cases(), only="L1/attention/gqa_3[float16]"))
    assert result.outcome is outcome
    assert words in result.message and result.gap == "in summer"


@pytest.mark.parametrize(
    ("today", "outcome", "words"),
    [
        ("2030-12-31", Outcome.DECLARED_UNSUPPORTED, "(until 2030-12-31)"),
        ("2031-01-01", Outcome.FAIL, "expired on 2030-12-31"),
    ],
)
def test_what_is_not_claimed_is_skipped_until_a_day(worker: Worker, today: str, outcome: Outcome, words: str) -> None:
    source = BackendSource(factory=TOY, profile=f"{FOLDER / 'toy_backend.py'}:dated_profile")
    with Runner(source, worker=worker, today=datetime.date.fromisoformat(today)) as runner:
        [result] = runner.run_group(select(all_cases(), only="L1/attention/gqa_3[float16]"))
    assert result.outcome is outcome
    assert words in result.excuse and "dtype float16 is not one of" in result.message
    assert result.expires == "2030-12-31"


def test_a_skip_without_a_date_is_a_failure_from_contract_1_1_on(worker: Worker) -> None:
    skip = CaseResult(case_id="L1/attention/x", outcome=Outcome.DECLARED_UNSUPPORTED, message="no kernel")
    with Runner(BackendSource(factory=TOY), worker=worker) as runner:
        assert runner._excused(skip) == skip, "a bare factory has no manifest"
        runner.about = {"contract": "1.0"}
        assert runner._excused(skip) == skip, "plugins that were written before the rule"
        runner.about = {"contract": "1.1"}
        failed = runner._excused(skip)
    assert failed.outcome is Outcome.FAIL
    assert "without an expiry date: no kernel" in failed.message and "skips_expire" in failed.message
    with pytest.raises(ValueError, match="isoformat"):
        ConformanceProfile(skips_expire="soon")


def test_floors_are_enforced_and_metrics_reported(worker: Worker) -> None:
    source = BackendSource(factory=TOY, profile=f"{FOLDER / 'toy_backend.py'}:floor_profile")
    chosen = select(all_cases(), 6, "rms_norm/*[float32],silu_and_mul/*[float32],copy_blocks/*[float32]")
    with Runner(source, worker=worker) as runner:
        found = {result.case_id.split("/")[1]: result for case in chosen for result in runner.run_group([case])}
    assert found["rms_norm"].outcome is Outcome.PASS and found["rms_norm"].metrics["share"] > 0
    assert found["silu_and_mul"].outcome is Outcome.FAIL
    assert "share is" in found["silu_and_mul"].message and "below the declared floor" in found["silu_and_mul"].message
    assert found["copy_blocks"].outcome is Outcome.FAIL
    assert "a floor for 'beauty'; this case measures gb_s, share" in found["copy_blocks"].message


def test_a_profile_that_names_no_case_is_told(worker: Worker) -> None:
    source = BackendSource(factory=TOY, profile=f"{FOLDER / 'toy_backend.py'}:misspelt_profile")
    with Runner(source, worker=worker) as runner:
        [result] = runner.run_group(select(all_cases(), 0, "profile_names_cases"))
    assert result.outcome is Outcome.FAIL and "L6/rmsnorm/*" in result.message


def test_support_is_asked_without_running_a_case(worker: Worker) -> None:
    with Runner(BackendSource(factory=TOY, options={"fault": "accepts_everything"}), worker=worker) as runner:
        support = runner.describe()["support"]
    assert support["ops"]["rms_norm"]["bfloat16"]["state"] == "native"
    assert support["ops"]["rms_norm"]["float16"]["state"] == "unsupported"
    assert support["attention"]["plain"]["float32"]["state"] == "native"
    refused = support["attention"]["mla"]["float32"]
    assert refused["state"] == "unsupported", "what is not claimed is refused, whatever supports() says"
    assert refused["reasons"] == ["features not supported: mla"]
    broken = BackendSource(factory=TOY, options={"fault": "raises_at_creation"})
    with Runner(broken, worker=worker) as runner, pytest.raises(BrokenPluginError, match="no toy today"):
        runner.describe()


def test_junit(tmp_path: Path) -> None:
    report = Report(
        target="acme",
        results=[
            CaseResult(case_id="L1/sample/a[float32]", outcome=Outcome.PASS, seconds=0.5, metrics={"share": 0.25}),
            CaseResult(case_id="L1/sample/b", outcome=Outcome.FALSE_CLAIM, message="<claims>\nand & ignores \x00"),
            CaseResult(case_id="L1/sample/c", outcome=Outcome.CRASH, message="SIGSEGV"),
            CaseResult(case_id="L2/memory/d", outcome=Outcome.DECLARED_UNSUPPORTED, message="not claimed"),
        ],
    )
    root = ElementTree.fromstring(report.to_junit())
    suites = {suite.get("name"): suite for suite in root}
    counts = {name: suites["L1/sample"].get(name) for name in ("tests", "failures", "errors", "skipped")}
    assert counts == {"tests": "3", "failures": "1", "errors": "1", "skipped": "0"}
    assert suites["L2/memory"].get("skipped") == "1"
    first, second, third = suites["L1/sample"]
    assert (first.get("classname"), first.get("name"), first.get("time")) == ("L1.sample", "a[float32]", "0.500")
    assert first.find("properties/property").get("value") == "0.25"  # type: ignore[union-attr]
    failure = second.find("failure")
    assert failure is not None and failure.get("type") == "false-claim" and failure.get("message") == "<claims>"
    assert failure.text == "<claims>\nand & ignores ?"
    assert third.find("error").get("message") == "SIGSEGV"  # type: ignore[union-attr]


def test_without_fork_the_outcomes_are_the_same() -> None:
    source = BackendSource(factory=TOY, options={"fault": "segfaults_bfloat16"})
    report = run(source, level=1, only="gqa_3[", fork=False)
    outcomes = {result.case_id.rpartition("[")[2]: result.outcome for result in report.results}
    assert outcomes == {
        "float32]": Outcome.PASS, "bfloat16]": Outcome.CRASH, "float16]": Outcome.DECLARED_UNSUPPORTED
    }  # fmt: skip


def test_a_device_that_does_not_exist_is_an_error_and_not_a_report() -> None:
    with pytest.raises(ParameterError, match="no_such_device"):
        Runner("no_such_device")


def test_what_a_plugin_starts_does_not_outlive_the_run() -> None:
    source = BackendSource(factory=TOY, options={"fault": "hangs_bfloat16"})
    with Worker() as own, Runner(source, worker=own, timeout=1) as runner:
        [result] = runner.run_group(select(all_cases(), 1, "gqa_3[bfloat16]"))
        assert result.outcome is Outcome.HANG
        server = own._process
        assert server is not None
    assert server.poll() is not None
    with pytest.raises(ProcessLookupError):
        os.killpg(server.pid, 0)


def test_report_counts_and_json() -> None:
    results = [
        CaseResult(case_id="L0/contract/a", outcome=Outcome.PASS),
        CaseResult(case_id="L1/attention/b", outcome=Outcome.DECLARED_UNSUPPORTED, message="no"),
    ]
    report = Report(target="toy", results=results, about={"distribution": "enginecore-toy", "version": "3"})
    assert report.ok
    assert not Report(target="toy", results=results[1:]).ok, "a report in which nothing passed proves nothing"
    data = json.loads(report.to_json())
    assert data["summary"]["pass"] == 1
    assert data["versions"]["enginecore-toy"] == "3"
    assert set(data["versions"]) >= {"enginecore", "contract", "python", "torch", "platform"}
    assert [case["outcome"] for case in data["cases"]] == ["pass", "declared-unsupported"]
    crash = CaseResult(case_id="L2/memory/c", outcome=Outcome.CRASH)
    assert Report(target="toy", results=[*results, crash]).failures() == [crash]


VENDOR_TEST = """
from enginecore.testing import BackendSource, pytest_cases
broken = BackendSource(factory={toy!r}, options={{"fault": "wrong_page_bytes"}})
@pytest_cases(broken, level=0, only="sane,op_table,agree")
def test_conformance(case): case.check()
@pytest_cases({toy!r}, level=1, only="head_size_512")
def test_more(case): case.check()
@pytest_cases("no_such_device", level=4)
def test_absent(case): case.check()
"""


def test_pytest_entry(tmp_path: Path) -> None:
    file = tmp_path / "test_conformance.py"
    file.write_text(VENDOR_TEST.format(toy=TOY))
    command = [sys.executable, "-m", "pytest", str(file), "-p", "no:cacheprovider", "-v", "-W", "error"]
    command += ["-p", "no:asyncio"]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}  # where the toy finds its parts
    found = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env, check=False)
    assert "test_conformance[L0/contract/capabilities_sane] PASSED" in found.stdout, found.stdout + found.stderr
    assert "test_conformance[L0/contract/layout_sane] FAILED" in found.stdout
    assert "fail: 3 blocks take" in found.stdout
    assert "no installed plugin offers the device 'no_such_device'" in found.stdout
    absent = len(select(all_cases(), 4, ""))
    assert f"{1 + absent} failed, 3 passed, 3 skipped" in found.stdout
