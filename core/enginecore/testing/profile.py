"""What a plugin declares about its own conformance: tolerances, gaps that are known, and speeds that it promises."""

from __future__ import annotations

import datetime
import fnmatch
from dataclasses import dataclass, field

from enginecore.testing.tolerance import TOLERANCES


def id_matches(case_id: str, pattern: str) -> bool:
    """Whether the whole id matches `pattern`, where * and ? are wild and brackets, which ids contain, are plain."""
    return fnmatch.fnmatchcase(case_id, pattern.replace("[", "[[]"))


@dataclass(frozen=True, kw_only=True)
class DeclaredGap:
    """Cases that are known not to pass. `cases` is a pattern over whole ids ("L1/attention/*alibi*[float16]").

    A gap needs a reason that a user can read and a date (ISO, "2027-01-31") after which it no longer excuses anything.
    The cases still run: one that passes is reported as such, so that a gap does not outlive its cause.
    """

    cases: str
    reason: str
    expires: str

    def __post_init__(self) -> None:
        if not self.reason.strip():
            raise ValueError(f"the gap {self.cases!r} needs a reason")
        datetime.date.fromisoformat(self.expires)

    def covers(self, case_id: str) -> bool:
        return id_matches(case_id, self.cases)

    def expired(self, today: datetime.date) -> bool:
        return today > datetime.date.fromisoformat(self.expires)


@dataclass(frozen=True, kw_only=True)
class PerformanceFloor:
    """A promise: `metric` of `case` is at least `at_least`, as a share of what the device was measured to reach."""

    case: str
    metric: str
    at_least: float


@dataclass(frozen=True, kw_only=True)
class ConformanceProfile:
    """Returned by the hook `enginecore_conformance_profile`; every field has a working default.

    `tolerances` maps a dtype ("bfloat16") or an op and dtype ("attention:float16") to the largest NMSE, in place of
    `enginecore.testing.tolerance.TOLERANCES`. `logprob_tolerance` bounds parity of models in float32
    (absolute, natural log).
    `timeout_scale` stretches every time limit, for devices that compile on first use.
    `skips_expire` (ISO date): until that day, cases of what the backend does not claim are skipped for the reason that
    it gives; from the next day on they fail, until somebody has looked again. A plugin of contract 1.1 or later needs
    it, or a gap, for every case that it skips.
    """

    tolerances: dict[str, float] = field(default_factory=dict)
    gaps: tuple[DeclaredGap, ...] = ()
    floors: tuple[PerformanceFloor, ...] = ()
    logprob_tolerance: float = 1e-3
    timeout_scale: float = 1.0
    skips_expire: str = ""

    def __post_init__(self) -> None:
        if self.skips_expire:
            datetime.date.fromisoformat(self.skips_expire)

    def tolerance(self, op: str, dtype: str) -> float:
        for key in (f"{op}:{dtype}", dtype):
            if key in self.tolerances:
                return self.tolerances[key]
        return TOLERANCES[dtype]

    def gap_for(self, case_id: str) -> DeclaredGap | None:
        return next((gap for gap in self.gaps if gap.covers(case_id)), None)
