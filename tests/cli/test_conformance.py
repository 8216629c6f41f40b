"""`enginecore conformance`: exit codes, the table, JSON, and what it says of wrong options."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
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


def test_list_runs_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conformance", "--device", "nothing:here", "--list", "--level", "0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "L0/contract/op_table" in lines and all(line.startswith("L0/") for line in lines)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--level", "9"], "levels are 0 to 5"), (["--only", "no_such_case"], "--list shows all ids")],
)
def test_what_matches_nothing_exits_with_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["conformance", "--device", TOY, *arguments]) == 2
    assert words in capsys.readouterr().err


def test_an_unknown_device_is_an_error_of_the_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conformance", "--device", "no_such_device", "--level", "0"]) == 2
    assert "no_such_device" in capsys.readouterr().err
