"""Broken packages are listed with the reason, and harm nobody else."""

from __future__ import annotations

import pickle
import subprocess
import sys
from importlib.metadata import distributions

import pytest
from enginecore.device import ProbeCause
from enginecore.device.discovery import discover
from enginecore.device.loading import contract_problem, load_hooks

from tests.device.packages import Site


def test_a_sound_plugin(site: Site) -> None:
    site.plugin("acme-npu", device="acme", more=", summary='An NPU'")
    plugin = site.only()
    assert plugin.fault is None and plugin.manifest is not None
    assert (plugin.label, plugin.devices, plugin.full_name("acme")) == ("acme-npu 1.2.3", ("acme",), "acme-npu:acme")
    assert plugin.accelerator and plugin.conflicts == ()
    assert pickle.loads(pickle.dumps(plugin)) == plugin
    assert load_hooks(plugin).enginecore_manifest().summary == "An NPU"


@pytest.mark.parametrize(
    ("top", "reason"),
    [
        ("raise ValueError('bad day')", "raised ValueError: bad day"),
        ("import sys; sys.exit(3)", "raised SystemExit: 3"),
        ("def broken(:", "SyntaxError"),
        ("import a_module_that_is_not_there", "No module named 'a_module_that_is_not_there'"),
        ("from enginecore.device import Teleporter", "Teleporter"),
    ],
)
def test_raising_at_import_harms_only_itself(site: Site, top: str, reason: str) -> None:
    site.plugin("acme-npu", top=top + "\n")
    site.plugin("sound", device="other")
    broken, sound = site.discover()
    assert sound.fault is None
    assert broken.fault is not None and broken.fault.cause is ProbeCause.FAILED
    assert reason in broken.fault.reason and "Traceback" in broken.fault.traceback
    assert "pip install --upgrade acme-npu" in broken.fault.fix
    assert broken.devices == ("acme",) and broken.accelerator, "what cannot be read may be an accelerator"


SEGFAULT = "import ctypes; ctypes.string_at(0)"


@pytest.mark.parametrize(
    ("fatal", "reason", "trace"),
    [
        (SEGFAULT, "was killed by SIGSEGV", "Segmentation fault"),
        ("import os; os.abort()", "was killed by SIGABRT", "Aborted"),
        ("import os; print('driver said no', flush=True); os._exit(7)", "exit code 7", "driver said no"),
        ("import os; os._exit(0)", "exit code 0 and no answer", ""),
    ],
)
@pytest.mark.parametrize("place", ["top", "manifest"])
def test_ending_the_process_while_a_manifest_is_read_harms_only_itself(
    site: Site, fatal: str, reason: str, trace: str, place: str
) -> None:
    if place == "top":
        site.plugin("b-fatal", device="fatal", top=fatal + "\n")
    else:
        site.plugin("b-fatal", device="fatal", more=f", summary=exec({fatal!r})")
    for name in ("a-sound", "c-sound"):
        site.plugin(name, device=name[0])
    first, fatal_plugin, last = site.discover()
    assert first.fault is None and last.fault is None and last.manifest is not None
    fault = fatal_plugin.fault
    assert fault is not None and fault.cause is ProbeCause.FAILED and fatal_plugin.manifest is None
    assert reason in fault.reason and fatal_plugin.value in fault.reason and trace in fault.traceback
    assert "pip install --upgrade b-fatal" in fault.fix
    assert fatal_plugin.accelerator, "what cannot be read may be an accelerator: never a quiet run on the host"


def test_hanging_while_a_manifest_is_read_is_ended_and_shown(site: Site) -> None:
    site.plugin("a-hangs", device="a", top="import time\ndef wait_for_card():\n    time.sleep(600)\nwait_for_card()\n")
    site.plugin("b-sound", device="b")
    hanging, sound = discover(distributions(path=[str(site.root)]), timeout_s=3)
    assert sound.fault is None
    assert hanging.fault is not None and "did not end within 3 s" in hanging.fault.reason
    assert "wait_for_card" in hanging.fault.traceback


def test_a_plugin_that_prints_json_cannot_answer_for_another(site: Site) -> None:
    answer = '{"manifest": null, "fault": null}'
    site.plugin("a-prints", device="a", top=f"import os; print({answer!r}); os.write(1, b'{answer}\\n')\n")
    site.plugin("b-sound", device="b")
    assert [plugin.devices for plugin in site.discover()] == [("a",), ("b",)]


def test_no_module_of_a_plugin_is_loaded_here(site: Site) -> None:
    module = site.plugin("acme-npu")
    assert site.only().fault is None and module not in sys.modules


def test_prints_of_a_plugin_stay_off_stdout(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    site.plugin("acme-npu", top="print('{ hello')\n")
    assert site.only().fault is None
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("place", ["top", "manifest"])
def test_torch_may_not_be_imported_to_read_a_manifest(site: Site, place: str) -> None:
    """In a process that has no torch yet, as the server's has none."""
    if place == "top":
        site.plugin("acme-npu", top="import torch\n")
    else:
        site.plugin("acme-npu", more=", summary=__import__('torch').__version__")
    code = (
        "import sys; from tests.device.packages import Site; from pathlib import Path\n"
        f"plugin = Site(Path({str(site.root)!r})).only()\n"
        "assert plugin.fault and 'may not import torch' in plugin.fault.reason, plugin\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env=_environment())


def _environment() -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"more": ", devices_too=1"}, "devices_too"),
        ({"device": "Acme NPU"}, "device name 'Acme NPU'"),
        ({"device": "auto"}, "not 'auto'"),
        ({"contract": "one"}, "contract must be MAJOR.MINOR, got 'one'"),
        ({"more": ", accelerator='yes'"}, "accelerator must be bool, got 'yes'"),
        ({"more": ", torch_min=2.11"}, "torch_min must be str | None, got 2.11"),
    ],
)
def test_manifest_faults_are_named(site: Site, change: dict[str, str], reason: str) -> None:
    site.plugin("acme-npu", **{"entry_point": "acme", **change})  # type: ignore[arg-type]
    fault = site.only().fault
    assert fault is not None and reason in fault.reason


def test_a_manifest_of_the_wrong_type_or_distribution(site: Site) -> None:
    hooks = "\n@hookimpl\ndef enginecore_probe(ctx): ...\n@hookimpl\ndef enginecore_create_backend(ctx): ...\n"
    header = "from enginecore import hookimpl\nfrom enginecore.device import *\n@hookimpl\ndef enginecore_manifest():\n"
    site.plugin("a-dict", source=header + "    return {'devices': ['acme']}" + hooks)
    manifest = "    return Manifest(devices=('x',), distribution='other', version='1', contract='1.0')"
    site.plugin("b-lies", device="lies", source=header + manifest + hooks)
    first, second = site.discover()
    assert first.fault is not None and "returned dict, not enginecore.device.Manifest" in first.fault.reason
    assert second.fault is not None and "'other' but 'b-lies' is installed" in second.fault.reason


def test_missing_and_misspelt_hooks(site: Site) -> None:
    site.plugin("a-empty", source="from enginecore import hookimpl\n")
    site.plugin("b-misspelt", device="b", extra="\n@hookimpl\ndef enginecore_doktor(ctx): ...\n")
    site.plugin("c-argument", device="c", extra="\n@hookimpl\ndef enginecore_doctor(context): ...\n")
    empty, misspelt, argument = [plugin.fault for plugin in site.discover()]
    assert empty and "no enginecore_manifest and no enginecore_probe and no enginecore_create_backend" in empty.reason
    assert misspelt and "enginecore_doktor" in misspelt.reason
    assert argument and "context" in argument.reason


@pytest.mark.parametrize(
    ("contract", "word", "fix"),
    [
        ("1.99", "newer", "pip install --upgrade enginecore"),
        ("2.0", "newer", "pip install --upgrade enginecore"),
        ("0.9", "older", "pip install --upgrade acme-npu"),
    ],
)
def test_contract_versions(site: Site, contract: str, word: str, fix: str) -> None:
    site.plugin("acme-npu", contract=contract, more=", accelerator=False")
    plugin = site.only()
    assert plugin.fault is not None and plugin.fault.cause is ProbeCause.CONTRACT
    assert f"contract {contract}, {word} than" in plugin.fault.reason and plugin.fault.fix == fix
    assert plugin.manifest is not None and not plugin.accelerator, "the manifest can be read all the same"


def test_contract_minors_only_add(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("enginecore.device.loading.CONTRACT_VERSION", (1, 4))
    assert contract_problem("1.0") is None and contract_problem("1.4") is None
    assert contract_problem("1.5") is not None and contract_problem("0.4") is not None


def test_two_distributions_of_one_device_name_each_other(site: Site) -> None:
    site.plugin("acme-npu", entry_point="one")
    site.plugin("better-acme", entry_point="two", version="9")
    for plugin in site.discover():
        assert plugin.conflicts == ("device 'acme' is claimed by acme-npu 1.2.3 and by better-acme 9",)


def test_duplicate_entry_point_names_name_both(site: Site) -> None:
    site.plugin("acme-npu", device="acme", entry_point="npu")
    site.plugin("other-npu", device="other", entry_point="npu")
    for plugin in site.discover():
        assert plugin.conflicts == ("entry point 'npu' is claimed by acme-npu 1.2.3 and by other-npu 1.2.3",)


def test_metadata_that_cannot_be_read_is_passed_over(site: Site) -> None:
    site.plugin("acme-npu")
    (site.root / "nameless-1.dist-info").mkdir()
    site.distribution("garbled", "1", "[enginecore.backends\n===\n")
    assert site.only().distribution == "acme-npu"


def test_a_shadowed_distribution_is_read_once(site: Site) -> None:
    site.plugin("acme-npu")
    assert len(discover(distributions(path=[str(site.root), str(site.root) + "/"]))) == 1
