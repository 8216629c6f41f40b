"""`enginecore plugin new`: a package for a new device that works at once, to be replaced piece by piece."""

from __future__ import annotations

import datetime
import re
import sys
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from enginecore.errors import ParameterError

app = typer.Typer(name="plugin", help="Plugins for devices.", no_args_is_help=True)

#: Template files, in `templates/plugin`, and where they go; @@name@@ is replaced in both text and path.
FILES: Mapping[str, str] = {
    "pyproject.toml.in": "pyproject.toml",
    "README.md.in": "README.md",
    "gitignore.in": ".gitignore",
    "package/__init__.py.in": "@@package@@/__init__.py",
    "package/plugin.py.in": "@@package@@/plugin.py",
    "package/backend.py.in": "@@package@@/backend.py",
    "package/ops.py.in": "@@package@@/ops.py",
    "package/profile.py.in": "@@package@@/profile.py",
    "tests/test_conformance.py.in": "tests/test_conformance.py",
    "github/ci.yml.in": ".github/workflows/ci.yml",
}

#: How long the template's one declared gap holds.
GAP_DAYS = 365


@app.callback()
def plugin() -> None:
    """Plugins for devices."""


@app.command()
def new(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Whose device it is: enginecore-NAME becomes the package.")
    ],
    device: Annotated[
        str | None, typer.Option(metavar="DEVICE", help="What users type after --device. Default: NAME.")
    ] = None,
    dir: Annotated[
        Path | None, typer.Option("--dir", metavar="DIR", help="Where to write it. Default: ./enginecore-NAME.")
    ] = None,
) -> None:
    """Write a plugin package that installs, passes the conformance kit and serves at once, on torch references.

    Replace one piece at a time: docs/writing-a-plugin.md leads through it.
    """
    names = template_names(name, device)
    folder = dir or Path(names["distribution"])
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ParameterError(f"{folder} is not empty", param="dir", fix="name another: --dir DIR")
    for path, text in render(names).items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    print(f"{names['distribution']} for --device {names['device']} is in {folder}")
    print(f"next: cd {folder} && pip install -e '.[test]' && pytest", file=sys.stderr)


def template_names(name: str, device: str | None) -> dict[str, str]:
    """What the template's placeholders stand for. Raises ParameterError for names that cannot be."""
    from enginecore._version import __version__
    from enginecore.device.contract import contract_version
    from enginecore.device.discovery import DEVICE_NAME, discover

    short = name.removeprefix("enginecore-")
    if not re.fullmatch(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*", short):
        raise ParameterError(f"name must be lower case letters, digits and -, got {name!r}", param="name")
    device = short.replace("-", "_") if device is None else device
    if not DEVICE_NAME.fullmatch(device) or device == "auto":
        raise ParameterError(
            f"device must be lower case letters, digits and _, and not 'auto', got {device!r}", param="device"
        )
    distribution = f"enginecore-{short.replace('_', '-')}"
    taken = [p.label for p in discover() if device in p.devices and p.distribution != distribution]
    if taken:
        raise ParameterError(
            f"the device {device!r} is that of {taken[0]} already", param="device", fix="choose another --device"
        )
    module = short.replace("-", "_")
    return {
        "distribution": distribution,
        "package": f"enginecore_{module}",
        "module": module,
        "class": "".join(part.capitalize() for part in module.split("_")),
        "device": device,
        "title": device,
        "contract": contract_version(),
        "enginecore": __version__,
        "expires": (datetime.date.today() + datetime.timedelta(days=GAP_DAYS)).isoformat(),
    }


def render(names: Mapping[str, str]) -> dict[str, str]:
    """Path to text of every file of the package."""
    source = files("enginecore.cli") / "templates" / "plugin"
    return {
        fill(path, names): fill(source.joinpath(*template.split("/")).read_text(encoding="utf-8"), names)
        for template, path in FILES.items()
    }


def fill(text: str, names: Mapping[str, str]) -> str:
    return re.sub(r"@@(\w+)@@", lambda match: names[match[1]], text)
