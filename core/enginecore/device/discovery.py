"""Which plugins are installed: entry points are read one by one, so that a broken package harms only itself.

Nothing here imports torch, opens a device file or starts a process. A plugin that cannot be loaded is still listed,
with the fault that says why; short device names that two plugins claim are listed as conflicts of both.
"""

from __future__ import annotations

import contextlib
import re
import sys
import traceback
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from importlib.metadata import Distribution, EntryPoint, distributions
from typing import Any

import pluggy
from packaging.utils import canonicalize_name

from enginecore.device.contract import CONTRACT_VERSION, contract_version
from enginecore.device.hookspecs import PROJECT, REQUIRED_HOOKS, HookSpecs
from enginecore.device.manifest import Manifest, ProbeCause
from enginecore.device.torch_build import torch_gate

GROUP = "enginecore.backends"

DEVICE_NAME = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True, kw_only=True)
class PluginFault:
    """Why an installed plugin cannot be used, what to type, and the traceback when something was raised."""

    cause: ProbeCause
    reason: str
    fix: str
    traceback: str = ""


@dataclass(frozen=True, kw_only=True)
class InstalledPlugin:
    """One entry point of group `enginecore.backends`. Exactly one of `manifest` and `fault` may be missing.

    Plain data that can be pickled: `load_hooks` finds the code again, in this process or in another.
    `conflicts` says which other plugins claim the same names; full names (`DIST:DEVICE`) work all the same.
    """

    distribution: str
    version: str
    entry_point: str
    value: str
    manifest: Manifest | None = None
    fault: PluginFault | None = None
    conflicts: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """How messages name the plugin: distribution and version."""
        return f"{self.distribution} {self.version}"

    @property
    def devices(self) -> tuple[str, ...]:
        """Short device names; those of the manifest, or the entry point's own name when there is no manifest."""
        return self.manifest.devices if self.manifest else (self.entry_point,)

    @property
    def accelerator(self) -> bool:
        """Whether it is one, or may be: a plugin whose manifest cannot be read counts as one."""
        return self.manifest is None or (self.manifest.accelerator and self.manifest.auto)

    def full_name(self, device: str) -> str:
        return f"{self.distribution}:{device}"


class PluginFaultError(Exception):
    """Carries a fault out of the loading steps; it never leaves this module."""

    def __init__(
        self, reason: str, fix: str, cause: ProbeCause = ProbeCause.FAILED, manifest: Manifest | None = None
    ) -> None:
        super().__init__(reason)
        self.fault = PluginFault(cause=cause, reason=reason, fix=fix)
        self.manifest = manifest


def discover(found: Iterable[Distribution] | None = None) -> list[InstalledPlugin]:
    """Every installed plugin, ordered by distribution and entry-point name. `found` replaces the installed packages."""
    plugins = [
        _inspect(distribution, entry_point)
        for distribution in _unique(distributions() if found is None else found)
        for entry_point in _entry_points(distribution)
    ]
    return _with_conflicts(sorted(plugins, key=lambda plugin: (plugin.distribution, plugin.entry_point)))


def _unique(found: Iterable[Distribution]) -> list[Distribution]:
    """The first distribution of each name, as an import would find it."""
    unique: dict[str, Distribution] = {}
    for distribution in found:
        with contextlib.suppress(Exception):  # metadata that cannot be read belongs to no plugin of ours
            unique.setdefault(canonicalize_name(distribution.metadata["Name"]), distribution)
    return list(unique.values())


def _entry_points(distribution: Distribution) -> list[EntryPoint]:
    try:
        return [entry_point for entry_point in distribution.entry_points if entry_point.group == GROUP]
    except Exception:  # an entry_points.txt that does not parse
        return []


def _inspect(distribution: Distribution, entry_point: EntryPoint) -> InstalledPlugin:
    plugin = InstalledPlugin(
        distribution=distribution.metadata["Name"],
        version=distribution.version,
        entry_point=entry_point.name,
        value=entry_point.value,
    )
    fix = upgrade_fix(plugin)
    try:
        return replace(plugin, manifest=_read_manifest(plugin, _load(entry_point), fix))
    except PluginFaultError as error:
        return replace(plugin, manifest=error.manifest, fault=error.fault)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a plugin may raise anything while it is imported, SystemExit included
        reason = f"loading {entry_point.value} raised {type(error).__name__}: {error}"
        trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        return replace(plugin, fault=PluginFault(cause=ProbeCause.FAILED, reason=reason, fix=fix, traceback=trace))


def upgrade_fix(plugin: InstalledPlugin) -> str:
    """What to type when a plugin is at fault."""
    name = plugin.distribution
    return f"upgrade it (pip install --upgrade {name}) or remove it (pip uninstall {name})"


def _refuse_torch() -> None:
    raise RuntimeError("a plugin's module may not import torch: import it inside enginecore_create_backend")


def _load(entry_point: EntryPoint) -> pluggy.PluginManager:
    """The plugin's object, registered with a manager of its own; what it prints goes to stderr."""
    with contextlib.redirect_stdout(sys.stderr), torch_gate(_refuse_torch):
        plugin = entry_point.load()
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(HookSpecs)
    manager.register(plugin, name=entry_point.name)
    return manager


def _read_manifest(plugin: InstalledPlugin, manager: pluggy.PluginManager, fix: str) -> Manifest:
    missing = [hook for hook in REQUIRED_HOOKS if not getattr(manager.hook, hook).get_hookimpls()]
    if missing:
        raise PluginFaultError(f"{plugin.value} has no {' and no '.join(missing)}; every plugin needs them", fix)
    with contextlib.redirect_stdout(sys.stderr), torch_gate(_refuse_torch):
        manifest: object = manager.hook.enginecore_manifest()
    if not isinstance(manifest, Manifest):
        raise PluginFaultError(
            f"enginecore_manifest returned {type(manifest).__name__}, not enginecore.device.Manifest", fix
        )
    problems = _manifest_problems(plugin, manifest)
    if problems:
        raise PluginFaultError("its manifest is not valid: " + "; ".join(problems), fix)
    mismatch = contract_problem(manifest.contract)
    if mismatch:
        raise PluginFaultError(mismatch, _contract_fix(plugin, manifest.contract), ProbeCause.CONTRACT, manifest)
    manager.check_pending()  # a misspelt hook would otherwise never be called
    return manifest


def _manifest_problems(plugin: InstalledPlugin, manifest: Manifest) -> list[str]:
    problems = [
        f"{field.name} must be {field.type}, got {value!r}"
        for field in fields(Manifest)
        if field.name != "devices" and not _is_a(value := getattr(manifest, field.name), str(field.type))
    ]
    if not isinstance(manifest.devices, tuple) or not manifest.devices:
        problems.append(f"devices must be a tuple of at least one name, got {manifest.devices!r}")
    else:
        problems += [
            f"device name {name!r} must be lower case letters, digits and _, and not 'auto'"
            for name in manifest.devices
            if not isinstance(name, str) or not DEVICE_NAME.fullmatch(name) or name == "auto"
        ]
    if not problems and canonicalize_name(manifest.distribution) != canonicalize_name(plugin.distribution):
        problems.append(f"distribution says {manifest.distribution!r} but {plugin.distribution!r} is installed")
    if isinstance(manifest.contract, str) and not re.fullmatch(r"\d+\.\d+", manifest.contract):
        problems.append(f"contract must be MAJOR.MINOR, got {manifest.contract!r}")
    return problems


def _is_a(value: object, annotation: str) -> bool:
    wanted: dict[str, tuple[type, ...]] = {"str": (str,), "str | None": (str, type(None)), "bool": (bool,)}
    return isinstance(value, wanted.get(annotation, (object,)))


def contract_problem(version: str) -> str | None:
    """Why a plugin of contract `version` does not fit this core; None when it does. Minors only add."""
    major, minor = (int(part) for part in version.split("."))
    if major == CONTRACT_VERSION[0] and minor <= CONTRACT_VERSION[1]:
        return None
    age = "newer" if (major, minor) > CONTRACT_VERSION else "older"
    return f"it was built against plugin contract {version}, {age} than this enginecore's {contract_version()}"


def _contract_fix(plugin: InstalledPlugin, version: str) -> str:
    newer = tuple(int(part) for part in version.split(".")) > CONTRACT_VERSION
    return f"pip install --upgrade {'enginecore' if newer else plugin.distribution}"


def _with_conflicts(plugins: list[InstalledPlugin]) -> list[InstalledPlugin]:
    owners: dict[str, list[InstalledPlugin]] = defaultdict(list)
    for plugin in plugins:
        for device in dict.fromkeys(plugin.devices):
            owners[f"device {device!r}"].append(plugin)
        owners[f"entry point {plugin.entry_point!r}"].append(plugin)
    clashes: dict[int, list[str]] = defaultdict(list)
    for name, claimants in owners.items():
        for plugin in claimants if len(claimants) > 1 else ():
            clashes[id(plugin)].append(f"{name} is claimed by {' and by '.join(other.label for other in claimants)}")
    return [replace(plugin, conflicts=tuple(clashes[id(plugin)])) for plugin in plugins]


def load_hooks(plugin: InstalledPlugin) -> Any:
    """The plugin's hooks, as pluggy's relay. Raises whatever the plugin raises: callers guard it."""
    return _load(EntryPoint(plugin.entry_point, plugin.value, GROUP)).hook
