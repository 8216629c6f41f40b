"""Gives a model that was built on meta its memory, one tensor at a time."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from enginecore.errors import ModelError
from enginecore.layers.linear import JoinedLinear, PackedEmbedding, PackedLinear
from enginecore.models.checkpoint import Checkpoint
from enginecore.models.quantization import SIMPLER
from enginecore.models.quantized_tensors import Kept, join
from enginecore.models.skeleton import Skeleton
from enginecore.ops.kquants import simpler
from enginecore.ops.quantized import QuantizedWeight, can_quantize_int8, quantize_int8

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Bytes from which on a weight gets memory of its own.
_LARGE = 1 << 18

Pack = Callable[["torch.Tensor | Kept", "torch.Tensor | None"], Any]
Adapt = Callable[[list[str], Any], Any]


#: transformers' mark on tensors that its initialisers must leave alone.
_INITIALIZED = "_is_hf_initialized"


class Materializer:
    """Reads weights of `checkpoint` onto `device`. `bytes` counts what it made. `schemes` are those of the device.
    `adapt` may put something around each linear that was made of certain modules."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: torch.device,
        pack: Pack,
        quantization: str | None = None,
        schemes: frozenset[str] = frozenset(),
        adapt: Adapt | None = None,
    ) -> None:
        self._adapt = adapt
        self.checkpoint, self.device, self.bytes = checkpoint, device, 0
        self._pack, self._quantization, self._schemes = pack, quantization, schemes
        #: Schemes in which weights of a quantised checkpoint stay.
        self.kept_schemes = schemes if quantization is None else frozenset()

    def tensor(self, name: str) -> torch.Tensor:
        """One parameter in the model's dtype."""
        out = self._stack([name])
        self.bytes += out.nbytes
        return out

    def linear(self, prefixes: list[str]) -> Any:
        """One packed linear out of the rows of several, in order. The unpacked weight is gone when this returns."""
        packed = self._linear(prefixes)
        return packed if self._adapt is None else self._adapt(prefixes, packed)

    def _linear(self, prefixes: list[str]) -> Any:
        blocks = self._blocks(prefixes) if self._quantization == "gguf" else []
        if len({weight.scheme for weight in blocks}) > 1:  # each part is a product of its own
            return JoinedLinear([self._linear([prefix]) for prefix in prefixes])
        kept = self._kept(prefixes)
        weight: torch.Tensor | Kept | None
        if kept:
            weight = join(kept)
            if weight is None:
                return JoinedLinear([self._linear([prefix]) for prefix in prefixes])
            weight = weight.to(self.device)
        elif blocks:
            data_OB = torch.cat([part.data_OB for part in blocks]) if len(blocks) > 1 else blocks[0].data_OB
            weight = replace(blocks[0], data_OB=data_OB.to(self.device))
        else:
            plain = weight = self._stack([f"{prefix}.weight" for prefix in prefixes])
            if self._quantization == "int8" and can_quantize_int8(plain.shape[1]):
                weight = quantize_int8(plain)
                del plain
        biases = [f"{prefix}.bias" for prefix in prefixes if f"{prefix}.bias" in self.checkpoint.parameters]
        if biases and len(biases) != len(prefixes):
            raise ModelError(f"only some of {prefixes} have a bias")
        bias_O = self._stack(biases) if biases else None
        packed = self._pack(weight, bias_O)
        self.bytes += packed.nbytes
        return packed

    def _kept(self, prefixes: list[str]) -> list[Any]:
        """The weights as a quantised checkpoint has them, in schemes that the device has: all of them or none."""
        if self._quantization is not None:
            return []
        found = []
        for prefix in prefixes:
            name = f"{prefix}.weight"
            weight = self.checkpoint.read_kept(name, self.checkpoint.parameters[name].dtype, self._schemes)
            if weight is None:
                return []
            found.append(weight)
        return found

    def _blocks(self, prefixes: list[str]) -> list[QuantizedWeight]:
        """The weights as their file has them, all of them or none."""
        names = [f"{prefix}.weight" for prefix in prefixes]
        read = (self.checkpoint.read_quantized(name, self.checkpoint.parameters[name].dtype) for name in names)
        found = [weight for weight in read if weight is not None]
        return [self._as_served(weight) for weight in found] if len(found) == len(names) else []

    def _as_served(self, weight: QuantizedWeight) -> QuantizedWeight:
        if weight.scheme in self._schemes or weight.scheme not in SIMPLER:
            return weight
        return simpler(weight, SIMPLER[weight.scheme])

    def _stack(self, names: list[str]) -> torch.Tensor:
        likes = [self.checkpoint.parameters[name] for name in names]
        if len(names) == 1:
            out = host_empty(tuple(likes[0].shape), likes[0].dtype)
            self.checkpoint.read_into(names[0], out)
            return out.to(self.device)
        rows = sum(like.shape[0] for like in likes)
        out = host_empty((rows, *likes[0].shape[1:]), likes[0].dtype)
        start = 0
        for name, like in zip(names, likes, strict=True):
            self.checkpoint.read_into(name, out[start : start + like.shape[0]])
            start += like.shape[0]
        return out.to(self.device)


def host_empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Host memory for one weight, straight from the system when it is large.

    The C library's heap would keep the holes that weights leave behind once they are packed, up to half the model.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < _LARGE:
        return torch.empty(shape, dtype=dtype)
    flags = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_ANONYMOUS") else {}
    return torch.frombuffer(mmap.mmap(-1, nbytes, **flags), dtype=dtype).view(shape)


def materialize(model: PreTrainedModel, weights: Materializer) -> None:
    """Fill every module of `model`, replacing linears with packed ones."""
    checkpoint = weights.checkpoint
    shared: dict[str, Any] = {}
    linears, embeddings = [], []
    for prefix, module in list(model.named_modules()):
        if type(module) is nn.Embedding:
            embeddings.append((prefix, module))  # after the linears: one of them may hold the same weight
        elif type(module) is nn.Linear and f"{prefix}.weight" in checkpoint.parameters:
            linears.append((prefix, module))
    # The largest first: packing needs the weight twice for a moment, which is cheapest while little else is there.
    for prefix, _ in sorted(linears, key=lambda entry: -entry[1].weight.numel()):
        packed = weights.linear([prefix])
        shared[checkpoint.source_name(f"{prefix}.weight")] = packed
        model.set_submodule(prefix, PackedLinear(packed))
    done = {prefix for prefix, _ in linears + embeddings}
    for prefix, module in list(model.named_modules()):
        if prefix not in done and not isinstance(module, PackedLinear):
            _fill(prefix, module, weights)
    for prefix, module in embeddings:
        packed = shared.get(checkpoint.source_name(f"{prefix}.weight"))
        if packed is not None and packed.in_features == module.embedding_dim:
            model.set_submodule(prefix, PackedEmbedding(packed))
        else:
            _fill(prefix, module, weights)
    restore_buffers(model, weights.device, checkpoint.rope_factors())


def _fill(prefix: str, module: nn.Module, weights: Materializer) -> None:
    dot = f"{prefix}." if prefix else ""
    for name, _ in list(module.named_parameters(recurse=False)):
        tensor = weights.tensor(dot + name)
        setattr(module, name, nn.Parameter(tensor, requires_grad=False))
    for name, _ in list(module.named_buffers(recurse=False)):
        if dot + name in weights.checkpoint.parameters:
            setattr(module, name, weights.tensor(dot + name))


def restore_buffers(
    model: PreTrainedModel | Skeleton,
    device: torch.device,
    rope_factors: torch.Tensor | None,
    within: nn.Module | None = None,
) -> None:
    """Compute the buffers that are not saved (rotary frequencies, say), as transformers does on loading.

    `within` limits this to a part of the model, where the rest stays on meta.
    """
    owners: list[nn.Module] = []
    for parameter in model.parameters():
        setattr(parameter, _INITIALIZED, True)
    for module in (within or model).modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_meta:
                # Not empty_like, which for a tensor on meta imports a library of symbolic mathematics.
                setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype, device=device))
                if not owners or owners[-1] is not module:
                    owners.append(module)
            else:
                setattr(buffer, _INITIALIZED, True)
    with torch.no_grad():
        for module in owners:
            model._init_weights(module)
            inv_freq = getattr(module, "inv_freq", None)
            if rope_factors is not None and isinstance(inv_freq, torch.Tensor):
                inv_freq.div_(rope_factors.to(inv_freq.device))
