"""What a test or a simulation may ask of the simulated device."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from enginecore.errors import ParameterError

from enginecore_sim.profiles import DeviceProfile, find_profile

GIB = 2**30
OUTPUTS = ("logits", "tokens", "hash")


@dataclass(frozen=True, kw_only=True)
class SimOptions:
    """Backend options, all off by default.

    raise_at_step, exit_at_step: the step (from 1) that raises SimulatedFailure or ends the process with EXIT_CODE.
    step_time_s, token_time_s: modelled time of a step and of each token in it.
    profile: the device whose roofline gives the time of a step instead, and memory (see `profiles.py`);
    tensor_parallel: so many of them act as one; compute_efficiency, bandwidth_efficiency: share of the peaks reached.
    output: "logits" (float32 rows, so that sampling works), "tokens" (the greedy ids, cheaper) or "hash" (ids that
    depend on the token before and its position only: nothing goes through the cache or is checked, which is cheapest).
    memory_bytes: size of the modelled device. bytes_per_slot: modelled cache bytes of one token, without a profile.
    """

    raise_at_step: int | None = None
    exit_at_step: int | None = None
    step_time_s: float = 0.0
    token_time_s: float = 0.0
    profile: str | None = None
    tensor_parallel: int = 1
    compute_efficiency: float = 1.0
    bandwidth_efficiency: float = 1.0
    output: str = "logits"
    memory_bytes: int | None = None
    bytes_per_slot: int = 8

    def __post_init__(self) -> None:
        if self.output not in OUTPUTS:
            raise ParameterError(f"sim option output must be {', '.join(OUTPUTS)}, got {self.output!r}", param="output")
        for name in ("step_time_s", "token_time_s"):
            self._check(name, "0 to 3600 seconds", 0, 3600)
        for name in ("compute_efficiency", "bandwidth_efficiency"):
            self._check(name, "above 0 and at most 1", 1e-6, 1)
        for name in ("memory_bytes", "bytes_per_slot", "tensor_parallel"):
            if getattr(self, name) is not None:
                self._check(name, "a positive integer", 1, 2**62, integer=True)
        device = self.device
        if self.tensor_parallel > 1 and (device is None or device.link_bytes_per_s is None):
            where = "needs a profile" if device is None else f"needs a link, and {device.name} has none"
            raise ParameterError(f"sim option tensor_parallel {where}", param="tensor_parallel")

    def _check(self, name: str, what: str, low: float, high: float, *, integer: bool = False) -> None:
        value = getattr(self, name)
        kinds = int if integer else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds) or not low <= value <= high:
            raise ParameterError(f"sim option {name} must be {what}, got {value!r}", param=name)

    @property
    def device(self) -> DeviceProfile | None:
        return None if self.profile is None else find_profile(self.profile)

    @property
    def total_memory(self) -> int:
        """Bytes of the modelled device, or of the group that acts as one."""
        if self.memory_bytes is not None:
            return self.memory_bytes
        return 4 * GIB if self.device is None else self.device.memory_bytes * self.tensor_parallel

    @classmethod
    def of(cls, options: dict[str, Any]) -> SimOptions:
        """From a backend's options; ParameterError for a name that does not exist."""
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise ParameterError(f"sim has no option {', '.join(unknown)}; it has {', '.join(known)}", param=unknown[0])
        return cls(**options)
