"""A simulation over time as a picture. matplotlib is optional: nothing else in enginecore needs it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from enginecore.errors import ParameterError

if TYPE_CHECKING:
    from enginecore.cli.bench_simulate import Timeline

KINDS = (".svg", ".png")


def require_matplotlib(target: Path, *, kinds: tuple[str, ...] = KINDS, param: str = "plot") -> Any:
    """matplotlib's module of figures. ParameterError when it is not installed or `target` is none of `kinds`, which is
    better known before a run than after it. `param` is the option that named the target."""
    if target.suffix not in kinds:
        raise ParameterError(f"{param} must end in {' or '.join(kinds)}, got {str(target)!r}", param=param)
    if not target.parent.is_dir():
        raise ParameterError(f"{param}: there is no folder {target.parent}", param=param)
    try:
        from matplotlib import figure
    except ImportError as error:
        raise ParameterError(
            f"{param} needs matplotlib, which is not installed", param=param, fix="pip install 'enginecore[plot]'"
        ) from error
    return figure


def draw_timeline(timeline: Timeline, target: Path, *, title: str) -> None:
    """Requests waiting, requests running and the share of KV blocks in use, one below the other."""
    picture = require_matplotlib(target).Figure(figsize=(8, 6), layout="constrained")
    columns = timeline.columns(2000)
    rows = (("waiting", "waiting"), ("running", "running"), ("kv_usage", "KV blocks in use"))
    axes = picture.subplots(len(rows), 1, sharex=True)
    for axis, (name, label) in zip(axes, rows, strict=True):
        axis.step(columns["at_s"], columns[name], where="post", linewidth=1)
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[0].set_title(title)
    axes[-1].set_xlabel("seconds, virtual")
    picture.savefig(target, dpi=120)
