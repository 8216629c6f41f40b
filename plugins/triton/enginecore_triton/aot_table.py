"""The outcomes of an ahead-of-time run as Markdown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from enginecore_triton.configs import DEFAULT
from enginecore_triton.targets import TARGETS

if TYPE_CHECKING:
    from enginecore_triton.aot import Outcome

_HEAD = """# Kernels, compiled ahead of time

Written by `python -m enginecore_triton.aot --write docs/kernels.md` (`make kernels`) on a machine without a GPU.
Each cell: registers of a thread / KiB of shared memory of one program. "!" marks a kernel that does not compile, spills
or does not fit; a run with one fails. A case appears once more, as "(default)", where the parts with the least shared
memory are compiled with the default config. That a kernel compiles says nothing about its results or its speed: what
has run on hardware is in the [support table](support.md).

"""


def table(outcomes: list[Outcome]) -> str:
    """One row a case, one column an architecture."""
    columns = [name for name in TARGETS if any(o.target == name for o in outcomes)]
    cells: dict[tuple[str, str, bool], dict[str, Outcome]] = {}
    own = {(o.op, o.case, o.target) for o in outcomes if o.row != DEFAULT}
    for o in outcomes:
        beside = o.row == DEFAULT and (o.op, o.case, o.target) in own
        cells.setdefault((o.op, o.case, beside), {})[o.target] = o
    lines = ["| op | case | " + " | ".join(columns) + " |", "|---|---|" + "---|" * len(columns)]
    for (op, case, beside), row in cells.items():
        texts = [_cell(row.get(name)) for name in columns]
        lines.append(f"| {op} | {case}{' (default)' if beside else ''} | " + " | ".join(texts) + " |")
    return "\n".join(lines)


def page(outcomes: list[Outcome]) -> str:
    return _HEAD + table(outcomes) + "\n"


def _cell(outcome: Outcome | None) -> str:
    if outcome is None:
        return ""
    mark = " !" if outcome.problem else ""
    return f"{outcome.registers} / {outcome.shared / 1024:.3g}{mark}"
