"""Whatever a plugin does in its probe, the answer is a result that says what happened; this process goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
from enginecore.device import ProbeCause, ProbeResult, ProbeStatus
from enginecore.device.probe import probe, probe_all, run_doctor

from tests.device.packages import ABSENT, AVAILABLE, Site


def ask(site: Site, *, timeout_s: float = 60) -> ProbeResult:
    return probe(site.only(), "acme", timeout_s=timeout_s)


def test_available_and_absent(site: Site) -> None:
    site.plugin("acme-npu", probe=AVAILABLE.replace("'in order'", "ctx.device, details={'torch': ctx.torch_build}"))
    result = ask(site)
    assert (result.status, result.reason) == (ProbeStatus.AVAILABLE, "acme")
    assert result.details["torch"][0].isdigit()


@pytest.mark.parametrize(
    ("body", "reason", "trace"),
    [
        ("raise OSError('no firmware')", "raised OSError: no firmware", "Traceback"),
        ("import os; os.kill(os.getpid(), 11)", "was killed by SIGSEGV", "Segmentation fault"),
        ("import ctypes; ctypes.string_at(0)", "was killed by SIGSEGV", "enginecore_probe"),
        ("import os; os.abort()", "was killed by SIGABRT", "Aborted"),
        ("import os; print('driver said no', flush=True); os._exit(7)", "exit code 7 and no answer", "driver said no"),
        ("import os; os._exit(0)", "exit code 0 and no answer", ""),
        ("raise SystemExit(4)", "called sys.exit(4)", "Traceback"),
        ("return 'yes'", "returned str, not enginecore.device.ProbeResult", ""),
        ("return None", "returned NoneType", ""),
        ("return ProbeResult(status='fine', reason='x')", "not of the contract", ""),
        ("return ProbeResult(status=ProbeStatus.AVAILABLE, reason=None)", "wrong type", ""),
        ("return ProbeResult(status=ProbeStatus.BROKEN, reason='')", "without a reason", ""),
    ],
)
def test_whatever_happens_is_told(site: Site, body: str, reason: str, trace: str) -> None:
    site.plugin("acme-npu", probe=body)
    result = ask(site)
    assert (result.status, result.cause) == (ProbeStatus.BROKEN, ProbeCause.FAILED)
    assert result.reason.startswith("acme-npu 1.2.3: ") and reason in result.reason
    assert trace in str(result.details.get("traceback", ""))
    assert "pip install --upgrade acme-npu" in result.fix


def test_a_hanging_probe_is_ended_and_shown(site: Site) -> None:
    top = "import time\ndef wait_for_firmware():\n    time.sleep(600)\n"
    site.plugin("acme-npu", top=top, probe="wait_for_firmware()")
    result = ask(site, timeout_s=6)
    assert result.status is ProbeStatus.BROKEN and "did not end within 6 s" in result.reason
    assert "wait_for_firmware" in result.details["traceback"]


def test_an_answer_survives_prints_leftover_children_and_a_crash_at_exit(site: Site) -> None:
    body = (
        "import os, subprocess, sys, atexit; print('{\"probe\": garbage'); os.write(1, b'more\\n'); "
        "atexit.register(os.abort); subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
    )
    site.plugin("acme-npu", probe=body + AVAILABLE)
    assert ask(site).status is ProbeStatus.AVAILABLE


def test_much_output_does_not_block(site: Site) -> None:
    site.plugin("acme-npu", probe=f"print('x' * 1_000_000); {AVAILABLE[:-1]}, details={{'long': 'y' * 300_000}})")
    assert len(ask(site).details["long"]) == 300_000


def test_details_that_are_no_json_are_shown_as_text(site: Site) -> None:
    site.plugin("acme-npu", probe=f"{AVAILABLE[:-1]}, details={{'card': object()}})")
    assert ask(site).details["card"].startswith("<object")


def test_a_plugin_that_was_not_loaded_is_broken_without_a_probe(site: Site) -> None:
    site.plugin("acme-npu", top="raise ValueError('bad day')\n")
    result = ask(site)
    assert result.status is ProbeStatus.BROKEN and "acme-npu 1.2.3: loading" in result.reason
    assert "ValueError: bad day" in result.details["traceback"]


@pytest.mark.parametrize("more", [", torch_variant='cu'", ", torch_min='99.0'"])
def test_wrong_torch_is_found_before_torch_loads(site: Site, more: str, tmp_path: Path) -> None:
    """The planted torch would leave a mark if its module ran."""
    _plant_torch(site, "9.0+acme1", tmp_path / "loaded")
    site.plugin("acme-npu", more=more + ", torch_install='pip install right-torch'", probe=f"import torch; {AVAILABLE}")
    result = ask(site)
    assert (result.status, result.cause) == (ProbeStatus.BROKEN, ProbeCause.WRONG_TORCH)
    assert result.reason.startswith("acme-npu 1.2.3: it needs") and "9.0+acme1" in result.reason
    assert result.fix == "pip install right-torch"
    assert not (tmp_path / "loaded").exists()


def test_wrong_torch_is_found_for_a_plugin_that_does_not_look(site: Site, tmp_path: Path) -> None:
    site.plugin("acme-npu", more=", torch_variant='cu'", probe=AVAILABLE)
    assert ask(site).cause is ProbeCause.WRONG_TORCH
    site.forget()


def test_wrong_torch_is_told_even_when_the_plugin_swallows_it(site: Site) -> None:
    body = "\n    try:\n        import torch\n    except Exception as error:\n"
    body += "        return ProbeResult(status=ProbeStatus.BROKEN, reason=str(error))\n"
    site.plugin("acme-npu", more=", torch_variant='cu'", probe=body)
    assert ask(site).cause is ProbeCause.WRONG_TORCH


def test_without_the_hardware_the_wrong_torch_does_not_matter(site: Site) -> None:
    site.plugin("acme-npu", more=", torch_variant='cu'", probe=ABSENT)
    result = ask(site)
    assert (result.status, result.reason) == (ProbeStatus.ABSENT, "no such card")


def test_the_right_torch_may_be_loaded(site: Site, tmp_path: Path) -> None:
    _plant_torch(site, "9.0+acme1", tmp_path / "loaded")
    site.plugin("acme-npu", more=", torch_variant='acme', torch_min='8.5'", probe=f"import torch; {AVAILABLE}")
    assert ask(site).status is ProbeStatus.AVAILABLE
    assert (tmp_path / "loaded").exists()


def _plant_torch(site: Site, version: str, mark: Path) -> None:
    site.distribution("torch", version)
    (site.root / "torch.py").write_text(f"open({str(mark)!r}, 'w')\n")


def test_a_missing_driver_keeps_its_cause(site: Site) -> None:
    body = "return ProbeResult(status=ProbeStatus.BROKEN, reason='libacme.so is missing', fix='apt install acme', "
    site.plugin("acme-npu", probe=body + "cause=ProbeCause.DRIVER_MISSING)")
    result = ask(site)
    assert (result.cause, result.fix) == (ProbeCause.DRIVER_MISSING, "apt install acme")
    assert result.reason == "acme-npu 1.2.3: libacme.so is missing"


def test_probes_run_at_the_same_time(site: Site, tmp_path: Path) -> None:
    """Each waits until the other has started: one after the other would never end well."""
    meet = (
        "\n    import pathlib, time\n"
        f"    here = pathlib.Path({str(tmp_path)!r})\n"
        "    (here / ('met_' + ctx.device)).touch()\n"
        "    while len(list(here.glob('met_*'))) < 2: time.sleep(0.01)\n"
        f"    {AVAILABLE}"
    )
    site.plugin("one", device="one", probe=meet)
    site.plugin("two", device="two", probe=meet)
    found = probe_all(site.discover(), timeout_s=60)
    assert [(each.full_name, each.result.status.value) for each in found] == [
        ("one:one", "available"),
        ("two:two", "available"),
    ]


def test_no_plugins_no_probes() -> None:
    assert probe_all([]) == []


def test_doctor_hooks(site: Site) -> None:
    hook = "\n@hookimpl\ndef enginecore_doctor(ctx):\n    {}\n"
    finding = "return [DoctorFinding(name='fan', ok=False, detail='is off', fix='turn it on')]"
    site.plugin("a-sound", device="a", extra=hook.format(finding))
    site.plugin("b-none", device="b")
    site.plugin("c-raises", device="c", extra=hook.format("raise OSError('no fan')"))
    site.plugin("d-wrong", device="d", extra=hook.format("return 'healthy'"))
    site.plugin("e-dies", device="e", extra=hook.format("import os; os.kill(os.getpid(), 9)"))
    sound, none, raises, wrong, dies = (run_doctor(plugin, plugin.devices[0]) for plugin in site.discover())
    assert [(each.name, each.fix) for each in sound] == [("fan", "turn it on")]
    assert none == []
    assert "raised OSError: no fan" in raises[0].detail and not raises[0].ok
    assert "returned 'healthy'" in wrong[0].detail
    assert "killed by SIGKILL" in dies[0].detail and "e-dies 1.2.3" in dies[0].detail
