"""GGUF's K-quants in the simpler formats that kernels have: for devices whose kernels do not read them as they are.

A K-quant packs 256 inputs: half-precision factors for the whole, small integers for each 32 (or 16) of them. Where the
parts are 32 inputs (Q4_K, Q5_K), codes stay as they are and each part's scale and minimum are multiplied out, so that
only those are rounded, to half precision. Where they are 16 (Q2_K, Q3_K, Q6_K) no simple format has as many scales: the
values are rounded anew to signed bytes with a scale for each 32, to half a step of 1/127 of the largest of them.

Layouts: ggml's `block_q4_K` and `block_q5_K`. Shapes: O outputs, S super-blocks, P parts of 32 inputs (8 each).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from enginecore.ops.quantized import SCHEMES, QuantizedWeight

#: Rows that are converted at a time: it bounds the memory that takes.
_ROWS = 2048


def simpler(weight: QuantizedWeight, scheme: str) -> QuantizedWeight:
    """`weight`, a K-quant, in `scheme`: "q4_1" for Q4_K, "q5_1" for Q5_K, "q8_0" for the others. ValueError else."""
    convert = _CONVERSIONS.get((weight.scheme, scheme))
    if convert is None:
        raise ValueError(f"weights in {weight.scheme} have no form in {scheme}")
    size = SCHEMES[scheme][2]
    rows = weight.data_OB.cpu().numpy()
    out_OB = np.empty((rows.shape[0], weight.in_features // 32 * size), np.uint8)
    for start in range(0, rows.shape[0], _ROWS):
        part = rows[start : start + _ROWS]
        out_OB[start : start + _ROWS] = convert(part, weight.scheme).reshape(len(part), -1)
    return replace(weight, scheme=scheme, data_OB=torch.from_numpy(out_OB).to(weight.data_OB.device))


def _super_blocks(rows_OB: np.ndarray, scheme: str) -> np.ndarray:
    return rows_OB.reshape(-1, SCHEMES[scheme][2])


def _scales_and_minima(blocks_SB: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float32 [S, P] each, multiplied out: value = scale * code - minimum. Both formats begin alike."""
    whole_S2 = blocks_SB[:, :4].copy().view(np.float16).astype(np.float32)
    packed = blocks_SB[:, 4:16].astype(np.uint8)
    low, middle, high = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([low & 63, (high & 15) | (low >> 6) << 4], axis=1).astype(np.float32)
    minima = np.concatenate([middle & 63, (high >> 4) | (middle >> 6) << 4], axis=1).astype(np.float32)
    return scales * whole_S2[:, :1], minima * whole_S2[:, 1:]


def _codes(packed_SB: np.ndarray) -> np.ndarray:
    """Four-bit codes uint8 [S, P, 32]: each 32 bytes hold one part in their low halves and the next in their high."""
    pairs = packed_SB.reshape(-1, 4, 1, 32)
    return np.concatenate([pairs & 15, pairs >> 4], axis=2).reshape(-1, 8, 32)


def _heads(blocks_SB: np.ndarray) -> np.ndarray:
    """The first four bytes of each part in the simple formats: scale and (added) minimum in half precision."""
    scales_SP, minima_SP = _scales_and_minima(blocks_SB)
    pair: np.ndarray = np.stack([scales_SP, -minima_SP], axis=-1).astype(np.float16)
    return pair.view(np.uint8)


def _nibbles(codes_SPI: np.ndarray) -> np.ndarray:
    """Inputs 0 to 15 in the low halves, 16 to 31 in the high ones."""
    packed: np.ndarray = codes_SPI[..., :16] | codes_SPI[..., 16:] << 4
    return packed


def _from_q4_k(rows_OB: np.ndarray, scheme: str) -> np.ndarray:
    blocks = _super_blocks(rows_OB, scheme)
    return np.concatenate([_heads(blocks), _nibbles(_codes(blocks[:, 16:144]))], axis=-1)


def _from_q5_k(rows_OB: np.ndarray, scheme: str) -> np.ndarray:
    blocks = _super_blocks(rows_OB, scheme)
    # Bit p of byte i: the fifth bit of input i of part p. The simple format has a bit mask of 32 for each part.
    bits = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[None, :, None] & 1
    masks = np.packbits(bits, axis=-1, bitorder="little")
    return np.concatenate([_heads(blocks), masks, _nibbles(_codes(blocks[:, 48:176]))], axis=-1)


def _requantize(rows_OB: np.ndarray, scheme: str) -> np.ndarray:
    from gguf.quants import dequantize, quantize

    values = dequantize(rows_OB, SCHEMES[scheme][0])  # type: ignore[arg-type]
    return quantize(values, SCHEMES["q8_0"][0])  # type: ignore[arg-type]


_CONVERSIONS = {
    ("q4_k", "q4_1"): _from_q4_k,
    ("q5_k", "q5_1"): _from_q5_k,
    ("q2_k", "q8_0"): _requantize,
    ("q3_k", "q8_0"): _requantize,
    ("q6_k", "q8_0"): _requantize,
}
