"""How much memory an engine's parts get: the ledger, the number of KV blocks, the configuration that follows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from enginecore.config import EngineConfig
from enginecore.device import KVCacheSpec, ModelSpec
from enginecore.engine.adapters import adapter_bytes, max_cpu_loras, refuse_for_runtime
from enginecore.engine.resolve import fit_blocks, model_size, resolve_max_model_len
from enginecore.engine.site import Site
from enginecore.engine.speculation import choose_speculation, speculation_at
from enginecore.errors import KVCacheTooSmall, ModelError, UnsupportedError
from enginecore.models.inspect import ModelShape
from enginecore.models.kv_layout import layout_of
from enginecore.runner.graphs import GraphPlan, plan_graphs
from enginecore.runner.model import runtime_copies_blocks
from enginecore.runner.speculation import most_rows

#: Settings that the engine runs on as they were given.
_UNCHANGED = (
    "long_prefill_token_threshold", "block_size", "enable_prefix_caching", "scheduling_policy", "seed", "max_logprobs",
    "num_speculative_tokens",
    "fuse", "strict_ops", "tenant_weights", "tenant_cache_floor", "tenant_cache_cap", "num_threads",
)  # fmt: skip

#: Of the memory that is free, so much may become KV cache where the user named no amount: others grow, too.
_SHARE_OF_FREE = 0.9


def size_runtime(site: Site) -> tuple[ModelSpec, EngineConfig, dict[str, int]]:
    """A backend that runs whole models keeps its own cache; unless it plans its memory, blocks cost nothing and their
    number comes from the args."""
    config, runtime = site.files.config, site.backend.runtime
    assert runtime is not None
    refuse_for_runtime(site)
    vocab_size = model_size(config, "vocab_size")
    if not vocab_size:
        raise ModelError(f"the config.json of {site.files.name} has no vocab_size")
    max_positions = model_size(config, "max_position_embeddings") or 2**20
    max_model_len = resolve_max_model_len(site.args, max_positions, site.choices)
    if site.settings.kv_dtype != site.settings.dtype:
        raise UnsupportedError(
            f"{site.selected.device} ({site.selected.plugin.label}) keeps its KV cache to itself",
            reasons=(f"it cannot be told to keep {site.settings.kv_dtype} under {site.settings.dtype}",),
            fix="leave kv_cache_dtype out",
        )
    if speculation_at(site) != "off":
        raise UnsupportedError(
            f"{site.selected.device} ({site.selected.plugin.label}) runs whole models itself",
            reasons=("guessed tokens cannot be checked there",),
            fix="leave speculation out",
        )
    spec = ModelSpec(
        name=site.files.name,
        config=config,
        dtype=site.settings.dtype,
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        max_num_seqs=site.settings.max_num_seqs,
        num_blocks=0,
        block_size=site.args.block_size,
        max_num_batched_tokens=site.settings.max_num_batched_tokens,
    )
    memory = runtime.memory_plan(spec)
    if memory is None:
        block_bytes, available = 1, -(-max_model_len // spec.block_size) * spec.max_num_seqs
        ledger = {}
    else:
        before = site.backend.memory.process_used_bytes()
        ledger = split_budget(site, before, memory.weight_bytes, memory.activation_bytes)
        block_bytes, available = memory.block_bytes, ledger["kv_cache"]
        if available < 0:
            raise KVCacheTooSmall(
                f"the weights ({memory.weight_bytes} bytes) and the largest step ({memory.activation_bytes} bytes) "
                f"exceed the budget of {ledger['budget']} bytes",
                fix="choose a larger device or several, raise memory_utilization, or lower max_num_batched_tokens",
            )
    num_blocks, max_model_len = fit_blocks(
        site.args, max_model_len, block_bytes, available, spec.max_num_seqs, site.choices
    )
    resolved = engine_config(site, vocab_size, max_model_len, num_blocks)
    if memory is not None:
        ledger["kv_cache"] = num_blocks * block_bytes
    return replace(spec, max_model_len=max_model_len, num_blocks=num_blocks), resolved, ledger


def size_paged(
    site: Site, shape: ModelShape, before: int, weight_bytes: int, *, loaded: bool
) -> tuple[EngineConfig, dict[str, int], list[KVCacheSpec]]:
    """The configuration, the ledger and what the cache holds, for weights of that many bytes, in memory already if
    `loaded`."""
    max_model_len = resolve_max_model_len(site.args, shape.max_positions, site.choices)
    site.kv_specs = specs = shape.kv_specs(site.args.block_size, site.settings.kv_dtype)
    block_bytes = block_bytes_of(site, specs)
    ledger = _ledger(site, shape, before, weight_bytes)
    part, ledger["kv_cache"] = ledger["kv_cache"], _what_is_free(site, ledger, 0 if loaded else weight_bytes)
    try:
        num_blocks, max_model_len = fit_blocks(
            site.args, max_model_len, block_bytes, ledger["kv_cache"], site.settings.max_num_seqs, site.choices
        )
    except KVCacheTooSmall as error:
        if ledger["kv_cache"] == part:
            raise
        free = site.backend.memory.memory_info().free_bytes
        raise KVCacheTooSmall(
            f"the budget has {part} bytes for the KV cache and {free} are free: other processes hold the rest; {error}",
            fix="stop them, lower max_model_len or set it to auto",
        ) from error
    ledger["kv_cache"] = num_blocks * block_bytes
    return engine_config(site, shape.vocab_size, max_model_len, num_blocks), ledger, specs


def _what_is_free(site: Site, ledger: dict[str, int], pending: int) -> int:
    """What the cache may take: its part of the budget, or less where others hold memory and the budget was not the
    user's choice. `pending` bytes are to be taken before it."""
    args, part = site.args, ledger["kv_cache"]
    explicit = (args.memory_utilization, args.kv_cache_memory, args.num_blocks)
    if any(value is not None for value in explicit):
        return part
    later = pending + ledger["activations"] + ledger.get("graphs", 0) + ledger.get("adapters", 0)
    left = int(_SHARE_OF_FREE * site.backend.memory.memory_info().free_bytes) - later
    if left >= part:
        return part
    site.choices.note("kv_cache_memory", max(0, left), f"other processes hold the rest of the {part} bytes budgeted")
    return left


def plan_site_graphs(site: Site, shape: ModelShape) -> GraphPlan:
    def activation_bytes(tokens: int) -> int:
        return estimate_activations(site, shape, tokens, tokens)

    enforce_eager = site.args.enforce_eager
    return plan_graphs(site.backend, rows_at(site), activation_bytes, enforce_eager=enforce_eager)


def block_bytes_of(site: Site, specs: list[KVCacheSpec]) -> int:
    """Of one KV block, over all layers."""
    attention = site.backend.attention
    assert attention is not None
    return sum(layout_of(attention, spec).page_bytes * spec.num_layers for spec in specs)


def _ledger(site: Site, shape: ModelShape, before: int, weight_bytes: int) -> dict[str, int]:
    """Who owns which bytes of this process's budget; `kv_cache` is what is left for the cache.

    Activations are those of the largest step. `graphs`, where there will be any, is reserved for what they may hold.
    """
    activations = site.activation_bytes
    if activations is None:
        activations = estimate_activations(site, shape, site.settings.max_num_batched_tokens, most_logits(site))
    graphs = plan_site_graphs(site, shape)
    reserved = {"graphs": graphs.budget_bytes} if graphs.keys else {}
    if site.args.enable_lora:
        reserved["adapters"] = adapter_bytes(site, shape)
    return split_budget(site, before, weight_bytes, activations, reserved)


def most_logits(site: Site) -> int:
    """Rows of logits that the largest step has."""
    settings = site.settings
    return min(rows_at(site), max(settings.max_num_seqs, settings.max_num_batched_tokens))


def rows_at(site: Site) -> int:
    """Rows of the largest step of one token a sequence, and those of its guesses."""
    most = site.settings.max_num_seqs
    if speculation_at(site) == "off":
        return most
    return min(most_rows(most), most * (1 + site.args.num_speculative_tokens))


def estimate_activations(site: Site, shape: ModelShape, tokens: int, rows: int) -> int:
    """An estimate of what a step needs: hidden states and the two widest products of each token, and float32 logits
    (twice, for the sampler's copy) of each row."""
    itemsize = 4 if site.settings.dtype == "float32" else 2
    width = 8 * shape.hidden_size + 4 * (model_size(site.files.config, "intermediate_size") or 4 * shape.hidden_size)
    return tokens * width * itemsize + rows * shape.vocab_size * 8


def split_budget(
    site: Site, before: int, weight_bytes: int, activation_bytes: int, reserved: dict[str, int] | None = None
) -> dict[str, int]:
    """The process's budget by owner, the cache last. `before` are the bytes that were in use before loading;
    `reserved` are further owners."""
    info = site.backend.memory.memory_info()
    budget = int(site.settings.memory_utilization * info.usable_bytes)
    base = min(before, budget)
    return {
        "usable": info.usable_bytes,
        "budget": budget,
        "process_base": base,
        "weights": weight_bytes,
        "activations": activation_bytes,
        **(reserved or {}),
        "kv_cache": budget - base - weight_bytes - activation_bytes - sum((reserved or {}).values()),
    }


def engine_config(site: Site, vocab_size: int, max_model_len: int, num_blocks: int) -> EngineConfig:
    args, settings = site.args, site.settings
    values: dict[str, Any] = {name: getattr(args, name) for name in _UNCHANGED}
    speculation, reason = choose_speculation(site)
    if args.speculation == "auto":
        site.choices.note("speculation", speculation, reason)
    return EngineConfig(
        model=args.model,
        model_path=site.files.path,
        served_model_name=args.served_model_name or site.files.name,
        device=site.selected.device,
        plugin=site.selected.plugin.label,
        dtype=settings.dtype,
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        num_blocks=num_blocks,
        quantization=None if args.quantization == "auto" else args.quantization,
        kv_cache_dtype=settings.kv_dtype if site.backend.runtime is None else "",
        enable_lora=args.enable_lora,
        max_loras=args.max_loras if args.enable_lora else 0,
        max_lora_rank=args.max_lora_rank if args.enable_lora else 0,
        max_cpu_loras=max_cpu_loras(site),
        lora_root=args.lora_root,
        speculation=speculation,
        copies_blocks=site.backend.runtime is None or runtime_copies_blocks(site.backend.runtime),
        choices=site.choices.made,
        **values,
    )
