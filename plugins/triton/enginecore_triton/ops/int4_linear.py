"""Products with weights of four bits, activations as they are.

Words are laid out anew once, at load: a word of tile t and row r holds the inputs 256 t + 32 j + r for j = 0..7 in its
nibbles, so that after a shift and a mask the words of a tile are 32 whole rows of the weight. Every loaded word is used
where it lies, in eight products over 32 inputs, and no two threads have to exchange anything:

    words [32, N]  >> 4 j & 15  ->  weight rows 256 t + 32 j .. + 32    (j = 0..7)

Few rows (decoding) are bound by reading the words: they take the kernel, cut along the inputs until the device is full.
Many rows are bound by arithmetic: the weight is unpacked once and the library's product does the rest.

Shape suffixes: M rows, I inputs, O outputs, G groups, T tiles of 256 inputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from enginecore.device.optable import OpQuery
from enginecore.ops.int4 import MIDDLE, Int4Weight, unpack_rows

from enginecore_triton import configs
from enginecore_triton.aot_case import AotCase
from enginecore_triton.device import DeviceDescription
from enginecore_triton.launch import cdiv, launch
from enginecore_triton.ops import _parts
from enginecore_triton.targets import TARGETS

TILE = 256
ROWS = 32
#: From this many rows on the weight is unpacked first.
MANY_ROWS = 256
_NO_FLOAT32 = frozenset({"gfx1100"})


@triton.jit
def _unpack(words, j: tl.constexpr, group, groups, scales_GO, zeros_GO, columns, inside, outputs,
            HAS_ZEROS: tl.constexpr):  # fmt: skip
    """The 32 weight rows in nibble `j` of `words` [32, N], float32; all of them are of one group."""
    codes = ((words >> (4 * j)) & 15).to(tl.float32)
    at = tl.minimum(group, groups - 1).to(tl.int64) * outputs + columns
    scale = tl.load(scales_GO + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_ZEROS:
        zero = tl.load(zeros_GO + at, mask=inside, other=0).to(tl.float32)
        return (codes - zero[None, :]) * scale[None, :]
    return (codes - 8.0) * scale[None, :]


@triton.jit
def _few_rows(
    x_MI, words, scales_GO, zeros_GO, order_I, bias_O, out_MO, parts_NMO,
    stride_x, rows, inputs, outputs, tiles, groups, group_size, number,
    HAS_ZEROS: tl.constexpr, HAS_ORDER: tl.constexpr, HAS_BIAS: tl.constexpr, IN_PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    part = tl.program_id(2)
    inside, below = columns < outputs, row < rows
    line = tl.arange(0, 32)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for tile in range(part, tiles, number):
        at = (tile * 32 + line).to(tl.int64)[:, None] * outputs + columns[None, :]
        tile_words = tl.load(words + at, mask=inside[None, :], other=0)
        for j in tl.static_range(8):
            first = tile * 256 + 32 * j
            k = first + line
            source = k
            if HAS_ORDER:
                source = tl.load(order_I + k, mask=k < inputs, other=0)
            x = tl.load(x_MI + row.to(tl.int64)[:, None] * stride_x + source[None, :],
                        mask=below[:, None] & (k < inputs)[None, :], other=0.0)  # fmt: skip
            weight = _unpack(tile_words, j, first // group_size, groups, scales_GO, zeros_GO, columns, inside, outputs,
                             HAS_ZEROS)  # fmt: skip
            total = tl.dot(x, weight.to(x.dtype), total, input_precision="ieee")
    mask = below[:, None] & inside[None, :]
    at = row.to(tl.int64)[:, None] * outputs + columns[None, :]
    if IN_PARTS:
        tl.store(parts_NMO + part.to(tl.int64) * rows * outputs + at, total, mask=mask)
    else:
        if HAS_BIAS:
            total += tl.load(bias_O + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
        tl.store(out_MO + at, total.to(out_MO.dtype.element_ty), mask=mask)


@triton.jit
def _unpack_all(
    words, scales_GO, zeros_GO, out_IO, inputs, outputs, groups, group_size,
    HAS_ZEROS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = columns < outputs
    line = tl.arange(0, 32)
    at = (tile * 32 + line).to(tl.int64)[:, None] * outputs + columns[None, :]
    tile_words = tl.load(words + at, mask=inside[None, :], other=0)
    for j in tl.static_range(8):
        first = tile * 256 + 32 * j
        k = first + line
        weight = _unpack(tile_words, j, first // group_size, groups, scales_GO, zeros_GO, columns, inside, outputs,
                         HAS_ZEROS)  # fmt: skip
        tl.store(out_IO + k.to(tl.int64)[:, None] * outputs + columns[None, :], weight.to(out_IO.dtype.element_ty),
                 mask=(k < inputs)[:, None] & inside[None, :])  # fmt: skip


def tiled(weight: Int4Weight) -> torch.Tensor:
    """The words in the layout above, int32 [32 T, O]; inputs beyond the weight's are zeros."""
    codes_IO = unpack_rows(weight.words_WO)
    padded_IO = codes_IO.new_zeros((cdiv(weight.in_features, TILE) * TILE, weight.out_features))
    padded_IO[: weight.in_features] = codes_IO
    parts = padded_IO.view(-1, 8, ROWS, weight.out_features).to(torch.int32).unbind(1)
    words = torch.zeros_like(parts[0])
    for j, part in enumerate(parts):
        words |= part << (4 * j)
    return words.flatten(0, 1)


class Int4Linear:
    """What `pack_linear` makes of an Int4Weight: called as packed(x_MI) -> y_MO."""

    def __init__(self, weight: Int4Weight, bias_O: torch.Tensor | None, device: DeviceDescription) -> None:
        self.in_features, self.out_features = weight.in_features, weight.out_features
        self._words, self._dtype, self._device = tiled(weight), weight.dtype, device
        self._scales_GO, self._zeros_GO = weight.scales_GO.contiguous(), weight.zeros_GO
        self._group_size, self._bias_O = weight.group_size, bias_O
        self._order_I = None if weight.permutation_I is None else weight.permutation_I.to(torch.int32)

    @property
    def nbytes(self) -> int:
        parts = (self._words, self._scales_GO, self._zeros_GO, self._order_I, self._bias_O)
        return sum(int(part.nbytes) for part in parts if part is not None)

    def __call__(self, x_MI: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        if x_MI.shape[0] >= MANY_ROWS:
            return self._many_rows(x_MI, out_dtype)
        x_MI = x_MI if x_MI.stride(1) == 1 else x_MI.contiguous()
        rows, tiles = x_MI.shape[0], self._words.shape[0] // ROWS
        out_MO = x_MI.new_empty((rows, self.out_features), dtype=out_dtype or x_MI.dtype)
        config = configs.pick("int4_linear", self._device.architecture, rows=rows, itemsize=x_MI.element_size())
        grid = (cdiv(self.out_features, config.constants["BLOCK_N"]), cdiv(rows, config.constants["BLOCK_M"]))
        number = _parts.number_of_parts(grid[0] * grid[1], tiles, self._device)
        parts = out_MO
        if number > 1:
            parts = x_MI.new_empty((number, rows, self.out_features), dtype=torch.float32)
        words = self._words
        launch(_few_rows, (*grid, number), x_MI, words, self._scales_GO, self._or(self._zeros_GO),
               self._or(self._order_I), self._or(self._bias_O), out_MO, parts, x_MI.stride(0), rows, self.in_features,
               self.out_features, tiles, self._scales_GO.shape[0], self._group_size, number, **self._flags,
               HAS_ORDER=self._order_I is not None, HAS_BIAS=self._bias_O is not None, IN_PARTS=number > 1,
               config=config)  # fmt: skip
        if number > 1:
            _parts.reduce(parts, self._bias_O, out_MO)
        return out_MO

    def rows(self, ids_M: torch.Tensor) -> torch.Tensor:
        words = self._words[:, ids_M].unflatten(0, (-1, 1, ROWS))
        shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device).view(1, 8, 1, 1)
        codes_IM = ((words >> shifts) & 15).flatten(0, 2)[: self.in_features].float()
        groups = torch.arange(self.in_features, device=words.device) // self._group_size
        zeros = MIDDLE if self._zeros_GO is None else self._zeros_GO[:, ids_M].float()[groups]
        weight_IM = (codes_IM - zeros) * self._scales_GO[:, ids_M].float()[groups]
        if self._order_I is not None:
            weight_IM = torch.empty_like(weight_IM).index_copy_(0, self._order_I.long(), weight_IM)
        return weight_IM.t().contiguous().to(self._dtype)

    def _many_rows(self, x_MI: torch.Tensor, out_dtype: torch.dtype | None) -> torch.Tensor:
        weight_IO = x_MI.new_empty((self.in_features, self.out_features))
        config = configs.pick("int4_unpack", self._device.architecture)
        tiles = self._words.shape[0] // ROWS
        launch(_unpack_all, (tiles, cdiv(self.out_features, config.constants["BLOCK_N"])), self._words,
               self._scales_GO, self._or(self._zeros_GO), weight_IO, self.in_features, self.out_features,
               self._scales_GO.shape[0], self._group_size, **self._flags, config=config)  # fmt: skip
        x_MI = x_MI if self._order_I is None else x_MI.index_select(1, self._order_I)
        y_MO = x_MI @ weight_IO
        y_MO = y_MO if self._bias_O is None else y_MO + self._bias_O
        return y_MO if out_dtype is None else y_MO.to(out_dtype)

    @property
    def _flags(self) -> dict[str, bool]:
        return {"HAS_ZEROS": self._zeros_GO is not None}

    def _or(self, tensor: torch.Tensor | None) -> torch.Tensor:
        """A kernel takes some pointer for what it will not read."""
        return self._words if tensor is None else tensor


def reasons_against(group_size: int, in_features: int, dtype: str = "", architecture: str = "") -> list[str]:
    """Why a weight cannot be had in this layout; its groups must not end within 32 inputs."""
    reasons = []
    if group_size % ROWS and group_size < in_features:
        reasons.append(f"int4 groups of {group_size} inputs are not whole multiples of {ROWS}")
    if dtype == "float32" and architecture in _NO_FLOAT32:
        reasons.append(f"int4 products of float32 do not fit the registers of {architecture}")
    return reasons


def supports(query: OpQuery, device: DeviceDescription) -> list[str]:
    size = query.attributes.get("group_size", ROWS)
    return reasons_against(size, query.attributes.get("in_features", size), query.dtype, device.architecture)


def aot_cases() -> list[AotCase]:
    quantised = {"words": "*i32:16", "scales_GO": "*fp16:16", "zeros_GO": "*u8:16"}
    sizes = {"inputs": "i32:16", "outputs": "i32:16", "groups": "i32", "group_size": "i32:16"}
    few = {
        "x_MI": "*bf16:16", **quantised, "order_I": "*i32:16", "bias_O": "*bf16:16", "out_MO": "*bf16:16",
        "parts_NMO": "*fp32:16", "stride_x": "i32:16", "rows": "i32", **sizes, "tiles": "i32", "number": "i32",
    }  # fmt: skip

    def case(name: str, rows: int, dtype: str = "bf16", **flags: bool) -> AotCase:
        constants = {"HAS_ZEROS": True, "HAS_ORDER": False, "HAS_BIAS": False, "IN_PARTS": True, **flags}
        signature = {key: kind.replace("bf16", dtype) for key, kind in few.items()}
        return AotCase(name=name, kernel=_few_rows, signature=signature, constants=constants, config="int4_linear",
                       sizes={"rows": rows, "itemsize": 2 if dtype == "bf16" else 4},
                       only=None if dtype == "bf16" else frozenset(TARGETS) - _NO_FLOAT32)  # fmt: skip

    return [
        case("AWQ, 1 row", 1),
        case("GPTQ, act-order, 32 rows", 32, HAS_ZEROS=False, HAS_ORDER=True),
        case("AWQ, 64 rows", 64, HAS_BIAS=True, IN_PARTS=False),
        case("AWQ, 64 rows, fp32", 64, "fp32"),
        AotCase(name="unpack", kernel=_unpack_all, signature={**quantised, "out_IO": "*bf16:16", **sizes},
                constants={"HAS_ZEROS": True}, config="int4_unpack"),
        AotCase(name="sum of parts", kernel=_parts.sum_parts, constants={"HAS_BIAS": True, "BLOCK": _parts.BLOCK},
                signature={"parts_NMO": "*fp32:16", "bias_O": "*bf16:16", "out_MO": "*bf16:16", "rows": "i32",
                           "outputs": "i32:16", "number": "i32"}, options={"num_warps": 2}),
    ]  # fmt: skip
