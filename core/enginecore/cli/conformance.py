"""`enginecore conformance`: run the kit on a device and say what passed, level by level."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from enginecore.errors import BrokenPluginError, ParameterError

if TYPE_CHECKING:
    from enginecore.testing.case import CaseResult
    from enginecore.testing.report import Report

#: Lines of a failure's message in the table's footer; the JSON holds all of it.
MESSAGE_LINES = 6


def conformance(
    device: Annotated[
        str,
        typer.Option(
            help="A device of an installed plugin, as for serve, or 'module:function' or 'file.py:function' that "
            "returns a Backend which is not packaged yet."
        ),
    ] = "auto",
    json: Annotated[
        bool, typer.Option("--json", help="Print the report as JSON, and nothing else, on standard output.")
    ] = False,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the JSON report to FILE too.")] = None,
    junit: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the results to FILE as JUnit's XML, for CI systems.")
    ] = None,
    level: Annotated[
        str | None,
        typer.Option(
            metavar="0-6",
            help="Levels to run, such as 1, 0-2 or 0,5: 0 contract, 1 ops, 2 memory, 3 graphs, 4 collectives, "
            "5 models, 6 performance. Default: all.",
        ),
    ] = None,
    only: Annotated[
        str | None,
        typer.Option(
            metavar="PATTERN", help="Cases whose id matches, such as 'L1/attention/*alibi*' or 'gqa'; comma for or."
        ),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODEL", help="At level 5, also compare this real model with transformers; may be repeated."
        ),
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Time limit of every case, in place of its own.")
    ] = None,
    list_cases: Annotated[
        bool, typer.Option("--list", help="List the ids of the chosen cases and run nothing.")
    ] = False,
    support: Annotated[
        bool, typer.Option("--support", help="Print what the backend says it can do, op by dtype, and run nothing.")
    ] = False,
) -> int:
    """Check a device plugin against the contract: every claim is tried, each op is compared with a float64 reference.

    Exit code 0 when every case passes or is declared unsupported, 1 otherwise, 2 when nothing matches.
    """
    from enginecore.cli.conformance_results import remember
    from enginecore.testing.cases import LEVELS, all_cases, select
    from enginecore.testing.runner import run

    if support:
        return _show_support(device, json)
    try:
        chosen = select(all_cases(), level, only)
    except ValueError as error:
        raise ParameterError(str(error), param="level") from None
    if not chosen:
        raise ParameterError(f"no case matches level {level!r} and pattern {only!r}", fix="--list shows all ids")
    if list_cases:
        print("\n".join(case.id for case in chosen))
        return 0
    progress = None if json else _Progress(len(chosen))
    report = run(device, level=level, only=only, timeout=timeout, options={"models": model or []}, on_result=progress)
    if progress is not None:
        progress.done()
    if out is not None:
        out.write_text(report.to_json())
    if junit is not None:
        junit.write_text(report.to_junit(), encoding="utf-8")
    if only is None:
        remember(report, level or f"{min(LEVELS)}-{max(LEVELS)}")
    if json:
        print(report.to_json())
    else:
        _print_report(report)
    return 0 if report.ok else 1


def _show_support(device: str, as_json: bool) -> int:
    """Make the backend in a process of its own and print what it answers."""
    import json as codec

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from enginecore.testing.runner import Runner

    with Runner(device) as runner:
        about = runner.describe()
    found = about["support"]
    if as_json:
        print(codec.dumps({"target": runner.source.label, **about}, indent=1))
        return 0
    console = Console(width=None if sys.stdout.isatty() else 120)
    if found["runtime"]:
        console.print("The backend runs whole models through its runtime; it has no ops of its own.")
        return 0
    if "error" in found:
        raise BrokenPluginError(f"{runner.source.label} cannot say what it supports: {found['error']}")
    for title in ("ops", "attention"):
        dtypes = list(next(iter(found[title].values())))
        table = Table(box=None, pad_edge=False, header_style="dim")
        for heading in (title, *dtypes):
            table.add_column(heading)
        for name, cells in found[title].items():
            states = [cells[dtype]["state"] for dtype in dtypes]
            table.add_row(Text(name), *(Text(state, style=_STATES[state]) for state in states))
        console.print(table)
        console.print()
    return 0


#: Colours of the states in `enginecore.testing.support`.
_STATES = {"native": "green", "reference": "yellow", "refused": "yellow", "unsupported": "dim"}


class _Progress:
    """One line on a terminal, rewritten as cases end; silent elsewhere."""

    def __init__(self, total: int) -> None:
        self._total, self._count = total, 0
        self._shown = sys.stderr.isatty()

    def __call__(self, result: CaseResult) -> None:
        self._count += 1
        if self._shown:
            print(f"\r\x1b[K{self._count}/{self._total} {result.case_id}", end="", file=sys.stderr, flush=True)

    def done(self) -> None:
        if self._shown:
            print("\r\x1b[K", end="", file=sys.stderr)


def _print_report(report: Report) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from enginecore.testing.case import Outcome
    from enginecore.testing.cases import LEVELS

    console = Console(width=None if sys.stdout.isatty() else 120)
    about = report.about
    name = f"{about['distribution']} {about['version']}" if "distribution" in about else ""
    console.print(f"[bold]{escape(report.target)}[/bold] {escape(name)}", highlight=False)
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("level")
    table.add_column("op")
    for outcome in Outcome:
        table.add_column("unsupported" if outcome is Outcome.DECLARED_UNSUPPORTED else outcome.value, justify="right")
    shown = ""
    for (level, op), counts in report.by_group().items():
        title = f"{level} {LEVELS[int(level[1:])]}" if level != shown else ""
        shown = level
        cells = [_cell(outcome, counts[outcome]) for outcome in Outcome]
        table.add_row(title, op, *cells)
    console.print(table)
    if measured := [result for result in report.results if result.metrics]:
        console.print(_measurements(measured))
    for line in _failures(report):
        console.print(line, highlight=False)
    counts = report.counts()
    verdict = "[green]conforms[/green]" if report.ok else "[red]does not conform[/red]"
    told = ", ".join(f"{counts[outcome]} {outcome.value}" for outcome in Outcome if counts[outcome])
    console.print(f"{verdict}: {told} in {report.seconds:.1f} s", highlight=False)


def _measurements(results: list[CaseResult]) -> Any:
    """Level 6: what was reached, and what share that is of the device's own copy or product."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("measured", "GB/s", "GFLOP/s", "share"):
        table.add_column(heading, justify="left" if heading == "measured" else "right")
    for result in results:
        values = [result.metrics.get(name) for name in ("gb_s", "gflop_s", "share")]
        shown = ["" if value is None else f"{value:.{2 if i == 2 else 1}f}" for i, value in enumerate(values)]
        table.add_row(Text(result.case_id), *shown)
    return table


def _cell(outcome: Any, count: int) -> str:
    if not count:
        return "[dim]·[/dim]"
    return f"{count}" if outcome.ok else f"[red]{count}[/red]"


def _failures(report: Report) -> list[str]:
    """A paragraph for each failure; cases that failed for the same reason share one."""
    from rich.markup import escape

    alike: dict[tuple[str, str], list[str]] = {}
    for result in report.failures():
        alike.setdefault((result.outcome.value, result.message), []).append(result.case_id)
    lines = []
    for (outcome, text), case_ids in alike.items():
        more = f" and {len(case_ids) - 1} more" if len(case_ids) > 1 else ""
        message = text.splitlines()[:MESSAGE_LINES] or [""]
        lines.append(f"[red]{outcome}[/red] [bold]{escape(case_ids[0])}[/bold]{more}: {escape(message[0])}")
        lines += [f"    {escape(line)}" for line in message[1:]]
    return lines
