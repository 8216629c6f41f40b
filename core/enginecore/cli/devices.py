"""`enginecore devices`: every device of every installed plugin, whether it is usable here, and what to type if not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from enginecore.device.probe import DeviceProbe

#: Besides torch, of which the build matters too.
PACKAGES = ("transformers", "tokenizers", "safetensors", "gguf", "numpy", "pluggy")

_COLOURS = {"available": "green", "absent": "dim", "broken": "red"}


def devices(
    json: Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on standard output.")] = False,
    ops: Annotated[
        bool,
        typer.Option("--ops", help="Make each usable device's backend and say which ops are its own. Loads torch."),
    ] = False,
) -> None:
    """List every device of the installed plugins: available, absent or broken, why, and what to type."""
    from dataclasses import asdict

    from enginecore.cli.backends import backend_facts, ops_told
    from enginecore.device.discovery import discover
    from enginecore.device.probe import probe_all

    probes = probe_all(discover())
    facts = backend_facts(probes) if ops else {}
    if json:
        rows = [device_row(probe) for probe in probes]
        for row in rows:
            if row["full_name"] in facts:
                row["backend"] = asdict(facts[row["full_name"]])
        print_json({"devices": rows, **versions()})
        return
    console = output_console()
    print_devices(console, probes)
    for name, found in facts.items():
        console.print(f"\n{name} ops: {ops_told(found)}", markup=False)
        if found.problem:
            print_problem(console, name, found.problem, "enginecore doctor says more")


def versions() -> dict[str, Any]:
    """What the plugins are judged against, and the packages whose versions matter."""
    from enginecore._version import __version__
    from enginecore.device.contract import contract_version
    from enginecore.device.torch_build import torch_build

    found = {name: package_version(name) for name in PACKAGES}
    return {"enginecore": __version__, "contract": contract_version(), "torch": torch_build(), "packages": found}


def package_version(name: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return None


def device_row(probe: DeviceProbe) -> dict[str, Any]:
    """One device as plain data."""
    from enginecore.cli.conformance_results import last_result

    plugin, result = probe.plugin, probe.result
    manifest = plugin.manifest
    return {
        "device": probe.device,
        "full_name": probe.full_name,
        "distribution": plugin.distribution,
        "version": plugin.version,
        "contract": manifest.contract if manifest else None,
        "summary": manifest.summary if manifest else "",
        "accelerator": manifest.accelerator if manifest else None,
        "auto": manifest.auto if manifest else None,
        "status": result.status.value,
        "cause": result.cause.value,
        "reason": result.reason,
        "fix": result.fix,
        "conflicts": list(plugin.conflicts),
        "conformance": last_result(probe.full_name),
        "details": result.details,
    }


def print_devices(console: Console, probes: list[DeviceProbe]) -> None:
    """A table, and under it, unclipped, each problem with its fix."""
    from rich.table import Table
    from rich.text import Text

    if not probes:
        console.print("No device plugin is installed. Install one, such as: pip install enginecore-cpu", markup=False)
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("DEVICE", "DISTRIBUTION", "VERSION", "CONTRACT", "STATE", "REASON"):
        table.add_column(heading, overflow="fold", no_wrap=heading in ("DEVICE", "STATE", "VERSION"))
    for probe in probes:
        row = device_row(probe)
        state = Text(row["status"], style=_COLOURS[row["status"]])
        names = [row["device"], row["distribution"], row["version"], row["contract"] or "?"]
        table.add_row(*map(Text, names), state, Text(row["reason"]))
    console.print(table)
    for probe in probes:
        result = probe.result
        if result.fix and result.status.value != "available":
            print_problem(console, probe.full_name, "", result.fix)
        elif result.fix:
            print_problem(console, probe.full_name, "works, and could do better", result.fix)
        if trace := result.details.get("traceback"):
            console.print(Text(str(trace), style="dim"))
    for conflict in dict.fromkeys(conflict for probe in probes for conflict in probe.plugin.conflicts):
        print_problem(console, "conflict", conflict, "type full names (DIST:DEVICE), or uninstall one of them")


def print_problem(console: Console, name: str, detail: str, fix: str) -> None:
    from rich.text import Text

    console.print(Text(f"\n{name}{': ' if detail else ''}{detail}"))
    console.print(Text(f"  fix: {fix}", style="yellow"))


def output_console() -> Console:
    """Standard output; wide where it is not a terminal, so that a pipe or a log gets whole lines."""
    import sys

    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 200, highlight=False)


def print_json(value: dict[str, Any]) -> None:
    import json as codec

    typer.echo(codec.dumps(value, indent=2, default=str))
