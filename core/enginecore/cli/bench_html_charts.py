"""Which pictures a report gets: what people would look at rather than read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from enginecore.cli.bench_charts import distributions, draw_lines, lines, ratio_bars, style
from enginecore.cli.bench_compare import FIGURES, RATES, value_of

Samples = Sequence[tuple[str, Mapping[str, Sequence[float]]]]
Panel = tuple[str, str, dict[str, list[tuple[float, float]]]]
#: Lines of a sweep that still can be told apart.
MAX_LINES = 7


def charts_of(report: dict[str, Any], samples: Samples) -> list[tuple[str, str]]:
    """Titles and SVGs."""
    charts = []
    if report.get("ratios"):
        charts.append(("Ratios", ratio_bars(report["ratios"], FIGURES, list(RATES))))
    if report.get("points"):
        charts.append((f"Over {report['sweep']}", lines(_sweep_panels(report), _label(report["sweep"]))))
    charts += [(f"Over {label}", lines(panels, label)) for label, panels in growth_panels(report)]
    if report.get("progress"):
        charts.append(("Over time", lines(_progress_panels(report["progress"]), "seconds")))
    shown = [(name, one) for name, one in samples if any(one.values())][:MAX_LINES]
    if shown:
        charts.append(("Distributions", distributions(dict(shown), _limits(report))))
    return charts


def draw_growth(report: Mapping[str, Any], target: Path) -> None:
    """The growth curves of a latency report as a picture, .svg or .png."""
    from matplotlib.figure import Figure

    groups = growth_panels(report)
    with style():
        picture = Figure(figsize=(3.3 * len(groups[0][1]), 3.0 * len(groups)), layout="constrained")
        rows = picture.subfigures(len(groups), 1, squeeze=False)[:, 0]
        for row, (label, panels) in zip(rows, groups, strict=True):
            draw_lines(row, panels, label)
        picture.savefig(target, dpi=120)


def _label(sweep: str) -> str:
    return "requests in flight" if sweep == "concurrency" else "requests started a second"


def _sweep_panels(report: dict[str, Any]) -> list[Panel]:
    points, sweep = report["points"], report["sweep"]

    def line(key: str) -> list[tuple[float, float]]:
        pairs = [(point[sweep], value_of(point, key)) for point in points]
        return sorted((x, y) for x, y in pairs if y is not None)

    panels: list[Panel] = [("Throughput", "output tokens/s", {"": line("output_tok_per_s")})]
    for key, title in (("ttft_ms", "Time to first token"), ("tpot_ms", "Time per output token")):
        panels.append((title, "ms", {which: line(f"{key}.{which}") for which in ("p50", "p90", "p99")}))
    if "goodput" in points[0]:
        panels.append(("Goodput", "requests/s within objectives", {"good": line("goodput.requests_per_s"),
                                                                   "all": line("requests_per_s")}))  # fmt: skip
    return [(title, unit, kept) for title, unit, series in panels if (kept := {k: v for k, v in series.items() if v})]


def growth_panels(report: Mapping[str, Any]) -> list[tuple[str, list[Panel]]]:
    """Panels over batch size and over context, with a line for each number of threads, and over threads, with a line
    for the smallest and for the largest batch. Each group has the name of its x."""
    rows = report.get("curves") or [{"batch": int(size), **one} for size, one in (report.get("batch") or {}).items()]
    if not rows:
        return []
    first = {key: rows[0].get(key) for key in ("context", "batch")}
    groups = []
    for axis, fixed, label in (
        ("batch", "context", "sequences in the batch"),
        ("context", "batch", "tokens of context"),
    ):
        kept = [row for row in rows if row.get(fixed) == first[fixed] and row.get(axis) is not None]
        if len({row[axis] for row in kept}) > 1 or (axis == "batch" and len(rows) == len(kept)):
            groups.append((label, _growth(kept, axis, _named_threads)))
    counts = {row.get("threads") for row in rows}
    if len(counts) > 1:
        kept = [row for row in rows if row.get("context") == first["context"]]
        sizes = sorted({row["batch"] for row in kept})
        ends = [row for row in kept if row["batch"] in (sizes[0], sizes[-1])]
        groups.append(("threads", _growth(ends, "threads", lambda row: f"batch {row['batch']}")))
    return groups


def _named_threads(row: Mapping[str, Any]) -> str:
    count = row.get("threads")
    return f"{count} thread{'s' if count > 1 else ''}" if count else ""


def _growth(rows: Sequence[Mapping[str, Any]], axis: str, name_of: Callable[[Mapping[str, Any]], str]) -> list[Panel]:
    panels: list[Panel] = []
    for key, title, unit, scale in (
        ("output_tok_per_s", "Throughput", "output tokens/s", 1.0),
        ("decode_step_ms", "Decode step", "ms", 1.0),
        ("prefill_s", "Prefill of the batch", "ms", 1000.0),
    ):
        series: dict[str, list[tuple[float, float]]] = {}
        for row in rows:
            if row.get(key) is not None:
                series.setdefault(name_of(row), []).append((float(row[axis]), row[key] * scale))
        if series:
            panels.append((title, unit, {name: sorted(points) for name, points in series.items()}))
    return panels


def _progress_panels(progress: Mapping[str, Sequence[float]]) -> list[Panel]:
    at = progress["at_s"]
    kinds = (("output_tok_per_s", "Speed", "output tokens/s"), ("running", "Running", "requests"))
    return [(title, unit, {"": list(zip(at, progress[key], strict=True))}) for key, title, unit in kinds]


def _limits(report: dict[str, Any]) -> dict[str, float]:
    """Objectives, wherever a report has its goodput."""
    places = [report, *(report.get("points") or []), *(report.get("servers") or {}).values()]
    goodput: dict[str, Any] = next((place["goodput"] for place in places if "goodput" in place), {})
    return {name: goodput[key] for name, key in (("ttft_ms", "ttft_slo_ms"), ("tpot_ms", "tpot_slo_ms"))
            if goodput.get(key) is not None}  # fmt: skip
