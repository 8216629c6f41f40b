"""Low-rank adapters as the PEFT library saves them: a folder with adapter_config.json and adapter_model.safetensors.

An adapter is small and may come from anybody, so it is read whole and checked before anything is done with it: what the
settings ask for that is not served, tensors that belong nowhere, shapes that do not fit, numbers that are none. All
reasons are given at once.

The product of a module becomes y = W x + B A x with A [R, I] and B [O, R]; PEFT's scale (lora_alpha / r, or with
use_rslora lora_alpha / sqrt(r)) is multiplied into B here, in float32.

Shape suffixes: R rank, I inputs, O outputs.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from enginecore.errors import ModelError, ParameterError, UnsupportedError
from enginecore.models.adapter_config import AdapterConfig, config_reasons

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
#: Bytes beyond which a config is none, and that the header of a file of weights may have.
_MAX_CONFIG, _MAX_HEADER = 1 << 20, 16 << 20
#: More reasons than these say nothing new.
_MOST_REASONS = 12

_TENSOR = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.default)?\.weight")


@dataclass(frozen=True)
class Adapter:
    """Checked weights in the model's dtype, in host memory. `weights` maps a module's name to its A and scaled B."""

    sha256: str
    rank: int
    weights: dict[str, tuple[torch.Tensor, torch.Tensor]]

    @property
    def nbytes(self) -> int:
        return sum(a_RI.nbytes + b_OR.nbytes for a_RI, b_OR in self.weights.values())


def find_adapter(path: str, root: str | None) -> Path:
    """The folder of an adapter with every link followed. With a `root`, relative paths begin there and nothing outside
    of it is looked at. Raises ParameterError."""
    given = Path(path).expanduser() if root is None else Path(root).expanduser() / path
    folder: Path | None
    top: Path | None
    try:
        folder = given.resolve(strict=True)
        top = None if root is None else Path(root).expanduser().resolve(strict=True)
    except (OSError, RuntimeError, ValueError):
        folder = top = None
    inside = folder is not None and (root is None or (top is not None and folder.is_relative_to(top)))
    if folder is None or not inside or not folder.is_dir():
        place = "" if root is None else " under the folder for adapters"
        raise ParameterError(f"there is no folder {path[:256]!r}{place}", param="lora_path")
    return folder


def read_adapter(
    folder: Path, modules: Mapping[str, tuple[int, int]], max_rank: int, dtype: torch.dtype, root: str | None = None
) -> Adapter:
    """The adapter in `folder` (from `find_adapter`), for a model whose adaptable `modules` have these (outputs,
    inputs). Raises ModelError for files that are broken, UnsupportedError with all reasons for what cannot be served.
    """
    text = _read(folder, CONFIG, _MAX_CONFIG, root)
    try:
        raw = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ModelError(f"{CONFIG} of the adapter is not JSON: {error}") from None
    config = AdapterConfig.of(raw)
    reasons = config_reasons(raw, config, max_rank)
    if reasons:
        raise _unsupported(reasons)
    largest = sum(max_rank * (outputs + inputs) * 4 for outputs, inputs in modules.values())
    data = _read(folder, WEIGHTS, largest + _MAX_HEADER, root)
    tensors = _parse(data)
    found, reasons = _sorted(tensors, modules)
    reasons += config.missing(found, modules)
    weights = {}
    for name, (a_RI, b_OR) in found.items():
        problem = _problem(name, a_RI, b_OR, modules[name], config.rank_of(name), max_rank)
        if problem is not None:
            reasons.append(problem)
            continue
        b_OR = b_OR.float() * config.scale_of(name, a_RI.shape[0])
        weights[name] = (a_RI.to(dtype).contiguous(), b_OR.to(dtype).contiguous())
        if not all(torch.isfinite(part).all() for part in weights[name]):
            reasons.append(f"{name}: a weight is too large for {str(dtype).removeprefix('torch.')}")
    if reasons:
        raise _unsupported(reasons)
    sha256 = hashlib.sha256(hashlib.sha256(text).digest() + hashlib.sha256(data).digest()).hexdigest()
    return Adapter(sha256, max(a_RI.shape[0] for a_RI, _ in weights.values()), weights)


def _read(folder: Path, name: str, limit: int, root: str | None) -> bytes:
    """A file of the adapter, links followed as far as the root allows."""
    try:
        file = (folder / name).resolve(strict=True)
    except (OSError, RuntimeError):
        pickled = name == WEIGHTS and (folder / "adapter_model.bin").is_file()
        fix = "pickled weights (adapter_model.bin) are not read: save the adapter as safetensors" if pickled else None
        raise ModelError(f"the adapter has no {name}", fix=fix) from None
    if root is not None and not file.is_relative_to(Path(root).expanduser().resolve()):
        raise ParameterError(f"{name} of the adapter is a link out of the folder for adapters", param="lora_path")
    try:
        with open(file, "rb") as stream:
            data = stream.read(limit + 1)
    except OSError as error:
        raise ModelError(f"cannot read {name} of the adapter: {error.strerror or error}") from None
    if len(data) > limit:
        raise ModelError(f"{name} of the adapter has more than the {limit} bytes that it can need for this model")
    return data


def _parse(data: bytes) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        return load(data)
    except (SafetensorError, ValueError, KeyError, RuntimeError, TypeError, AttributeError) as error:
        raise ModelError(f"{WEIGHTS} of the adapter is broken: {error}") from None


def _sorted(
    tensors: dict[str, torch.Tensor], modules: Mapping[str, tuple[int, int]]
) -> tuple[dict[str, tuple[torch.Tensor, torch.Tensor]], list[str]]:
    """(A and B of each module, what does not belong there)."""
    halves: dict[str, dict[str, torch.Tensor]] = {}
    reasons = []
    for name, tensor in tensors.items():
        match = _TENSOR.fullmatch(name)
        if match is None:
            reasons.append(f"tensor {name[:256]!r} is neither lora_A nor lora_B of a linear module")
        elif match[1] not in modules:
            reasons.append(f"this model has no module {match[1][:256]!r} that can be adapted")
        else:
            halves.setdefault(match[1], {})[match[2]] = tensor
    for name, half in halves.items():
        reasons += [f"{name} has no lora_{part}" for part in "AB" if part not in half]
    return {name: (half["A"], half["B"]) for name, half in halves.items() if len(half) == 2}, reasons


def _problem(
    name: str, a_RI: torch.Tensor, b_OR: torch.Tensor, sizes: tuple[int, int], rank: int, max_rank: int
) -> str | None:
    outputs, inputs = sizes
    if not (a_RI.is_floating_point() and b_OR.is_floating_point()) or a_RI.element_size() < 2:
        return f"{name}: weights of dtype {str(a_RI.dtype).removeprefix('torch.')} are not served"
    if tuple(a_RI.shape) != (rank, inputs) or tuple(b_OR.shape) != (outputs, rank):
        return (
            f"{name}: lora_A is {tuple(a_RI.shape)} and lora_B {tuple(b_OR.shape)}, "
            f"for rank {rank} and this model they must be {(rank, inputs)} and {(outputs, rank)}"
        )
    if rank > max_rank:
        return f"{name}: its rank {rank} is above max_lora_rank {max_rank}"
    bad = [part for part, tensor in (("A", a_RI), ("B", b_OR)) if not torch.isfinite(tensor).all()]
    return f"{name}: lora_{' and lora_'.join(bad)} holds NaN or infinity" if bad else None


def _unsupported(reasons: list[str]) -> UnsupportedError:
    more = len(reasons) - _MOST_REASONS
    shown = reasons if more <= 0 else [*reasons[:_MOST_REASONS], f"and {more} more"]
    return UnsupportedError("the adapter cannot be served", reasons=tuple(shown))
