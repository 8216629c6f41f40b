"""What becomes of a step whose device ran out of memory: its requests end with an error, everyone else goes on."""

from __future__ import annotations

import logging

from enginecore.errors import OutOfDeviceMemory
from enginecore.request import EngineOutput
from enginecore.scheduler import Scheduler
from enginecore.scheduler.lookahead import Flight

logger = logging.getLogger("enginecore.engine")


def lose_step(
    scheduler: Scheduler, flight: Flight, error: OutOfDeviceMemory, ledger: dict[str, int]
) -> list[EngineOutput]:
    """End every request that still has a part in the step. Nothing of it was booked: its blocks are free again, none
    of them was published as a cached prefix, and requests that wait are scheduled as if it had not been. A step that
    was planned on top of it goes on without them."""
    owners = ", ".join(f"{name} {size}" for name, size in ledger.items()) or "empty"
    logger.error("%s. The ledger, in bytes: %s", error, owners)
    lost = scheduler.lose(flight)
    return [EngineOutput(request_id, [], finish_reason="error", error=str(error)) for request_id in lost]
