"""Memory for KV blocks: the caches of the device, the tiers below them, and what a block on disk must agree on."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from enginecore._version import __version__
from enginecore.config import EngineArgs, EngineConfig
from enginecore.device import CONTRACT_VERSION, Backend, KVCacheLayout, KVCacheSpec
from enginecore.device.limits import memory_limit
from enginecore.errors import ParameterError, UnsupportedError
from enginecore.kvcache.disk import DiskTier
from enginecore.kvcache.host import HostTier
from enginecore.kvcache.lane import Results, ThreadLane
from enginecore.kvcache.tiers import BlockMover, Tiers
from enginecore.models.inspect import ModelShape
from enginecore.models.kv_layout import LATENT, layout_of
from enginecore.models.store import ModelFiles
from enginecore.runner.blocks import PagedMover, RuntimeMover, runtime_moves_blocks
from enginecore.scheduler import Scheduler

if TYPE_CHECKING:
    from enginecore.engine.site import Site

logger = logging.getLogger("enginecore.engine")

#: Bytes that a folder may hold when nothing is said about it.
DEFAULT_DISK_SIZE = 10 * 2**30
#: Changes whenever what is in a block's file does, for the same model and backend.
FORMAT = 1
_READ_BYTES = 1 << 22


def allocate_caches(
    backend: Backend, shape: ModelShape, specs: list[KVCacheSpec], num_blocks: int
) -> list[torch.Tensor]:
    """One cache for each attention call, in the order of the calls."""
    assert backend.attention is not None
    pools = {}
    for spec in specs:
        layout, key = layout_of(backend.attention, spec), (spec.num_kv_heads, spec.head_size, spec.kind == LATENT)
        pools[key] = backend.memory.allocate_kv(layout, num_blocks, spec.num_layers)
    taken = {key: iter(pool) for key, pool in pools.items()}
    keys = [(call.num_kv_heads, call.head_size, call.latent is not None) for call in shape.calls]
    return [next(taken[key]) for key in keys]


def check_tiers(site: Site) -> None:
    """Refuse what cannot be opened, before the weights are read. Raises UnsupportedError or ParameterError."""
    args, runtime = site.args, site.backend.runtime
    limit = memory_limit()
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    most = min(physical, int(limit.value)) if limit is not None else physical
    if args.kv_host_memory is not None and args.kv_host_memory > most:
        raise ParameterError(
            f"kv_host_memory asks for {args.kv_host_memory} bytes; this machine has {most}", param="kv_host_memory",
            fix="lower kv_host_memory",
        )  # fmt: skip
    wanted = args.kv_host_memory is not None or args.kv_disk is not None
    if wanted and runtime is not None and not runtime_moves_blocks(runtime):
        raise UnsupportedError(
            f"{site.selected.device} ({site.selected.plugin.label}) keeps its KV cache to itself",
            reasons=("it does not give out blocks (export_block, import_block)",),
            fix="leave kv_host_memory and kv_disk out",
        )


def open_tiers(site: Site, config: EngineConfig, caches: list[torch.Tensor], scheduler: Scheduler) -> Tiers | None:
    """The tiers that the arguments ask for, None for none. A folder that cannot be used is a warning.

    Raises ParameterError when host memory holds not one block.
    """
    args = site.args
    if args.kv_host_memory is None and args.kv_disk is None:
        return None
    block_bytes = _block_bytes(site, config, caches)
    slots = config.num_blocks
    if args.kv_host_memory is not None:
        slots = args.kv_host_memory // block_bytes
    elif config.max_model_len // config.block_size < slots:
        slots = config.max_model_len // config.block_size  # one sequence at a time passes through on its way to disk
    if slots < 1:
        raise ParameterError(
            f"kv_host_memory has {args.kv_host_memory} bytes; one block has {block_bytes}", param="kv_host_memory",
            fix="raise it or lower block_size",
        )  # fmt: skip
    disk = _open_disk(args, identity(site, config, caches))
    if disk is None and args.kv_host_memory is None:
        return None
    results = Results()
    prepare = lambda: site.backend.set_device(site.selected.index)  # noqa: E731
    lanes = [
        ThreadLane(f"enginecore-kv-{name}", results, prepare)
        for name in (("copy",) if disk is None else ("copy", "read", "write"))
    ]
    host = f"{slots} blocks ({slots * block_bytes} bytes) of host memory"
    logger.info("KV blocks also go to %s%s", host, "" if disk is None else f" and to {disk.folder}")
    mover = _mover(site, config, caches, slots)
    return Tiers(mover, scheduler.pool, HostTier(slots), results, lanes[0], disk, *lanes[1:])


def _block_bytes(site: Site, config: EngineConfig, caches: list[torch.Tensor]) -> int:
    runtime = site.backend.runtime
    if runtime is None:
        return sum(layout.page_bytes for layout in _layouts(site, config, caches))
    return len(runtime.export_block(0))


def _layouts(site: Site, config: EngineConfig, caches: list[torch.Tensor]) -> list[KVCacheLayout]:
    """The layout of each cache, told by its shape."""
    attention = site.backend.attention
    assert attention is not None
    specs: list[KVCacheSpec] = site.kv_specs
    by_shape = {}
    for spec in specs:
        layout = layout_of(attention, spec)
        by_shape[tuple(layout.shape_for(config.num_blocks)), layout.dtype] = layout
    return [by_shape[tuple(cache.shape), str(cache.dtype).removeprefix("torch.")] for cache in caches]


def _mover(site: Site, config: EngineConfig, caches: list[torch.Tensor], slots: int) -> BlockMover:
    if site.backend.runtime is not None:
        return RuntimeMover(site.backend.runtime, slots)
    return PagedMover(site.backend, caches, _layouts(site, config, caches), slots)


def _open_disk(args: EngineArgs, model: str) -> DiskTier | None:
    if args.kv_disk is None:
        return None
    try:
        return DiskTier(Path(args.kv_disk).expanduser(), model, args.kv_disk_size or DEFAULT_DISK_SIZE)
    except OSError as error:
        logger.warning("KV blocks are not kept on disk: %s cannot be used: %s", args.kv_disk, error)
        return None


# ---- identity --------------------------------------------------------------------------------------------------------


def identity(site: Site, config: EngineConfig, caches: list[torch.Tensor]) -> str:
    """Names the folder of blocks that this engine may use: all that their bytes depend on beside tokens, salt and
    adapter, which are in the blocks' own names."""
    layouts = [] if site.backend.runtime is not None else _layouts(site, config, caches)
    depends_on: dict[str, Any] = {
        "format": FORMAT,
        "version": __version__,
        "contract": CONTRACT_VERSION,
        "plugin": site.selected.plugin.label,
        "device": config.device,
        "isa": site.backend.capabilities.isa,
        "options": site.args.device_options,
        "weights": [_digest(Path(path), site.args.kv_disk) for path in _inputs(site.files)],
        "config": site.files.config,
        "dtype": config.dtype,
        "quantization": config.quantization,
        "fuse": config.fuse,
        "block_size": config.block_size,
        "layouts": [(layout.shape, layout.dtype, layout.page_bytes) for layout in layouts],
    }
    text = json.dumps(depends_on, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _inputs(files: ModelFiles) -> list[str]:
    """The weights, and the code that comes with the model where it may run."""
    code = sorted(Path(files.path).glob("*.py")) if files.trust_remote_code else []
    return [*files.weights, *map(str, code)]


def _digest(path: Path, folder: str | None) -> str:
    """sha256 of a file. It is remembered in the tier's folder for as long as the file's size, time and number stay."""
    stat = path.stat()
    key = hashlib.sha256(f"{path.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}\0{stat.st_ino}".encode()).hexdigest()
    memory = None if folder is None else Path(folder).expanduser() / "weights" / key
    if memory is not None:
        with suppress(OSError):
            found = memory.read_text()
            if len(found) == 64:
                return found
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while data := file.read(_READ_BYTES):
            digest.update(data)
    if memory is not None:
        with suppress(OSError):
            memory.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            beside = memory.with_name(f"{key}.{os.getpid()}")
            beside.write_text(digest.hexdigest())
            os.replace(beside, memory)
    return digest.hexdigest()
