"""The adapters of an engine: loading them while it runs, who still has one, and what serving them takes.

A name is served from when its files have been read and checked, which happens beside the steps, until it is unloaded;
sequences that have the adapter then keep it to their end. Each load has a number of its own.
"""

from __future__ import annotations

import itertools
import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import msgspec
import torch

from enginecore.adapters import AdapterInfo, AdapterKey, LoadTicket, check_adapter_name
from enginecore.config import EngineConfig
from enginecore.device import RuntimeBatch
from enginecore.engine.site import Site
from enginecore.errors import EngineCoreError, ModelError, ParameterError, UnsupportedError
from enginecore.models.adapter_files import Adapter, find_adapter, read_adapter
from enginecore.models.adapter_slots import AdapterSlots, slots_bytes
from enginecore.models.inspect import ModelShape
from enginecore.ops.dispatch import Ops
from enginecore.request import EngineRequest
from enginecore.runner.adapters import RunnerAdapters
from enginecore.runner.model import PagedModel
from enginecore.scheduler import Scheduler

logger = logging.getLogger("enginecore.engine")

#: Tokens of the step that shows which modules of a model that is not ours run once on each token.
_WATCHED_TOKENS = 3


class AdapterRegistry:
    """Names and what they stand for. Used from the engine's thread; files are read in another."""

    def __init__(self, runner: RunnerAdapters, scheduler: Scheduler, config: EngineConfig) -> None:
        self._runner, self._scheduler, self._config = runner, scheduler, config
        self._names: dict[str, AdapterInfo] = {}
        self._leaving: set[AdapterKey] = set()
        self._loads: dict[int, tuple[str, bool, Future[AdapterInfo]]] = {}
        self._read: dict[AdapterKey, Adapter] = {}
        self._tickets, self._generations = itertools.count(1), itertools.count(1)
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="enginecore-adapters")

    def names(self) -> list[AdapterInfo]:
        return list(self._names.values())

    def start(self, name: str, path: str, *, in_place: bool, root: str | None) -> int:
        """Begin to load; `state` tells how it goes on. Raises ParameterError."""
        self.drop_unused()
        check_adapter_name(name)
        for ticket in [ticket for ticket, (_, _, future) in self._loads.items() if future.done()]:
            self.state(ticket)  # whoever asked for it has not come back
        if name in (self._config.served_model_name, self._config.model):
            raise ParameterError(f"{name!r} is the model's own name", param="lora_name")
        if any(name == other for other, _, _ in self._loads.values()):
            raise ParameterError(f"the adapter {name!r} is being loaded already", param="lora_name")
        if name in self._names and not in_place:
            raise ParameterError(
                f"the adapter {name!r} is loaded already", param="lora_name",
                fix="unload it first, or load it in place (load_inplace)",
            )  # fmt: skip
        most, replaced = self._config.max_cpu_loras, name in self._names
        if len(self._runner.loaded) + len(self._loads) - replaced >= most:
            raise ParameterError(
                f"{most} adapters are loaded, those included that unfinished requests still have; no more may be",
                param="lora_name", fix="unload one, or raise max_cpu_loras",
            )  # fmt: skip
        folder = find_adapter(path, root)
        ticket, key = next(self._tickets), (name, next(self._generations))
        self._loads[ticket] = (name, in_place, self._threads.submit(self._load, key, str(folder), root))
        return ticket

    def _load(self, key: AdapterKey, path: str, root: str | None) -> AdapterInfo:
        """In the thread."""
        slots = self._runner.slots
        adapter = read_adapter(find_adapter(path, root), slots.modules, slots.max_rank, slots.dtype, root)
        self._read[key] = adapter
        return AdapterInfo(
            name=key[0], generation=key[1], path=path, sha256=adapter.sha256, rank=adapter.rank,
            num_modules=len(adapter.weights), num_bytes=adapter.nbytes, created=int(time.time()),
        )  # fmt: skip

    def state(self, ticket: int) -> LoadTicket:
        """Takes the adapter into service once it is read. A ticket that has ended is forgotten."""
        entry = self._loads.get(ticket)
        if entry is None:
            return LoadTicket(problem="there is no such load")
        name, in_place, future = entry
        if not future.done():
            return LoadTicket()
        del self._loads[ticket]
        error = future.exception()
        if error is not None:
            if not isinstance(error, EngineCoreError):
                logger.error("the adapter %s cannot be read", name, exc_info=error)
            told = str(error) if isinstance(error, EngineCoreError) else f"{type(error).__name__}: {error}"
            return LoadTicket(problem=told)
        info = future.result()
        if in_place and name in self._names:
            self.unload(name)
        self._names[name] = info
        self._runner.loaded[info.key] = self._read.pop(info.key)
        logger.info("adapter %s: %d modules of rank %d from %s", name, info.num_modules, info.rank, info.path)
        return LoadTicket(info=info)

    def load(self, name: str, path: str, *, in_place: bool = False, root: str | None = None) -> AdapterInfo:
        """`start`, and wait. Raises what is wrong with the adapter."""
        ticket = self.start(name, path, in_place=in_place, root=root)
        future = self._loads[ticket][2]
        try:
            future.result()
        finally:
            told = self.state(ticket)
        assert told.info is not None
        return told.info

    def unload(self, name: str) -> int:
        """The name is not served any more. How many sequences keep the adapter until they end. ParameterError for an
        unknown name."""
        info = self._names.pop(name, None)
        if info is None:
            raise ParameterError(f"there is no adapter {str(name)[:128]!r}", param="lora_name")
        self._leaving.add(info.key)
        left = self._scheduler.num_with_adapter(info.key)
        self.drop_unused()
        return left

    def drop_unused(self) -> None:
        """Let go of what was unloaded and has no sequence left."""
        for key in [key for key in self._leaving if not self._scheduler.num_with_adapter(key)]:
            self._leaving.discard(key)
            self._runner.loaded.pop(key, None)
            if self._scheduler.adapters is not None:
                self._scheduler.adapters.forget(key)

    def problem(self, request: EngineRequest) -> str | None:
        """Why a request cannot have its adapter."""
        if request.adapter is None or request.adapter in self._runner.loaded:
            return None
        return f"the adapter {request.adapter[0]!r} has been unloaded"

    def figures(self) -> tuple[int, int]:
        """(steps with adapters, adapters put into slots)."""
        places = self._scheduler.adapters
        return self._runner.num_steps, places.num_placed if places is not None else 0

    def shutdown(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


class AdapterCalls:
    """A base of `Engine`: what a frontend may ask about adapters."""

    #: None where the engine was built without adapters.
    adapters: AdapterRegistry | None = None
    config: EngineConfig

    def _registry(self) -> AdapterRegistry:
        if self.adapters is None:
            raise UnsupportedError("this engine serves no adapters", fix="start it with --enable-lora")
        return self.adapters

    def load_adapter(self, name: str, path: str, in_place: bool = False) -> AdapterInfo:
        """Load an adapter and wait for it: for an engine in the caller's process. Raises ParameterError, ModelError or
        UnsupportedError with all reasons; the engine is then as it was."""
        return self._registry().load(name, path, in_place=in_place, root=self.config.lora_root)

    def start_loading_adapter(self, name: str, path: str, in_place: bool = False) -> int:
        """A ticket for `adapter_load`. With a `lora_root` nothing outside of it is read."""
        return self._registry().start(name, path, in_place=in_place, root=self.config.lora_root)

    def adapter_load(self, ticket: int) -> dict[str, Any]:
        """How a load stands, as the members of a `LoadTicket`."""
        told: dict[str, Any] = msgspec.to_builtins(self._registry().state(ticket))
        return told

    def unload_adapter(self, name: str) -> int:
        """How many sequences still run on with the adapter."""
        return self._registry().unload(name)

    def list_adapters(self) -> list[AdapterInfo]:
        return [] if self.adapters is None else self.adapters.names()

    def _adapter_problem(self, request: EngineRequest) -> str | None:
        if request.adapter is None:
            return None
        return "this engine serves no adapters" if self.adapters is None else self.adapters.problem(request)


# ---- when an engine is built -----------------------------------------------------------------------------------------


def refuse_for_runtime(site: Site) -> None:
    """A device that runs whole models has no modules of ours."""
    if site.args.enable_lora:
        raise UnsupportedError(
            f"{site.selected.device} ({site.selected.plugin.label}) runs whole models itself, without adapters",
            fix="run without --enable-lora",
        )


def max_cpu_loras(site: Site) -> int:
    args = site.args
    return (args.max_cpu_loras or 2 * args.max_loras) if args.enable_lora else 0


def adapter_bytes(site: Site, shape: ModelShape) -> int:
    """What adapters take of the device's memory: the slots and, where that is the same memory, those that wait."""
    args = site.args
    if not args.enable_lora:
        return 0
    count = args.max_loras + (max_cpu_loras(site) if site.backend.capabilities.unified_memory else 0)
    return slots_bytes(shape.linears, count, args.max_lora_rank, 4 if shape.dtype == "float32" else 2)


def open_slots(site: Site, shape: ModelShape, ops: Ops) -> AdapterSlots | None:
    """The places for adapters in a model that is about to be loaded. UnsupportedError where it can have none."""
    args = site.args
    if not args.enable_lora:
        return None
    if not shape.linears:
        raise UnsupportedError(f"{shape.model_class} has no linear modules that can be adapted")
    return AdapterSlots(
        shape.linears, slots=args.max_loras, rank=args.max_lora_rank, dtype=site.settings.dtype,
        device=site.backend.torch_device(), ops=ops,
    )  # fmt: skip


def watch_modules(slots: AdapterSlots, model: PagedModel) -> None:
    """Find out, by a step that writes nothing, which modules of a model that is not ours can be adapted."""
    count, device = _WATCHED_TOKENS, "cpu"
    positions = torch.arange(count, device=device).numpy()
    batch = RuntimeBatch(
        token_ids=positions * 0,
        positions=positions,
        query_start_loc=torch.tensor([0, count], dtype=torch.int32).numpy(),
        seq_lens=torch.tensor([count], dtype=torch.int32).numpy(),
        block_table=torch.zeros(1, 1, dtype=torch.int32).numpy(),
        slot_mapping=positions * 0 - 1,
        logits_indices=positions,
    )
    slots.keep_per_token(lambda: model.execute(batch), count)


def open_registry(
    site: Site, config: EngineConfig, slots: AdapterSlots | None, runner: RunnerAdapters | None, scheduler: Scheduler
) -> AdapterRegistry | None:
    """The registry with the adapters that the settings name. Raises what is wrong with one of them, naming it."""
    if slots is None or runner is None:
        return None
    registry = AdapterRegistry(runner, scheduler, config)
    for name, path in site.args.lora_modules.items():
        _load_first(registry, name, path)
    return registry


def _load_first(registry: AdapterRegistry, name: str, path: str) -> None:
    try:
        registry.load(name, path)
    except EngineCoreError as error:
        raise ModelError(f"adapter {name!r} ({path}): {error.message}", fix=error.fix) from error
