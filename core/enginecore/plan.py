"""What one step is to do (`StepPlan`) and what came of it (`StepResult`). Host arrays only.

Shape suffix: N rows of the plan, one a scheduled sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from enginecore.adapters import AdapterKey
from enginecore.request import EngineRequest, TokenLogprobs

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class NewRequest:
    """A sequence that enters `slot` (for the first time, or again after preemption) with all its tokens so far.

    `prompt_logprobs_from` is the first position whose prompt log-probabilities are still owed, None for none.
    `write_from` is the first position whose keys and values are written: what is computed before it, in the first step,
    is in blocks that others have too.
    """

    slot: int
    request: EngineRequest
    token_ids: list[int]
    num_prompt: int
    seed: int
    prompt_logprobs_from: int | None
    write_from: int = 0


@dataclass(frozen=True)
class BeamMove:
    """Slot `slots[i]` takes over the tokens before `position` and the blocks of slot `sources[i]`, as they were after
    the last step, and has `tokens[i]` at `position`. All at once: sources are read before any slot changes."""

    slots: IntArray
    sources: IntArray
    position: int
    tokens: list[int]


@dataclass(frozen=True)
class StepPlan:
    """Row i computes `num_new_N[i]` tokens of the sequence in `slots_N[i]`, from position `starts_N[i]` on; if
    `samples_N[i]`, the last of them is the sequence's last token and a next one is sampled.

    `guesses` are by row the last of its tokens, where nobody knows yet whether those are right: then a token is sampled
    after the last known one and after each guess, and the sequence goes on from the first that differs.
    `adapters` (slot for adapters, which one it has from now on) comes before all else.
    `moves`, `new`, `block_updates` (slot, first index, block ids) and `copies` (block src to block dst, no dst being a
    src too) come before the step, in this order.
    """

    slots_N: IntArray
    starts_N: IntArray
    num_new_N: IntArray
    samples_N: BoolArray
    new: list[NewRequest] = field(default_factory=list)
    block_updates: list[tuple[int, int, list[int]]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    moves: list[BeamMove] = field(default_factory=list)
    adapters: list[tuple[int, AdapterKey]] = field(default_factory=list)
    guesses: dict[int, list[int]] = field(default_factory=dict)

    @property
    def ends_N(self) -> IntArray:
        """Where each row's known tokens end; a token sampled after them goes there."""
        ends: IntArray = self.starts_N + self.num_new_N
        for row, ids in self.guesses.items():
            ends[row] -= len(ids)
        return ends

    @property
    def num_tokens(self) -> int:
        return int(self.num_new_N.sum())

    @property
    def empty(self) -> bool:
        return len(self.slots_N) == 0


@dataclass(frozen=True)
class StepResult:
    """`token_ids` holds one id for each sampling row, in row order; `forced` those that must come after it.

    The dicts are keyed by row; `prompt_logprobs[i]` covers positions starts[i] + 1 and on, as far as they are prompt. A
    row in `errors` has no usable token. `seconds` is how long the step takes on a device whose time is modelled, None
    on any other. `replayed`: a captured graph ran, and not the step's operations one by one.
    Where a row's guesses held, `accepted` has the tokens sampled after each of those, in order, and
    `accepted_logprobs` theirs; `guesses` are what the runner expects next.
    """

    token_ids: list[int]
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    seconds: float | None = None
    forced: dict[int, list[int]] = field(default_factory=dict)
    replayed: bool = False
    accepted: dict[int, list[int]] = field(default_factory=dict)
    accepted_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    guesses: dict[int, list[int]] = field(default_factory=dict)
