"""A checkpoint under the model's own weight names: which files hold what each parameter needs, checked before reading.

transformers keeps a list of renamings and conversions (experts stored apart but used as one tensor, say) for each
architecture. We ask it for the list and for each key's new name, and read only when a parameter is asked for.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from enginecore.errors import ModelError
from enginecore.models.gguf_weights import GGUFTensors
from enginecore.models.pickle_loader import PickledTensors
from enginecore.models.quantized_config import read_config
from enginecore.models.quantized_tensors import Kept, QuantizedTensors
from enginecore.models.safetensors_loader import SafetensorsFile, TensorSource
from enginecore.models.skeleton import Skeleton
from enginecore.models.store import ModelFiles
from enginecore.ops.int4 import Int4Weight, as_blocks
from enginecore.ops.quantized import QuantizedWeight

Rename = Callable[[str], "tuple[str, str | None]"]

_SOURCES: dict[str, Any] = {"safetensors": SafetensorsFile, "gguf": GGUFTensors, "bin": PickledTensors}

#: Buffers that old checkpoints carry and that are computed now.
_COMPUTED = re.compile(
    r"rotary_emb\.inv_freq|\.attn\.(bias|masked_bias)$|\.attention\.(bias|masked_bias)$|position_ids$"
)


class Checkpoint:
    """The weights of `model` (built on meta) in `files`. Tensors whose names in the files `unused` finds are not looked
    at. Raises ModelError naming what is missing or does not fit."""

    def __init__(self, files: ModelFiles, model: nn.Module, unused: re.Pattern[str] | None = None) -> None:
        self._unused = unused
        self.sources: list[TensorSource] = [_SOURCES[files.kind](path) for path in files.weights]
        quantized = read_config(files.config.get("quantization_config"))
        if quantized is not None and files.kind == "safetensors":
            self.sources = [QuantizedTensors(cast("list[SafetensorsFile]", self.sources), quantized)]
        self.name = files.path
        self._model = model
        # Buffers that are not saved with the model are not in here.
        self.parameters: dict[str, torch.Tensor] = dict(model.state_dict())
        self._tied: dict[str, str] = dict(getattr(model, "all_tied_weights_keys", None) or {})
        self._direct: dict[str, tuple[TensorSource, str]] = {}
        self._converted: dict[str, Any] = {}
        self._ready: dict[str, torch.Tensor] = {}
        #: Parameter that is converted -> (pattern, source, key) of what it is made of, in order.
        self._parts: dict[str, list[tuple[str, TensorSource, str]]] = {}
        self._plan()
        self._check()

    def source_name(self, name: str) -> str:
        """The name under which tied weights are stored; `name` itself for others."""
        if name in self._direct or name in self._converted:
            other = self._tied.get(name)
            return name if other is None or not self._has(other) else other
        if name in self._tied:
            return self._tied[name]
        return next((target for target, source in self._tied.items() if source == name and self._has(target)), name)

    def is_tied(self, a: str, b: str) -> bool:
        """Whether the two parameters are one."""
        return self.source_name(a) == self.source_name(b)

    def read_into(self, name: str, out: torch.Tensor) -> None:
        """Fill `out` with parameter `name`, converted to the dtype and device of `out`."""
        name = self.source_name(name)
        if name in self._direct:
            source, key = self._direct[name]
            source.read_into(key, out)
            return
        if name not in self._ready:
            self._ready.update(self._convert(name))
        out.copy_(self._ready.pop(name))

    def read_quantized(self, name: str, dtype: torch.dtype) -> QuantizedWeight | None:
        """Parameter `name` in the blocks of its file, for activations in `dtype`; None when it is in plain numbers."""
        source, key = self._direct.get(self.source_name(name), (None, ""))
        return source.read_quantized(key, dtype) if isinstance(source, GGUFTensors) else None

    def read_kept(self, name: str, dtype: torch.dtype, schemes: frozenset[str]) -> Kept | None:
        """Parameter `name` as a quantised checkpoint has it, where that is in one of `schemes`; None otherwise.

        Four-bit weights are given in blocks to devices that have kernels for those only.
        """
        source, key = self._direct.get(self.source_name(name), (None, ""))
        if not isinstance(source, QuantizedTensors):
            return None
        scheme = source.scheme(key)
        if scheme in schemes:
            return source.read_quantized(key, dtype)
        kept = source.read_quantized(key, dtype) if scheme == "int4" and "q4_1" in schemes else None
        return as_blocks(kept) if isinstance(kept, Int4Weight) else None

    def parts_of_experts(self, name: str) -> list[list[tuple[TensorSource, str]]]:
        """What parameter `name` [X, ...] is stacked from: for each side (gate and up, or down) the tensors of all
        experts in order. Empty where it is made in another way."""
        group: Any = self._converted.get(name)
        made = [type(operation).__name__ for operation in getattr(group, "operations", [])]
        if made not in (["MergeModulelist"], ["MergeModulelist", "Concatenate"]):
            return []
        dims = [operation.dim for operation in group.operations]
        parts = self._parts[name]
        patterns = [pattern for pattern in group.source_patterns if any(part[0] == pattern for part in parts)]
        sides = [[part[1:] for part in parts if part[0] == pattern] for pattern in patterns]
        fits = dims == [0, 1][: len(dims)] and len(sides) == len(made) and len({len(side) for side in sides}) == 1
        return sides if fits else []

    def read_kept_part(
        self, source: TensorSource, key: str, dtype: torch.dtype, schemes: frozenset[str]
    ) -> Kept | None:
        """One of `parts_of_experts` as a quantised checkpoint has it, where that is in one of `schemes`."""
        if not isinstance(source, QuantizedTensors) or source.scheme(key) not in schemes:
            return None
        return source.read_quantized(key, dtype)

    def forget(self, name: str) -> None:
        """Parameter `name` was read in parts."""
        self._converted.pop(name, None)

    def rope_factors(self) -> torch.Tensor | None:
        """Divisors of the rotary frequencies that come with the weights (GGUF files of llama 3)."""
        for source in self.sources:
            if isinstance(source, GGUFTensors):
                return source.rope_factors()
        return None

    # -- planning -----------------------------------------------------------------------------------------------

    def _has(self, name: str) -> bool:
        return name in self._direct or name in self._converted

    def _plan(self) -> None:
        rename, converters = _library_names(self._model, self.parameters)
        self._unexpected: list[tuple[TensorSource, str]] = []
        seen: dict[str, TensorSource] = {}
        for source in self.sources:
            for key in sorted(source.shapes, key=_natural):
                if key in seen:
                    raise ModelError(f"tensor {key!r} is both in {seen[key].path} and in {source.path}")
                seen[key] = source
                if self._unused is not None and self._unused.search(key):
                    continue
                name, pattern = rename(key)
                self._add(key, source, name, pattern, converters)

    def _add(self, key: str, source: TensorSource, name: str, pattern: str | None, converters: dict[str, Any]) -> None:
        if name not in self.parameters and key in self.parameters:
            name, pattern = key, None
        if name not in self.parameters:
            self._unexpected.append((source, key))
        elif pattern is None:
            self._direct[name] = (source, key)
        else:
            group = self._converted.setdefault(name, copy.deepcopy(converters[pattern]))
            dtype = self.parameters[name].dtype
            group.add_tensor(name, key, pattern, partial(_read, source, key, dtype))
            self._parts.setdefault(name, []).append((pattern, source, key))

    def _check(self) -> None:
        for name, (source, key) in self._direct.items():
            expected, found = tuple(self.parameters[name].shape), source.shapes[key]
            if expected != found:
                raise ModelError(f"{source.path}: tensor {key!r} has the shape {found}, the model needs {expected}")
        ignored = getattr(self._model, "_keys_to_ignore_on_load_unexpected", None) or ()
        for source, key in self._unexpected:
            if not _COMPUTED.search(key) and not any(re.search(pattern, key) for pattern in ignored):
                raise ModelError(f"{source.path}: tensor {key!r} is not a part of {type(self._model).__name__}")
        optional = getattr(self._model, "_keys_to_ignore_on_load_missing", None) or ()
        split = {target for group in self._converted.values() for target in _targets(group, self.parameters)}
        for name in self.parameters:
            known = self._has(self.source_name(name)) or name in split
            if not known and not any(re.search(pattern, name) for pattern in optional):
                where = (
                    self.sources[0].path if len(self.sources) == 1 else f"the {len(self.sources)} files of {self.name}"
                )
                raise ModelError(f"{where}: tensor {name!r} is missing")

    def _convert(self, name: str) -> dict[str, torch.Tensor]:
        group_name = name if name in self._converted else next(
            (key for key, group in self._converted.items() if name in _targets(group, self.parameters)), ""
        )  # fmt: skip
        if not group_name:
            raise ModelError(f"{self.name}: tensor {name!r} is missing")
        try:
            made = self._converted.pop(group_name).convert(group_name, model=self._model, config=self._model.config)
        except (RuntimeError, ValueError, KeyError) as error:
            raise ModelError(f"{self.name}: the parts of {name!r} do not fit together: {error}") from error
        tensors = {key: value[0] if isinstance(value, list) else value for key, value in made.items()}
        if name not in tensors or tensors[name].shape != self.parameters[name].shape:
            raise ModelError(f"{self.name}: the parts of {name!r} do not make up {tuple(self.parameters[name].shape)}")
        return tensors


def _read(source: TensorSource, key: str, dtype: torch.dtype) -> torch.Tensor:
    tensor = torch.empty(source.shapes[key], dtype=dtype)
    source.read_into(key, tensor)
    return tensor


def _targets(group: Any, parameters: dict[str, torch.Tensor]) -> set[str]:
    """Parameters that a conversion makes besides the one it is filed under."""
    targets = getattr(group, "layer_targets", None) or {}
    return {name for name in targets if name in parameters}


def _natural(key: str) -> tuple[Any, ...]:
    """Order experts by number: 2 before 10."""
    return tuple((0, int(part), "") if part.isdigit() else (1, 0, part) for part in key.split("."))


def _library_names(model: nn.Module, parameters: dict[str, torch.Tensor]) -> tuple[Rename, dict[str, Any]]:
    """A function from a checkpoint key to (parameter name, conversion pattern), and the conversions by pattern."""
    if isinstance(model, Skeleton):  # its checkpoints have the model's own names; others are transformers' to rename
        return lambda key: (key, None), {}
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    prefix = getattr(model, "base_model_prefix", "")

    def rename(key: str) -> tuple[str, str | None]:
        name, pattern = rename_source_key(key, renamings, converters, prefix, parameters)
        return name, pattern

    return rename, {pattern: entry for entry in converters for pattern in entry.source_patterns}
