"""Experts are read into `layers.experts.Experts` where the device has an op for them: a quantised checkpoint's as they
are, others in the model's dtype. Where it has none, transformers' module stays and gets its weights unpacked."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from torch import nn

from enginecore.errors import ModelError
from enginecore.layers.experts import Experts, activation_of
from enginecore.models.checkpoint import Checkpoint
from enginecore.models.quantized_tensors import QuantizedTensors, join
from enginecore.ops.dispatch import Ops
from enginecore.ops.expert_weights import ExpertWeights, stack_experts

if TYPE_CHECKING:
    from enginecore.models.materialize import Materializer

logger = logging.getLogger(__name__)


def load_experts(model: nn.Module, weights: Materializer, ops: Ops, dtype: str) -> list[str]:
    """Replace what can be replaced in `model`; the names of modules whose weights stay packed."""
    packed, unpacked = [], []
    packs = ops.native("quantized_experts", dtype) is not None
    for prefix, module in list(model.named_modules()):
        activation = activation_of(module)
        if activation is None:
            continue
        names = [f"{prefix}.{part}" for part in ("gate_up_proj", "down_proj")]
        made = _packed(weights, names, ops, dtype, activation) if packs else None
        if made is not None:
            model.set_submodule(prefix, made)
            packed.append(prefix)
            continue
        if any(_is_quantised(weights.checkpoint, name) for name in names):
            unpacked.append(prefix)
        op = ops.native("moe_experts", dtype)
        if op is not None:
            gate_up_X2FE, down_XEF = (weights.tensor(name) for name in names)
            model.set_submodule(prefix, Experts(op, gate_up_X2FE, down_XEF, activation))
    if unpacked:
        logger.warning("experts of %d layers are unpacked: no product of the device's takes them as they are",
                       len(unpacked))  # fmt: skip
    return packed


def _packed(weights: Materializer, names: list[str], ops: Ops, dtype: str, activation: str) -> Experts | None:
    """The experts as the checkpoint has them; None where it has them in plain numbers or the device refuses them."""
    op, sides = None, []
    for name in names:
        kept = read_kept_experts(weights.checkpoint, name, weights.kept_schemes)
        op = ops.native("quantized_experts", dtype, **kept.attributes()) if kept is not None else None
        if kept is None or op is None:
            return None
        sides.append(kept)
    assert op is not None
    gate_up, down = (side.to(weights.device) for side in sides)
    weights.bytes += gate_up.nbytes + down.nbytes
    for name in names:
        weights.checkpoint.forget(name)
    return Experts(op, gate_up, down, activation)


def _is_quantised(checkpoint: Checkpoint, name: str) -> bool:
    sides = checkpoint.parts_of_experts(name)
    source, key = sides[0][0] if sides else (None, "")
    return isinstance(source, QuantizedTensors) and source.scheme(key) is not None


def read_kept_experts(checkpoint: Checkpoint, name: str, schemes: frozenset[str]) -> ExpertWeights | None:
    """The experts that make up parameter `name` [X, O, I] as a quantised checkpoint has them; None where it has them in
    plain numbers, the device lacks the scheme, or they do not fit into one tensor."""
    sides = checkpoint.parts_of_experts(name)
    if not sides:
        return None
    parameter = checkpoint.parameters[name]
    rows = []
    for keys in zip(*sides, strict=True):  # an expert's gate and up, or its down
        kept = [checkpoint.read_kept_part(source, key, parameter.dtype, schemes) for source, key in keys]
        joined = None if any(part is None for part in kept) else join(kept)
        if joined is None:
            return None
        rows.append(joined)
    stacked = stack_experts(rows)
    if stacked is not None and stacked.shape != tuple(parameter.shape):
        raise ModelError(f"{checkpoint.name}: the parts of {name!r} make up {stacked.shape}, the model needs "
                         f"{tuple(parameter.shape)}")  # fmt: skip
    return stacked
