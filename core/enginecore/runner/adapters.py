"""The runner's part in adapters: those that are loaded, and which of them each row of a step has.

Shape suffixes: S slots of sequences, N rows of the plan, T tokens of the step, R logits rows.
"""

from __future__ import annotations

import numpy as np
import torch

from enginecore.adapters import AdapterKey
from enginecore.models.adapter_files import Adapter
from enginecore.models.adapter_slots import AdapterSlots
from enginecore.plan import NewRequest, StepPlan
from enginecore.runner.transfers import Transfers


class RunnerAdapters:
    """`loaded` holds adapters in host memory; a plan says which of them lie in the model's slots."""

    def __init__(self, slots: AdapterSlots, max_num_seqs: int, device: torch.device) -> None:
        self.slots = slots
        self.loaded: dict[AdapterKey, Adapter] = {}
        #: Steps in which some row had an adapter.
        self.num_steps = 0
        #: How a step's arrays come to the device.
        self.transfers = Transfers(device)
        self._slot_of: dict[AdapterKey, int] = {}
        self._adapter_S = np.full(max_num_seqs, -1, np.int64)

    def place(self, plan: StepPlan) -> None:
        """What the plan wants in the slots."""
        for slot, key in plan.adapters:
            adapter = self.loaded.get(key)
            if adapter is not None:  # else it was let go after the plan was made: whoever wanted it is gone, too
                self.slots.fill(slot, adapter)
            self._slot_of = {other: at for other, at in self._slot_of.items() if at != slot} | {key: slot}

    def enter(self, new: NewRequest) -> None:
        """A sequence has come into a slot for sequences."""
        adapter = new.request.adapter
        self._adapter_S[new.slot] = -1 if adapter is None else self._slot_of.get(adapter, -1)

    def begin(self, plan: StepPlan, logits_indices: np.ndarray) -> None:
        """Before the model runs the plan."""
        adapter_N = self._adapter_S[plan.slots_N]
        if (adapter_N < 0).all():
            self.slots.rows.clear()
            return
        self.num_steps += 1
        adapter_T, logits_indices_R = self.transfers.send(np.repeat(adapter_N, plan.num_new_N), logits_indices)
        self.slots.rows.use(adapter_T, logits_indices_R)
