"""The op part of the contract: a table from op name to implementation. Names and signatures are in `enginecore.ops`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from enginecore.device.capabilities import Verdict, VerdictStatus
from enginecore.device.contract import Contract


@dataclass(frozen=True, kw_only=True)
class OpQuery:
    """What is fixed about a use of an op: its dtype ("bfloat16") and named sizes or settings."""

    op: str
    dtype: str
    attributes: dict[str, Any] = field(default_factory=dict)


def _always(query: OpQuery) -> Verdict:
    return Verdict(VerdictStatus.SUPPORTED)


@dataclass(frozen=True)
class Impl:
    """One implementation: `run` follows the op's schema; `supports` is asked once for each use, never in a hot path.

    `build_errors` are what `run` raises, before it has touched anything, when its kernel cannot be built on this
    machine: the core then runs the torch reference.
    """

    run: Callable[..., Any]
    supports: Callable[[OpQuery], Verdict] = _always
    name: str = ""
    build_errors: tuple[type[BaseException], ...] = ()


class OpTable(Contract):
    @abstractmethod
    def get(self, op: str) -> Impl | None:
        """The implementation of `op`, or None: then the core runs its torch reference on the same device."""
