"""`enginecore run-batch`: a file of API requests, answered offline."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from enginecore.cli import options, serve
from enginecore.cli.common import tell_loading, with_engine
from enginecore.config import EngineArgs
from enginecore.errors import ParameterError

#: Every line has its answer, but not all of them are a success.
SOME_FAILED = 9

ModelOption = Annotated[
    str, typer.Option("--model", help="As MODEL of the other commands.", rich_help_panel=options.MODEL)
]
Source = Annotated[
    str,
    typer.Argument(metavar="IN.jsonl", help="A request a line, as OpenAI's batches have them; - for standard input."),
]
Target = Annotated[
    str, typer.Argument(metavar="OUT.jsonl", help="An answer a line, in any order; - for standard output.")
]


def _model_as_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """The two files stand where other commands have the model."""
    signature = inspect.signature(command)
    parameters = [
        parameter.replace(annotation=ModelOption) if name == "model" else parameter
        for name, parameter in signature.parameters.items()
    ]
    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


@_model_as_option
@with_engine
def run_batch(
    engine: EngineArgs,
    source: Source,
    target: Target,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on with OUT.jsonl: custom_ids that have an answer there are left out. Lines that tell of a bad "
            "request line, of a busy server or of one that broke are taken out and tried again.",
        ),
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Begin OUT.jsonl anew.")] = False,
    in_flight: Annotated[
        int | None,
        typer.Option(
            min=1, max=65536, metavar="N", help="Requests at a time. Default: twice the sequences that can run at once."
        ),
    ] = None,
    served_model_name: serve.ServedModelName = None,
    strict_fields: serve.StrictFields = False,
    tool_call_parser: serve.ToolCallParser = "auto",
    reasoning_parser: serve.ReasoningParser = "auto",
    override_generation_config: serve.OverrideGenerationConfig = None,
    progress: Annotated[bool, typer.Option(help="Show a progress bar on a terminal.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> int:
    """Answer a file of API requests, a line each, without a server: every POST route that `serve` has.

    A line is {"custom_id": ID, "method": "POST", "url": "/v1/chat/completions", "body": {...}}. A line that is no
    request gets a line with an `error` and costs nothing else. Exit codes: 0 when all answers are a success, 9 when
    some are not, 1 when it could not be finished (go on with --resume), 130 when it was interrupted.

    Examples: enginecore run-batch questions.jsonl answers.jsonl

    enginecore run-batch --model ./my-model --resume questions.jsonl answers.jsonl --json
    """
    from enginecore.cli.run_batch_file import Files, run_files
    from enginecore.server.args import ServerArgs

    if resume and overwrite:
        raise ParameterError("give either --resume or --overwrite", param="resume")
    server = ServerArgs(
        max_waiting=2**31,  # what is in flight bounds it
        strict_fields=strict_fields,
        tool_call_parser=tool_call_parser,
        reasoning_parser=reasoning_parser,
        override_generation_config=serve.json_object(override_generation_config),
        disable_log_requests=True,
    )
    engine = msgspec.structs.replace(engine, served_model_name=served_model_name)
    files = Files(source, None if target == "-" else Path(target), resume=resume, overwrite=overwrite)
    with files:
        tell_loading(engine)
        summary = run_files(engine, server, files, in_flight=in_flight, progress=progress)
    told = json.dumps(summary, indent=2) if as_json else _sentence(summary)
    typer.echo(told, err=target == "-" or not as_json)
    if not summary["finished"]:
        return 130
    return SOME_FAILED if summary["failed"] or summary["invalid"] else 0


def _sentence(summary: dict[str, Any]) -> str:
    """What has happened, for people."""
    parts = [f"{summary['succeeded']} answered"]
    parts += [f"{summary[name]} {name}" for name in ("failed", "invalid", "skipped") if summary[name]]
    if summary["failures"]:
        parts.append("(" + ", ".join(f"{count} x {why}" for why, count in summary["failures"].items()) + ")")
    tokens, seconds = summary["generated_tokens"], summary["seconds"]
    told = f"{', '.join(parts)}; {tokens} tokens in {seconds:.1f} s ({tokens / max(seconds, 1e-9):.0f} a second)"
    return told if summary["finished"] else told + "; interrupted: go on with --resume"
