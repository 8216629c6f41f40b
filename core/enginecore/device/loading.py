"""Loading a plugin's module and its hooks: in processes that it may end, or in the worker that it serves."""

from __future__ import annotations

import contextlib
import re
import sys
import traceback
from dataclasses import fields, replace
from importlib.metadata import EntryPoint
from typing import Any

import pluggy
from packaging.utils import canonicalize_name

from enginecore.device.contract import CONTRACT_VERSION, contract_version
from enginecore.device.discovery import DEVICE_NAME, GROUP, InstalledPlugin, PluginFault, upgrade_fix
from enginecore.device.hookspecs import PROJECT, REQUIRED_HOOKS, HookSpecs
from enginecore.device.manifest import Manifest, ProbeCause
from enginecore.device.torch_build import torch_gate


class PluginFaultError(Exception):
    """Carries a fault out of the loading steps; it never leaves this module."""

    def __init__(
        self, reason: str, fix: str, cause: ProbeCause = ProbeCause.FAILED, manifest: Manifest | None = None
    ) -> None:
        super().__init__(reason)
        self.fault = PluginFault(cause=cause, reason=reason, fix=fix)
        self.manifest = manifest


def inspect(plugin: InstalledPlugin) -> InstalledPlugin:
    """`plugin` with its manifest, or with the fault that says why there is none. Loads the plugin's module."""
    fix = upgrade_fix(plugin)
    try:
        manager = _load(EntryPoint(plugin.entry_point, plugin.value, GROUP))
        return replace(plugin, manifest=_read_manifest(plugin, manager, fix))
    except PluginFaultError as error:
        return replace(plugin, manifest=error.manifest, fault=error.fault)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a plugin may raise anything while it is imported, SystemExit included
        reason = f"loading {plugin.value} raised {type(error).__name__}: {error}"
        trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        return replace(plugin, fault=PluginFault(cause=ProbeCause.FAILED, reason=reason, fix=fix, traceback=trace))


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


def load_hooks(plugin: InstalledPlugin) -> Any:
    """The plugin's hooks, as pluggy's relay. Raises whatever the plugin raises: callers guard it."""
    return _load(EntryPoint(plugin.entry_point, plugin.value, GROUP)).hook
