"""Purpose-built plugin packages: a module and a dist-info directory each, planted where a test has put them."""

from __future__ import annotations

import itertools
import sys
from importlib.metadata import distributions
from pathlib import Path

from enginecore.device.discovery import InstalledPlugin, discover

_HEADER = """
from enginecore import hookimpl
from enginecore.device import *
"""

_MANIFEST = """
@hookimpl
def enginecore_manifest():
    return Manifest(devices=({device!r},), distribution={name!r}, version={version!r}, contract={contract!r}{more})
"""

_PROBE = """
@hookimpl
def enginecore_probe(ctx):
    {probe}
"""

_CREATE = """
@hookimpl
def enginecore_create_backend(ctx):
    {create}
"""

AVAILABLE = "return ProbeResult(status=ProbeStatus.AVAILABLE, reason='in order')"
ABSENT = "return ProbeResult(status=ProbeStatus.ABSENT, reason='no such card', cause=ProbeCause.NO_DEVICE)"

_serial = itertools.count()


class Site:
    """A directory of packages. Module names are new for every package, so that no test sees another's."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def plugin(
        self,
        name: str,
        *,
        device: str = "acme",
        version: str = "1.2.3",
        contract: str = "1.0",
        more: str = "",
        probe: str = AVAILABLE,
        create: str = "raise NotImplementedError",
        top: str = "",
        extra: str = "",
        entry_point: str | None = None,
        source: str | None = None,
    ) -> str:
        """Plant a plugin; `source` replaces its module. Returns the module's name."""
        module = f"planted_{next(_serial)}_{name.replace('-', '_')}"
        if source is None:
            source = top + _HEADER
            source += _MANIFEST.format(device=device, name=name, version=version, contract=contract, more=more)
            source += _PROBE.format(probe=probe) + _CREATE.format(create=create) + extra
        (self.root / f"{module}.py").write_text(source)
        entry = entry_point or device
        self.distribution(name, version, f"[enginecore.backends]\n{entry} = {module}\n")
        return module

    def distribution(self, name: str, version: str, entry_points: str = "") -> Path:
        info = self.root / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(entry_points)
        return info

    def discover(self) -> list[InstalledPlugin]:
        """The plugins of this directory alone."""
        return discover(distributions(path=[str(self.root)]))

    def only(self) -> InstalledPlugin:
        (plugin,) = self.discover()
        return plugin

    def forget(self) -> None:
        for name in [name for name in sys.modules if name.startswith("planted_")]:
            del sys.modules[name]
