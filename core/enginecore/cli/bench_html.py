"""A report as one page that stands alone: pictures are inline, and nothing is fetched from anywhere."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from enginecore.cli.bench_compare import FIGURES, RATES, value_of
from enginecore.cli.bench_plot import require_matplotlib
from enginecore.cli.bench_report import machine_facts, print_report, short, versions

#: What stands in large print at the top, where a report has it.
HEADLINES = {
    "output_tok_per_s": "output tokens/s",
    "total_tok_per_s": "tokens/s in and out",
    "requests_per_s": "requests/s",
    "ttft_ms.p50": "TTFT p50, ms",
    "ttft_ms.p99": "TTFT p99, ms",
    "tpot_ms.p50": "TPOT p50, ms",
    "itl_ms.p99": "ITL p99, ms",
    "goodput.share": "within objectives",
    "peak_running": "running at most",
    "kv_waste": "KV waste",
}
#: Keys with places of their own, or too long for a table of figures.
_ELSEWHERE = frozenset(
    {"runs", "settings", "fingerprint", "servers", "ratios", "points", "batch", "curves", "progress", "notes", "errors"}
)
_STYLE = """
body{font:15px/1.45 system-ui,sans-serif;color:#1c1f23;background:#fff;max-width:1080px;margin:2em auto;padding:0 1.2em}
h1{font-size:1.5em;margin:0}h2{font-size:1.1em;margin:2em 0 .5em;border-bottom:1px solid #d8dde3;padding-bottom:.2em}
p.sub{color:#5a636d;margin:.2em 0 1.4em}.tiles{display:flex;flex-wrap:wrap;gap:.7em}
.tile{border:1px solid #d8dde3;border-radius:6px;padding:.5em .9em;min-width:6.5em}
.tile b{display:block;font-size:1.45em;font-weight:600}.tile span{color:#5a636d;font-size:.85em}
svg{max-width:100%;height:auto;display:block;margin:.4em 0}
table{border-collapse:collapse;font-size:.9em;font-variant-numeric:tabular-nums}
td,th{padding:.22em .8em;border-bottom:1px solid #e6eaee;text-align:right;vertical-align:top}
th{font-weight:600;color:#5a636d}td:first-child,th:first-child{text-align:left;padding-left:0}
table.facts td{text-align:left;overflow-wrap:anywhere}.wide{overflow-x:auto}
summary{cursor:pointer;color:#5a636d;margin:.6em 0}pre{font-size:.8em;white-space:pre-wrap;overflow-wrap:anywhere}
p.note{color:#8a4b00;margin:.2em 0}
"""


def require_html(target: Path | None) -> None:
    """Nothing when a page can be written there, else ParameterError: better known before a measurement than after."""
    if target is not None:
        require_matplotlib(target, kinds=(".html",), param="html")


def deliver(
    report: dict[str, Any],
    *,
    html: Path | None,
    as_json: bool,
    samples: Sequence[tuple[str, Mapping[str, Sequence[float]]]] = (),
    lines: Sequence[str] | None = None,
) -> None:
    """Print a report, and write its page to `html` where that is given. `samples` are the single times behind its
    percentiles, by name."""
    if html is not None:
        html.write_text(page_of(report, samples), encoding="utf-8")
    print_report(report, as_json=as_json, lines=lines)


def page_of(report: dict[str, Any], samples: Sequence[tuple[str, Mapping[str, Sequence[float]]]] = ()) -> str:
    """The page as text. Everything that comes from outside is escaped."""
    from enginecore.cli.bench_html_charts import charts_of

    machine, known = machine_facts(), versions()
    parts = [f"<h1>enginecore bench {escape(report['benchmark'])}</h1>", f'<p class="sub">{escape(_subtitle(report))}'
             f" &middot; {escape(machine['processor'])}, {machine['cores']} cores</p>"]  # fmt: skip
    parts += [f'<p class="note">{escape(text)}</p>' for text in _remarks(report)]
    parts.append(_tiles(report))
    for title, picture in charts_of(report, samples):
        parts.append(f"<h2>{escape(title)}</h2>{picture}")
    parts += _tables(report)
    parts.append("<h2>Configuration</h2>" + _facts(_flat(_configuration(report))))
    parts.append("<h2>Machine and versions</h2>" + _facts(_flat({**machine, **known})))
    command = "enginecore " + " ".join(sys.argv[1:])
    parts.append(f"<h2>To repeat it</h2><pre>{escape(command)}</pre>")
    whole = json.dumps(report, indent=1)
    parts.append(f"<details><summary>All figures as JSON</summary><pre>{escape(whole, quote=False)}</pre></details>")
    title = escape(f"{report['benchmark']}: {_subtitle(report)}")
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>\n<body>\n'
        + "\n".join(part for part in parts if part)
        + "\n</body></html>\n"
    )


def _subtitle(report: dict[str, Any]) -> str:
    configuration = report.get("settings") or {}
    serving = configuration.get("serve") or []
    model = configuration.get("model") or report.get("model") or (serving[-1] if serving else None)
    fingerprint = report.get("fingerprint") or {}
    device = (fingerprint.get("device") or {}).get("summary")
    day = time.strftime("%Y-%m-%d %H:%M %Z")
    return ", ".join(str(part) for part in (model, fingerprint.get("dtype"), device, day) if part)


def _remarks(report: dict[str, Any]) -> list[str]:
    told = [*(report.get("notes") or []), *(report.get("errors") or [])]
    for name, one in (report.get("servers") or {}).items():
        told += [f"{name}: {text}" for text in [*one["notes"], *one["errors"]]]
    for point in report.get("points") or []:
        told += point["errors"]
    return list(dict.fromkeys(told))


def _tiles(report: dict[str, Any]) -> str:
    found = [(label, _figure(key, value)) for key, label in HEADLINES.items()
             if (value := value_of(report, key)) is not None]  # fmt: skip
    for name, ratios in (report.get("ratios") or {}).items():
        found += [(f"{FIGURES[key]}, ours / {name}", f"{one['median']:.2f}x") for key, one in ratios.items() if one]
    tiles = [f'<div class="tile"><b>{escape(value)}</b><span>{escape(label)}</span></div>' for label, value in found]
    return f'<div class="tiles">{"".join(tiles)}</div>' if tiles else ""


def _figure(key: str, value: float) -> str:
    return f"{value:.1%}" if key in ("goodput.share", "kv_waste") else short(value)


def _tables(report: dict[str, Any]) -> list[str]:
    """Tables of figures: of servers, of the points of a sweep, of batches, or just of what is at the top."""
    parts = []
    if "servers" in report:
        rows = [["", *FIGURES.values()]]
        rows += [[name, *(short(value_of(one, key)) for key in FIGURES)] for name, one in report["servers"].items()]
        for name, ratios in report["ratios"].items():
            spans = [ratios.get(key) for key in FIGURES]
            rows.append([f"ours / {name}", *(f"{s['median']:.2f}x ({s['min']:.2f} to {s['max']:.2f})" if s else "-"
                                             for s in spans)])  # fmt: skip
        parts.append(_table("Figures", rows))
        parts.append(
            f"<p>Medians of {report['rounds']} rounds, in which every server took its turn with the same requests. "
            f"Ratios are of the same round: median, least and most. Above 1 is better for {', '.join(RATES.values())}, "
            "below 1 for times.</p>"
        )
    for key, named in (("points", report.get("sweep", "")), ("curves", "")):
        if report.get(key):
            parts.append(_table("Figures", _rows(report[key], named)))
    if "batch" in report:
        rows = _rows([{"batch size": size, **one} for size, one in report["batch"].items()], "batch size")
        parts.append(_table("Figures", rows))
    simple = {k: v for k, v in report.items() if k not in _ELSEWHERE and not isinstance(v, list)}
    if not parts:
        parts.append("<h2>Figures</h2>" + _facts(_flat(simple)))
    return parts


def _rows(points: Sequence[Mapping[str, Any]], first: str) -> list[list[str]]:
    flat = [_flat({k: v for k, v in point.items() if k not in _ELSEWHERE}) for point in points]
    keys = [first, *(key for key in flat[0] if key != first)] if first else list(flat[0])
    return [keys, *([one.get(key, "-") for key in keys] for one in flat)]


def _table(title: str, rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in rows[0])
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows[1:])
    return f'<h2>{escape(title)}</h2><div class="wide"><table><tr>{head}</tr>{body}</table></div>'


def _configuration(report: dict[str, Any]) -> dict[str, Any]:
    """Everything that says what was measured: settings, and the fingerprint of the server or engine."""
    named = ("url", "model", "concurrency", "rate", "sweep", "rounds", "repeat", "input_len", "output_len")
    found = {key: report[key] for key in named if report.get(key) is not None}
    for name, one in (report.get("servers") or {}).items():
        found[name] = {"url": one["url"], "model": one["model"]}
    return {**found, **(report.get("settings") or {}), "fingerprint": report.get("fingerprint")}


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """{"a.b": text} of nested mappings."""
    found: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found.update(_flat(value, f"{prefix}{key}."))
        elif isinstance(value, float):
            found[f"{prefix}{key}"] = f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
        elif isinstance(value, (list, tuple)):
            found[f"{prefix}{key}"] = " ".join(str(each) for each in value) or "-"
        else:
            found[f"{prefix}{key}"] = "-" if value is None else str(value)
    return found


def _facts(values: Mapping[str, str]) -> str:
    rows = "".join(f"<tr><td>{escape(key)}</td><td>{escape(value)}</td></tr>" for key, value in values.items())
    return f'<table class="facts">{rows}</table>'
