"""Which plugins are installed: entry points are read one by one, so that a broken package harms only itself.

Package metadata is read here; the plugins' modules, which may do anything when they are imported, in a process of its
own. Nothing imports torch, opens a device file or initialises a driver. A plugin that cannot be loaded is still listed,
with the fault that says why; short device names that two plugins claim are listed as conflicts of both.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from importlib.metadata import Distribution, EntryPoint, distributions
from typing import Any

from packaging.utils import canonicalize_name

from enginecore.device.child import run_child
from enginecore.device.manifest import Manifest, ProbeCause

GROUP = "enginecore.backends"

#: For all plugins together: their modules import neither torch nor a driver.
MANIFEST_TIMEOUT_S = 60.0

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
    def identity(self) -> dict[str, str]:
        """What another process needs to find it again."""
        return {name: getattr(self, name) for name in ("distribution", "version", "entry_point", "value")}

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


def discover(
    found: Iterable[Distribution] | None = None, *, timeout_s: float = MANIFEST_TIMEOUT_S
) -> list[InstalledPlugin]:
    """Every installed plugin, ordered by distribution and entry-point name. `found` replaces the installed packages.

    The plugins' modules are loaded in another process, once; nothing of them is loaded or remembered here.
    """
    plugins = [
        _listed(distribution, entry_point)
        for distribution in _unique(distributions() if found is None else found)
        for entry_point in _entry_points(distribution)
    ]
    plugins.sort(key=lambda plugin: (plugin.distribution, plugin.entry_point))
    return _with_conflicts(_with_manifests(plugins, timeout_s))


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


def _listed(distribution: Distribution, entry_point: EntryPoint) -> InstalledPlugin:
    return InstalledPlugin(
        distribution=distribution.metadata["Name"],
        version=distribution.version,
        entry_point=entry_point.name,
        value=entry_point.value,
    )


def _with_manifests(plugins: list[InstalledPlugin], timeout_s: float) -> list[InstalledPlugin]:
    """`plugins` with their manifests or faults, all read in one other process.

    One that ends or hangs that process gets the blame, and a new process goes on with those after it.
    """
    found: list[InstalledPlugin] = []
    while len(found) < len(plugins):
        waiting = plugins[len(found) :]
        task = {"plugins": [plugin.identity for plugin in waiting], "timeout_s": timeout_s}
        ended = run_child("enginecore.device.manifest_main", task, timeout_s)
        answers = [json.loads(line) for line in ended.out.splitlines() if line.endswith(b"}")]
        found += [_told(plugin, answer) for plugin, answer in zip(waiting, answers, strict=False)]
        if len(answers) < len(waiting):
            guilty = waiting[len(answers)]
            reason = f"a process that loaded {guilty.value} to read its manifest {ended.reason}"
            fault = PluginFault(
                cause=ProbeCause.FAILED, reason=reason, fix=upgrade_fix(guilty), traceback=ended.trace
            )
            found.append(replace(guilty, fault=fault))
    return found


def _told(plugin: InstalledPlugin, answer: dict[str, Any]) -> InstalledPlugin:
    """`plugin` with what the reading process found of it."""
    manifest, fault = answer["manifest"], answer["fault"]
    if manifest is not None:
        manifest = Manifest(**{**manifest, "devices": tuple(manifest["devices"])})
    if fault is not None:
        fault = PluginFault(**{**fault, "cause": ProbeCause(fault["cause"])})
    return replace(plugin, manifest=manifest, fault=fault)


def upgrade_fix(plugin: InstalledPlugin) -> str:
    """What to type when a plugin is at fault."""
    name = plugin.distribution
    return f"upgrade it (pip install --upgrade {name}) or remove it (pip uninstall {name})"


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
