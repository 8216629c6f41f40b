"""The graph part of the contract (an optional slot of a backend): capture a step once, replay it without the host."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from enginecore.device.contract import Contract


@dataclass(frozen=True, order=True)
class GraphKey:
    """The shape a graph is captured for: tokens in the step, sequences, and tokens a sequence when uniform (else 0)."""

    num_tokens: int
    num_seqs: int
    uniform_query_len: int = 0


class GraphRunner(Contract):
    @abstractmethod
    def plan(self, keys: list[GraphKey], budget_bytes: int) -> list[GraphKey]:
        """Which of `keys` to capture within `budget_bytes`, in capture order."""

    @abstractmethod
    def capture(self, key: GraphKey, fn: Callable[..., Any], static_inputs: dict[str, Any]) -> Any:
        """Record `fn(**static_inputs)`; returns a handle. Raises when the device cannot capture it."""

    @abstractmethod
    def replay(self, handle: Any) -> Any:
        """Run the recorded work on the current contents of the static inputs; returns what `fn` returned."""

    @abstractmethod
    def memory_bytes(self) -> int: ...

    @abstractmethod
    def release(self) -> None: ...
