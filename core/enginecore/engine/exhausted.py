"""What becomes of a step whose device ran out of memory: its requests end with an error, everyone else goes on."""

from __future__ import annotations

import logging

from enginecore.errors import OutOfDeviceMemory
from enginecore.plan import StepPlan
from enginecore.request import EngineOutput
from enginecore.scheduler import Scheduler

logger = logging.getLogger("enginecore.engine")


def lose_step(
    scheduler: Scheduler, plan: StepPlan, error: OutOfDeviceMemory, ledger: dict[str, int]
) -> list[EngineOutput]:
    """End every request that had a part in `plan`. Nothing of the step was booked: its blocks are free again, none of
    them was published as a cached prefix, and requests that wait are scheduled as if it had not been."""
    owners = ", ".join(f"{name} {size}" for name, size in ledger.items()) or "empty"
    logger.error("%s. The ledger, in bytes: %s", error, owners)
    sequences = [scheduler.running.sequence(slot) for slot in plan.slots_N.tolist()]
    lost = scheduler.abort(dict.fromkeys(sequence.request_id for sequence in sequences), reason="error")
    return [EngineOutput(request_id, [], finish_reason="error", error=str(error)) for request_id in lost]
