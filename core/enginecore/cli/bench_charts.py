"""Pictures of measurements, each a function from figures to the text of an SVG. Needs matplotlib."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

#: Okabe and Ito's colours ("Color Universal Design", 2008), which most colour-blind people can tell apart: ours first.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#666666")
BETTER, WORSE, GREY = COLOURS[0], COLOURS[1], "#777777"
TITLES = {
    "ttft_ms": "Time to first token",
    "tpot_ms": "Time per output token",
    "itl_ms": "Gap between chunks",
    "e2e_ms": "Whole answer",
}
#: A distribution whose 99th percentile is so many times its 1st is drawn over a logarithmic axis.
WIDE = 20.0
#: Chunks that were read together have gaps of next to nothing, which would stretch such an axis.
SHORTEST_MS = 0.1
#: More points than this look the same on paper.
MAX_POINTS = 400
_STYLE = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "svg.fonttype": "path",
}


def svg(width: float, height: float, draw: Callable[[Any], None]) -> str:
    """What `draw` puts on a matplotlib Figure of this size in inches, as an `<svg>` element to stand in a page."""
    from matplotlib.figure import Figure

    with style():
        picture = Figure(figsize=(width, height), layout="constrained")
        draw(picture)
        target = io.StringIO()
        picture.savefig(target, format="svg", metadata={"Date": None})
    text = target.getvalue()
    text = re.sub(r'<g id="[^"]*"', "<g", text[text.index("<svg") :])  # an id may stand only once in a page
    return re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL).replace("<svg", '<svg role="img"', 1)


def style() -> AbstractContextManager[Any]:
    """The look of all pictures, for as long as the block lasts."""
    from matplotlib import rc_context

    return rc_context(_STYLE)  # type: ignore[arg-type]


def distributions(samples: Mapping[str, Mapping[str, Sequence[float]]], limits: Mapping[str, float]) -> str:
    """For each kind of time the share of requests (or gaps) that took at most so long, a line for each name in
    `samples`; `limits` are objectives in milliseconds by kind."""
    from matplotlib.ticker import LogLocator, NullFormatter

    kinds = [kind for kind in TITLES if any(one.get(kind) for one in samples.values())]

    def draw(picture: Any) -> None:
        axes = picture.subplots(1, len(kinds), sharey=True, squeeze=False)[0]
        for axis, kind in zip(axes, kinds, strict=True):
            for (name, one), colour in zip(samples.items(), _colours(len(samples)), strict=True):
                xs, ys = _cumulative(one.get(kind) or [])
                axis.step(xs, ys, where="post", color=colour, label=name, linewidth=1.5)
            values = sorted(value for one in samples.values() for value in one.get(kind) or [])
            edge = len(values) // 100
            low = max(values[edge], SHORTEST_MS)
            if values[-1 - edge] > WIDE * low:
                axis.set_xscale("log")
                axis.set_xlim(left=0.9 * low)
                axis.xaxis.set_major_locator(LogLocator(subs=(1.0, 3.0), numticks=6))
                axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
                axis.xaxis.set_minor_formatter(NullFormatter())
            else:
                axis.set_xlim(left=0)
            if kind in limits:
                axis.axvline(limits[kind], color=GREY, linestyle="--", linewidth=1)
                axis.annotate("objective", (limits[kind], 0.02), rotation=90, color=GREY, ha="right", fontsize=7)
            axis.set_title(TITLES[kind])
            axis.set_xlabel("ms")
            axis.set_ylim(0, 1.01)
        axes[0].set_ylabel("share that took at most so long")
        axes[0].yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        if len(samples) > 1:
            picture.legend(*axes[0].get_legend_handles_labels(), loc="outside upper left", ncols=min(6, len(samples)))

    return svg(2.6 * len(kinds), 3.0, draw)


def _cumulative(values: Sequence[float]) -> tuple[list[float], list[float]]:
    ordered, count = sorted(values), len(values)
    ranks = (
        range(count) if count <= MAX_POINTS else [round(i * (count - 1) / MAX_POINTS) for i in range(MAX_POINTS + 1)]
    )
    return [ordered[rank] for rank in ranks], [(rank + 1) / count for rank in ranks]


def _colours(count: int) -> list[str]:
    return [COLOURS[at % len(COLOURS)] for at in range(count)]


def ratio_bars(ratios: Mapping[str, Mapping[str, Any]], names: Mapping[str, str], rates: Sequence[str]) -> str:
    """For each other server how many times better (to the right) or worse ours is; times count as theirs / ours. Thin
    lines go from the least to the most of all rounds."""
    rows = [key for key in names if any(one.get(key) for one in ratios.values())]

    def draw(picture: Any) -> None:
        axes = picture.subplots(1, len(ratios), sharey=True, squeeze=False)[0]
        for axis, (name, one) in zip(axes, ratios.items(), strict=True):
            for at, key in enumerate(rows):
                value = one.get(key)
                if value is None:
                    continue
                turned = {k: v if key in rates else 1 / v for k, v in value.items()}
                colour = BETTER if turned["median"] >= 1 else WORSE
                axis.barh(at, turned["median"] - 1, left=1, color=colour, height=0.6)
                axis.plot(sorted((turned["min"], turned["max"])), (at, at), color="#222222", linewidth=1)
                axis.annotate(f"{turned['median']:.2f}x", (max(1.0, *turned.values()), at), (5, 0),
                              textcoords="offset points", va="center", fontsize=8)  # fmt: skip
            axis.axvline(1, color="#222222", linewidth=1)
            axis.set_xscale("log", base=2)
            axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}x")
            low, high = axis.get_xlim()
            axis.set_xlim(min(low, 0.8), max(high, 1.25) * 1.25)
            axis.set_title(f"against {name}")
            axis.grid(visible=False, axis="y")
            axis.set_xlabel("times better")
        axes[0].set_yticks(range(len(rows)), [names[key] for key in rows])
        axes[0].invert_yaxis()

    return svg(max(6.5, 3.6 * len(ratios)), 0.9 + 0.38 * len(rows), draw)


def lines(panels: Sequence[tuple[str, str, Mapping[str, Sequence[tuple[float, float]]]]], x_label: str) -> str:
    """Panels (title, unit, lines by name as points) side by side over a common kind of x."""
    return svg(3.3 * len(panels), 3.0, lambda picture: draw_lines(picture, panels, x_label))


def draw_lines(
    picture: Any, panels: Sequence[tuple[str, str, Mapping[str, Sequence[tuple[float, float]]]]], x_label: str
) -> None:
    """What `lines` shows, on a figure."""
    axes = picture.subplots(1, len(panels), squeeze=False)[0]
    for axis, (title, unit, series) in zip(axes, panels, strict=True):
        places = sorted({x for points in series.values() for x, _ in points})
        for (name, points), colour in zip(series.items(), _colours(len(series)), strict=True):
            axis.plot(*zip(*points, strict=True), color=colour, label=name, linewidth=1.5,
                      marker="o" if len(points) <= 40 else None, markersize=3.5)  # fmt: skip
        if 2 < len(places) <= 40 and places[0] > 0 and places[-1] > 8 * places[0]:
            axis.set_xscale("log", base=2)
        if len(places) <= 10:
            axis.set_xticks(places, [f"{place:g}" for place in places])
            axis.minorticks_off()
        axis.set_ylim(bottom=0)
        axis.set_title(title)
        axis.set_xlabel(x_label)
        axis.set_ylabel(unit)
        if len(series) > 1:
            axis.legend(fontsize=8)
