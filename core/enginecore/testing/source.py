"""Where the backend under test comes from: an installed plugin, or a function that makes one."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from enginecore.device import Backend
from enginecore.device.discovery import discover
from enginecore.device.select import (
    SelectedDevice,
    backend_problems,
    conformance_profile,
    create_backend,
    parse_spec,
    select_device,
)
from enginecore.errors import DeviceError
from enginecore.testing.profile import ConformanceProfile


@dataclass(frozen=True, kw_only=True)
class BackendSource:
    """Plain data, sent to the processes that run cases.

    `device` is what a user types after `--device`. `factory` is "module:function" or "path/to/file.py:function", called
    with `options` as keywords, for a backend that is not packaged yet; `profile` names a function in the same way.
    """

    device: str = ""
    factory: str = ""
    profile: str = ""
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if bool(self.device) == bool(self.factory):
            raise ValueError("give a device or a factory, not both and not neither")

    @classmethod
    def of(cls, target: str | BackendSource) -> BackendSource:
        """A source from what a caller wrote: a source, "module:function", "file.py:function", or a device."""
        if isinstance(target, BackendSource):
            return target
        module, colon, name = target.rpartition(":")
        if colon and name.isidentifier() and (module.endswith(".py") or "." in module):
            return cls(factory=target)
        return cls(device=target)

    def resolved(self) -> BackendSource:
        """With a device, the one that it means ("auto", a short name), probed here, once; raises DeviceError kinds."""
        if self.factory:
            return self
        return replace(self, device=select_device(self.device).full_name)

    @property
    def label(self) -> str:
        return self.device or self.factory

    def create(self) -> tuple[Backend, ConformanceProfile, dict[str, str]]:
        """The backend, its profile, and who made it. In a worker process only."""
        if self.factory:
            profile = _function(self.profile)() if self.profile else None
            backend = _function(self.factory)(**self.options)
            problems = backend_problems(backend)
            if problems:
                raise TypeError("; ".join(problems))
            return backend, as_profile(profile), {"factory": self.factory}
        selected = _find(self.device)
        backend = create_backend(selected, options=self.options)
        plugin = selected.plugin
        about = {"distribution": plugin.distribution, "version": plugin.version, "device": selected.full_name}
        if plugin.manifest is not None:
            about["contract"] = plugin.manifest.contract
        return backend, as_profile(conformance_profile(plugin)), about


def _find(full_name: str) -> SelectedDevice:
    """The device of a full name (`DIST:DEVICE:INDEX`), without another probe: that may take seconds."""
    distribution, device, index = parse_spec(full_name)
    for plugin in discover():
        if canonicalize_name(plugin.distribution) == distribution and device in plugin.devices:
            return SelectedDevice(plugin=plugin, device=device, index=index)
    raise DeviceError(f"{full_name} is not installed")


def as_profile(value: Any) -> ConformanceProfile:
    """What a plugin's hook returned; TypeError when it is neither None nor a ConformanceProfile."""
    if value is None:
        return ConformanceProfile()
    if not isinstance(value, ConformanceProfile):
        raise TypeError(
            "enginecore_conformance_profile must return an enginecore.testing.ConformanceProfile or None, "
            f"got a {type(value).__name__}"
        )
    return value


def _function(reference: str) -> Any:
    module, _, name = reference.rpartition(":")
    if not module.endswith(".py"):
        return getattr(importlib.import_module(module), name)
    path = Path(module).resolve()
    key = f"_enginecore_conformance_{path.stem}"
    if key not in sys.modules:
        spec = importlib.util.spec_from_file_location(key, path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{path} is not a Python file")
        loaded = importlib.util.module_from_spec(spec)
        sys.modules[key] = loaded
        spec.loader.exec_module(loaded)
    return getattr(sys.modules[key], name)
