"""The adapters' places in a model: which modules can have one, their memory on the device, what lies in which slot."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from enginecore.layers.lora import AdaptedLinear, AdaptedPreparingLinear, RowSlots
from enginecore.models.adapter_files import Adapter
from enginecore.ops.dispatch import Ops


def adaptable(name: str) -> bool:
    """Whether a linear module of this name may have adapters: those inside of numbered layers. The output embedding is
    none of them; experts are reached in another way, and so is the up-projection of latent attention."""
    parts = name.split(".")
    return any(part.isdigit() for part in parts) and "experts" not in parts and parts[-1] != "kv_b_proj"


def adaptable_linears(model: nn.Module) -> tuple[tuple[str, int, int], ...]:
    """(name, outputs, inputs) of the modules of a model, on meta or not, that may have adapters."""
    return tuple(
        (name, module.out_features, module.in_features)
        for name, module in model.named_modules()
        if type(module) is nn.Linear and adaptable(name)
    )


def slots_bytes(linears: Iterable[tuple[str, int, int]], slots: int, rank: int, itemsize: int) -> int:
    """What the slots take on the device."""
    return sum(slots * rank * (outputs + inputs) for _, outputs, inputs in linears) * itemsize


class _Seen:
    """Stands in for the rows' slots while a model is watched."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def rows(self, count: int) -> None:
        self.counts.append(count)


class AdapterSlots:
    """`slots` places for adapters of rank `rank` at most. `adapt` is called as the model's weights are loaded; after
    that `modules` has (outputs, inputs) of every module that an adapter may name."""

    def __init__(
        self,
        linears: Iterable[tuple[str, int, int]],
        *,
        slots: int,
        rank: int,
        dtype: str,
        device: torch.device,
        ops: Ops,
    ) -> None:
        self.num_slots, self.max_rank = slots, rank
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.rows = RowSlots()
        self.modules: dict[str, tuple[int, int]] = {}
        self._linears = {name: (outputs, inputs) for name, outputs, inputs in linears}
        self._places: dict[str, tuple[AdaptedLinear, int]] = {}
        self._filled: list[set[str]] = [set() for _ in range(slots)]
        self._device, self._ops = device, ops
        self._shrink = ops.get("lora_shrink", dtype, rank=rank)
        self._expand = ops.get("lora_expand", dtype, rank=rank)

    def adapt(self, prefixes: list[str], packed: Any) -> Any:
        """The linear that `packed` becomes, which has the outputs of these modules side by side; itself where none of
        them may have adapters."""
        if not all(prefix in self._linears for prefix in prefixes):
            return packed
        sizes = [self._linears[prefix][0] for prefix in prefixes]
        settings: dict[str, Any] = {
            "slots": self.num_slots, "rank": self.max_rank, "dtype": self.dtype, "device": self._device,
            "shrink": self._shrink, "expand": self._expand,
        }  # fmt: skip
        if hasattr(packed, "normed"):
            linear: AdaptedLinear = AdaptedPreparingLinear(packed, sizes, self.rows, ops=self._ops, **settings)
        else:
            linear = AdaptedLinear(packed, sizes, self.rows, **settings)
        for number, prefix in enumerate(prefixes):
            self._places[prefix] = (linear, number)
            self.modules[prefix] = self._linears[prefix]
        return linear

    def keep_per_token(self, run: Callable[[], object], num_tokens: int) -> None:
        """Forget the modules that do not run once on the tokens of a step, going by `run`, which is one of so many
        tokens, all of whose logits are wanted. For models whose modules are not called by us."""
        seen = {name: _Seen() for name in self._places}
        for name, (linear, _) in self._places.items():
            linear.rows = seen[name]
        try:
            run()
        finally:
            for linear, _ in self._places.values():
                linear.rows = self.rows
        for name, witness in seen.items():
            if witness.counts != [num_tokens]:
                del self._places[name], self.modules[name]

    @property
    def nbytes(self) -> int:
        return sum(linear.adapter_bytes for linear in {id(at[0]): at[0] for at in self._places.values()}.values())

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def fill(self, slot: int, adapter: Adapter) -> None:
        """Put an adapter into a slot, in place of what was there."""
        for name in self._filled[slot] - adapter.weights.keys():
            linear, number = self._places[name]
            linear.fill(number, slot, None)
        for name, weights in adapter.weights.items():
            linear, number = self._places[name]
            linear.fill(number, slot, weights)
        self._filled[slot] = set(adapter.weights)
