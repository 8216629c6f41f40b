"""`enginecore doctor`: why it will not run here, and what to type. Exit code 0 only when some device can serve."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from enginecore.cli.backends import BackendFacts
    from enginecore.device.discovery import InstalledPlugin
    from enginecore.device.manifest import DoctorFinding
    from enginecore.device.probe import DeviceProbe


def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on standard output.")] = False,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="DEVICE",
            help="Look at this device alone, named as for serve; exits with the code that serve would exit with.",
        ),
    ] = None,
) -> int:
    """Check this machine, torch and every plugin; say what is wrong and what to type. Exits 0 if one can serve.

    Makes the backend of each usable device, in a process of its own: which ops it has, what memory it sees.
    """
    from enginecore.cli.backends import backend_facts, backend_findings
    from enginecore.cli.devices import print_json
    from enginecore.cli.machine import machine_checks
    from enginecore.device.discovery import discover
    from enginecore.device.probe import probe_all

    plugins = discover() if device is None else plugins_of(device, discover())
    probes = probe_all(plugins)
    findings = [*machine_checks(), torch_check(probes), packages_check()]
    facts = backend_facts(probes)
    own = plugin_checks(probes)
    for probe in probes:
        if probe.full_name in facts:
            own.setdefault(probe.full_name, []).extend(backend_findings(probe, facts[probe.full_name]))
    serving = [p.full_name for p in probes if can_serve(p, named=device is not None) and not facts[p.full_name].problem]
    verdict = serving_check(serving)
    if json:
        print_json(_as_data(probes, findings, own, verdict, facts, serving))
    else:
        _print_report(probes, findings, own, verdict)
    if serving:
        return 0
    return 1 if device is None else _exit_code(device, plugins)


def plugins_of(spec: str, installed: list[InstalledPlugin]) -> list[InstalledPlugin]:
    """The installed plugins that `spec` may mean, each narrowed to that device. ParameterError when there is none."""
    from dataclasses import replace

    from packaging.utils import canonicalize_name

    from enginecore.device.select import parse_spec
    from enginecore.errors import ParameterError

    distribution, name, _ = parse_spec(spec)
    if name == "auto":
        return installed
    found = [
        plugin
        for plugin in installed
        if name in plugin.devices and distribution in (None, canonicalize_name(plugin.distribution))
    ]
    if not found:
        reason = f"no installed plugin offers the device {spec!r}"
        raise ParameterError(reason, param="device", fix="enginecore devices lists what is installed")
    return [
        plugin if plugin.manifest is None else replace(plugin, manifest=replace(plugin.manifest, devices=(name,)))
        for plugin in found
    ]


def _exit_code(spec: str, plugins: list[InstalledPlugin]) -> int:
    """The code of the error that `--device SPEC` leads to."""
    from enginecore.device.select import select_device
    from enginecore.errors import BrokenPluginError, EngineCoreError, UnsupportedError

    try:
        selected = select_device(spec, plugins=plugins)
    except EngineCoreError as error:
        return error.exit_code
    serves = selected.probe is None or selected.probe.details.get("serves", True)
    return BrokenPluginError.exit_code if serves else UnsupportedError.exit_code


def _as_data(
    probes: list[DeviceProbe],
    findings: list[DoctorFinding],
    own: dict[str, list[DoctorFinding]],
    verdict: DoctorFinding,
    facts: dict[str, BackendFacts],
    serving: list[str],
) -> dict[str, Any]:
    from dataclasses import asdict

    from enginecore.cli.devices import device_row, versions

    rows = []
    for probe in probes:
        found = facts.get(probe.full_name)
        checks = [asdict(finding) for finding in own.get(probe.full_name, [])]
        rows.append({**device_row(probe), "backend": asdict(found) if found else None, "checks": checks})
    checks = [asdict(finding) for finding in (*findings, verdict)]
    return {**versions(), "checks": checks, "devices": rows, "can_serve": serving}


def can_serve(probe: DeviceProbe, *, named: bool = False) -> bool:
    """An available device whose plugin has kernels in this version; a simulation serves nobody who did not name it."""
    manifest = probe.plugin.manifest
    usable = probe.result.status.value == "available" and probe.result.details.get("serves", True)
    return bool(manifest and (manifest.auto or named) and usable)


def packages_check() -> DoctorFinding:
    from enginecore.cli.devices import versions
    from enginecore.device.manifest import DoctorFinding

    found = versions()
    missing = [name for name, version in found["packages"].items() if version is None]
    packages = {"enginecore": found["enginecore"], "plugin contract": found["contract"], **found["packages"]}
    detail = ", ".join(f"{name} {version or 'not installed'}" for name, version in packages.items())
    fix = f"pip install {' '.join(missing)}" if missing else ""
    return DoctorFinding(name="versions", ok=not missing, detail=detail, fix=fix)


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
