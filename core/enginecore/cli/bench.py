"""`enginecore bench`: throughput offline, latency by batch size, and what the users of a server feel."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from enginecore.cli import bench_online
from enginecore.cli.bench_options import WORK, Html, Json, NumRequests, Repeat, Workload
from enginecore.cli.common import with_engine
from enginecore.config import EngineArgs

app = typer.Typer(
    help="Measure. Absolute figures mean little on a shared machine: quote ratios of interleaved runs, and medians.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)


@app.command()
@with_engine
def throughput(
    engine: EngineArgs,
    workload: Workload = None,
    num_requests: NumRequests = 32,
    repeat: Repeat = 1,
    html: Html = None,
    as_json: Json = False,
) -> None:
    """All requests at once through the Python API: how many tokens a second?

    Answers are greedy and exactly as long as the workload says, so that every engine does the same work. `kv_waste` is
    the share of KV slots held by running sequences that hold no token.

    Example: enginecore bench throughput --dtype bfloat16 --num-requests 32 --repeat 3
    """
    from enginecore.cli.bench_html import deliver, require_html
    from enginecore.cli.bench_throughput import measure_throughput
    from enginecore.cli.bench_workload import load_workload

    require_html(html)
    deliver(measure_throughput(engine, load_workload(workload, num_requests), repeat), html=html, as_json=as_json)


@app.command()
@with_engine
def latency(
    engine: EngineArgs,
    batch_sizes: Annotated[
        str, typer.Option(help="Batch sizes to measure, separated by commas.", rich_help_panel=WORK)
    ] = "1,4,16",
    input_len: Annotated[int, typer.Option(min=1, help="Prompt tokens of each sequence.", rich_help_panel=WORK)] = 128,
    contexts: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,...",
            help="Prompt lengths instead of --input-len. Batch sizes are measured at the first length, and all lengths "
            "with the first batch size.",
            rich_help_panel=WORK,
        ),
    ] = None,
    threads: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,...",
            help="Measure with each of these --num-threads, one engine after the other.",
            rich_help_panel=WORK,
        ),
    ] = None,
    output_len: Annotated[int, typer.Option(min=2, help="Output tokens of each sequence.", rich_help_panel=WORK)] = 64,
    workload: Workload = None,
    num_requests: NumRequests = 32,
    repeat: Repeat = 3,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.svg|FILE.png",
            help="Draw how times grow. Needs matplotlib: pip install 'enginecore[plot]'.",
        ),
    ] = None,
    html: Html = None,
    as_json: Json = False,
) -> None:
    """One batch at a time: time of its prefill, time of its decode, TTFT and TPOT, and how they grow.

    The prompts are cut from the text of the workload's first --num-requests requests; no two are the same, so the
    prefix cache has no part in it. `decode_step_ms` is the median step that brings a token to every sequence.

    Example: enginecore bench latency --batch-sizes 1,2,4,8,16,32 --contexts 128,1000,4000 --threads 1,2 --plot grow.svg
    """
    from enginecore.cli import bench_latency
    from enginecore.cli.bench_html import deliver, require_html
    from enginecore.cli.bench_html_charts import draw_growth
    from enginecore.cli.bench_plot import require_matplotlib
    from enginecore.cli.bench_progress import progress_bars
    from enginecore.cli.bench_workload import load_workload

    require_html(html)
    if plot is not None:
        require_matplotlib(plot)
    lengths: list[int] = [input_len]
    counts: list[int] | list[None] = [None]
    if contexts is not None:
        lengths = bench_latency.parse_counts(contexts, "contexts", bench_latency.MAX_CONTEXT)
    if threads is not None:
        counts = bench_latency.parse_counts(threads, "threads", bench_latency.MAX_THREADS)
    growth = bench_latency.Growth(bench_latency.parse_batch_sizes(batch_sizes), lengths, counts)
    items = load_workload(workload, num_requests)
    with progress_bars() as begin:
        report = bench_latency.measure_latency(engine, items, growth, output_len, repeat, begin)
    if plot is not None:
        draw_growth(report, plot)
    table = bench_latency.growth_table(report) if "curves" in report else None
    deliver(report, html=html, as_json=as_json, lines=table)


@app.command()
@with_engine
def perplexity(
    engine: EngineArgs,
    text: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Text to score. Default: the prompts of the built-in workload, one after the other.",
            rich_help_panel=WORK,
        ),
    ] = None,
    window: Annotated[int, typer.Option(min=2, help="Tokens that are scored together.", rich_help_panel=WORK)] = 512,
    max_tokens: Annotated[int, typer.Option(min=2, help="Score this much of the text.", rich_help_panel=WORK)] = 16384,
    as_json: Json = False,
) -> None:
    """How well the model predicts a fixed text: what a dtype or a quantization costs in accuracy.

    Windows of --window tokens are scored each by itself; the figure is exp of the mean negative log-likelihood.

    Example: enginecore bench perplexity --quantization int8
    """
    from enginecore.cli.bench_perplexity import measure_perplexity, text_of
    from enginecore.cli.bench_report import print_report
    from enginecore.cli.bench_workload import load_workload

    content = text.read_text(encoding="utf-8") if text is not None else text_of(load_workload(None, 128))
    print_report(measure_perplexity(engine, content, window, max_tokens), as_json=as_json)


@app.command()
@with_engine
def startup(
    engine: EngineArgs,
    repeat: Repeat = 5,
    cold: Annotated[
        bool,
        typer.Option(
            "--cold",
            help="Before each launch have the system forget the files of Python's packages and of the model, so that "
            "they come from disk. What other running programs use of them stays in memory.",
            rich_help_panel=WORK,
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """A server is launched and stopped again and again: how long until it is healthy, and until its first token?

    Example: enginecore bench startup smollm2-135m --repeat 5
    """
    from enginecore.cli.bench_progress import progress_bars
    from enginecore.cli.bench_report import print_report
    from enginecore.cli.bench_startup import measure_startup, startup_table

    with progress_bars() as begin:
        report = measure_startup(engine, repeat, cold=cold, begin=begin)
    print_report(report, as_json=as_json, lines=startup_table(report))


app.command()(bench_online.serve)
app.command()(bench_online.compare)


@app.command()
@with_engine
def simulate(
    engine: EngineArgs,
    profile: Annotated[
        str | None,
        typer.Option(
            help="The device to simulate, such as h100: the same as --device-option profile=NAME. A name that does not "
            "exist lists those that do.",
            rich_help_panel="Simulation",
        ),
    ] = None,
    lengths: Annotated[
        str,
        typer.Option(
            metavar="sharegpt|alpaca|IN:OUT",
            help="Tokens of prompts and answers: log-normal with the published means of ShareGPT (161 and 338) or "
            "Alpaca (19 and 58), or all the same, such as 512:128.",
            rich_help_panel=WORK,
        ),
    ] = "sharegpt",
    num_requests: Annotated[int, typer.Option(min=1, help="How many requests.", rich_help_panel=WORK)] = 1000,
    rate: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            help="Requests a second, at Poisson times. Default: all are there at once.",
            rich_help_panel=WORK,
        ),
    ] = None,
    shared_prefix: Annotated[
        int, typer.Option(min=0, help="Tokens that begin every prompt, on top of its own.", rich_help_panel=WORK)
    ] = 0,
    traffic_seed: Annotated[
        int, typer.Option(min=0, help="Seed of lengths, times and tokens.", rich_help_panel=WORK)
    ] = 0,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.svg|FILE.png",
            help="Draw queue, running requests and KV use over time. Needs matplotlib: pip install 'enginecore[plot]'.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """A device that is not there: the real scheduler and cache in virtual time, with the device's time from arithmetic.

    MODEL may be a name that the simulated device knows (opt-13b, llama-3-8b, llama-3-70b) or the path of any
    config.json; no weights are needed. Times are virtual, those under `host` are this machine's. The same command gives
    the same figures.

    Example: enginecore bench simulate llama-3-8b --profile h100 --num-requests 10000 --rate 40 --max-num-seqs 1024
    """
    import msgspec

    from enginecore.cli.bench_plot import draw_timeline, require_matplotlib
    from enginecore.cli.bench_report import print_report
    from enginecore.cli.bench_simulate import measure_simulation
    from enginecore.cli.bench_traffic import Traffic

    if plot is not None:
        require_matplotlib(plot)
    options = {"output": "hash", **({} if profile is None else {"profile": profile}), **engine.device_options}
    traffic = Traffic(
        num_requests=num_requests, lengths=lengths, rate=rate, shared_prefix=shared_prefix, seed=traffic_seed
    )
    report, timeline = measure_simulation(msgspec.structs.replace(engine, device_options=options), traffic)
    if plot is not None:
        draw_timeline(timeline, plot, title=f"{engine.model} on {profile or engine.device}, {num_requests} requests")
    print_report(report, as_json=as_json)


@app.command("kv-policies")
def kv_policies(
    seconds: Annotated[
        float, typer.Option(min=1, help="Virtual seconds of traffic in each run.", rich_help_panel=WORK)
    ] = 200.0,
    lengths: Annotated[
        str, typer.Option(help="sharegpt, alpaca, or both with a comma between.", rich_help_panel=WORK)
    ] = "sharegpt,alpaca",
    num_requests: Annotated[
        int, typer.Option(min=1, help="Requests in each of the runs about sharing.", rich_help_panel=WORK)
    ] = 100,
    traffic_seed: Annotated[
        int, typer.Option(min=0, help="Seed of lengths, times and tokens.", rich_help_panel=WORK)
    ] = 0,
    quick: Annotated[
        bool, typer.Option("--quick", help="A fifth of everything, and rougher: rates of short traffic are too high.")
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.svg|FILE.png",
            help="Draw it all. Needs matplotlib: pip install 'enginecore[plot]'.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """What paging buys: paged against contiguous KV memory on a simulated OPT-13B and A100, beside published figures.

    The real scheduler serves the same traffic in virtual time with blocks as they are needed, and with one piece of
    memory a request: of the longest length ("max"), of the next power of two ("pow2"), or of just what it will need
    ("oracle"). Reported are the requests in a batch at the same rate, the rate sustained at the same latency for each
    token, what memory is used for, and what sharing saves for samples and beams. The same command gives the same
    figures.

    Example: enginecore bench kv-policies --plot kv-policies.png
    """
    from enginecore.cli.bench_kv_policies import Plan
    from enginecore.cli.bench_kv_published import PUBLISHED
    from enginecore.cli.bench_kv_report import draw_report, measure_kv_policies, table_of
    from enginecore.cli.bench_plot import require_matplotlib
    from enginecore.cli.bench_report import print_report
    from enginecore.errors import ParameterError

    names = tuple(dict.fromkeys(name.strip() for name in lengths.split(",")))
    unknown = [name for name in names if name not in PUBLISHED]
    if unknown:
        raise ParameterError(f"lengths must be of {', '.join(PUBLISHED)}, got {unknown[0]!r}", param="lengths")
    if plot is not None:
        require_matplotlib(plot)
    scale, resolution = (0.2, 1.2) if quick else (1.0, 1.03)
    plan = Plan(seconds=max(1.0, seconds * scale), lengths=names, seed=traffic_seed, resolution=resolution)
    report = measure_kv_policies(plan, max(4, int(num_requests * scale)), lambda text: typer.echo(text, err=True))
    if plot is not None:
        draw_report(report, plot)
    if as_json:
        print_report(report, as_json=True)
        return
    for line in table_of(report):
        typer.echo(line)
