"""The torch reference of every op in `ops/schema.py`. It runs on any device torch knows, slowly and correctly.

Shape suffixes as in `ops/schema.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from enginecore.ops.quantized import QuantizedWeight


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


def pack_linear(weight_OI: torch.Tensor | QuantizedWeight, bias_O: torch.Tensor | None) -> PackedLinear:
    if isinstance(weight_OI, QuantizedWeight):
        weight_OI = weight_OI.dequantize()
    return PackedLinear(weight_OI, bias_O)


def sample(
    logits_RV: torch.Tensor,
    temperature_R: torch.Tensor,
    top_k_R: torch.Tensor,
    top_p_R: torch.Tensor,
    min_p_R: torch.Tensor,
    uniform_R: torch.Tensor,
) -> torch.Tensor:
    """Sorts each row, marks what the three filters keep, and draws by the inverse of the cumulative mass in id order.

    Ties keep the order of ids: a stable sort makes "the k most likely" the same set on every device.
    """
    best_R, greedy_R = logits_RV.max(dim=-1)  # a NaN counts as the largest
    greedy_R = greedy_R.masked_fill(~torch.isfinite(best_R), -1)
    random_R = (temperature_R > 0) & (greedy_R >= 0)
    if not bool(random_R.any()):
        return greedy_R
    scale_R1 = torch.where(random_R, temperature_R, torch.ones_like(temperature_R)).double().unsqueeze(1)
    # The largest logit goes first: a tiny temperature would overflow the exponential otherwise.
    shifted_RV = logits_RV.double() - logits_RV.max(dim=-1, keepdim=True).values.double()
    p_RV = torch.softmax(shifted_RV / scale_R1, dim=-1)
    sorted_RV, order_RV = p_RV.sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(p_RV.shape[1], device=p_RV.device)
    top_k_R1 = torch.where(top_k_R > 0, top_k_R, torch.full_like(top_k_R, p_RV.shape[1])).unsqueeze(1)
    sorted_RV = sorted_RV.masked_fill(rank_V >= top_k_R1, 0.0)
    total_R1 = sorted_RV.sum(dim=-1, keepdim=True)
    before_RV = sorted_RV.cumsum(dim=-1) - sorted_RV
    # A token is needed as long as the mass before it falls short of top_p; the first always is.
    needed_RV = (before_RV < top_p_R.double().unsqueeze(1) * total_R1) | (rank_V == 0)
    likely_RV = sorted_RV >= min_p_R.double().unsqueeze(1) * sorted_RV[:, :1]
    kept_RV = sorted_RV.masked_fill(~(needed_RV & likely_RV), 0.0)
    kept_RV = torch.zeros_like(p_RV).scatter_(1, order_RV, kept_RV)
    mass_RV = kept_RV.cumsum(dim=-1)
    drawn_R = (mass_RV <= uniform_R.double().unsqueeze(1) * mass_RV[:, -1:]).sum(dim=-1)
    # Rounding can leave the target at the very end: the last kept id is the answer then.
    last_R = kept_RV.shape[1] - 1 - (kept_RV.flip(-1) > 0).int().argmax(dim=-1)
    return torch.where(random_R, torch.minimum(drawn_R, last_R), greedy_R)


REFERENCE: dict[str, Callable[..., Any]] = {
    "rms_norm": rms_norm,
    "fused_add_rms_norm": fused_add_rms_norm,
    "rotary_embedding": rotary_embedding,
    "silu_and_mul": silu_and_mul,
    "gelu_and_mul": gelu_and_mul,
    "gelu_tanh_and_mul": gelu_tanh_and_mul,
    "pack_linear": pack_linear,
    "sample": sample,
}
