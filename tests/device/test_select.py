"""From `--device` to a device: the rules of auto, names, conflicts, and an exit code for each way to fail."""

from __future__ import annotations

import logging
import pickle
import subprocess
import sys

import pytest
from enginecore.device import Backend, ConfigContext
from enginecore.device.select import config_defaults, conformance_profile, create_backend, parse_spec, select_device
from enginecore.errors import (
    AmbiguousDeviceError,
    BrokenPluginError,
    ContractMismatchError,
    DeviceError,
    DriverMissingError,
    ParameterError,
    UnsupportedError,
    WrongTorchBuildError,
)

from tests.device.packages import ABSENT, AVAILABLE, Site

HOST = ", accelerator=False"
MISSING = "return ProbeResult(status=ProbeStatus.BROKEN, reason='no libacme', cause=ProbeCause.DRIVER_MISSING)"


def choose(site: Site, spec: str = "auto"):
    return select_device(spec, plugins=site.discover())


@pytest.fixture
def host(site: Site) -> Site:
    site.plugin("host-plugin", device="host", more=HOST)
    return site


def test_auto_takes_the_one_healthy_accelerator(host: Site) -> None:
    host.plugin("acme-npu")
    host.plugin("other-npu", device="other", probe=ABSENT)
    selected = choose(host)
    assert selected.full_name == "acme-npu:acme:0"
    assert pickle.loads(pickle.dumps(selected)) == selected
    assert choose(host, selected.full_name) == selected


def test_auto_takes_the_host_when_accelerators_are_absent(host: Site, caplog: pytest.LogCaptureFixture) -> None:
    host.plugin("acme-npu", probe=ABSENT)
    with caplog.at_level(logging.INFO, logger="enginecore"):
        assert choose(host).device == "host"
    assert "acme (acme-npu 1.2.3) is absent: no such card" in caplog.text


def test_auto_never_takes_what_says_no(host: Site) -> None:
    host.plugin("pretend", device="pretend", more=", accelerator=True, auto=False")
    host.plugin("pretend-host", device="pretend_host", more=HOST + ", auto=False")
    assert choose(host).device == "host"
    assert choose(host, "pretend").device == "pretend"


@pytest.mark.parametrize(
    ("change", "error", "code", "word"),
    [
        ({"probe": "raise OSError('no firmware')"}, BrokenPluginError, 3, "OSError: no firmware"),
        ({"top": "raise ValueError('bad day')\n"}, BrokenPluginError, 3, "ValueError: bad day"),
        ({"top": "import ctypes; ctypes.string_at(0)\n"}, BrokenPluginError, 3, "SIGSEGV"),
        ({"probe": "import os; os.kill(os.getpid(), 11)"}, BrokenPluginError, 3, "SIGSEGV"),
        ({"probe": MISSING}, DriverMissingError, 5, "no libacme"),
        ({"more": ", torch_variant='cu'"}, WrongTorchBuildError, 6, "'cu'"),
        ({"contract": "1.99"}, ContractMismatchError, 7, "newer"),
        ({"contract": "0.1"}, ContractMismatchError, 7, "older"),
    ],
)
@pytest.mark.parametrize("spec", ["auto", "acme", "acme-npu:acme"])
def test_a_broken_accelerator_is_never_a_quiet_run_on_the_host(
    host: Site, spec: str, change: dict[str, str], error: type[DeviceError], code: int, word: str
) -> None:
    host.plugin("acme-npu", **change)  # type: ignore[arg-type]
    with pytest.raises(error) as raised:
        choose(host, spec)
    assert raised.value.exit_code == code
    assert "acme-npu 1.2.3" in str(raised.value) and word in str(raised.value)
    assert raised.value.fix
    if code == 3 and "SIG" not in word:
        assert "Traceback" in str(raised.value)


def test_auto_with_a_healthy_and_a_broken_accelerator_says_how_to_go_on(host: Site) -> None:
    host.plugin("acme-npu")
    host.plugin("bad-npu", device="bad", probe=MISSING)
    host.plugin("worse-npu", device="worse", probe="raise OSError('smoke')")
    with pytest.raises(DriverMissingError) as raised:
        choose(host)
    text = str(raised.value)
    assert "no libacme" in text and "OSError: smoke" in text and "--device acme" in text


def test_a_broken_plugin_that_is_no_accelerator_does_not_stop_auto(host: Site) -> None:
    host.plugin("old-host", device="old", contract="0.1", more=HOST)
    assert choose(host).device == "host"


def test_two_healthy_accelerators_are_ambiguous(host: Site) -> None:
    host.plugin("acme-npu")
    host.plugin("other-npu", device="other")
    with pytest.raises(AmbiguousDeviceError) as raised:
        choose(host)
    assert raised.value.exit_code == 4
    assert raised.value.fix == "choose one: --device acme or --device other"


@pytest.mark.parametrize("spec", ["auto", "acme", "acme:1"])
def test_two_distributions_of_one_device_are_ambiguous(site: Site, spec: str) -> None:
    site.plugin("acme-npu", entry_point="one")
    site.plugin("better-acme", entry_point="two")
    with pytest.raises(AmbiguousDeviceError) as raised:
        choose(site, spec)
    text = str(raised.value)
    assert "acme-npu 1.2.3" in text and "better-acme 1.2.3" in text
    assert "--device acme-npu:acme or --device better-acme:acme" in text
    assert choose(site, "better-acme:acme").plugin.distribution == "better-acme"
    assert choose(site, "Better_Acme:acme:2").index == 2


def test_a_duplicate_entry_point_name_is_ambiguous_by_short_name(host: Site) -> None:
    host.plugin("acme-npu", device="acme", entry_point="npu", probe=AVAILABLE)
    host.plugin("other-npu", device="other", entry_point="npu", probe=ABSENT)
    for spec in ("auto", "acme", "other"):
        with pytest.raises(AmbiguousDeviceError, match=r"'npu' is claimed by acme-npu 1\.2\.3 and by other-npu"):
            choose(host, spec)
    assert choose(host, "acme-npu:acme").device == "acme"


def test_two_hosts_are_ambiguous_and_none_is_an_error(host: Site) -> None:
    host.plugin("host-two", device="host_two", more=HOST)
    with pytest.raises(AmbiguousDeviceError, match="more than one plugin serves the host"):
        choose(host)
    with pytest.raises(DeviceError, match="no installed plugin") as raised:
        select_device("auto", plugins=[])
    assert "pip install" in str(raised.value)


def test_a_broken_host_is_an_error(site: Site) -> None:
    site.plugin("host-plugin", device="host", more=HOST, probe="raise OSError('no memory')")
    with pytest.raises(BrokenPluginError, match="no memory"):
        choose(site)


def test_absent_by_name(site: Site) -> None:
    site.plugin("acme-npu", probe=ABSENT)
    with pytest.raises(DriverMissingError, match=r"acme of acme-npu 1\.2\.3 is absent: no such card") as raised:
        choose(site, "acme")
    assert raised.value.exit_code == 5 and raised.value.fix == "enginecore devices lists what is usable here"


def test_unknown_devices(host: Site) -> None:
    with pytest.raises(ParameterError) as raised:
        choose(host, "acme")
    text = str(raised.value)
    assert raised.value.param == "device" and "installed: host" in text and "pip install enginecore-acme" in text
    with pytest.raises(ParameterError, match="'host' is offered by host-plugin:host"):
        choose(host, "elsewhere:host")


def test_only_the_chosen_device_is_probed(site: Site) -> None:
    site.plugin("acme-npu", probe=AVAILABLE)
    site.plugin("slow", device="slow", probe="import time; time.sleep(600)")
    assert choose(site, "acme").device == "acme"


@pytest.mark.parametrize(
    ("spec", "parsed"),
    [
        ("cuda", (None, "cuda", 0)),
        (" cuda:1 ", (None, "cuda", 1)),
        ("Enginecore_CUDA:cuda", ("enginecore-cuda", "cuda", 0)),
        ("enginecore-cuda:cuda:12", ("enginecore-cuda", "cuda", 12)),
    ],
)
def test_specs(spec: str, parsed: tuple[str | None, str, int]) -> None:
    assert parse_spec(spec) == parsed


@pytest.mark.parametrize("spec", ["", ":", "a:", ":a", "a:b:c", "auto:1", "x:auto", "a:b:-1"])
def test_malformed_specs(spec: str) -> None:
    with pytest.raises(ParameterError) as raised:
        parse_spec(spec)
    assert raised.value.exit_code == 2 and raised.value.param == "device"


def test_an_index_beyond_the_count_is_refused(site: Site) -> None:
    site.plugin("acme-npu", probe=f"{AVAILABLE[:-1]}, details={{'count': 2}})")
    assert choose(site, "acme:1").index == 1
    with pytest.raises(DriverMissingError, match="no index 2: 2 found"):
        choose(site, "acme:2")


BACKEND = """
class Memory(MemoryManager):
    def memory_info(self): ...
    def process_used_bytes(self): ...
    def peak_bytes(self): ...
    def reset_peak(self): ...
    def empty_cache(self): ...
    def allocate_kv(self, layout, num_blocks, num_layers): ...
    def release_kv(self, caches): ...

class Runtime(ModelRuntime):
    def load(self, spec, weights): ...
    def execute(self, batch): ...
    def memory_bytes(self): ...

class Whole(Backend):
    capabilities = Capabilities()
    attention = ops = None
    runtime = Runtime()
    memory = Memory()
    def torch_device(self): ...
    def set_device(self, index): ...
    def synchronize(self): ...
    def stream(self): ...
    def event(self): ...
    def manual_seed(self, seed): ...
    def shutdown(self): ...
"""


def test_create_backend(site: Site) -> None:
    body = "backend = Whole(); backend.context = ctx; return backend"
    site.plugin("acme-npu", create=body, extra=BACKEND)
    backend = create_backend(choose(site, "acme:3"), num_threads=2, options={"a": 1})
    assert isinstance(backend, Backend)
    context = backend.context  # type: ignore[attr-defined]
    assert (context.device, context.index, context.num_threads, context.options) == ("acme", 3, 2, {"a": 1})


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("return None", "it returned NoneType, not an enginecore.device.Backend"),
        ("raise RuntimeError('out of luck')", "RuntimeError: out of luck"),
        ("import sys; sys.exit('bye')", "SystemExit: bye"),
        ("b = Whole(); b.memory = {}; return b", "backend.memory is a dict, not a MemoryManager"),
        ("b = Whole(); b.capabilities = None; return b", "backend.capabilities is not set"),
        ("b = Whole(); b.runtime = None; return b", "backend.attention is not set"),
        ("b = Whole(); b.graphs = 'fast'; return b", "backend.graphs is a str, not a GraphRunner"),
        ("class Half(Backend): pass\n    return Half()", "Can't instantiate abstract class"),
        ("class Bad(Whole):\n        def set_device(self, number): ...\n    return Bad()", "does not match"),
    ],
)
def test_a_backend_that_breaks_the_contract_is_refused(site: Site, body: str, reason: str) -> None:
    site.plugin("acme-npu", create=body, extra=BACKEND)
    with pytest.raises(BrokenPluginError) as raised:
        create_backend(choose(site, "acme"))
    assert reason in str(raised.value) and "acme-npu 1.2.3" in str(raised.value)
    assert "pip install --upgrade acme-npu" in str(raised.value)


def test_enginecore_errors_of_a_plugin_pass_as_they_are(site: Site) -> None:
    body = "from enginecore.errors import UnsupportedError; raise UnsupportedError('no kernels yet')"
    site.plugin("acme-npu", create=body)
    with pytest.raises(UnsupportedError, match="no kernels yet") as raised:
        create_backend(choose(site, "acme"))
    assert raised.value.exit_code == 8


def test_config_defaults_keep_to_what_the_user_left_open(site: Site) -> None:
    hook = "\n@hookimpl\ndef enginecore_config_defaults(ctx):\n    return {}\n"
    context = ConfigContext(device="acme", model_type="llama", hidden_size=1, num_layers=1, unset=("block_size",))
    wanted = "{'block_size': 32, 'dtype': 'bfloat16'}"
    site.plugin("a-wants", device="a", extra=hook.replace("{}", wanted))
    site.plugin("b-silent", device="b")
    site.plugin("c-wrong", device="c", extra=hook.replace("{}", "['block_size']"))
    assert config_defaults(choose(site, "a"), context) == {"block_size": 32}
    assert config_defaults(choose(site, "b"), context) == {}
    with pytest.raises(BrokenPluginError, match="not a dict of settings"):
        config_defaults(choose(site, "c"), context)


def test_conformance_profile(site: Site) -> None:
    site.plugin("acme-npu", extra="\n@hookimpl\ndef enginecore_conformance_profile():\n    return {'floors': {}}\n")
    assert conformance_profile(site.only()) == {"floors": {}}


def test_finding_and_probing_devices_loads_no_torch_here() -> None:
    code = (
        "import sys\nfrom enginecore.device.discovery import discover\nfrom enginecore.device.probe import probe_all\n"
        "from enginecore.device.select import select_device\nprobe_all(discover())\nassert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
