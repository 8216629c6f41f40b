"""`enginecore doctor`: why it will not run here, and what to type. Exit code 0 only when some device can serve."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from enginecore.device.manifest import DoctorFinding
    from enginecore.device.probe import DeviceProbe


def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on standard output.")] = False,
) -> None:
    """Check this machine, torch and every plugin; say what is wrong and what to type. Exits 0 if one can serve."""
    from dataclasses import asdict

    from enginecore.cli.devices import device_row, print_json, versions
    from enginecore.cli.machine import machine_checks
    from enginecore.device.discovery import discover
    from enginecore.device.probe import probe_all

    probes = probe_all(discover())
    findings = [*machine_checks(), torch_check(probes)]
    own = plugin_checks(probes)
    serving = [probe.full_name for probe in probes if can_serve(probe)]
    verdict = serving_check(serving)
    if json:
        report = {
            **versions(),
            "checks": [asdict(finding) for finding in (*findings, verdict)],
            "devices": [
                {**device_row(probe), "checks": [asdict(finding) for finding in own.get(probe.full_name, [])]}
                for probe in probes
            ],
            "can_serve": serving,
        }
        print_json(report)
    else:
        _print_report(probes, findings, own, verdict)
    raise typer.Exit(0 if serving else 1)


def can_serve(probe: DeviceProbe) -> bool:
    """An available device whose plugin has kernels in this version; a simulation serves nobody."""
    manifest = probe.plugin.manifest
    usable = probe.result.status.value == "available" and probe.result.details.get("serves", True)
    return bool(manifest and manifest.auto and usable)


def serving_check(serving: list[str]) -> DoctorFinding:
    from enginecore.device.manifest import DoctorFinding

    return DoctorFinding(
        name="can serve",
        ok=bool(serving),
        detail=", ".join(serving) or "no device can serve a model here",
        fix="" if serving else "see the problems above, or pip install enginecore-cpu",
    )


def torch_check(probes: list[DeviceProbe]) -> DoctorFinding:
    """The installed build, from package metadata, and which plugins ask for another one."""
    from enginecore.device.manifest import DoctorFinding, ProbeCause
    from enginecore.device.torch_build import torch_build

    build = torch_build()
    if build is None:
        return DoctorFinding(name="torch", ok=False, detail="not installed", fix="pip install torch")
    wrong = [probe for probe in probes if probe.result.cause is ProbeCause.WRONG_TORCH]
    if wrong:
        names = ", ".join(probe.full_name for probe in wrong)
        return DoctorFinding(name="torch", ok=False, detail=f"{build}; wrong for {names}", fix=wrong[0].result.fix)
    return DoctorFinding(name="torch", ok=True, detail=build)


def plugin_checks(probes: list[DeviceProbe]) -> dict[str, list[DoctorFinding]]:
    """What the plugins' own doctor hooks find, by full device name; plugins that cannot be loaded are left out."""
    from concurrent.futures import ThreadPoolExecutor

    from enginecore.device.probe import run_doctor

    asked = [probe for probe in probes if probe.plugin.fault is None]
    with ThreadPoolExecutor(max_workers=4) as pool:
        found = pool.map(lambda probe: run_doctor(probe.plugin, probe.device), asked)
        return {probe.full_name: findings for probe, findings in zip(asked, found, strict=True)}


def _print_report(
    probes: list[DeviceProbe],
    findings: list[DoctorFinding],
    own: dict[str, list[DoctorFinding]],
    verdict: DoctorFinding,
) -> None:
    from rich.text import Text

    from enginecore.cli.devices import output_console, print_devices, print_problem

    console = output_console()
    sections: dict[str, list[DoctorFinding]] = {"This machine": findings, **own, "Result": [verdict]}
    console.print(Text("Devices", style="bold"))
    print_devices(console, probes)
    for title, checks in sections.items():
        if checks:
            console.print(Text(f"\n{title}", style="bold"))
            console.print(_table(checks))
    problems = [(title, finding) for title, checks in sections.items() for finding in checks if not finding.ok]
    if problems:
        console.print(Text(f"\n{len(problems)} problem{'s' if len(problems) > 1 else ''}", style="bold red"))
    for title, finding in problems:
        print_problem(console, f"{title}: {finding.name}", finding.detail, finding.fix or "none known")


def _table(checks: list[DoctorFinding]) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=False)
    for finding in checks:
        mark = Text("ok", style="green") if finding.ok else Text("problem", style="red")
        table.add_row(mark, Text(finding.name), Text(finding.detail))
    return table
