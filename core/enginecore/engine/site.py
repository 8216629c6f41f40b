"""What building an engine begins with: the device, the model's files and the resolved settings. No weights, no
memory."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from enginecore.clock import Clock, VirtualClock
from enginecore.config import EngineArgs
from enginecore.device import Backend, KVCacheSpec
from enginecore.device.select import SelectedDevice, create_backend, select_device
from enginecore.engine.nearest import nearest_settings
from enginecore.engine.resolve import Choices, Settings, resolve_settings
from enginecore.errors import UnsupportedError
from enginecore.models.adapter_slots import AdapterSlots
from enginecore.models.inspect import ModelShape
from enginecore.models.quantization import quantization_reasons
from enginecore.models.store import ModelFiles, resolve_model

logger = logging.getLogger("enginecore.engine")


@dataclass
class Site:
    """What the building steps share."""

    args: EngineArgs
    files: ModelFiles
    selected: SelectedDevice
    backend: Backend
    settings: Settings
    choices: Choices
    kv_specs: list[KVCacheSpec] = field(default_factory=list)
    #: What the largest step took beside weights and cache, None as long as it is not measured.
    activation_bytes: int | None = None
    loaded_bytes: int = 0
    #: The places for adapters, where there are any.
    adapter_slots: AdapterSlots | None = None


def open_site(args: EngineArgs, clock: Clock | None, chosen: Callable[[], SelectedDevice] | None = None) -> Site:
    """Choose the device (or wait for `chosen`), find the model and resolve the settings; no weights, no memory."""
    choices = Choices()
    selected = chosen() if chosen is not None else select_device(args.device)
    if args.device == "auto":
        choices.note("device", selected.full_name, selected.probe.reason if selected.probe else "selected")
    backend = create_backend(selected, num_threads=args.num_threads, options=args.device_options)
    backend.set_device(selected.index)
    if isinstance(clock, VirtualClock) and (backend.runtime is None or backend.runtime.step_seconds() is None):
        raise UnsupportedError(
            f"{selected.device} ({selected.plugin.label}) models no time as it is, so time cannot be virtual",
            fix="name what a simulated device shall model, such as --profile h100",
        )
    files = _find_model(args, backend)
    settings = resolve_settings(args, selected, files.config, backend.capabilities.dtypes, choices)
    return Site(args, files, selected, backend, settings, choices)


def _find_model(args: EngineArgs, backend: Backend) -> ModelFiles:
    """The model's files, unless the device brings a model of that name itself."""
    config = backend.runtime.model_config(args.model) if backend.runtime is not None else None
    if config is not None:
        return ModelFiles(args.model, args.model, "runtime", config)
    return resolve_model(
        args.model, progress=logger.info, allow_pickle=args.allow_pickle, trust_remote_code=args.trust_remote_code
    )


def refuse_unsupported(site: Site, shape: ModelShape) -> None:
    """All reasons at once, before weights are read."""
    capabilities, attention = site.backend.capabilities, site.backend.attention
    assert attention is not None
    reasons: list[str] = []
    if site.settings.dtype not in capabilities.dtypes:
        reasons.append(f"dtype {site.settings.dtype} is not one of {sorted(capabilities.dtypes)}")
    quantization = None if site.args.quantization == "auto" else site.args.quantization
    reasons += quantization_reasons(site.files, quantization, capabilities)
    reasons += shape.latent_reasons(site.settings.kv_dtype)
    for query in shape.attention_queries(site.args.block_size, site.settings.kv_dtype):
        unknown = query.features - capabilities.features
        known = replace(query, features=query.features & capabilities.features)
        reasons += [f"feature {name} is not supported" for name in sorted(unknown)]
        reasons += attention.supports(known).reasons
    if reasons:
        raise UnsupportedError(
            f"{site.selected.device} ({site.selected.plugin.label}) cannot run {site.files.name}",
            reasons=tuple(dict.fromkeys(reasons)),
            fix=nearest_settings(capabilities, site.settings.dtype, site.args.block_size, site.settings.kv_dtype),
        )
