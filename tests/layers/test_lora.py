"""Linears with adapters beside them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from enginecore.layers.lora import AdaptedLinear, AdaptedPreparingLinear, RowSlots
from enginecore.models.adapter_files import Adapter
from enginecore.models.adapter_slots import AdapterSlots, adaptable
from enginecore.ops.dispatch import Ops
from enginecore.ops.reference import REFERENCE

SIZES, INPUTS, SLOTS, RANK = [6, 4, 4], 8, 3, 8
NAMES = [f"model.layers.0.{part}" for part in "qkv"]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


class Base:
    """A packed linear that can take the norm and the activation before it along."""

    nbytes, in_features, out_features = 1, INPUTS, sum(SIZES)

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.weight_OI = random(sum(SIZES), INPUTS).to(dtype)
        self.taken = 0

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        return x_TI @ self.weight_OI.t()

    def normed(self, x_TI: Any, residual_TI: Any, weight_I: Any, eps: float) -> Any:
        self.taken += 1
        if residual_TI is None:
            return self(REFERENCE["rms_norm"](x_TI, weight_I, eps)), x_TI
        normed_TI, sum_TI = REFERENCE["fused_add_rms_norm"](x_TI, residual_TI, weight_I, eps)
        return self(normed_TI), sum_TI

    def activated(self, x_T2I: torch.Tensor, activation: str) -> torch.Tensor:
        self.taken += 1
        return self(REFERENCE[activation](x_T2I))


class Plain(Base):
    normed = activated = None  # type: ignore[assignment]

    def __getattribute__(self, name: str) -> Any:
        if name in ("normed", "activated"):
            raise AttributeError(name)
        return super().__getattribute__(name)


def made(base: Base, dtype: str = "float32") -> tuple[AdapterSlots, Any]:
    slots = AdapterSlots(
        [(name, size, INPUTS) for name, size in zip(NAMES, SIZES, strict=True)],
        slots=SLOTS, rank=RANK, dtype=dtype, device=torch.device("cpu"), ops=Ops(None, dtype=dtype),
    )  # fmt: skip
    return slots, slots.adapt(NAMES, base)


def adapter(seed: int, rank: int, names: list[str] = NAMES, dtype: torch.dtype = torch.float32) -> Adapter:
    weights = {
        name: (random(rank, INPUTS, seed=seed).to(dtype), random(SIZES[NAMES.index(name)], rank, seed=seed).to(dtype))
        for name in names
    }
    return Adapter("0" * 64, rank, weights)


def expected(base: Base, x_TI: torch.Tensor, adapters: list[Adapter | None]) -> torch.Tensor:
    rows = []
    for x_I, each in zip(x_TI, adapters, strict=True):
        parts = []
        for name, size in zip(NAMES, SIZES, strict=True):
            a_RI, b_OR = each.weights.get(name, (None, None)) if each is not None else (None, None)
            parts.append(torch.zeros(size) if a_RI is None else b_OR @ (a_RI @ x_I))
        rows.append(base(x_I[None])[0] + torch.cat(parts))
    return torch.stack(rows)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_each_row_has_its_own_and_the_others_keep_their_bits(dtype: str) -> None:
    torch_dtype = getattr(torch, dtype)
    base = Plain(torch_dtype)
    slots, linear = made(base, dtype)
    assert type(linear) is AdaptedLinear
    one, two = adapter(1, 8, dtype=torch_dtype), adapter(2, 3, [NAMES[0], NAMES[2]], torch_dtype)
    slots.fill(0, one)
    slots.fill(2, two)
    x_TI = random(6, INPUTS).to(torch_dtype)
    slots.rows.use(torch.tensor([0, -1, 2, 0, -1, 2]), torch.tensor([1, 5]))
    y_TO = linear(x_TI)
    assert torch.equal(y_TO[[1, 4]], base(x_TI)[[1, 4]])
    if dtype == "float32":
        torch.testing.assert_close(y_TO, expected(base, x_TI, [one, None, two, one, None, two]))
        last = linear(x_TI[[1, 5]])  # as a model does that drops rows whose logits nobody wants
        torch.testing.assert_close(last, expected(base, x_TI[[1, 5]], [None, two]))
    slots.rows.clear()
    assert torch.equal(linear(x_TI), base(x_TI))


def test_a_slot_that_is_filled_again_keeps_nothing() -> None:
    base = Plain()
    slots, linear = made(base)
    small = adapter(4, 2, [NAMES[1]])
    slots.fill(1, adapter(3, 8))
    slots.fill(1, small)
    x_TI = random(2, INPUTS)
    slots.rows.use(torch.tensor([1, 1]), torch.tensor([0, 1]))
    torch.testing.assert_close(linear(x_TI), expected(base, x_TI, [small, small]))


def test_what_a_linear_does_along_with_the_step_before_it() -> None:
    """Base steps leave it to the base; steps with adapters give what norm, product and adapter give in turn."""
    base = Base()
    slots, linear = made(base)
    assert type(linear) is AdaptedPreparingLinear
    slots.fill(0, adapter(5, 4))
    x_TI, residual_TI, weight_I = random(3, INPUTS), random(3, INPUTS, seed=9), random(INPUTS)
    y_TO, sum_TI = linear.normed(x_TI, residual_TI.clone(), weight_I, 1e-5)
    assert base.taken == 1
    slots.rows.use(torch.tensor([0, -1, 0]), torch.tensor([2]))
    normed_TI, _ = REFERENCE["fused_add_rms_norm"](x_TI, residual_TI.clone(), weight_I, 1e-5)
    adapted_TO, adapted_sum_TI = linear.normed(x_TI, residual_TI.clone(), weight_I, 1e-5)
    assert torch.equal(adapted_TO, linear(normed_TI)) and torch.equal(adapted_sum_TI, sum_TI)
    assert torch.equal(adapted_TO[1], y_TO[1]) and not torch.equal(adapted_TO[0], y_TO[0])
    first_TO, same_TI = linear.normed(x_TI, None, weight_I, 1e-5)
    assert same_TI is x_TI and torch.equal(first_TO, linear(REFERENCE["rms_norm"](x_TI, weight_I, 1e-5)))
    x_T2I = random(3, 2 * INPUTS)
    assert torch.equal(linear.activated(x_T2I, "silu_and_mul"), linear(REFERENCE["silu_and_mul"](x_T2I)))
    assert base.taken == 1
    slots.rows.clear()
    linear.activated(x_T2I, "silu_and_mul")
    assert base.taken == 2


def test_which_modules_may_have_adapters() -> None:
    assert adaptable("model.layers.3.self_attn.q_proj") and adaptable("transformer.h.0.mlp.c_fc")
    for name in ("lm_head", "model.embed_tokens", "model.layers.1.mlp.experts.0.up_proj", "score"):
        assert not adaptable(name)
    slots, _ = made(Plain())
    other = Base()
    assert slots.adapt(["lm_head"], other) is other and "lm_head" not in slots.modules


def test_rows_are_told_apart_by_their_number() -> None:
    rows = RowSlots()
    assert rows.rows(5) is None and not rows.active
    rows.use(torch.tensor([0, -1, 1]), torch.tensor([2, 1, 0]))
    assert rows.active and rows.rows(3).tolist() == [0, -1, 1]
