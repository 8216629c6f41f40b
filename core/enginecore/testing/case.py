"""One conformance case, what it is given, and the ways in which it can end."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from enginecore.device import AttentionBackend, AttentionQuery, Backend, MemoryManager, OpQuery, check_attention
from enginecore.testing.profile import ConformanceProfile, id_matches
from enginecore.testing.tolerance import deviation

if TYPE_CHECKING:
    import torch


class Outcome(str, Enum):
    """`FALSE_CLAIM`: the backend said that it can, and then refused, or ignored what it was asked."""

    PASS = "pass"
    FAIL = "fail"
    CRASH = "crash"
    HANG = "hang"
    DECLARED_UNSUPPORTED = "declared-unsupported"
    FALSE_CLAIM = "false-claim"

    @property
    def ok(self) -> bool:
        return self in (Outcome.PASS, Outcome.DECLARED_UNSUPPORTED)


class DeclaredUnsupported(Exception):
    """The backend says that it cannot do what this case needs; the message holds its reasons."""


class FalseClaim(AssertionError):
    """The backend contradicts its own claim."""


class ProcessDied(Exception):
    """A process that the case has started ended in the middle of its work."""


class ProcessHung(Exception):
    """A process that the case has started did not answer in time; it was killed."""


class CaseContext:
    """What a case works with: the backend, its profile, a generator seeded by the case's id, and the judgements."""

    def __init__(self, case: Case, backend: Backend, profile: ConformanceProfile, options: dict[str, Any]) -> None:
        import torch

        self.case = case
        self.backend = backend
        self.profile = profile
        self.options = options
        self.device: torch.device = backend.torch_device()
        self.metrics: dict[str, float] = {}
        self.rng = torch.Generator().manual_seed(zlib.crc32(case.id.encode()))

    # What the backend offers -------------------------------------------------------------------------------------

    @property
    def attention(self) -> AttentionBackend:
        if self.backend.attention is None:
            raise DeclaredUnsupported("no attention: the backend runs whole models through its runtime")
        return self.backend.attention

    @property
    def memory(self) -> MemoryManager:
        return self.backend.memory

    def require_attention(self, query: AttentionQuery) -> None:
        """Go on only when the backend claims `query`; its two ways of claiming must not contradict each other."""
        verdict = self.attention.supports(query)
        missing = check_attention(self.backend.capabilities, query)
        if verdict and missing:
            raise FalseClaim(f"supports() accepts {query} but the capabilities do not: " + "; ".join(missing))
        if not verdict:
            self.unsupported("; ".join(verdict.reasons) or "supports() refused and gave no reason")

    def require_op(self, op: str, dtype: str) -> Callable[..., Any]:
        """The backend's implementation of `op`, or DeclaredUnsupported when it leaves this dtype to the reference.

        The question is the engine's own, an op and a dtype: a yes covers every shape."""
        self.require_dtype(dtype)
        table = self.backend.ops
        impl = table.get(op) if table is not None else None
        if impl is None:
            raise DeclaredUnsupported(f"{op} is not in the op table: the torch reference runs instead")
        verdict = impl.supports(OpQuery(op=op, dtype=dtype))
        if not verdict:
            self.unsupported("; ".join(verdict.reasons) or f"{op} refuses {dtype} and gave no reason")
        return impl.run

    def require_dtype(self, dtype: str) -> None:
        if dtype not in self.backend.capabilities.dtypes:
            self.unsupported(f"dtype {dtype} is not one of {sorted(self.backend.capabilities.dtypes)}")

    def unsupported(self, reason: str) -> None:
        raise DeclaredUnsupported(reason)

    # Judgements --------------------------------------------------------------------------------------------------

    def check(self, condition: Any, message: str) -> None:
        if not condition:
            raise AssertionError(message)

    def close(
        self, actual: torch.Tensor, expected: torch.Tensor, dtype: str, what: str, *, op: str = "", slack: float = 1.0
    ) -> None:
        """`actual` equals the float64 `expected` within the tolerance of `op` (the case's own) and `dtype`."""
        tolerance = self.profile.tolerance(op or self.case.op, dtype) * slack
        found = deviation(actual, expected)
        self.check(found.within(tolerance), f"{what}: {found.describe(tolerance)}")

    def check_floors(self) -> None:
        """Hold what was measured to the speeds that the plugin promises."""
        for floor in self.profile.floors:
            if not id_matches(self.case.id, floor.case):
                continue
            measured = ", ".join(sorted(self.metrics)) or "nothing"
            self.check(floor.metric in self.metrics, f"a floor for {floor.metric!r}; this case measures {measured}")
            value = self.metrics[floor.metric]
            told = f"{floor.metric} is {value:.3g}, below the declared floor of {floor.at_least:.3g}"
            self.check(value >= floor.at_least, told)

    # Data --------------------------------------------------------------------------------------------------------

    def normal(self, *shape: int, dtype: str = "float32", scale: float = 1.0) -> torch.Tensor:
        """Standard normal numbers on the device, the same on every run."""
        import torch

        host = torch.randn(*shape, generator=self.rng) * scale
        return host.to(getattr(torch, dtype)).to(self.device)

    def uniform(self, *shape: int) -> torch.Tensor:
        import torch

        return torch.rand(*shape, generator=self.rng, dtype=torch.float64)

    def permutation(self, count: int) -> list[int]:
        import torch

        order: list[int] = torch.randperm(count, generator=self.rng).tolist()
        return order

    def integer(self, low: int, high: int) -> int:
        """A number from low to high, both included."""
        import torch

        return int(torch.randint(low, high + 1, (1,), generator=self.rng))


@dataclass(frozen=True)
class Case:
    """`id` is "L1/op/name". Cases with the same level and op share a process. `seconds` is the time limit."""

    level: int
    op: str
    name: str
    run: Callable[[CaseContext], None] = field(compare=False)
    seconds: float = 60.0
    isolated: bool = False

    @property
    def id(self) -> str:
        return f"L{self.level}/{self.op}/{self.name}"

    @property
    def group(self) -> str:
        return self.id if self.isolated else f"L{self.level}/{self.op}"


@dataclass(frozen=True, kw_only=True)
class CaseResult:
    """How a case ended. `message` explains anything but a plain pass; `gap` is the declared gap that excuses it;
    `expires` (ISO date) is the last day on which it is excused; `metrics` is what it measured."""

    case_id: str
    outcome: Outcome
    message: str = ""
    seconds: float = 0.0
    gap: str | None = None
    expires: str | None = None
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def excuse(self) -> str:
        """The message, with the day until which it is accepted where there is one."""
        if self.outcome is Outcome.DECLARED_UNSUPPORTED and self.expires:
            return f"{self.message} (until {self.expires})"
        return self.message
