"""Scales of keys and values that a checkpoint brings for a cache in fp8: what is cached is the state divided by them.

Tools write them beside a layer's attention, and have done so under several names:

    NAME.self_attn.k_scale, .v_scale                            llm-compressor
    NAME.self_attn.k_proj.k_scale, .v_proj.v_scale              ModelOpt
    NAME.self_attn.k_proj.output_scale, .v_proj.output_scale    AutoFP8, Quark

A scale is one number, or one for each key-value head. Shape suffixes: K key-value heads.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import torch

from enginecore.errors import ModelError, UnsupportedError
from enginecore.models.quantized_tensors import QuantizedTensors

if TYPE_CHECKING:
    from enginecore.device.attention import AttentionBackend
    from enginecore.models.bridge import AttentionCall
    from enginecore.models.checkpoint import Checkpoint

_NAME = re.compile(r"\.(?:(?P<side>[kv])_proj\.output_scale|(?:[kv]_proj\.)?(?P<plain>[kv])_scale)$")
_LAYER = re.compile(r"\.(\d+)\.")

Scales = tuple[torch.Tensor, torch.Tensor]


def read_kv_scales(checkpoint: Checkpoint, calls: tuple[AttentionCall, ...]) -> dict[int, Scales]:
    """layer -> float32 scales [K] of its keys and of its values; no entry for layers without any.

    Raises ModelError for scales that are not positive, do not fit the heads, or stand for one side only.
    """
    heads = {call.layer: call.num_kv_heads for call in calls}
    found: dict[int, dict[str, torch.Tensor]] = {}
    for source in checkpoint.sources:
        if not isinstance(source, QuantizedTensors):
            continue
        for name in source.left_out:
            match, layer = _NAME.search(name), _LAYER.search(name)
            if match is None or layer is None or int(layer[1]) not in heads:
                continue
            scales = _checked(name, source.read_left_out(name), heads[int(layer[1])])
            found.setdefault(int(layer[1]), {})[match["side"] or match["plain"]] = scales
    for number, sides in found.items():
        if len(sides) < 2:
            raise ModelError(
                f"layer {number} of {checkpoint.name} has scales of {', '.join(sides)} alone, not of k and v"
            )
    return {number: (sides["k"], sides["v"]) for number, sides in found.items()}


def _checked(name: str, scales: torch.Tensor, heads: int) -> torch.Tensor:
    scales = scales.float().reshape(-1)
    if scales.numel() not in (1, heads):
        raise ModelError(f"{name!r} has {scales.numel()} scales for {heads} key-value heads")
    if not bool((scales.isfinite() & (scales > 0)).all()):
        raise ModelError(f"{name!r} is not positive: {scales.tolist()}")
    return scales.expand(heads).contiguous()


def attention_of_calls(
    attention: AttentionBackend, calls: tuple[AttentionCall, ...], scales: dict[int, Scales], device: torch.device
) -> list[AttentionBackend]:
    """The attention of each call: one for all of them, or one for each layer that has scales.

    Raises UnsupportedError where the device's attention takes none.
    """
    made: dict[int, AttentionBackend] = {}
    for layer, (keys_K, values_K) in scales.items():
        scaled = attention.with_kv_scales(keys_K.to(device), values_K.to(device))
        if scaled is None:
            raise UnsupportedError(
                "the checkpoint has scales for keys and values in fp8, which the device's attention does not take",
                fix="leave --kv-cache-dtype at auto",
            )
        made[layer] = scaled
    return [made.get(call.layer, attention) for call in calls]
