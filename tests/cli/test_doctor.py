"""`enginecore doctor`: every problem with what to type, and an exit code that says whether something can serve."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from enginecore.cli.conformance_results import result_path
from enginecore.cli.main import main
from enginecore.device.contract import contract_version
from enginecore.device.discovery import InstalledPlugin
from enginecore.ops.schema import OPS

from tests.device.packages import ABSENT, AVAILABLE, Site

#: A backend that works: torch on the host.
WORKS = "from enginecore.ops.torch_backend import TorchBackend; return TorchBackend(ctx)"


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


def report(capfd: pytest.CaptureFixture[str], *options: str) -> tuple[int, dict]:
    code = main(["doctor", "--json", *options])
    return code, json.loads(capfd.readouterr().out)


def test_the_installed_plugins_can_serve(capfd: pytest.CaptureFixture[str]) -> None:
    code, found = report(capfd)
    assert code == 0 and "enginecore-cpu:cpu" in found["can_serve"]
    assert "enginecore-sim:sim" not in found["can_serve"]
    names = [check["name"] for check in found["checks"]]
    machine = ["python", "memory", "processors", "instruction sets", "model cache"]
    assert names == [*machine, "torch", "versions", "can serve"]
    assert found["packages"]["transformers"] and found["contract"] == contract_version()
    rows = {row["device"]: row for row in found["devices"]}
    backend = rows["cpu"]["backend"]
    assert "rms_norm" in backend["ops"]["native"] and not backend["problem"]
    assert 0 < backend["memory"]["usable_bytes"] <= backend["memory"]["total_bytes"]
    assert rows["sim"]["backend"]["runtime"] and rows["cuda"]["backend"] is None
    told = {check["name"]: check["detail"] for check in rows["cpu"]["checks"]}
    assert "native" in told["ops"] and "usable of" in told["device memory"] and told["conformance"]


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
    site.plugin("acme-npu", create=WORKS, extra=hook.format(finding))
    site.plugin("bad-npu", device="bad", create=WORKS, extra=hook.format("import os; os.abort()"))
    site.plugin("cu-npu", device="cu", more=", torch_variant='cu', torch_install='pip install right'")
    site.plugin("dead-npu", device="dead", top="raise ValueError('bad day')\n")
    code, found = report(capfd)
    assert code == 0 and found["can_serve"] == ["acme-npu:acme", "bad-npu:bad"]
    rows = {row["device"]: row for row in found["devices"]}
    checks = rows["acme"]["checks"]
    assert checks[0] == {"name": "fan", "ok": False, "detail": "is off", "fix": "turn it on"}
    assert [check["name"] for check in checks[1:]] == ["device memory", "KV cache", "ops", "conformance"]
    assert checks[3]["detail"].startswith(f"0 native, {len(OPS)} reference (rms_norm, ")
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


def test_a_backend_that_cannot_be_made_serves_nobody(site: Site, capfd: pytest.CaptureFixture[str]) -> None:
    site.plugin("acme-npu", create="raise OSError('firmware too old')")
    code, found = report(capfd, "--device", "acme")
    assert code == 3 and found["can_serve"] == []
    [row] = found["devices"]
    [backend, conformance] = row["checks"]
    assert backend["name"] == "backend" and not backend["ok"]
    assert "acme-npu 1.2.3" in backend["detail"] and "firmware too old" in backend["detail"]
    assert backend["fix"] == "pip install --upgrade acme-npu"
    assert "never run" in conformance["detail"]


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"create": WORKS, "more": ", auto=False"}, 0),
        ({"probe": "raise OSError('no firmware')"}, 3),
        ({"top": "import os; os.abort()\n"}, 3),
        ({"probe": ABSENT}, 5),
        ({"more": ", torch_variant='cu'"}, 6),
        ({"contract": "1.99"}, 7),
        ({"probe": f"{AVAILABLE[:-1]}, details={{'serves': False}})"}, 8),
    ],
)
def test_for_one_device_the_exit_code_is_that_of_serve(
    site: Site, change: dict[str, str], code: int, capfd: pytest.CaptureFixture[str]
) -> None:
    site.plugin("acme-npu", **change)  # type: ignore[arg-type]
    site.plugin("slow", device="slow", probe="import time; time.sleep(600)")
    found, told = report(capfd, "--device", "acme")
    assert found == code
    assert [row["device"] for row in told["devices"]] == ["acme"]


def test_an_unknown_or_ambiguous_device(site: Site, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--device", "warp"]) == 2
    assert "warp" in capfd.readouterr().err
    site.plugin("acme-npu", entry_point="one", probe=ABSENT)
    site.plugin("better-acme", entry_point="two", probe=ABSENT)
    assert report(capfd, "--device", "acme")[0] == 4
    assert report(capfd, "--device", "better-acme:acme")[0] == 5


def test_the_last_conformance_result_is_shown(site: Site, capfd: pytest.CaptureFixture[str]) -> None:
    site.plugin("acme-npu", create=WORKS)
    kept = {
        "ok": False, "finished": "2026-01-02T03:04:05+00:00", "version": "1.0.0", "levels": "0-6",
        "summary": {"pass": 3, "fail": 2, "crash": 0},
    }  # fmt: skip
    path = result_path("acme-npu:acme")
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(kept))
    code, found = report(capfd, "--device", "acme")
    check = found["devices"][0]["checks"][-1]
    assert code == 0 and not check["ok"] and "enginecore conformance --device acme" in check["fix"]
    assert check["detail"].startswith("does not conform: 3 pass, 2 fail (levels 0-6, 2026-01-02")
    assert "of version 1.0.0, 1.2.3 is installed" in check["detail"]
    assert found["devices"][0]["conformance"] == kept
