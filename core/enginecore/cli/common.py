"""What the commands share: the engine's options, declared once, and the way a failure is shown.

Nothing here may import torch, transformers or fastapi: `enginecore --help` loads this module.
"""

from __future__ import annotations

import functools
import inspect
import json
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from enginecore.config import DEFAULT_MODEL, EngineArgs, parse_bytes
from enginecore.errors import EngineCoreError, ParameterError

if TYPE_CHECKING:
    from enginecore.frontend.llm import LLM

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
MODEL, MEMORY, SCHEDULING, ADVANCED = "Model and device", "Memory", "Scheduling", "Advanced"


@dataclass
class Session:
    """What one run of the command line remembers; it travels as the `obj` of typer's context."""

    debug: bool = False


def set_debug(context: typer.Context, value: bool) -> bool:
    """Callback of --debug, wherever it stands on the line."""
    if value:
        context.ensure_object(Session).debug = True
    return value


Debug = Annotated[
    bool,
    typer.Option(
        "--debug", help="Show the traceback of a failure and debug logs.", callback=set_debug, expose_value=True
    ),
]


def engine_settings(
    model: Annotated[
        str,
        typer.Argument(
            help="A directory with config.json and weights, a .gguf file, a Hugging Face id (when the network allows), "
            "or an alias. The default is SmolLM2-135M-Instruct, an Apache-2.0 model that comes from the Python package "
            "index."
        ),
    ] = DEFAULT_MODEL,
    device: Annotated[
        str,
        typer.Option(
            help="Where to run: auto, a device of an installed plugin such as cpu, one of several such as cuda:1, or "
            "its full name such as enginecore-cpu:cpu. auto takes the one healthy accelerator, or the CPU where no "
            "accelerator plugin is installed. 'enginecore devices' lists them.",
            rich_help_panel=MODEL,
        ),
    ] = "auto",
    dtype: Annotated[
        str,
        typer.Option(
            help="Arithmetic of weights and activations: auto, bfloat16, float16 or float32. auto asks the plugin, "
            "then the checkpoint.",
            rich_help_panel=MODEL,
        ),
    ] = "auto",
    max_model_len: Annotated[
        str | None,
        typer.Option(
            metavar="N|auto",
            help="Longest sequence in tokens, prompt and answer together. Default: what the model was made for. auto "
            "takes the longest that the KV cache can hold.",
            rich_help_panel=MODEL,
        ),
    ] = None,
    chat_template: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Jinja chat template to use instead of the model's own.", rich_help_panel=MODEL
        ),
    ] = None,
    generation_config: Annotated[
        str,
        typer.Option(
            metavar="auto|none|DIR",
            help="Where sampling defaults come from: the model's own generation_config.json (auto), nowhere (none), or "
            "the one in DIR. What a request says always wins.",
            rich_help_panel=MODEL,
        ),
    ] = "auto",
    kv_cache_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Memory for the KV cache alone, such as 2GiB or 512MB. Default: what --memory-utilization leaves "
            "after the weights.",
            rich_help_panel=MEMORY,
        ),
    ] = None,
    num_blocks: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Blocks of the KV cache; the other way of saying --kv-cache-memory.",
            rich_help_panel=MEMORY,
        ),
    ] = None,
    block_size: Annotated[
        int, typer.Option(help="Tokens in a block: 8, 16, 32, 64 or 128.", rich_help_panel=MEMORY)
    ] = 16,
    memory_utilization: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            help="Share of the device's memory that this process may use, weights and cache together, such as 0.5. "
            "Default: the plugin's choice, else 0.9.",
            rich_help_panel=MEMORY,
        ),
    ] = None,
    prefix_caching: Annotated[
        bool,
        typer.Option(
            help="Keep the KV blocks of finished requests and reuse them for prompts that begin the same way.",
            rich_help_panel=MEMORY,
        ),
    ] = True,
    max_num_seqs: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Sequences that run at the same time. Default: the plugin's choice, else 256.",
            rich_help_panel=SCHEDULING,
        ),
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Tokens computed in one step, over all sequences. Smaller gives smoother streams, larger more "
            "throughput. Default: the plugin's choice, else 2048.",
            rich_help_panel=SCHEDULING,
        ),
    ] = None,
    long_prefill_token_threshold: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Most tokens of one prompt in one step, so that a long prompt cannot take a whole step. 0: no such "
            "limit.",
            rich_help_panel=SCHEDULING,
        ),
    ] = 0,
    scheduling_policy: Annotated[
        str,
        typer.Option(
            metavar="fcfs|priority",
            help="Who waits: first come, first served, or by the priority in the request (smaller goes first).",
            rich_help_panel=SCHEDULING,
        ),
    ] = "fcfs",
    seed: Annotated[int, typer.Option(help="Seed of requests that bring none.", rich_help_panel=SCHEDULING)] = 0,
    max_logprobs: Annotated[
        int,
        typer.Option(help="Most log-probabilities a request may ask for at a position.", rich_help_panel=SCHEDULING),
    ] = 20,
    num_threads: Annotated[
        int | None,
        typer.Option(metavar="N", help="Host threads. Default: the plugin's choice.", rich_help_panel=ADVANCED),
    ] = None,
    device_option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="An option of the plugin itself, such as step_time_s=0.01 of the simulated device; may be repeated. "
            "The value is read as JSON where it is JSON, else as text.",
            rich_help_panel=ADVANCED,
        ),
    ] = None,
    fuse: Annotated[
        bool, typer.Option(help="Join matrix products and norms where that is exact.", rich_help_panel=ADVANCED)
    ] = True,
    strict_ops: Annotated[
        bool,
        typer.Option(
            "--strict-ops",
            help="Fail when the device has no kernel of its own for an operation, instead of running the reference "
            "there.",
            rich_help_panel=ADVANCED,
        ),
    ] = False,
    trust_remote_code: Annotated[
        bool,
        typer.Option(
            "--trust-remote-code", help="Run Python code that comes with the model's files.", rich_help_panel=ADVANCED
        ),
    ] = False,
    allow_pickle: Annotated[
        bool,
        typer.Option(
            "--allow-pickle",
            help="Read .bin weights, through the weights-only loader. safetensors and GGUF need no such permission.",
            rich_help_panel=ADVANCED,
        ),
    ] = False,
    debug: Debug = False,
) -> EngineArgs:
    """The options of an engine, as `EngineArgs`. Raises ParameterError naming the option."""
    return EngineArgs(
        model=model,
        device=device,
        dtype=dtype,
        max_model_len=_model_len(max_model_len),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        long_prefill_token_threshold=long_prefill_token_threshold,
        block_size=block_size,
        num_blocks=num_blocks,
        kv_cache_memory=None if kv_cache_memory is None else parse_bytes(kv_cache_memory, param="kv_cache_memory"),
        memory_utilization=memory_utilization,
        enable_prefix_caching=prefix_caching,
        scheduling_policy=_policy(scheduling_policy),
        seed=seed,
        max_logprobs=max_logprobs,
        generation_config=generation_config,
        chat_template=chat_template,
        trust_remote_code=trust_remote_code,
        allow_pickle=allow_pickle,
        fuse=fuse,
        strict_ops=strict_ops,
        num_threads=num_threads,
        device_options=_device_options(device_option or []),
    )


def _model_len(text: str | None) -> Any:
    if text is None or text == "auto":
        return text
    if not text.isascii() or not text.isdigit() or len(text) > 12:
        raise ParameterError(f"max_model_len must be a number of tokens or auto, got {text!r}", param="max_model_len")
    return int(text)


def _policy(text: str) -> Any:
    if text not in ("fcfs", "priority"):
        raise ParameterError(f"scheduling_policy must be fcfs or priority, got {text!r}", param="scheduling_policy")
    return text


def _device_options(pairs: list[str]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not name or not equals:
            raise ParameterError(f"device_option must be NAME=VALUE, got {pair!r}", param="device_option")
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = value
    return options


def with_engine(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the engine's options: they go before its own, and arrive as its first parameter, an
    `EngineArgs`."""
    shared = inspect.signature(engine_settings, eval_str=True)
    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]

    @functools.wraps(command)
    def run(**values: Any) -> Any:
        set_up_logging(logging.DEBUG if values["debug"] else logging.WARNING)
        engine_args = engine_settings(**{name: values.pop(name) for name in shared.parameters})
        return command(engine_args, **values)

    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in [*shared.parameters.values(), *own]]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def engine_argv(engine: EngineArgs) -> list[str]:
    """The command line that gives these settings: what `engine_settings` reads, written."""
    argv: list[str] = []
    for name, parameter in inspect.signature(engine_settings, eval_str=True).parameters.items():
        if name in ("model", "device_option", "debug"):
            continue
        value = getattr(engine, "enable_prefix_caching" if name == "prefix_caching" else name)
        flag = "--" + name.replace("_", "-")
        if value == parameter.default:
            continue
        if isinstance(value, bool):
            argv.append(flag if value else flag.replace("--", "--no-", 1))
        else:
            argv += [flag, str(value)]
    for option, value in engine.device_options.items():
        argv += ["--device-option", f"{option}={json.dumps(value)}"]
    return [*argv, "--", engine.model]


def open_llm(engine: EngineArgs) -> LLM:
    """The engine that `engine` describes, in this process."""
    from enginecore.frontend.llm import LLM

    return LLM(**{name: getattr(engine, name) for name in engine.__struct_fields__})


def set_up_logging(level: int) -> None:
    """Logs go to standard error, so that standard output carries only what was asked for. `level` is enginecore's own;
    libraries get a word in from WARNING on."""
    logging.basicConfig(level=logging.WARNING, format=LOG_FORMAT, stream=sys.stderr)
    logging.getLogger("enginecore").setLevel(level)


def print_error(message: str, fix: str | None = None) -> None:
    """`error: MESSAGE` and, where there is something to type, `fix: ...`, on standard error."""
    print(f"error: {message}", file=sys.stderr)
    if fix:
        print(f"fix: {fix}", file=sys.stderr)


def show_failure(error: EngineCoreError) -> int:
    """Print an error the way every command does; returns the exit code."""
    print_error(error.message, error.fix)
    return error.exit_code
