"""`enginecore doctor`: every problem with what to type, and an exit code that says whether something can serve."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from enginecore.cli.main import main
from enginecore.device.discovery import InstalledPlugin

from tests.device.packages import ABSENT, AVAILABLE, Site


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """A directory of planted packages, on the path; only they are found."""
    planted = Site(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def only_planted() -> list[InstalledPlugin]:
        return planted.discover()

    monkeypatch.setattr("enginecore.device.discovery.discover", only_planted)
    monkeypatch.setenv("ENGINECORE_CACHE", str(tmp_path / "cache"))
    yield planted
    planted.forget()


def report(capfd: pytest.CaptureFixture[str]) -> tuple[int, dict]:
    code = main(["doctor", "--json"])
    return code, json.loads(capfd.readouterr().out)


def test_the_installed_plugins_can_serve(capfd: pytest.CaptureFixture[str]) -> None:
    code, found = report(capfd)
    assert code == 0 and "enginecore-cpu:cpu" in found["can_serve"]
    assert "enginecore-sim:sim" not in found["can_serve"]
    names = [check["name"] for check in found["checks"]]
    assert names == ["python", "memory", "processors", "instruction sets", "model cache", "torch", "can serve"]


@pytest.mark.parametrize(
    ("probe", "more"),
    [
        (ABSENT, ""),
        ("raise OSError('no firmware')", ""),
        (AVAILABLE, ", auto=False"),
        (f"{AVAILABLE[:-1]}, details={{'serves': False}})", ""),
    ],
)
def test_nothing_can_serve(site: Site, probe: str, more: str, capfd: pytest.CaptureFixture[str]) -> None:
    site.plugin("acme-npu", probe=probe, more=more)
    code, found = report(capfd)
    assert code == 1 and found["can_serve"] == []
    verdict = found["checks"][-1]
    assert not verdict["ok"] and verdict["fix"]


def test_plugin_checks_and_wrong_torch(site: Site, capfd: pytest.CaptureFixture[str]) -> None:
    hook = "\n@hookimpl\ndef enginecore_doctor(ctx):\n    {}\n"
    finding = "return [DoctorFinding(name='fan', ok=False, detail='is off', fix='turn it on')]"
    site.plugin("acme-npu", extra=hook.format(finding))
    site.plugin("bad-npu", device="bad", extra=hook.format("import os; os.abort()"))
    site.plugin("cu-npu", device="cu", more=", torch_variant='cu', torch_install='pip install right'")
    site.plugin("dead-npu", device="dead", top="raise ValueError('bad day')\n")
    code, found = report(capfd)
    assert code == 0 and found["can_serve"] == ["acme-npu:acme", "bad-npu:bad"]
    rows = {row["device"]: row for row in found["devices"]}
    assert rows["acme"]["checks"] == [{"name": "fan", "ok": False, "detail": "is off", "fix": "turn it on"}]
    assert "SIGABRT" in rows["bad"]["checks"][0]["detail"]
    assert rows["dead"]["checks"] == []
    torch = next(check for check in found["checks"] if check["name"] == "torch")
    assert not torch["ok"] and "wrong for cu-npu:cu" in torch["detail"] and torch["fix"] == "pip install right"


def test_the_report_lists_problems_with_fixes(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    site.plugin("acme-npu", probe="raise OSError('no firmware')")
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    for text in ("This machine", "no firmware", "fix: upgrade it", "no device can serve a model here", "1 problem"):
        assert text in out
