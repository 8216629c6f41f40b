"""`enginecore conformance`: exit codes, the table, JSON, and what it says of wrong options."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from enginecore.cli.conformance_results import last_result, result_path, told
from enginecore.cli.main import main

TOY = f"{Path(__file__).parents[1] / 'testing' / 'toy_backend.py'}:create"


def test_passing_cases_exit_with_0_and_a_table(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    assert main(["conformance", "--device", TOY, "--level", "1", "--only", "L1/rms_norm,gqa_7", "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert "L1 ops" in text and "rms_norm" in text and "conforms" in text
    report = json.loads(out.read_text())
    assert report["ok"] and report["target"] == TOY
    assert report["summary"]["pass"] == sum(case["outcome"] == "pass" for case in report["cases"])


def test_failures_exit_with_1_and_are_told_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("def create():\n    raise RuntimeError('no device here')\n")
    assert main(["conformance", "--device", f"{broken}:create", "--only", "L0/,L4/"]) == 1
    text = capsys.readouterr().out
    assert "does not conform" in text
    assert text.count("no device here") == 2, "once for the group that found it, once for all that were not run"


def test_json_is_all_that_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conformance", "--device", TOY, "--json", "--only", "L0/contract/capabilities_sane"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [case["id"] for case in report["cases"]] == ["L0/contract/capabilities_sane"]
    assert report["backend"]["backend"] == "ToyBackend"
    assert report["backend"]["capabilities"]["max_gqa_ratio"] == 16


def test_junit_and_measurements(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    chosen = ["--only", "L6/rms_norm/wide[float32],L0/contract/op_table"]
    assert main(["conformance", "--device", TOY, *chosen, "--junit", str(tmp_path / "report.xml")]) == 0
    text = capsys.readouterr().out
    assert "GB/s" in text and "L6/rms_norm/wide[float32]" in text
    root = ElementTree.parse(tmp_path / "report.xml").getroot()
    assert [suite.get("name") for suite in root] == ["L0/contract", "L6/rms_norm"]


def test_support_is_a_table_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conformance", "--device", "cpu", "--support"]) == 0
    text = capsys.readouterr().out
    assert "rms_norm" in text and "native" in text and "unsupported" in text and "sliding_window" in text
    assert main(["conformance", "--device", TOY, "--support", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["support"]["ops"]["sample"]["float32"]["state"] == "native"


def test_the_last_result_of_an_installed_device_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ENGINECORE_CACHE", str(tmp_path / "cache"))
    assert main(["conformance", "--device", "sim", "--only", "shutdown"]) == 0
    assert last_result("enginecore-sim:sim") is None, "a part of a level is no result"
    assert main(["conformance", "--device", "sim", "--level", "3"]) == 1, "nothing of level 3 can pass there"
    kept = last_result("enginecore-sim:sim:0")
    assert kept is not None and kept["levels"] == "3" and kept["summary"]["pass"] == 0
    assert kept["summary"]["declared-unsupported"] > 2
    assert "levels 3" in told(kept, kept["version"]) and "9 is installed" in told(kept, "9")
    result_path("enginecore-sim:sim").write_text("{")
    assert last_result("enginecore-sim:sim") is None
    assert "never run" in told(None, "1")
    capsys.readouterr()


def test_list_runs_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conformance", "--device", "nothing:here", "--list", "--level", "0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "L0/contract/op_table" in lines and all(line.startswith("L0/") for line in lines)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--level", "9"], "levels are 0 to 6"), (["--only", "no_such_case"], "--list shows all ids")],
)
def test_what_matches_nothing_exits_with_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["conformance", "--device", TOY, *arguments]) == 2
    assert words in capsys.readouterr().err


def test_an_unknown_device_is_an_error_of_the_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conformance", "--device", "no_such_device", "--level", "0"]) == 2
    assert "no_such_device" in capsys.readouterr().err
