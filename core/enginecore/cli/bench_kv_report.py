"""The report of `enginecore bench kv-policies`: ours beside what was published, and why where they differ."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from enginecore.cli.bench_kv_policies import ALL, NORMALISED_LATENCY_S, Plan, measure_policies, ratios
from enginecore.cli.bench_kv_published import PUBLISHED, WIDTHS
from enginecore.cli.bench_kv_sharing import saved
from enginecore.cli.bench_plot import require_matplotlib
from enginecore.cli.bench_traffic import PUBLISHED as MEANS
from enginecore.cli.bench_traffic import SIGMA

#: Ours agree when they lie within what was published, its ends widened by this share.
TOLERANCE = 0.1


def measure_kv_policies(plan: Plan, num_requests: int, tell: Callable[[str], None]) -> dict[str, Any]:
    """The whole report as plain data. `num_requests` are those of the runs about sharing."""
    policies = measure_policies(plan, tell)
    sharing: dict[str, dict[str, dict[str, float]]] = {}
    for lengths in plan.lengths:
        sharing[lengths] = {
            kind: {
                str(width): saved(lengths, width, beams=kind == "beams", num_requests=num_requests, seed=plan.seed)
                for width in WIDTHS
            }
            for kind in ("samples", "beams")
        }
        tell(f"{lengths}: sharing is measured")
    means = ", ".join(f"{name} {MEANS[name][0]:.0f} in and {MEANS[name][1]:.0f} out" for name in plan.lengths)
    return {
        "benchmark": "kv-policies",
        "model": "opt-13b on one a100-40g, simulated",
        "lengths": f"log-normal, mean tokens {means}; sigma of the logarithm {SIGMA:g}; cut to 2,048 together",
        "arrivals": "Poisson",
        "virtual_seconds": plan.seconds,
        "normalised_latency_s": NORMALISED_LATENCY_S,
        "policies": policies,
        "sharing": sharing,
        "rows": [row for lengths in plan.lengths for row in _rows(lengths, policies[lengths], sharing[lengths])],
    }


def _rows(lengths: str, figures: dict[str, Any], sharing: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    """What can be compared: ours as a value or a range, the published one, and why where they differ."""
    batched, rate = ratios(figures, "mean_running"), ratios(figures, "sustained_rate")
    policies = figures["policies"]
    ours: dict[str, list[float]] = {
        **{f"batched_to_{name}": [value] for name, value in batched.items()},
        **{f"rate_to_{name}": [value] for name, value in rate.items()},
        **{f"used_by_{name}": [100 * policies[name]["token_states"]] for name in ALL},
        "waste_of_paged": [100 * policies["paged"]["waste_of_held"]],
        "saved_by_sampling": [100 * value for value in sharing["samples"].values()],
        "saved_by_beams": [100 * value for value in sharing["beams"].values()],
    }
    rows = []
    for key, published in PUBLISHED[lengths].items():
        low, high = min(ours[key]), max(ours[key])
        within = (1 - TOLERANCE) * published.low <= low and high <= (1 + TOLERANCE) * published.high
        rows.append(
            {
                "lengths": lengths, "what": published.what, "unit": published.unit, "ours": [low, high],
                "published": [published.low, published.high], "place": published.place, "within": within,
                "why": None if within else published.why,
            }
        )  # fmt: skip
    return rows


def table_of(report: dict[str, Any]) -> list[str]:
    """The report for people."""
    lines = [
        f"{report['model']}; lengths {report['lengths']}",
        f"requests/s: sustained at {NORMALISED_LATENCY_S} s of latency a token; the other columns at one rate for all",
    ]
    for lengths, figures in report["policies"].items():
        lines += ["", f"{lengths}: all policies at {figures['same_rate']:.2f} requests/s; shares of all KV slots"]
        heads = ("requests/s", "batched", "tokens", "reserved", "internal", "external")
        lines.append(f"  {'policy':<8}" + "".join(f"{head:>11}" for head in heads))
        for policy, row in figures["policies"].items():
            keys = ("token_states", "reserved", "internal_waste", "external_waste")
            shares = "".join(f"{100 * row[key]:>10.1f}%" for key in keys)
            lines.append(f"  {policy:<8}{row['sustained_rate']:>11.2f}{row['mean_running']:>11.2f}{shares}")
        sharing = report["sharing"][lengths]
        for kind, values in sharing.items():
            told = ", ".join(f"{width}: {100 * value:.1f}%" for width, value in values.items())
            lines.append(f"  saved by sharing, {kind} {told}")
    lines += ["", f"{'':<10}{'':<36}{'ours':>16}{'published':>16}"]
    notes: dict[str, int] = {}
    for row in report["rows"]:
        mark = "" if row["within"] else f"  [{notes.setdefault(row['why'], len(notes) + 1)}]"
        ours, published = (_range(row[key], row["unit"]) for key in ("ours", "published"))
        lines.append(f"{row['lengths']:<10}{row['what']:<36}{ours:>16}{published:>16}  {row['place']}{mark}")
    lines += ["", *(f"[{number}] {why}" for why, number in notes.items())] if notes else []
    return lines


def _range(bounds: list[float], unit: str) -> str:
    low, high = (f"{value:.1f}" if unit == "%" else f"{value:.2f}" for value in bounds)
    return f"{low}{unit}" if low == high else f"{low} to {high}{unit}"


def draw_report(report: dict[str, Any], target: Path) -> None:
    """Rate against latency, what memory is for, and what sharing saves, for each distribution of lengths."""
    names = list(report["policies"])
    picture = require_matplotlib(target).Figure(figsize=(12, 3.8 * len(names)), layout="constrained")
    axes = picture.subplots(len(names), 3, squeeze=False)
    for row, name in zip(axes, names, strict=True):
        figures = report["policies"][name]
        _draw_curves(row[0], name, figures["curves"])
        _draw_memory(row[1], name, figures["policies"])
        _draw_sharing(row[2], name, report["sharing"][name])
    picture.suptitle(f"{report['model']}: paged KV memory and contiguous policies")
    picture.savefig(target, dpi=120)


def _draw_curves(axis: Any, name: str, curves: dict[str, list[tuple[float, float | None]]]) -> None:
    for policy in ALL:
        points = [(rate, latency) for rate, latency in curves[policy] if latency is not None]
        axis.plot([rate for rate, _ in points], [latency for _, latency in points], marker="o", label=policy)
    axis.set(xlabel="requests/s", ylabel="normalised latency, s/token", title=f"{name}: rates sustained")
    axis.set_ylim(0, 1.1 * NORMALISED_LATENCY_S)
    axis.legend()
    axis.grid(alpha=0.3)


def _draw_memory(axis: Any, name: str, policies: dict[str, dict[str, float]]) -> None:
    bottom = [0.0] * len(ALL)
    for key, label in (
        ("token_states", "holds tokens"), ("reserved", "reserved, used later"), ("internal_waste", "never used"),
        ("external_waste", "held by nobody"),
    ):  # fmt: skip
        heights = [100 * policies[policy][key] for policy in ALL]
        axis.bar(ALL, heights, bottom=bottom, label=label)
        bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
    batched = [f"{policy}\n{policies[policy]['mean_running']:.1f}" for policy in ALL]
    axis.set_xticks(range(len(ALL)), batched)
    axis.set(ylabel="% of KV slots", title=f"{name}: memory, and requests batched")
    axis.legend(fontsize="x-small")


def _draw_sharing(axis: Any, name: str, sharing: dict[str, dict[str, float]]) -> None:
    places = range(len(WIDTHS))
    for shift, (kind, values) in zip((-0.2, 0.2), sharing.items(), strict=True):
        heights = [100 * value for value in values.values()]
        axis.bar([place + shift for place in places], heights, width=0.4, label=kind)
        published = PUBLISHED[name][f"saved_by_{'sampling' if kind == 'samples' else 'beams'}"]
        axis.hlines([published.low, published.high], -0.5, len(WIDTHS) - 0.5, linestyles=":", colors="gray")
    axis.set_xticks(list(places), [str(width) for width in WIDTHS])
    axis.set(xlabel="samples or beams", ylabel="% of blocks saved", title=f"{name}: sharing (dotted: published)")
    axis.legend()
