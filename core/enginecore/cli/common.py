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

from enginecore.cli import options
from enginecore.config import DEFAULT_MODEL, EngineArgs, parse_bytes
from enginecore.errors import EngineCoreError, ParameterError

if TYPE_CHECKING:
    from enginecore.frontend.llm import LLM

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


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
    model: options.Model = DEFAULT_MODEL,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    quantization: options.Quantization = "auto",
    kv_cache_dtype: options.KvCacheDtype = "auto",
    max_model_len: options.MaxModelLen = None,
    runner: options.Runner = "auto",
    pooler_config: options.PoolerConfig = None,
    chat_template: options.ChatTemplate = None,
    generation_config: options.GenerationConfig = "auto",
    kv_cache_memory: options.KvCacheMemory = None,
    num_blocks: options.NumBlocks = None,
    block_size: options.BlockSize = 16,
    memory_utilization: options.MemoryUtilization = None,
    prefix_caching: options.PrefixCaching = True,
    max_num_seqs: options.MaxNumSeqs = None,
    max_num_batched_tokens: options.MaxNumBatchedTokens = None,
    long_prefill_token_threshold: options.LongPrefillTokenThreshold = 0,
    scheduling_policy: options.SchedulingPolicy = "fcfs",
    tenant_weight: options.TenantWeight = None,
    tenant_cache_floor: options.TenantCacheFloor = 0.0,
    tenant_cache_cap: options.TenantCacheCap = 1.0,
    seed: options.Seed = 0,
    max_logprobs: options.MaxLogprobs = 20,
    speculation: options.Speculation = "auto",
    num_speculative_tokens: options.NumSpeculativeTokens = 4,
    num_threads: options.NumThreads = None,
    kv_host_memory: options.KvHostMemory = None,
    kv_disk: options.KvDisk = None,
    kv_disk_size: options.KvDiskSize = None,
    kv_events_endpoint: options.KvEventsEndpoint = None,
    kv_events_replay: options.KvEventsReplay = None,
    kv_events_topic: options.KvEventsTopic = None,
    enable_lora: options.EnableLora = False,
    lora_modules: options.LoraModules = None,
    max_loras: options.MaxLoras = 4,
    max_lora_rank: options.MaxLoraRank = 16,
    max_cpu_loras: options.MaxCpuLoras = None,
    lora_root: options.LoraRoot = None,
    device_option: options.DeviceOption = None,
    fuse: options.Fuse = True,
    strict_ops: options.StrictOps = False,
    enforce_eager: options.EnforceEager = False,
    require_graphs: options.RequireGraphs = False,
    overlap: options.Overlap = "auto",
    trust_remote_code: options.TrustRemoteCode = False,
    allow_pickle: options.AllowPickle = False,
    debug: Debug = False,
) -> EngineArgs:
    """The options of an engine, as `EngineArgs`. Raises ParameterError naming the option."""
    return EngineArgs(
        model=model,
        device=device,
        dtype=dtype,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
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
        tenant_weights=_tenant_weights(tenant_weight or []),
        tenant_cache_floor=tenant_cache_floor,
        tenant_cache_cap=tenant_cache_cap,
        seed=seed,
        max_logprobs=max_logprobs,
        generation_config=generation_config,
        chat_template=chat_template,
        runner=_runner(runner),
        pooler_config=_json_object(pooler_config, "pooler_config"),
        trust_remote_code=trust_remote_code,
        allow_pickle=allow_pickle,
        fuse=fuse,
        strict_ops=strict_ops,
        enforce_eager=enforce_eager,
        require_graphs=require_graphs,
        speculation=speculation,  # type: ignore[arg-type]  # checked there
        num_speculative_tokens=num_speculative_tokens,
        overlap=overlap,  # type: ignore[arg-type]  # checked there
        num_threads=num_threads,
        kv_host_memory=None if kv_host_memory is None else parse_bytes(kv_host_memory, param="kv_host_memory"),
        kv_disk=kv_disk,
        kv_disk_size=None if kv_disk_size is None else parse_bytes(kv_disk_size, param="kv_disk_size"),
        kv_events_endpoint=kv_events_endpoint,
        kv_events_replay=kv_events_replay,
        kv_events_topic=kv_events_topic,
        enable_lora=enable_lora,
        lora_modules=_lora_modules(lora_modules or []),
        max_loras=max_loras,
        max_lora_rank=max_lora_rank,
        max_cpu_loras=max_cpu_loras,
        lora_root=lora_root,
        device_options=_device_options(device_option or []),
    )


def _model_len(text: str | None) -> Any:
    if text is None or text == "auto":
        return text
    if not text.isascii() or not text.isdigit() or len(text) > 12:
        raise ParameterError(f"max_model_len must be a number of tokens or auto, got {text!r}", param="max_model_len")
    return int(text)


def _policy(text: str) -> Any:
    if text not in ("fcfs", "priority", "fair"):
        told = f"scheduling_policy must be fcfs, priority or fair, got {text!r}"
        raise ParameterError(told, param="scheduling_policy")
    return text


def _runner(text: str) -> Any:
    if text not in ("auto", "generate", "pooling"):
        raise ParameterError(f"runner must be auto, generate or pooling, got {text!r}", param="runner")
    return text


def _json_object(text: str | None, param: str) -> dict[str, Any]:
    try:
        value = json.loads(text) if text is not None else {}
    except (ValueError, RecursionError) as error:
        raise ParameterError(f"{param} is not valid JSON: {error}", param=param) from error
    if not isinstance(value, dict):
        raise ParameterError(f"{param} must be a JSON object", param=param)
    return value


def _tenant_weights(pairs: list[str]) -> dict[str, float]:
    found: dict[str, float] = {}
    for pair in pairs:
        tenant, equals, weight = pair.rpartition("=")
        try:
            found[tenant] = float(weight)
        except ValueError:
            equals = ""
        if not tenant or not equals:
            raise ParameterError(f"tenant_weight must be TENANT=WEIGHT, got {pair!r}", param="tenant_weight")
    return found


def _lora_modules(pairs: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for pair in pairs:
        name, _, folder = pair.partition("=")
        if not name or not folder or name in found:
            told = "names an adapter twice" if name in found else "must be NAME=DIR"
            raise ParameterError(f"lora_modules {told}, got {pair!r}", param="lora_modules")
        found[name] = folder
    return found


def _device_options(pairs: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not name or not equals:
            raise ParameterError(f"device_option must be NAME=VALUE, got {pair!r}", param="device_option")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


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
        if name in ("model", "device_option", "tenant_weight", "lora_modules", "pooler_config", "debug"):
            continue
        value = getattr(engine, "enable_prefix_caching" if name == "prefix_caching" else name)
        flag = "--" + name.replace("_", "-")
        if value == parameter.default:
            continue
        if isinstance(value, bool):
            argv.append(flag if value else flag.replace("--", "--no-", 1))
        else:
            argv += [flag, str(value)]
    for tenant, weight in engine.tenant_weights.items():
        argv += ["--tenant-weight", f"{tenant}={weight}"]
    for name, folder in engine.lora_modules.items():
        argv += ["--lora-modules", f"{name}={folder}"]
    if engine.pooler_config:
        argv += ["--pooler-config", json.dumps(engine.pooler_config)]
    for option, value in engine.device_options.items():
        argv += ["--device-option", f"{option}={json.dumps(value)}"]
    return [*argv, "--", engine.model]


def open_llm(engine: EngineArgs) -> LLM:
    """The engine that `engine` describes, in this process. Loading takes seconds, so a terminal is told."""
    tell_loading(engine)
    from enginecore.frontend.llm import LLM

    return LLM(**{name: getattr(engine, name) for name in engine.__struct_fields__})


def tell_loading(engine: EngineArgs) -> None:
    """One line on a terminal's standard error."""
    if sys.stderr.isatty():
        print(f"loading {engine.model} on {engine.device} ...", file=sys.stderr, flush=True)


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
