"""Starting whatever engine a model needs: one that generates text, or one for pooling."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from enginecore.config import EngineArgs, ReadyInfo
from enginecore.device.select import SelectedDevice
from enginecore.engine.build import build_at, plan_at
from enginecore.engine.build_pooling import build_pooling, plan_pooling
from enginecore.engine.site import open_site
from enginecore.models.sentence import pooling_model


def start_engine(args: EngineArgs, chosen: Callable[[], SelectedDevice] | None = None) -> tuple[Any, ReadyInfo]:
    """(an `Engine` or `PoolingEngine` that is ready to step, what was decided). Raises what `build_engine` raises.

    `chosen` waits for the device where it is being chosen already."""
    begun = time.perf_counter()
    site = open_site(args, None, chosen)
    model = pooling_model(site.files, args.runner, args.pooler_config)
    return build_at(site, None, begun) if model is None else build_pooling(site, model, begun)


def plan_start(args: EngineArgs) -> ReadyInfo:
    """What `start_engine` would decide, without reading weights or taking memory: the ledger is a prediction.

    Raises what `start_engine` raises for settings that cannot work.
    """
    begun = time.perf_counter()
    site = open_site(args, None)
    try:
        model = pooling_model(site.files, args.runner, args.pooler_config)
        return plan_at(site, begun) if model is None else plan_pooling(site, model, begun)
    finally:
        site.backend.shutdown()
