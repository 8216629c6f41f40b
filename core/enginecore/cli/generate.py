"""`enginecore generate`: one prompt to standard output, or a file of prompts to a file of answers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from enginecore.cli.common import open_llm, with_engine
from enginecore.config import EngineArgs
from enginecore.errors import ParameterError

SAMPLING = "Sampling"
DEFAULT_MAX_TOKENS = 256

Temperature = Annotated[
    float | None,
    typer.Option(
        metavar="NUMBER", help="0 is greedy. Default: the model's generation config, else 1.", rich_help_panel=SAMPLING
    ),
]
TopP = Annotated[
    float | None,
    typer.Option(
        metavar="NUMBER",
        help="Sample from the likeliest tokens that make up this much probability.",
        rich_help_panel=SAMPLING,
    ),
]
TopK = Annotated[
    int | None,
    typer.Option(metavar="N", help="Sample from the k likeliest tokens; 0 is off.", rich_help_panel=SAMPLING),
]
MaxTokens = Annotated[int, typer.Option(metavar="N", help="Most tokens of an answer.", rich_help_panel=SAMPLING)]
Stop = Annotated[
    list[str] | None,
    typer.Option(help="Text that ends an answer; may be repeated.", rich_help_panel=SAMPLING),
]


@with_engine
def generate(
    engine: EngineArgs,
    prompt: Annotated[str | None, typer.Option(help="Text to continue; - reads it from standard input.")] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.jsonl",
            help='One request a line: {"prompt": TEXT}, {"prompt_token_ids": [...]} or {"messages": [...]}, and '
            'optionally "id" and sampling parameters of its own, such as "max_tokens": 32.',
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.jsonl",
            help="Where the answers go, one a line, in the order of the prompts. Written at once, at the end.",
        ),
    ] = None,
    max_tokens: MaxTokens = DEFAULT_MAX_TOKENS,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    stop: Stop = None,
    progress: Annotated[bool, typer.Option(help="Show a progress bar with tokens per second.")] = True,
) -> None:
    """Generate offline, with everything batched.

    Examples: enginecore generate --prompt "The capital of France is" --max-tokens 16 --temperature 0

    enginecore generate --prompts questions.jsonl --out answers.jsonl --dtype bfloat16
    """
    from enginecore.cli.generate_file import check_sampling, generate_file, read_requests

    if (prompt is None) == (prompts is None):
        raise ParameterError("give either --prompt or --prompts", param="prompt", fix="enginecore generate --help")
    if (prompts is None) != (out is None):
        raise ParameterError("--prompts and --out go together", param="out", fix="enginecore generate --help")
    chosen: dict[str, Any] = {
        "max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k, "stop": stop or None,
    }  # fmt: skip
    sampling = check_sampling({name: value for name, value in chosen.items() if value is not None})
    if prompts is not None and out is not None:
        requests = read_requests(prompts, sampling)
        generate_file(engine, requests, prompts, out, progress=progress)
        return
    assert prompt is not None
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text:
        raise ParameterError("the prompt is empty", param="prompt")
    _generate_one(engine, text, sampling, progress=progress and sys.stderr.isatty())


def _generate_one(engine: EngineArgs, text: str, sampling: dict[str, Any], *, progress: bool) -> None:
    from enginecore.cli.generate_file import with_defaults

    with open_llm(engine) as llm:
        answer = llm.generate([text], with_defaults(llm, sampling), use_tqdm=progress)[0]
    print(answer.outputs[0].text)
