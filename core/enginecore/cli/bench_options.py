"""Options that several benchmarks have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

WORK = "Workload"

Workload = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.json",
        help='A list of {"prompt": TEXT or "prompt_token_ids": [...], "output_tokens": N}. Default: a built-in one of '
        "128 requests with the length distribution of chat traffic, mean input 136 and mean output 117 tokens.",
        rich_help_panel=WORK,
    ),
]
NumRequests = Annotated[
    int,
    typer.Option(
        min=1, help="How many requests; the workload is taken from its start and repeated.", rich_help_panel=WORK
    ),
]
Repeat = Annotated[int, typer.Option(min=1, help="Measure this often and report the medians.", rich_help_panel=WORK)]
Json = Annotated[bool, typer.Option("--json", help="Print everything, machine and settings too, as JSON.")]
Concurrency = Annotated[
    int, typer.Option(min=1, help="Closed loop: this many requests in flight at all times.", rich_help_panel=WORK)
]
Rate = Annotated[
    float | None,
    typer.Option(
        min=0.001,
        help="Open loop instead: start this many requests a second, at Poisson times, whatever the server does.",
        rich_help_panel=WORK,
    ),
]
TtftSlo = Annotated[
    float | None,
    typer.Option(min=0.001, metavar="MS", help="Goodput: the first token must come so soon.", rich_help_panel=WORK),
]
TpotSlo = Annotated[
    float | None,
    typer.Option(
        min=0.001,
        metavar="MS",
        help="Goodput: each token after the first may take so long, on average over its answer.",
        rich_help_panel=WORK,
    ),
]
Html = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.html",
        help="Write a page with figures, plots, the full configuration, machine and versions, which needs no network. "
        "Needs matplotlib: pip install 'enginecore[plot]'.",
    ),
]
