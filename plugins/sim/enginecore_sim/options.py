"""What a test may ask of the simulated device."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from enginecore.errors import ParameterError

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class SimOptions:
    """Backend options, all off by default.

    raise_at_step, exit_at_step: the step (from 1) that raises SimulatedFailure or ends the process with EXIT_CODE.
    step_time_s, token_time_s: modelled time of a step and of each token in it; `execute` sleeps that long.
    output: "logits" (float32 rows, so that sampling works) or "tokens" (the greedy ids, cheaper).
    memory_bytes: size of the modelled device. bytes_per_slot: modelled cache bytes of one token.
    """

    raise_at_step: int | None = None
    exit_at_step: int | None = None
    step_time_s: float = 0.0
    token_time_s: float = 0.0
    output: str = "logits"
    memory_bytes: int = 4 * GIB
    bytes_per_slot: int = 8

    def __post_init__(self) -> None:
        if self.output not in ("logits", "tokens"):
            raise ParameterError(f"sim option output must be logits or tokens, got {self.output!r}", param="output")
        for name in ("step_time_s", "token_time_s"):
            if not 0 <= getattr(self, name) < 3600:
                raise ParameterError(
                    f"sim option {name} must be 0 to 3600 seconds, got {getattr(self, name)}", param=name
                )
        for name in ("memory_bytes", "bytes_per_slot"):
            if getattr(self, name) < 1:
                raise ParameterError(f"sim option {name} must be positive, got {getattr(self, name)}", param=name)

    @classmethod
    def of(cls, options: dict[str, Any]) -> SimOptions:
        """From a backend's options; ParameterError for a name that does not exist."""
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise ParameterError(f"sim has no option {', '.join(unknown)}; it has {', '.join(known)}", param=unknown[0])
        return cls(**options)
