"""From `EngineArgs` to `EngineConfig`: every open setting is decided here, once, with the reason recorded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from enginecore.config import KV_CACHE_DTYPES, EngineArgs
from enginecore.device import ConfigContext
from enginecore.device.select import SelectedDevice, config_defaults
from enginecore.errors import KVCacheTooSmall, ModelError, ParameterError

DEFAULTS: dict[str, Any] = {
    "max_num_batched_tokens": 2048,
    "max_num_seqs": 256,
    "memory_utilization": 0.9,
}


@dataclass
class Choices:
    """Collects what was decided for the user, as (setting, value, reason)."""

    made: list[tuple[str, str, str]] = field(default_factory=list)

    def note(self, setting: str, value: Any, reason: str) -> None:
        self.made.append((setting, str(value), reason))


@dataclass(frozen=True)
class Settings:
    """The settings that do not depend on how much memory is left after loading. `kv_dtype` is torch's name of the
    KV cache's."""

    dtype: str
    max_num_seqs: int
    max_num_batched_tokens: int
    memory_utilization: float
    kv_dtype: str


def model_size(model_config: dict[str, Any], name: str) -> int:
    """A size in a model's config.json: 0 where it is not given, the largest where each layer has its own. Raises
    ModelError."""
    value = model_config.get(name)
    sizes = value if isinstance(value, list) else [0 if value is None else value]
    if not all(type(size) is int and size >= 0 for size in sizes):
        raise ModelError(f"the config.json of the model cannot be used: {name} is {value!r}")
    return max(sizes, default=0)


def resolve_settings(
    args: EngineArgs, selected: SelectedDevice, model_config: dict[str, Any], dtypes: frozenset[str], choices: Choices
) -> Settings:
    """Fill what the user left open: the plugin's preference first, then the default."""
    names = (*DEFAULTS, "dtype")
    unset = tuple(name for name in names if getattr(args, name) in (None, "auto"))
    context = ConfigContext(
        device=selected.device,
        model_type=str(model_config.get("model_type", "")),
        hidden_size=model_size(model_config, "hidden_size"),
        num_layers=model_size(model_config, "num_hidden_layers"),
        unset=unset,
    )
    preferred = config_defaults(selected, context) if unset else {}
    values: dict[str, Any] = {}
    for name in DEFAULTS:
        if name not in unset:
            values[name] = getattr(args, name)
        elif name in preferred:
            values[name] = preferred[name]
            choices.note(name, preferred[name], f"preferred by {selected.plugin.distribution}")
        else:
            values[name] = DEFAULTS[name]
            choices.note(name, DEFAULTS[name], "default")
    dtype = _dtype(args, preferred, model_config, dtypes, selected, choices)
    kv_dtype = dtype if args.kv_cache_dtype == "auto" else KV_CACHE_DTYPES[args.kv_cache_dtype]
    return Settings(dtype=dtype, kv_dtype=kv_dtype, **values)


def _dtype(
    args: EngineArgs,
    preferred: dict[str, Any],
    model_config: dict[str, Any],
    dtypes: frozenset[str],
    selected: SelectedDevice,
    choices: Choices,
) -> str:
    if args.dtype != "auto":
        return args.dtype
    if "dtype" in preferred:
        choices.note("dtype", preferred["dtype"], f"preferred by {selected.plugin.distribution}")
        return str(preferred["dtype"])
    own = str(model_config.get("dtype") or model_config.get("torch_dtype") or "float32").removeprefix("torch.")
    dtype = own if own in dtypes else "float32"
    choices.note("dtype", dtype, "the checkpoint's own" if dtype == own else f"the device has no {own}")
    return dtype


def resolve_max_model_len(args: EngineArgs, max_positions: int, choices: Choices) -> int:
    """The longest sequence asked for, or the model's own limit. ParameterError above the model's limit."""
    if isinstance(args.max_model_len, int):
        if args.max_model_len > max_positions:
            raise ParameterError(
                f"max_model_len {args.max_model_len} is above the model's {max_positions} positions",
                param="max_model_len",
                fix=f"choose at most {max_positions}",
            )
        return args.max_model_len
    if args.max_model_len is None:
        choices.note("max_model_len", max_positions, "the model's positions")
    return max_positions


def fit_blocks(
    args: EngineArgs,
    max_model_len: int,
    block_bytes: int,
    available_bytes: int | None,
    max_num_seqs: int,
    choices: Choices,
) -> tuple[int, int]:
    """(num_blocks, max_model_len) for the memory there is.

    `available_bytes` is what the budget leaves for the cache; it is not used when the user gave `num_blocks` or
    `kv_cache_memory`. Raises KVCacheTooSmall when one full sequence does not fit, unless max_model_len is "auto".
    """
    size = args.block_size
    most = -(-max_model_len // size) * max_num_seqs
    if args.num_blocks is not None:
        num_blocks = args.num_blocks
    elif args.kv_cache_memory is not None:
        num_blocks = args.kv_cache_memory // block_bytes
    else:
        num_blocks = max(0, available_bytes or 0) // block_bytes
    if args.num_blocks is None and num_blocks > most:
        choices.note("num_blocks", most, f"all that {max_num_seqs} sequences of {max_model_len} tokens can use")
        num_blocks = most
    fits = num_blocks * size
    if fits >= max_model_len:
        return num_blocks, max_model_len
    if args.max_model_len == "auto" and fits > 0:
        choices.note("max_model_len", fits, "the longest sequence that the KV cache holds")
        return num_blocks, fits
    needed = -(-max_model_len // size)
    raise KVCacheTooSmall(
        f"the KV cache cannot hold one sequence of {max_model_len} tokens: needed {needed} blocks "
        f"({needed * block_bytes} bytes), available {num_blocks} blocks ({num_blocks * block_bytes} bytes); "
        f"the largest max_model_len that fits is {fits}",
        fix="lower max_model_len, set it to auto, or raise kv_cache_memory, num_blocks or memory_utilization",
    )
