"""From what the user typed after `--device` to one device of one plugin, and from there to its backend.

    auto              the one healthy accelerator, or the host's own device when no accelerator is present
    DEVICE[:INDEX]    a short name; an error when two plugins claim it
    DIST:DEVICE[:INDEX]   a full name, never ambiguous

A broken accelerator is never passed over in silence: under `auto` it is an error that says how to go on without it.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from packaging.utils import canonicalize_name

from enginecore.device.attention import AttentionBackend
from enginecore.device.backend import Backend
from enginecore.device.capabilities import Capabilities
from enginecore.device.collectives import Communicator
from enginecore.device.discovery import InstalledPlugin, discover
from enginecore.device.graphs import GraphRunner
from enginecore.device.loading import load_hooks
from enginecore.device.manifest import BackendContext, ConfigContext, ProbeCause, ProbeResult, ProbeStatus
from enginecore.device.memory import MemoryManager
from enginecore.device.optable import OpTable
from enginecore.device.probe import PROBE_TIMEOUT_S, DeviceProbe, probe_all
from enginecore.device.runtime import ModelRuntime
from enginecore.errors import (
    AmbiguousDeviceError,
    BrokenPluginError,
    ContractMismatchError,
    DeviceError,
    DriverMissingError,
    EngineCoreError,
    ParameterError,
    WrongTorchBuildError,
)

logger = logging.getLogger(__name__)

_ERRORS: dict[ProbeCause, type[DeviceError]] = {
    ProbeCause.NO_DEVICE: DriverMissingError,
    ProbeCause.DRIVER_MISSING: DriverMissingError,
    ProbeCause.WRONG_TORCH: WrongTorchBuildError,
    ProbeCause.CONTRACT: ContractMismatchError,
}


@dataclass(frozen=True, kw_only=True)
class SelectedDevice:
    """A healthy device: plain data that can be sent to the worker process."""

    plugin: InstalledPlugin
    device: str
    index: int = 0
    probe: ProbeResult | None = field(default=None, compare=False)

    @property
    def full_name(self) -> str:
        """`DIST:DEVICE:INDEX`, which selects this very device again."""
        return f"{self.plugin.full_name(self.device)}:{self.index}"


def select_device(
    spec: str = "auto", *, plugins: Sequence[InstalledPlugin] | None = None, timeout_s: float = PROBE_TIMEOUT_S
) -> SelectedDevice:
    """The device that `spec` means. `plugins` replaces the installed ones.

    Raises ParameterError (no such device), AmbiguousDeviceError, BrokenPluginError, DriverMissingError,
    WrongTorchBuildError or ContractMismatchError; each says what to type.
    """
    installed = list(discover() if plugins is None else plugins)
    distribution, device, index = parse_spec(spec)
    if device == "auto":
        return _select_auto(installed, timeout_s)
    candidates = [
        plugin
        for plugin in installed
        if device in plugin.devices and distribution in (None, canonicalize_name(plugin.distribution))
    ]
    if not candidates:
        raise _unknown(spec, device, installed)
    if distribution is None:
        _refuse_conflicts(candidates, device)
    chosen = probe_all([_only(candidates[0], device)], timeout_s=timeout_s)[0]
    return _require_available(chosen, index)


def parse_spec(spec: str) -> tuple[str | None, str, int]:
    """(distribution or None, device, index) of `spec`; ParameterError when it is malformed."""
    parts = spec.strip().split(":")
    index = int(parts.pop()) if len(parts) > 1 and parts[-1].isascii() and parts[-1].isdigit() else 0
    if len(parts) > 2 or not all(parts) or (parts[-1] == "auto" and spec.strip() != "auto"):
        raise ParameterError(
            f"device {spec!r} is not auto, DEVICE, DEVICE:INDEX, DIST:DEVICE or DIST:DEVICE:INDEX", param="device"
        )
    return (canonicalize_name(parts[0]) if len(parts) == 2 else None), parts[-1], index


def _only(plugin: InstalledPlugin, device: str) -> InstalledPlugin:
    """`plugin` narrowed to one of its devices, so that the others are not probed."""
    if plugin.manifest is None:
        return plugin
    return replace(plugin, manifest=replace(plugin.manifest, devices=(device,)))


def _select_auto(installed: list[InstalledPlugin], timeout_s: float) -> SelectedDevice:
    hosts = [p for p in installed if p.manifest and p.manifest.auto and not p.manifest.accelerator]
    # Hosts are asked in the same breath: where there is no accelerator their answer is needed next.
    answers = probe_all([*(plugin for plugin in installed if plugin.accelerator), *hosts], timeout_s=timeout_s)
    found = [probe for probe in answers if probe.plugin.accelerator]
    broken = [probe for probe in found if probe.result.status is ProbeStatus.BROKEN]
    healthy = [probe for probe in found if probe.result.status is ProbeStatus.AVAILABLE]
    if broken:
        raise _broken_under_auto(broken, healthy)
    for probe in found:
        if probe.result.status is ProbeStatus.ABSENT:
            logger.info("device %s (%s) is absent: %s", probe.device, probe.plugin.label, probe.result.reason)
    if not healthy:
        return _select_host([probe for probe in answers if not probe.plugin.accelerator])
    if len(healthy) > 1:
        raise AmbiguousDeviceError(
            "more than one device could serve: " + ", ".join(_described(probe) for probe in healthy),
            fix="choose one: " + _choices(healthy),
        )
    _refuse_conflicts([healthy[0].plugin], healthy[0].device)
    return _require_available(healthy[0], 0)


def _select_host(found: list[DeviceProbe]) -> SelectedDevice:
    if not found:
        raise DeviceError(
            "no installed plugin offers a device that --device auto may choose",
            fix="install one, such as pip install enginecore-cpu",
        )
    healthy = [probe for probe in found if probe.result.status is ProbeStatus.AVAILABLE]
    if len(healthy) > 1:
        raise AmbiguousDeviceError(
            "no accelerator is present and more than one plugin serves the host: "
            + ", ".join(_described(probe) for probe in healthy),
            fix="choose one: " + _choices(healthy),
        )
    return _require_available(healthy[0] if healthy else found[0], 0)


def _described(probe: DeviceProbe) -> str:
    return f"{probe.device} of {probe.plugin.label}"


def _choices(probes: Sequence[DeviceProbe]) -> str:
    """What to type for each: the short name, unless two of them share it."""
    short = [probe.device for probe in probes]
    return " or ".join(
        f"--device {probe.device if short.count(probe.device) == 1 and not probe.plugin.conflicts else probe.full_name}"
        for probe in probes
    )


def _refuse_conflicts(candidates: list[InstalledPlugin], device: str) -> None:
    conflicts = dict.fromkeys(conflict for plugin in candidates for conflict in plugin.conflicts)
    if not conflicts:
        return
    names = " or ".join(f"--device {plugin.full_name(device)}" for plugin in candidates)
    raise AmbiguousDeviceError("; ".join(conflicts), fix=f"type {names}, or uninstall one of them")


def _broken_under_auto(broken: list[DeviceProbe], healthy: list[DeviceProbe]) -> DeviceError:
    """One error for all broken accelerators; the first one's cause decides the class."""
    advice = _choices(healthy) if healthy else "--device with another name, such as the host's own"
    error = _error_for(broken[0])
    more = "".join(f"\n{probe.result.reason}{_trace(probe.result)}" for probe in broken[1:])
    fixes = [broken[0].result.fix] if broken[0].result.fix else []
    return type(error)(error.message + more, fix="; ".join([*fixes, f"to go on without it, choose {advice}"]))


def _trace(result: ProbeResult) -> str:
    trace = str(result.details.get("traceback", "")).strip()
    return f"\n{trace}\n" if trace else ""


def _error_for(probe: DeviceProbe) -> DeviceError:
    result = probe.result
    kind = _ERRORS.get(result.cause, DriverMissingError if result.status is ProbeStatus.ABSENT else BrokenPluginError)
    text = result.reason if result.status is ProbeStatus.BROKEN else f"{_described(probe)} is absent: {result.reason}"
    return kind(text + _trace(result), fix=result.fix or "enginecore devices lists what is usable here")


def _require_available(probe: DeviceProbe, index: int) -> SelectedDevice:
    if probe.result.status is not ProbeStatus.AVAILABLE:
        raise _error_for(probe)
    count = probe.result.details.get("count")
    if isinstance(count, int) and index >= count:
        raise DriverMissingError(
            f"{_described(probe)} has no index {index}: {count} found", fix=f"choose an index from 0 to {count - 1}"
        )
    return SelectedDevice(plugin=probe.plugin, device=probe.device, index=index, probe=probe.result)


def _unknown(spec: str, device: str, installed: list[InstalledPlugin]) -> ParameterError:
    names = sorted({name for plugin in installed for name in plugin.devices})
    full = sorted(plugin.full_name(name) for plugin in installed for name in plugin.devices if name == device)
    if full:
        offered = ", ".join(full)
        return ParameterError(f"no plugin is called {spec!r}; {device!r} is offered by {offered}", param="device")
    return ParameterError(
        f"no installed plugin offers the device {spec!r}; installed: {', '.join(names) or 'none'}",
        param="device",
        fix=f"pip install enginecore-{device}, or choose one that is installed",
    )


def create_backend(
    selected: SelectedDevice, *, num_threads: int | None = None, options: dict[str, Any] | None = None
) -> Backend:
    """The backend of `selected`, checked against the contract. In the worker process only.

    Errors of enginecore pass as they are (UnsupportedError, DriverMissingError, ...); anything else that the plugin
    raises or returns amiss becomes a BrokenPluginError with its traceback.
    """
    plugin = selected.plugin
    context = BackendContext(
        device=selected.device, index=selected.index, num_threads=num_threads, options=dict(options or {})
    )
    backend = _guarded(plugin, "enginecore_create_backend", context)
    problems = backend_problems(backend)
    if problems:
        raise BrokenPluginError(
            f"{plugin.label}: its backend for {selected.device!r} breaks the contract: " + "; ".join(problems),
            fix=f"pip install --upgrade {plugin.distribution}",
        )
    return backend  # type: ignore[no-any-return]


def config_defaults(selected: SelectedDevice, context: ConfigContext) -> dict[str, Any]:
    """The plugin's preferred settings; empty when it has none. Only settings in `context.unset` are kept."""
    wanted = _guarded(selected.plugin, "enginecore_config_defaults", context)
    if wanted is None:
        return {}
    if not isinstance(wanted, dict) or not all(isinstance(name, str) for name in wanted):
        raise BrokenPluginError(
            f"{selected.plugin.label}: enginecore_config_defaults returned {wanted!r}, not a dict of settings",
            fix=f"pip install --upgrade {selected.plugin.distribution}",
        )
    return {name: value for name, value in wanted.items() if name in context.unset}


def conformance_profile(plugin: InstalledPlugin) -> Any:
    """What the plugin's conformance hook returns; None when it has none."""
    return _guarded(plugin, "enginecore_conformance_profile")


def _guarded(plugin: InstalledPlugin, hook: str, *context: Any) -> Any:
    try:
        relay = getattr(load_hooks(plugin), hook)
        return relay(ctx=context[0]) if context else relay()
    except EngineCoreError:
        raise
    except (Exception, SystemExit) as error:
        trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        raise BrokenPluginError(
            f"{plugin.label}: {hook} raised {type(error).__name__}: {error}\n{trace}",
            fix=f"pip install --upgrade {plugin.distribution}",
        ) from error


_PARTS: tuple[tuple[str, type, bool], ...] = (
    ("capabilities", Capabilities, True),
    ("memory", MemoryManager, True),
    ("attention", AttentionBackend, False),
    ("ops", OpTable, False),
    ("graphs", GraphRunner, False),
    ("collectives", Communicator, False),
    ("runtime", ModelRuntime, False),
)


def backend_problems(backend: object) -> list[str]:
    """Every way in which `backend` is not what the contract asks for; empty when it is sound."""
    if not isinstance(backend, Backend):
        return [f"it returned {type(backend).__name__}, not an enginecore.device.Backend"]
    problems = []
    for name, kind, required in _PARTS:
        part = getattr(backend, name, None)
        if part is None and required:
            problems.append(f"backend.{name} is not set; it must be a {kind.__name__}")
        elif part is not None and not isinstance(part, kind):
            problems.append(f"backend.{name} is a {type(part).__name__}, not a {kind.__name__}")
    if getattr(backend, "runtime", None) is None:
        missing = [name for name in ("attention", "ops") if getattr(backend, name, None) is None]
        problems += [f"backend.{name} is not set, and there is no runtime to do without it" for name in missing]
    return problems
