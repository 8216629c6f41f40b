"""`enginecore bench serve` and `compare`: the commands that measure servers."""

from __future__ import annotations

from typing import Annotated

import typer

from enginecore.cli.bench_options import (
    WORK,
    Concurrency,
    Html,
    Json,
    NumRequests,
    Rate,
    Repeat,
    TpotSlo,
    TtftSlo,
    Workload,
)
from enginecore.cli.common import with_engine
from enginecore.config import DEFAULT_MODEL, EngineArgs

SERVER = "Server"
KEY = "ENGINECORE_API_KEY"

Url = Annotated[
    str | None,
    typer.Option(
        help="A running OpenAI-compatible server, ours or another's, such as http://127.0.0.1:8000. Without it a "
        "server is started with the options above, and stopped afterwards.",
        rich_help_panel=SERVER,
    ),
]
ApiKey = Annotated[str | None, typer.Option(help="Key of the server at --url.", envvar=KEY, rich_help_panel=SERVER)]
ServedModel = Annotated[
    str | None,
    typer.Option(help="Model name to ask for. Default: the first that the server lists.", rich_help_panel=SERVER),
]
SweepRate = Annotated[
    str | None,
    typer.Option(
        metavar="R,R,...", help="Open loop at each of these rates, one after the other.", rich_help_panel=WORK
    ),
]
SweepConcurrency = Annotated[
    str | None,
    typer.Option(
        metavar="N,N,...",
        help="Closed loop with each of these numbers of requests in flight, one after the other.",
        rich_help_panel=WORK,
    ),
]


@with_engine
def serve(
    engine: EngineArgs,
    url: Url = None,
    api_key: ApiKey = None,
    served_model: ServedModel = None,
    concurrency: Concurrency = 16,
    rate: Rate = None,
    sweep_concurrency: SweepConcurrency = None,
    sweep_rate: SweepRate = None,
    ttft_slo: TtftSlo = None,
    tpot_slo: TpotSlo = None,
    workload: Workload = None,
    num_requests: NumRequests = 32,
    repeat: Repeat = 1,
    html: Html = None,
    as_json: Json = False,
) -> None:
    """Streams over HTTP: time to first token, time per output token, the gaps between tokens, and failures.

    With --ttft-slo or --tpot-slo also goodput: the share and the rate of requests that keep to them. A sweep reports
    a row for each load.

    Example: enginecore bench serve --sweep-concurrency 1,4,16 --ttft-slo 500 --tpot-slo 50 --num-requests 64
    """
    from enginecore.cli.bench_client import Load
    from enginecore.cli.bench_figures import Objectives
    from enginecore.cli.bench_html import deliver, require_html
    from enginecore.cli.bench_progress import progress_bars
    from enginecore.cli.bench_serve import Site, measure_serving, name_of, parse_points, sweep_table
    from enginecore.cli.bench_workload import load_workload

    require_html(html)
    points = parse_points(sweep_rate, sweep_concurrency, Load(concurrency=concurrency, rate=rate))
    items, site = load_workload(workload, num_requests), Site(url=url, api_key=api_key, model=served_model)
    with progress_bars() as begin:
        report = measure_serving(engine, site, points, items, repeat, Objectives(ttft_slo, tpot_slo), begin)
    samples = list(zip((name_of(load) for load in points), report.pop("samples"), strict=True))
    table = sweep_table(report) if "points" in report else None
    deliver(report, html=html, as_json=as_json, samples=samples, lines=table)


@with_engine
def compare(
    engine: EngineArgs,
    urls: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="URL...",
            help="Other OpenAI-compatible servers, as http://127.0.0.1:8001 or NAME=http://127.0.0.1:8001.",
        ),
    ] = None,
    ours: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Our server, when it is running already. Without it one is started with the options above, and "
            "stopped afterwards.",
            rich_help_panel=SERVER,
        ),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(help="Key of the server at --ours.", envvar=KEY, rich_help_panel=SERVER)
    ] = None,
    their_key: Annotated[str | None, typer.Option(help="Key of the other servers.", rich_help_panel=SERVER)] = None,
    their_model: Annotated[
        str | None,
        typer.Option(
            help="Model name to ask the other servers for. Default: the first that each lists.", rich_help_panel=SERVER
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of every server.", rich_help_panel=WORK)] = 5,
    concurrency: Concurrency = 16,
    rate: Rate = None,
    ttft_slo: TtftSlo = None,
    tpot_slo: TpotSlo = None,
    workload: Workload = None,
    num_requests: NumRequests = 32,
    html: Html = None,
    as_json: Json = False,
) -> None:
    """Our server beside others: the same requests to each, in turns, and the ratios of what their users feel.

    MODEL may be left out. Fields that a server refuses are left away, with a word about it. Prompts begin differently
    in every round, so that nobody's prefix cache has a part in it.

    Example: enginecore bench compare vllm=http://127.0.0.1:8001 --rounds 5 --num-requests 32
    """
    import msgspec

    from enginecore.cli.bench_client import Load
    from enginecore.cli.bench_compare import Contest, comparison_table, measure_comparison, parse_servers
    from enginecore.cli.bench_figures import Objectives
    from enginecore.cli.bench_html import deliver, require_html
    from enginecore.cli.bench_progress import progress_bars
    from enginecore.cli.bench_workload import load_workload

    require_html(html)
    given = list(urls or [])
    if "://" in engine.model:  # MODEL was left out, and the first URL taken for it
        given.insert(0, engine.model)
        engine = msgspec.structs.replace(engine, model=DEFAULT_MODEL)
    contest = Contest(
        theirs=parse_servers(given),
        load=Load(concurrency=concurrency, rate=rate),
        rounds=rounds,
        objectives=Objectives(ttft_slo, tpot_slo),
        ours=ours,
        api_key=api_key,
        their_key=their_key,
        their_model=their_model,
    )
    with progress_bars() as begin:
        report = measure_comparison(engine, contest, load_workload(workload, num_requests), begin)
    samples = list(report.pop("samples").items())
    deliver(report, html=html, as_json=as_json, samples=samples, lines=comparison_table(report))
