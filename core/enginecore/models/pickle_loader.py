"""Pickled weights, through torch's weights-only loader and only where the user allowed it."""

from __future__ import annotations

import pickle

import torch

from enginecore.errors import ModelError


class PickledTensors:
    """A TensorSource over one .bin file. The loader refuses anything but tensors and plain containers."""

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise ModelError(f"{path}: torch's weights-only loader refused it: {reason[:200]}") from error
        if not isinstance(loaded, dict) or not all(isinstance(value, torch.Tensor) for value in loaded.values()):
            raise ModelError(f"{path} does not hold a dictionary of tensors")
        self._tensors: dict[str, torch.Tensor] = loaded
        self.shapes = {name: tuple(tensor.shape) for name, tensor in loaded.items()}

    def read_into(self, name: str, out: torch.Tensor) -> None:
        out.copy_(self._tensors[name])
