"""The torch reference of every op in `ops/schema.py`. It runs on any device torch knows, slowly and correctly.

Shape suffixes as in `ops/schema.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from enginecore.ops.adapters import lora_expand, lora_shrink
from enginecore.ops.experts import moe_experts
from enginecore.ops.int4 import Int4Weight
from enginecore.ops.latent import latent_attention, latent_cache
from enginecore.ops.quantized import QuantizedWeight
from enginecore.ops.recurrent import causal_conv, selective_scan, ssd_scan
from enginecore.ops.sampling import rejection_sample, sample, sampling_probabilities
from enginecore.ops.scaled import ScaledWeight


def rms_norm(x_TE: torch.Tensor, weight_E: torch.Tensor, eps: float) -> torch.Tensor:
    x = x_TE.float()
    scaled = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return (scaled * weight_E.float()).to(x_TE.dtype)


def fused_add_rms_norm(
    x_TE: torch.Tensor, residual_TE: torch.Tensor, weight_E: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    total_TE = x_TE + residual_TE
    return rms_norm(total_TE, weight_E, eps), total_TE


def rotary_embedding(
    positions_T: torch.Tensor,
    query_THD: torch.Tensor,
    key_TKD: torch.Tensor,
    cos_sin_PN: torch.Tensor,
    interleaved: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    cos_T1N, sin_T1N = cos_sin_PN[positions_T].unsqueeze(1).chunk(2, dim=-1)
    half = cos_T1N.shape[-1]
    for states in (query_THD, key_TKD):
        rotated = states[..., : 2 * half]
        if interleaved:
            first, second = rotated[..., 0::2], rotated[..., 1::2]
        else:
            first, second = rotated[..., :half], rotated[..., half:]
        a, b = first.float(), second.float()
        # Both are worked out before either is written: float() of float32 is no copy.
        turned = a * cos_T1N - b * sin_T1N, b * cos_T1N + a * sin_T1N
        first.copy_(turned[0])
        second.copy_(turned[1])
    return query_THD, key_TKD


def silu_and_mul(x_T2F: torch.Tensor) -> torch.Tensor:
    gate, up = x_T2F.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu_and_mul(x_T2F: torch.Tensor) -> torch.Tensor:
    gate, up = x_T2F.chunk(2, dim=-1)
    return F.gelu(gate) * up


def gelu_tanh_and_mul(x_T2F: torch.Tensor) -> torch.Tensor:
    gate, up = x_T2F.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


class PackedLinear:
    """A linear layer whose weight is kept as it came."""

    def __init__(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> None:
        self.weight_OI, self.bias_O = weight_OI, bias_O
        self.out_features, self.in_features = weight_OI.shape

    def __call__(self, x_TI: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        y_TO = F.linear(x_TI, self.weight_OI, self.bias_O)
        return y_TO if out_dtype is None else y_TO.to(out_dtype)

    def rows(self, ids_T: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids_T, self.weight_OI)

    @property
    def nbytes(self) -> int:
        return int(self.weight_OI.nbytes) + (0 if self.bias_O is None else int(self.bias_O.nbytes))


def pack_linear(
    weight_OI: torch.Tensor | QuantizedWeight | Int4Weight | ScaledWeight, bias_O: torch.Tensor | None
) -> PackedLinear:
    if not isinstance(weight_OI, torch.Tensor):
        weight_OI = weight_OI.dequantize()
    return PackedLinear(weight_OI, bias_O)


REFERENCE: dict[str, Callable[..., Any]] = {
    "rms_norm": rms_norm,
    "fused_add_rms_norm": fused_add_rms_norm,
    "rotary_embedding": rotary_embedding,
    "silu_and_mul": silu_and_mul,
    "gelu_and_mul": gelu_and_mul,
    "gelu_tanh_and_mul": gelu_tanh_and_mul,
    "pack_linear": pack_linear,
    "sample": sample,
    "sampling_probabilities": sampling_probabilities,
    "rejection_sample": rejection_sample,
    "moe_experts": moe_experts,
    "quantized_experts": moe_experts,
    "latent_cache": latent_cache,
    "latent_attention": latent_attention,
    "lora_shrink": lora_shrink,
    "lora_expand": lora_expand,
    "causal_conv": causal_conv,
    "selective_scan": selective_scan,
    "ssd_scan": ssd_scan,
}
