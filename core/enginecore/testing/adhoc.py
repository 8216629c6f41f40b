"""Makes a backend that is not packaged look installed, so that the engine finds it as it finds any other."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from enginecore.device.discovery import GROUP
from enginecore.testing.source import BackendSource

DEVICE = "adhoc"
_NAME = "enginecore-adhoc"

_MODULE = """
from enginecore.device.contract import contract_version
from enginecore.device.hookspecs import hookimpl
from enginecore.device.manifest import Manifest, ProbeResult, ProbeStatus

SOURCE = {source!r}


@hookimpl
def enginecore_manifest():
    return Manifest(
        devices=({device!r},), distribution={name!r}, version="0", contract=contract_version(), accelerator=False
    )


@hookimpl
def enginecore_probe(ctx):
    return ProbeResult(status=ProbeStatus.AVAILABLE, reason="made for a test of the kit")


@hookimpl
def enginecore_create_backend(ctx):
    from enginecore.testing.source import BackendSource

    return BackendSource(**SOURCE).create()[0]
"""


def install(source: BackendSource, folder: Path) -> str:
    """Write a distribution for `source` into `folder`, make it importable here and in child processes.

    Returns what to give as the device. Only for a process that ends with the test: sys.path stays changed.
    """
    info = folder / "enginecore_adhoc-0.dist-info"
    if not info.exists():
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {_NAME}\nVersion: 0\n")
        (info / "entry_points.txt").write_text(f"[{GROUP}]\n{DEVICE} = enginecore_adhoc_plugin\n")
        module = _MODULE.format(source=vars(source), device=DEVICE, name=_NAME)
        (folder / "enginecore_adhoc_plugin.py").write_text(module)
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
        os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    return f"{_NAME}:{DEVICE}"
