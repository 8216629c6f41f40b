"""The ops that a backend may provide: name, signature, meaning. The torch references are in `ops/reference.py`.

Shape suffixes: T tokens, E hidden size, F intermediate size, H query heads, K key-value heads, D head size,
O output features, I input features, R rows of logits, V vocabulary, P positions, N rotary dimensions.
Attention and cache writes are not here: they are required and live in `AttentionBackend`.
An implementation may return new tensors or reuse the memory of its inputs where the schema says so.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class OpSchema:
    """`signature` is Python's, as text; `doc` says what it computes and what may be overwritten."""

    name: str
    signature: str
    doc: str


_OPS = (
    OpSchema(
        "rms_norm",
        "(x_TE, weight_E, eps: float) -> out_TE",
        "x / sqrt(mean(x^2) + eps) * weight, computed in float32. Rows may be strided; any leading shape.",
    ),
    OpSchema(
        "fused_add_rms_norm",
        "(x_TE, residual_TE, weight_E, eps: float) -> (out_TE, residual_TE)",
        "s = x + residual; returns rms_norm(s) and s. May overwrite both inputs.",
    ),
    OpSchema(
        "rotary_embedding",
        "(positions_T, query_THD, key_TKD, cos_sin_PN, interleaved: bool) -> (query_THD, key_TKD)",
        "Rotates the first N dimensions of each head by the angles of the token's position. cos_sin (float32) holds "
        "N/2 cosines then N/2 sines. interleaved False pairs i with i + N/2 (neox), True pairs 2i with 2i + 1. "
        "Works in place: inputs may be strided over T.",
    ),
    OpSchema("silu_and_mul", "(x_T2F) -> out_TF", "silu(x[:, :F]) * x[:, F:]"),
    OpSchema("gelu_and_mul", "(x_T2F) -> out_TF", "gelu(x[:, :F]) * x[:, F:], exact gelu"),
    OpSchema("gelu_tanh_and_mul", "(x_T2F) -> out_TF", "gelu with the tanh approximation"),
    OpSchema(
        "pack_linear",
        "(weight_OI, bias_O | None) -> PackedLinear",
        "Prepares a weight for this device, once, at load. A QuantizedWeight (ops/quantized.py) instead has a scheme "
        "that the backend claims in Capabilities.quantizations. The result is called as packed(x_TI) -> y_TO "
        "(x.dtype), has rows(ids_T) -> [T, I] (rows of the original weight, so that a tied embedding needs one copy), "
        "`nbytes`, `in_features` and `out_features`.",
    ),
    OpSchema(
        "sample",
        "(logits_RV, temperature_R, top_k_R, top_p_R, min_p_R, uniform_R) -> ids_R",
        "float32 logits; temperature 0 takes the arg max. Otherwise p = softmax(logits / temperature); keep the top_k "
        "most likely (0: all), then the smallest set whose mass reaches top_p (of the renormalised rest), then those "
        "with at least min_p times the largest; the id is the first, in id order, at which the cumulative mass of the "
        "kept passes uniform (in [0, 1), float64) times their total. int64 ids; -1 for a row that holds a NaN or an "
        "infinity, or nothing above minus infinity. May overwrite logits.",
    ),
)

OPS: dict[str, OpSchema] = {op.name: op for op in _OPS}
