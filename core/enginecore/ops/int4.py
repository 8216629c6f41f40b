"""Weights of four bits with a scale and a zero for each group of inputs, out of the formats that checkpoints use.

All of them mean w = (q - z) * s with q and z in 0..15. What differs is how nibbles lie in 32-bit words:

    AWQ    qweight [I, O/8]: a word holds 8 outputs, in the order of AWQ_ORDER; qzeros [G, O/8] likewise
    GPTQ   qweight [I/8, O]: a word holds 8 inputs, lowest nibble first; qzeros [G, O/8] holds outputs in order, and
           z - 1 rather than z in all but the "gptq_v2" files; g_idx [I] is the group of each input ("act-order")
    packed weight_packed [O, I/8]: 8 inputs, lowest nibble first (compressed-tensors "pack-quantized");
           weight_zero_point [O/8, G] holds outputs in order; q is the signed code plus 8

Sources: Lin et al. 2023 (AWQ) and its reference code; Frantar et al. 2022 (GPTQ) and AutoGPTQ; compressed-tensors.
Here all become one form, `Int4Weight`, without loss. Shape suffixes: O outputs, I inputs, G groups, W words of 8.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from enginecore.errors import ModelError
from enginecore.ops.quantized import QuantizedWeight

#: Output column, within its eight, that nibble i of an AWQ word holds.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
IN_ORDER = (0, 1, 2, 3, 4, 5, 6, 7)
#: The zero of symmetric codes.
MIDDLE = 8


@dataclass(frozen=True)
class Int4Weight:
    """What `pack_linear` takes in place of a weight [O, I] of four bits.

    `words_WO` int32 [I/8, O] holds inputs 8w to 8w + 7, lowest nibble first; inputs come sorted by group, so that row
    i belongs to group i // group_size. `permutation_I` (int64) says which input of the layer row i multiplies; None
    means i. `zeros_GO` is uint8, None stands for 8 throughout. `dtype` is that of activations.
    """

    words_WO: torch.Tensor
    scales_GO: torch.Tensor
    zeros_GO: torch.Tensor | None
    group_size: int
    dtype: torch.dtype
    permutation_I: torch.Tensor | None = None
    scheme: str = "int4"

    @property
    def in_features(self) -> int:
        return int(self.words_WO.shape[0]) * 8

    @property
    def out_features(self) -> int:
        return int(self.words_WO.shape[1])

    @property
    def nbytes(self) -> int:
        parts = (self.words_WO, self.scales_GO, self.zeros_GO, self.permutation_I)
        return sum(int(part.nbytes) for part in parts if part is not None)

    def to(self, device: torch.device) -> Int4Weight:
        return replace(
            self,
            words_WO=self.words_WO.to(device),
            scales_GO=self.scales_GO.to(device),
            zeros_GO=None if self.zeros_GO is None else self.zeros_GO.to(device),
            permutation_I=None if self.permutation_I is None else self.permutation_I.to(device),
        )

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The weight [O, I] in `dtype` (None: the weight's own), worked out in float32 (float64 for float64)."""
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        codes_IO = unpack_rows(self.words_WO).to(exact)
        zeros = MIDDLE if self.zeros_GO is None else self._spread(self.zeros_GO).to(exact)
        weight_IO = (codes_IO - zeros) * self._spread(self.scales_GO).to(exact)
        if self.permutation_I is not None:
            weight_IO = torch.empty_like(weight_IO).index_copy_(0, self.permutation_I, weight_IO)
        return weight_IO.t().contiguous().to(dtype or self.dtype)

    def _spread(self, values_GO: torch.Tensor) -> torch.Tensor:
        return values_GO.repeat_interleave(self.group_size, 0)[: self.in_features]


def unpack_rows(words_WO: torch.Tensor, order: tuple[int, ...] = IN_ORDER) -> torch.Tensor:
    """Nibbles of int32 [W, O] as uint8 [8W, O]: nibble i of a word goes to row 8w + order[i]."""
    out = words_WO.new_empty((words_WO.shape[0], 8, *words_WO.shape[1:]), dtype=torch.uint8)
    for nibble, row in enumerate(order):
        out[:, row] = ((words_WO >> (4 * nibble)) & 15).to(torch.uint8)
    return out.flatten(0, 1)


def unpack_columns(words_IW: torch.Tensor, order: tuple[int, ...] = IN_ORDER) -> torch.Tensor:
    """Nibbles of int32 [I, W] as uint8 [I, 8W]: nibble i of a word goes to column 8w + order[i]."""
    return unpack_rows(words_IW.t(), order).t()


def pack_rows(codes_IO: torch.Tensor) -> torch.Tensor:
    """The inverse of `unpack_rows` in order: int32 [I/8, O]."""
    codes = codes_IO.to(torch.int64).unflatten(0, (-1, 8))
    words = torch.zeros_like(codes[:, 0])
    for nibble in range(8):
        words |= codes[:, nibble] << (4 * nibble)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32).contiguous()


def from_awq(
    qweight_IW: torch.Tensor, qzeros_GW: torch.Tensor, scales_GO: torch.Tensor, dtype: torch.dtype
) -> Int4Weight:
    codes_IO = unpack_columns(qweight_IW, AWQ_ORDER)
    zeros_GO = unpack_columns(qzeros_GW, AWQ_ORDER).contiguous()
    group_size = _group_size(codes_IO.shape[0], scales_GO)
    _same_shape("qzeros", zeros_GO, scales_GO)
    return Int4Weight(pack_rows(codes_IO), scales_GO.contiguous(), zeros_GO, group_size, dtype)


def from_gptq(
    qweight_WO: torch.Tensor,
    qzeros_GW: torch.Tensor | None,
    scales_GO: torch.Tensor,
    g_idx_I: torch.Tensor | None,
    dtype: torch.dtype,
    *,
    zero_offset: int = 1,
) -> Int4Weight:
    """`zero_offset` is what the file subtracted from zeros: 1, or 0 in "gptq_v2" files."""
    zeros_GO = None
    if qzeros_GW is not None:
        # A zero of 16 does not exist: the stored 15 of the first kind of files is a wrapped 0.
        zeros_GO = ((unpack_columns(qzeros_GW) + zero_offset) & 15).contiguous()
        _same_shape("qzeros", zeros_GO, scales_GO)
    return _by_group(qweight_WO, scales_GO, zeros_GO, g_idx_I, dtype)


def from_packed(
    packed_OW: torch.Tensor,
    scales_OG: torch.Tensor,
    zeros_WG: torch.Tensor | None,
    g_idx_I: torch.Tensor | None,
    dtype: torch.dtype,
) -> Int4Weight:
    """compressed-tensors' "pack-quantized" of four bits."""
    scales_GO = scales_OG.t().contiguous()
    zeros_GO = None if zeros_WG is None else unpack_rows(zeros_WG).t().contiguous()
    if zeros_GO is not None:
        _same_shape("weight_zero_point", zeros_GO, scales_GO)
    return _by_group(packed_OW.t().contiguous(), scales_GO, zeros_GO, g_idx_I, dtype)


def _by_group(
    words_WO: torch.Tensor,
    scales_GO: torch.Tensor,
    zeros_GO: torch.Tensor | None,
    g_idx_I: torch.Tensor | None,
    dtype: torch.dtype,
) -> Int4Weight:
    inputs = words_WO.shape[0] * 8
    size = _group_size(inputs, scales_GO)
    permutation_I = None
    # A file may carry g_idx without a meaning: -1 throughout, or the plain order.
    if g_idx_I is not None and not bool((g_idx_I < 0).all()):
        if g_idx_I.shape != (inputs,) or int(g_idx_I.max()) >= scales_GO.shape[0] or int(g_idx_I.min()) < 0:
            raise ModelError(f"g_idx does not name one of {scales_GO.shape[0]} groups for each of {inputs} inputs")
        sorted_I, order_I = g_idx_I.long().sort(stable=True)
        if not torch.equal(sorted_I, torch.arange(inputs, device=sorted_I.device) // size):
            raise ModelError(f"g_idx has groups that are not of {size} inputs; re-quantise without uneven groups")
        if not torch.equal(order_I, torch.arange(inputs, device=order_I.device)):
            permutation_I = order_I
            words_WO = pack_rows(unpack_rows(words_WO)[order_I])
    return Int4Weight(words_WO.contiguous(), scales_GO.contiguous(), zeros_GO, size, dtype, permutation_I)


def _group_size(inputs: int, scales_GO: torch.Tensor) -> int:
    groups = int(scales_GO.shape[0])
    if groups == 0 or inputs % groups:
        raise ModelError(f"{groups} groups of scales do not divide {inputs} inputs")
    return inputs // groups


def _same_shape(name: str, zeros_GO: torch.Tensor, scales_GO: torch.Tensor) -> None:
    if zeros_GO.shape != scales_GO.shape:
        raise ModelError(f"{name} stands for {tuple(zeros_GO.shape)} zeros, scales for {tuple(scales_GO.shape)}")


def join(parts: list[Int4Weight]) -> Int4Weight | None:
    """The rows of several layers over the same inputs as one weight, or None where their groups differ."""
    first = parts[0]
    for part in parts[1:]:
        same_order = (part.permutation_I is None) == (first.permutation_I is None) and (
            part.permutation_I is None or torch.equal(part.permutation_I, first.permutation_I)
        )
        if part.group_size != first.group_size or not same_order:
            return None
    zeros_GO = None
    if any(part.zeros_GO is not None for part in parts):
        filled = [part.scales_GO.new_full(part.scales_GO.shape, MIDDLE, dtype=torch.uint8)
                  if part.zeros_GO is None else part.zeros_GO for part in parts]  # fmt: skip
        zeros_GO = torch.cat(filled, 1)
    return replace(
        first,
        words_WO=torch.cat([part.words_WO for part in parts], 1),
        scales_GO=torch.cat([part.scales_GO for part in parts], 1),
        zeros_GO=zeros_GO,
    )


def as_blocks(weight: Int4Weight) -> QuantizedWeight | None:
    """The weight in blocks of 32 inputs ("q4_1": scale * code + minimum), for kernels that have those; None where
    groups are no whole blocks or the inputs are permuted. Scales and minima are rounded to half precision."""
    inputs, outputs = weight.in_features, weight.out_features
    if weight.permutation_I is not None or inputs % 32 or (weight.group_size % 32 and weight.group_size < inputs):
        return None
    scales_GO = weight.scales_GO.float()
    zeros_GO = torch.full_like(scales_GO, MIDDLE) if weight.zeros_GO is None else weight.zeros_GO.float()
    group_B = torch.arange(0, inputs, 32) // weight.group_size
    heads_OB2 = torch.stack([scales_GO, -zeros_GO * scales_GO])[:, group_B].permute(2, 1, 0).half().contiguous()
    codes_OB32 = unpack_rows(weight.words_WO).t().reshape(outputs, -1, 32)
    nibbles = codes_OB32[..., :16] | codes_OB32[..., 16:] << 4
    data = torch.cat([heads_OB2.view(torch.uint8), nibbles], dim=-1)
    return QuantizedWeight("q4_1", data.reshape(outputs, -1), inputs, weight.dtype)
