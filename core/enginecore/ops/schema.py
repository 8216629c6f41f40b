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
        "Prepares a weight for this device, once, at load. A QuantizedWeight (ops/quantized.py), Int4Weight "
        "(ops/int4.py) or ScaledWeight (ops/scaled.py) instead has a scheme that the backend claims in "
        "Capabilities.quantizations. The result is called as packed(x_TI) -> y_TO (x.dtype), has rows(ids_T) -> [T, I] "
        "(rows of the original weight, so that a tied embedding needs one copy), `nbytes`, `in_features` and "
        "`out_features`. It may have normed(x_TI, residual_TI | None, weight_I, eps) -> (y_TO, s_TI), the product of "
        "rms_norm(s) and s = x + residual (or x), and activated(x_T2I, activation) -> y_TO, the product of that op's "
        "result: the same bits as op and product in turn, faster. normed may overwrite residual.",
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
    OpSchema(
        "sampling_probabilities",
        "(logits_RV, temperature_R, top_k_R, top_p_R, min_p_R) -> p_RV",
        "The distribution that `sample` draws from, float32: 0 for what the filters drop, 1 for the arg max at "
        "temperature 0; all 0 where `sample` gives -1.",
    ),
    OpSchema(
        "rejection_sample",
        "(draft_ids_D, starts_R1, target_DV, draft_DV | None, bonus_R, accept_D, redraw_R, width: int) -> ids_RS",
        "Row r has the drafts starts[r] to starts[r + 1]. A draft d is taken while accept * q(d) < p(d), with p and q "
        "its rows of target and draft (None: certain of d); the first that is not is replaced by a draw, as in "
        "`sample`, from max(p - q, 0) by redraw[r]; a row whose drafts are all taken ends with bonus[r]. accept and "
        "redraw are float64 in [0, 1). int64 [R, width], -1 behind each row's last; width is above any row's drafts.",
    ),
    OpSchema(
        "moe_experts",
        "(x_TE, expert_ids_TK, expert_weights_TK, gate_up_X2FE, down_XEF, activation: str) -> out_TE",
        "The sum over a token's experts of weight * down(act(gate) * up); activation silu, gelu or gelu_tanh. An id of "
        "-1 adds nothing. float32 weights of experts.",
    ),
    OpSchema(
        "quantized_experts",
        "(x_TE, expert_ids_TK, expert_weights_TK, gate_up_X2FE: ExpertWeights, down_XEF: ExpertWeights, "
        "activation: str) -> out_TE",
        "moe_experts with weights that stay packed (ops/expert_weights.py), in schemes that the backend claims in "
        "Capabilities.quantizations. Activations may be put in the weights' eight bits. Uses are asked about with "
        "ExpertWeights.attributes(); where the backend has no kernel for one, experts are unpacked at load.",
    ),
    OpSchema(
        "latent_cache",
        "(rows_TW, cache, slot_mapping_T) -> None",
        "Writes rows into their slots of a cache of latents [blocks, block_size, W]; a slot of -1 is skipped.",
    ),
    OpSchema(
        "latent_attention",
        "(query_THW, cache, metadata, scale: float, latent: int) -> out_THL",
        "Causal attention of each token over its sequence's cached rows, all of a row being the key of every head and "
        "its first `latent` numbers the value. `metadata` is an AttentionMetadata, of which `slot_mapping` and `state` "
        "are not looked at. Uses are asked about with the attributes latent, rope (W - latent) and heads.",
    ),
    OpSchema(
        "lora_shrink",
        "(x_TI, a_SNRI, adapter_T) -> h_STR",
        "For each of S slices the product of x with its token's adapter of N, float32; zeros where adapter is -1. "
        "Adapters of a lower rank are padded with zeros to R.",
    ),
    OpSchema(
        "lora_expand",
        "(h_STR, b: list, adapter_T, y_TO) -> y_TO",
        "Adds h[s] times the token's adapter of b[s] [N, P, R] to the slice's P columns of y, in place; slices lie in "
        "order from column 0 on. Rows with adapter -1 are left as they are.",
    ),
    OpSchema(
        "causal_conv",
        "(x_TC, weight_CW, bias_C | None, states_SCW, starts_N1, slots_N, has_state_N, silu: bool, max_query_len: int)"
        " -> y_TC",
        "A convolution of each channel over the W - 1 inputs before and its own, with or without silu. states [S, C, "
        "W - 1] hold those inputs and are updated in place. Sequences lie end to end from starts[i] on, with their "
        "state in row slots[i] (-1: padding), which counts as zero where has_state (bool) is false.",
    ),
    OpSchema(
        "selective_scan",
        "(x_TC, dt_TC, a_CD, b_TD, c_TD, skip_C | None, gate_TC | None, dt_bias_C | None, dt_softplus: bool, "
        "states_SCD, starts_N1, slots_N, has_state_N, max_query_len: int) -> y_TC",
        "state = exp(dt a) state + dt x b; y = (state c + skip x) silu(gate), a state [C, D] carried through each "
        "sequence (Mamba). dt has its bias added and softplus applied first. Sequences and states as in causal_conv.",
    ),
    OpSchema(
        "ssd_scan",
        "(x_THP, dt_TH, a_H, b_TGD, c_TGD, skip_H | None, gate_THP | None, dt_bias_H | None, dt_softplus: bool, "
        "states_SHPD, starts_N1, slots_N, has_state_N, max_query_len: int) -> y_THP",
        "The same with one decay a head (Mamba-2): states [S, H, P, D], b and c shared by the heads of a group.",
    ),
)

OPS: dict[str, OpSchema] = {op.name: op for op in _OPS}
