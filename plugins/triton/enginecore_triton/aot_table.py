"""The outcomes of an ahead-of-time run as Markdown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from enginecore_triton.targets import TARGETS

if TYPE_CHECKING:
    from enginecore_triton.aot import Outcome

_HEAD = """# Kernels, compiled ahead of time

Written by `python -m enginecore_triton.aot --write docs/kernels.md` (`make kernels`) on a machine without a GPU.
Each cell: registers of a thread / KiB of shared memory of one program. "!" marks a kernel that does not compile, spills
or does not fit; a run with one fails. That a kernel compiles says nothing about its results or its speed: what has run
on hardware is in the [support table](support.md).

"""


def table(outcomes: list[Outcome]) -> str:
    """One row a case, one column an architecture."""
    columns = [name for name in TARGETS if any(o.target == name for o in outcomes)]
    cells: dict[tuple[str, str], dict[str, Outcome]] = {}
    for o in outcomes:
        cells.setdefault((o.op, o.case), {})[o.target] = o
    lines = ["| op | case | " + " | ".join(columns) + " |", "|---|---|" + "---|" * len(columns)]
    for (op, case), row in cells.items():
        lines.append(f"| {op} | {case} | " + " | ".join(_cell(row.get(name)) for name in columns) + " |")
    return "\n".join(lines)


def page(outcomes: list[Outcome]) -> str:
    return _HEAD + table(outcomes) + "\n"


def _cell(outcome: Outcome | None) -> str:
    if outcome is None:
        return ""
    mark = " !" if outcome.problem else ""
    return f"{outcome.registers} / {outcome.shared / 1024:.3g}{mark}"
