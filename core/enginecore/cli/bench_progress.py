"""Progress of a measurement, for people who wait for it: on a terminal's standard error, and nowhere else."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

#: Called with the name of a part and how many steps it has; gives the function to call after each step.
Begin = Callable[[str, int], Callable[[], object]]


def silent(_name: str, _total: int) -> Callable[[], object]:
    """A `Begin` that shows nothing."""
    return lambda: None


@contextmanager
def progress_bars() -> Iterator[Begin]:
    """Bars, one a part that has begun, that go away at the end."""
    if not sys.stderr.isatty():
        yield silent
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:

        def begin(name: str, total: int) -> Callable[[], object]:
            for task in bars.tasks:
                if task.finished:
                    bars.remove_task(task.id)
            current = bars.add_task(name, total=total)
            return lambda: bars.advance(current)

        yield begin
