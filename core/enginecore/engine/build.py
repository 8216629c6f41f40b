"""Building an engine: device, model, memory budget, KV cache, runner. What can be refused is refused before
weights are read."""

from __future__ import annotations

import logging
import time
from functools import partial

import msgspec
import torch

from enginecore.clock import Clock
from enginecore.config import EngineArgs, EngineConfig, ReadyInfo
from enginecore.engine.account import MemoryAccount
from enginecore.engine.adapters import open_registry, open_slots, watch_modules
from enginecore.engine.engine import Engine
from enginecore.engine.graphs import capture_graphs, require_graphs
from enginecore.engine.kv_events import EventPublisher, open_publisher
from enginecore.engine.kv_transfer import allocate_caches, check_tiers, open_tiers
from enginecore.engine.overlap import choose_overlap
from enginecore.engine.resolve import (
    Choices,
    fit_blocks,
    resolve_max_model_len,
)
from enginecore.engine.site import Site, open_site, refuse_unsupported
from enginecore.engine.sizing import block_bytes_of, most_logits, plan_site_graphs, size_paged, size_runtime
from enginecore.errors import KVCacheTooSmall
from enginecore.models.inspect import inspect_meta, inspect_model
from enginecore.models.loader import load_model
from enginecore.ops.dispatch import Ops
from enginecore.parallel.executor import InprocExecutor
from enginecore.runner import ModelRunner
from enginecore.runner.adapters import RunnerAdapters
from enginecore.runner.exhausted import MemoryGuard
from enginecore.runner.model import PagedModel, RuntimeModel, StepModel
from enginecore.runner.profile import can_measure, measure_activations
from enginecore.runner.speculation import speculation_of
from enginecore.runner.transfers import StagedTransfers

logger = logging.getLogger("enginecore.engine")


def build_engine(args: EngineArgs, clock: Clock | None = None) -> tuple[Engine, ReadyInfo]:
    """An engine that is ready to step, and what was decided on the way. `clock` passes the time of steps that a
    simulated device models; a virtual one needs such a device.

    Raises ModelError, DeviceError kinds, UnsupportedError, KVCacheTooSmall or ParameterError, each with a fix.
    """
    begun = time.perf_counter()
    return build_at(open_site(args, clock), clock, begun)


def build_at(site: Site, clock: Clock | None, begun: float) -> tuple[Engine, ReadyInfo]:
    """`build_engine` for a device and a model that are found already. `begun` is when that began."""
    check_tiers(site)
    publisher = open_publisher(site.args, site.files.name)
    try:
        engine = _assemble(site, clock, publisher)
        site.backend.synchronize()  # what the device still does at start-up would make the first requests slow
    except BaseException:
        if publisher is not None:
            publisher.close()
        raise
    selected = site.selected
    ready = ReadyInfo(
        config=engine.config,
        ledger=engine.ledger,
        device_summary=f"{selected.device} ({selected.plugin.label})",
        load_seconds=time.perf_counter() - begun,
        details={
            **(selected.probe.details if selected.probe else {}),
            "batch_invariant": site.backend.capabilities.batch_invariant,
        },
        adapters=engine.list_adapters(),
    )
    return engine, ready


def _assemble(site: Site, clock: Clock | None, publisher: EventPublisher | None) -> Engine:
    backend = site.backend
    ops = Ops(backend.ops, strict=site.args.strict_ops)
    if backend.runtime is not None:
        model, config, ledger, caches = _load_runtime(site)
    else:
        model, config, ledger, caches = _load_paged(site, ops)
    slots = site.adapter_slots
    adapters = None if slots is None else RunnerAdapters(slots, config.max_num_seqs, backend.torch_device())
    runner = ModelRunner(
        model,
        device=backend.torch_device(),
        ops=ops,
        vocab_size=config.vocab_size,
        max_num_seqs=config.max_num_seqs,
        max_model_len=config.max_model_len,
        block_size=config.block_size,
        adapters=adapters,
        speculation=speculation_of(config),
    )
    worker = MemoryGuard(runner, backend)

    def release() -> None:
        if backend.graphs is not None:
            backend.graphs.release()
        backend.memory.release_kv(caches)
        backend.shutdown()

    overlap = choose_overlap(site)
    if overlap == "ahead":
        runner.look_ahead(StagedTransfers(backend))
    executor = InprocExecutor(worker, release, beside=overlap == "beside")
    store = runner.grammars.store
    engine = Engine(config, executor, clock, publisher, store, overlap=overlap != "off")
    engine.adapters = open_registry(site, config, slots, adapters, engine.scheduler)
    engine.ledger = ledger
    engine.account = MemoryAccount(ledger, site.loaded_bytes, backend.memory, caches)
    engine.use_tiers(open_tiers(site, config, caches, engine.scheduler))
    return engine


def plan_engine(args: EngineArgs) -> ReadyInfo:
    """What `build_engine` would decide, without reading weights or taking memory: the ledger is a prediction.

    Raises what `build_engine` raises for settings that cannot work.
    """
    begun = time.perf_counter()
    site = open_site(args, None)
    try:
        return plan_at(site, begun)
    finally:
        site.backend.shutdown()


def plan_at(site: Site, begun: float) -> ReadyInfo:
    """`plan_engine` for a device and a model that are found already."""
    if site.backend.runtime is not None:
        _, config, ledger = size_runtime(site)
    else:
        shape = inspect_model(site.files, site.settings.dtype)
        refuse_unsupported(site, shape)
        before = site.backend.memory.process_used_bytes()
        config, ledger, _ = size_paged(site, shape, before, shape.weight_bytes, loaded=False)
    summary = f"{site.selected.device} ({site.selected.plugin.label})"
    seconds = time.perf_counter() - begun
    return ReadyInfo(config=config, ledger=ledger, device_summary=summary, load_seconds=seconds)


def _load_runtime(site: Site) -> tuple[StepModel, EngineConfig, dict[str, int], list[torch.Tensor]]:
    runtime = site.backend.runtime
    assert runtime is not None
    require_graphs(site, "its plugin runs whole models itself")
    spec, resolved, ledger = size_runtime(site)
    runtime.load(spec, None)
    if "kv_cache" not in ledger:
        ledger["runtime"] = runtime.memory_bytes()
    return RuntimeModel(runtime), resolved, ledger, []


def _load_paged(site: Site, ops: Ops) -> tuple[StepModel, EngineConfig, dict[str, int], list[torch.Tensor]]:
    args, backend, settings = site.args, site.backend, site.settings
    memory = backend.memory
    quantization = None if args.quantization == "auto" else args.quantization
    shape, _ = inspected = inspect_meta(site.files, settings.dtype, skeleton=args.fuse)
    refuse_unsupported(site, shape)
    assert backend.attention is not None
    if reason := backend.attention.reference_reason():
        ops.note_reference("attention", reason)
    graphs = plan_site_graphs(site, shape)
    if not graphs.keys:
        require_graphs(site, graphs.reason)
    max_model_len = resolve_max_model_len(args, shape.max_positions, Choices())
    specs = shape.kv_specs(args.block_size, settings.kv_dtype)
    usable = memory.memory_info().usable_bytes
    if args.kv_cache_memory is not None and args.kv_cache_memory > usable:
        raise KVCacheTooSmall(
            f"kv_cache_memory asks for {args.kv_cache_memory} bytes; the device has {usable} usable",
            fix="lower kv_cache_memory",
        )
    explicit = args.num_blocks is not None or args.kv_cache_memory is not None
    if explicit:  # refused before the weights are read
        fit_blocks(args, max_model_len, block_bytes_of(site, specs), None, settings.max_num_seqs, Choices())

    before = memory.process_used_bytes()
    site.adapter_slots = slots = open_slots(site, shape, ops)
    load = partial(
        load_model,
        site.files,
        backend=backend,
        dtype=settings.dtype,
        fuse=args.fuse,
        ops=ops,
        max_model_len=max_model_len,
        quantization=quantization,
        adapt=slots.adapt if slots is not None else None,
        kv_dtype=settings.kv_dtype,
    )
    model = load(inspected=inspected)
    if settings.kv_dtype.startswith("float8"):
        told = f"the checkpoint's, of {model.scaled_layers} layers" if model.scaled_layers else "1"
        site.choices.note("kv_cache_scales", told, "read beside the weights" if model.scaled_layers else "none there")
    site.loaded_bytes = memory.process_used_bytes() - before
    if not explicit and can_measure(backend):
        sizes = settings.max_num_batched_tokens, most_logits(site), max_model_len
        caches = allocate_caches(backend, shape, specs, 1)
        site.activation_bytes = measure_activations(model, backend, ops, caches, *sizes)
    config, ledger, specs = size_paged(site, shape, before, model.weight_bytes, loaded=True)
    free = memory.memory_info().free_bytes
    if ledger["kv_cache"] > free:
        raise KVCacheTooSmall(
            f"the KV cache needs {ledger['kv_cache']} bytes and {free} are free: other processes hold the rest",
            fix="stop them, or lower memory_utilization, kv_cache_memory or num_blocks",
        )
    caches = allocate_caches(backend, shape, specs, config.num_blocks)
    paged = PagedModel(model, backend, caches, slots.rows if slots is not None else None)
    if slots is not None and not model.fused:
        watch_modules(slots, paged)
    if slots is None:
        paged.reload = lambda: (load(), allocate_caches(backend, shape, specs, config.num_blocks))
    graphed = capture_graphs(site, paged, graphs, ledger, config.max_model_len)
    return graphed, msgspec.structs.replace(config, choices=site.choices.made), ledger, caches
