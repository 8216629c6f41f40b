"""Quantised checkpoints as a source of ordinary weights: the parts of a layer stand as one tensor "NAME.weight".

    awq, gptq            NAME.qweight, NAME.qzeros, NAME.scales, NAME.g_idx
    compressed-tensors   NAME.weight_packed, .weight_scale, .weight_zero_point, .weight_g_idx, .weight_shape;
                         or NAME.weight in eight bits, with NAME.weight_scale
    fp8                  NAME.weight in e4m3, with NAME.weight_scale_inv (of blocks) or NAME.weight_scale

What a layer has is told by the tensors that are there, so layers left in plain numbers need no list. Read with
`read_into` a weight is unpacked, for devices without the scheme; with `read_quantized` it stays as it is. Scales of
activations that were found beforehand are left out: the device finds one for each token, which is never coarser. Those
of cached keys and values are for `models/kv_scales.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from enginecore.errors import ModelError
from enginecore.models.quantized_config import QuantizedConfig
from enginecore.models.safetensors_loader import SafetensorsFile
from enginecore.ops import int4
from enginecore.ops import scaled as scaled_weights
from enginecore.ops.int4 import Int4Weight
from enginecore.ops.quantized import INT8, QuantizedWeight, can_quantize_int8, int8_weight
from enginecore.ops.scaled import ScaledWeight, scaled

Kept = Int4Weight | ScaledWeight | QuantizedWeight

#: Last part of a name -> what it is for a layer. The first of these makes a layer quantised.
_PACKED = ("qweight", "weight_packed")
_PARTS = ("qzeros", "scales", "g_idx", "weight_scale", "weight_scale_inv", "weight_zero_point", "weight_g_idx",
          "weight_shape")  # fmt: skip
#: Scales of activations and of cached keys and values.
_LEFT_OUT = ("input_scale", "input_zero_point", "input_global_scale", "output_scale", "k_scale", "v_scale", "q_scale",
             "activation_scale")  # fmt: skip
_EIGHT_BITS = {torch.float8_e4m3fn: "fp8", torch.int8: INT8}


class QuantizedTensors:
    """All files of a checkpoint at once: a layer's parts may lie in several. ModelError when parts are missing."""

    def __init__(self, files: list[SafetensorsFile], config: QuantizedConfig) -> None:
        self.path, self._config = files[0].path, config
        self._where: dict[str, SafetensorsFile] = {}
        for file in files:
            for name in file.shapes:
                if name in self._where:
                    raise ModelError(f"tensor {name!r} is both in {self._where[name].path} and in {file.path}")
                self._where[name] = file
        self.shapes: dict[str, tuple[int, ...]] = {}
        #: Names of tensors that are no part of a weight.
        self.left_out: list[str] = []
        self._layers: dict[str, dict[str, str]] = {}
        for name in self._where:
            self._add(name)

    def read_into(self, name: str, out: torch.Tensor) -> None:
        layer = self._layers.get(name)
        if layer is None:
            self._where[name].read_into(name, out)
        else:
            out.copy_(self._read(name, layer, out.dtype).dequantize())

    def read_quantized(self, name: str, dtype: torch.dtype) -> Kept | None:
        """The weight as its file has it, for activations in `dtype`; None when it is in plain numbers."""
        layer = self._layers.get(name)
        return None if layer is None else self._read(name, layer, dtype)

    def read_left_out(self, name: str) -> torch.Tensor:
        """One of `left_out`, as it is."""
        return self._tensor(name)

    def scheme(self, name: str) -> str | None:
        """The scheme of weight `name`, without reading it; None where it is to be unpacked on every device."""
        layer = self._layers.get(name)
        if layer is None:
            return None
        if "packed" in layer:
            return "int4"
        kind = _EIGHT_BITS[self._where[name].dtype(name)]
        return None if kind == INT8 and not can_quantize_int8(self.shapes[name][1]) else kind

    def _add(self, name: str) -> None:
        prefix, _, last = name.rpartition(".")
        weight = f"{prefix}.weight"
        if last in _PACKED:
            if weight in self._where:
                raise ModelError(f"{self._where[name].path}: layer {prefix!r} has both {last} and weight")
            rows, columns = self._shape2(name)
            self._layers[weight] = self._parts(prefix) | {"packed": name}
            if last == "weight_packed" or self._config.method == "awq":  # words along the second side
                rows, columns = rows, columns * 8
            else:
                rows, columns = rows * 8, columns
            self.shapes[weight] = (rows, columns) if last == "weight_packed" else (columns, rows)
        elif last == "weight" and self._where[name].dtype(name) in _EIGHT_BITS:
            self.shapes[name], self._layers[name] = self._shape2(name), self._parts(prefix)
        elif last in _LEFT_OUT:
            self.left_out.append(name)
        elif last not in _PARTS or not self._of_a_layer(prefix):
            self.shapes[name] = self._where[name].shapes[name]

    def _of_a_layer(self, prefix: str) -> bool:
        if any(f"{prefix}.{packed}" in self._where for packed in _PACKED):
            return True
        weight = f"{prefix}.weight"
        return weight in self._where and self._where[weight].dtype(weight) in _EIGHT_BITS

    def _parts(self, prefix: str) -> dict[str, str]:
        return {part: f"{prefix}.{part}" for part in _PARTS if f"{prefix}.{part}" in self._where}

    def _shape2(self, name: str) -> tuple[int, int]:
        shape = self._where[name].shapes[name]
        if len(shape) != 2:
            raise ModelError(
                f"{self._where[name].path}: quantised tensor {name!r} has the shape {shape}, not two sides"
            )
        return shape[0], shape[1]

    def _tensor(self, name: str) -> torch.Tensor:
        file = self._where[name]
        out = torch.empty(file.shapes[name], dtype=file.dtype(name))
        file.read_into(name, out)
        return out

    def _read(self, name: str, layer: dict[str, str], dtype: torch.dtype) -> Kept:
        def part(*kinds: str) -> torch.Tensor | None:
            return next((self._tensor(layer[kind]) for kind in kinds if kind in layer), None)

        def needed(*kinds: str) -> torch.Tensor:
            found = part(*kinds)
            if found is None:
                raise ModelError(f"{self._where[layer.get('packed', name)].path}: {name!r} is quantised, but "
                                 f"{' or '.join(kinds)} is missing")  # fmt: skip
            return found

        try:
            if "packed" not in layer:
                return self._read_scaled(name, needed("weight_scale", "weight_scale_inv"), dtype)
            packed = self._tensor(layer["packed"])
            if layer["packed"].endswith("weight_packed"):
                zeros, groups = part("weight_zero_point"), part("weight_g_idx")
                return int4.from_packed(packed, needed("weight_scale"), zeros, groups, dtype)
            if self._config.method == "awq":
                return int4.from_awq(packed, needed("qzeros"), needed("scales"), dtype)
            return int4.from_gptq(
                packed, part("qzeros"), needed("scales"), part("g_idx"), dtype, zero_offset=self._config.zero_offset
            )
        except ModelError as error:
            raise ModelError(f"{name!r} of {self.path}: {error}") from error

    def _read_scaled(self, name: str, scales: torch.Tensor, dtype: torch.dtype) -> Kept:
        values_OI = self._tensor(name)
        scheme = _EIGHT_BITS[values_OI.dtype]
        block = self._config.block
        if block is not None:
            wanted = tuple(-(-side // part) for side, part in zip(values_OI.shape, block, strict=True))
            block = block if tuple(scales.shape) == wanted else None
        weight = scaled(scheme, values_OI, scales, dtype, block)
        return int8_weight(values_OI, weight.scales_AB, dtype) if scheme == INT8 else weight


def join(parts: list[Any]) -> Any | None:
    """The rows of several layers over the same inputs as one weight, or None where they must stay apart."""
    if len(parts) == 1:
        return parts[0]
    if len({type(part) for part in parts}) > 1:
        return None
    if isinstance(parts[0], Int4Weight):
        return int4.join(parts)
    if isinstance(parts[0], ScaledWeight):
        return scaled_weights.join(parts)
    if len({(part.scheme, part.in_features) for part in parts}) > 1:
        return None
    return replace(parts[0], data_OB=torch.cat([part.data_OB for part in parts]))
