"""The graph part of the contract (an optional slot of a backend): capture a step once, replay it without the host.

What the core does with it, for steps of one token a sequence: it chooses batch sizes (1, 2, 4, 8, 16, 24, ...), asks
`plan` which of them fit, and for each runs the step once as it is and then gives it to `capture`. A step of n sequences
is replayed in the smallest captured size that holds it. The rows that are left over are padding: sequences of one token
(position 0, seq_lens 1) in block 0 whose slot is -1, so that nothing of them is written and nothing is read from them.

The static inputs of a step are named token_ids, positions, query_start_loc, seq_lens, block_table, slot_mapping and
logits_indices. Smaller sizes get the beginnings of the larger ones' tensors. `AttentionBackend.build_metadata` is
called once for each size, before the capture; a backend whose metadata holds more than those tensors renews it in
`AttentionBackend.refresh_metadata`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from enginecore.device.contract import Contract


@dataclass(frozen=True, order=True)
class GraphKey:
    """The shape a graph is captured for: tokens in the step, sequences, and tokens a sequence when uniform (else 0).

    `activation_bytes` is the core's estimate of what such a step needs beside weights and cache while it runs.
    """

    num_tokens: int
    num_seqs: int
    uniform_query_len: int = 0
    activation_bytes: int = field(default=0, compare=False)


class GraphRunner(Contract):
    @abstractmethod
    def plan(self, keys: list[GraphKey], budget_bytes: int) -> list[GraphKey]:
        """Which of `keys` to capture so that `memory_bytes` stays within `budget_bytes`, in capture order."""

    #: Optional: False where `capture` needs no earlier call of `fn`, which then is not made.
    needs_warm_up: bool = True

    #: Optional: what one graph is taken to hold beside the activations, which all may share, as memory is shared out.
    bytes_each: int = 8 * 2**20

    def sizes(self, max_num_seqs: int) -> list[int] | None:
        """Optional: the batch sizes that are worth capturing here; None leaves the choice to the core."""
        return None

    @abstractmethod
    def capture(self, key: GraphKey, fn: Callable[..., Any], static_inputs: dict[str, Any]) -> Any:
        """Record `fn(**static_inputs)`; returns a handle. Raises when the device cannot capture it.

        `fn` has been called once with the same inputs, so that whatever compiles on first use has compiled, unless
        `needs_warm_up` is False.
        """

    @abstractmethod
    def replay(self, handle: Any) -> Any:
        """Run the recorded work on the current contents of the static inputs; returns what `fn` returned, which the
        next replay may overwrite."""

    @abstractmethod
    def memory_bytes(self) -> int:
        """What the captured graphs hold on the device, their static outputs and workspace included."""

    @abstractmethod
    def release(self) -> None:
        """Give all of it back; handles are not used afterwards."""
