"""`enginecore devices`, with plugins planted beside the installed ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from enginecore.cli.main import main
from enginecore.device.contract import contract_version
from enginecore.ops.schema import OPS

from tests.device.packages import ABSENT, Site


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """A directory of planted packages, on the path."""
    planted = Site(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield planted
    planted.forget()


def test_json_has_every_plugin_and_nothing_else(site: Site, capfd: pytest.CaptureFixture[str]) -> None:
    site.plugin("acme-npu", probe="print('noise'); raise OSError('no firmware')", top="print('more noise')\n")
    site.plugin("other-npu", device="other", probe=ABSENT)
    site.plugin("too-new", device="new", contract="9.0")
    assert main(["devices", "--json"]) == 0
    report = json.loads(capfd.readouterr().out)
    assert report["contract"] == contract_version() and report["torch"]
    rows = {row["device"]: row for row in report["devices"]}
    assert rows.keys() >= {"cpu", "cuda", "rocm", "xpu", "sim", "acme", "other", "new"}
    assert rows["cpu"]["status"] == "available" and rows["cpu"]["full_name"] == "enginecore-cpu:cpu"
    assert rows["other"]["status"] == "absent" and rows["other"]["reason"] == "no such card"
    broken = rows["acme"]
    assert (broken["status"], broken["cause"]) == ("broken", "failed")
    assert "acme-npu 1.2.3" in broken["reason"] and "no firmware" in broken["reason"]
    assert "pip install --upgrade acme-npu" in broken["fix"] and "Traceback" in broken["details"]["traceback"]
    assert (rows["new"]["cause"], rows["new"]["contract"]) == ("contract", "9.0")


def test_the_table_shows_state_reason_fix_and_conflicts(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    site.plugin("acme-npu", probe="raise OSError('no [bold]firmware[/oops]')", entry_point="one")
    site.plugin("better-acme", entry_point="two")
    assert main(["devices"]) == 0
    out = capsys.readouterr().out
    for text in ("DEVICE", "available", "broken", "no [bold]firmware[/oops]", "fix: upgrade it", "Traceback"):
        assert text in out
    assert "device 'acme' is claimed by acme-npu 1.2.3 and by better-acme 1.2.3" in out


def test_no_plugins(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("enginecore.device.discovery.discover", list)
    assert main(["devices"]) == 0
    assert "pip install enginecore-cpu" in capsys.readouterr().out


def test_ops_of_usable_devices(site: Site, capfd: pytest.CaptureFixture[str]) -> None:
    works = "from enginecore.ops.torch_backend import TorchBackend; return TorchBackend(ctx)"
    site.plugin("acme-npu", create=works)
    site.plugin("bad-npu", device="bad", create="raise OSError('smoke')")
    assert main(["devices", "--ops"]) == 0
    out = capfd.readouterr().out
    assert f"acme-npu:acme ops: 0 native, {len(OPS)} reference (rms_norm, " in out
    assert "enginecore-cpu:cpu ops: " in out
    assert "bad-npu:bad ops: unknown" in out and "OSError: smoke" in out
