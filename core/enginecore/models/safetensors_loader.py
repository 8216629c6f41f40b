"""Memory-mapped safetensors files, read tensor by tensor straight into place.

    header length u64 | header JSON {name: {dtype, shape, data_offsets}} | data

The mapping is private and its pages are dropped after each tensor, so that loading a model costs the memory of the
model and not that of its files besides.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from typing import Any, Protocol

import torch

from enginecore.errors import ModelError
from enginecore.models.gguf_reader import release_pages

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
_MAX_HEADER = 100 << 20


class TensorSource(Protocol):
    """A file of named tensors. `shapes` is known before anything is read."""

    path: str
    shapes: dict[str, tuple[int, ...]]

    def read_into(self, name: str, out: torch.Tensor) -> None:
        """Fill `out`, which has the tensor's shape, converting to its dtype and device."""


class SafetensorsFile:
    """One safetensors file. Raises ModelError, naming file and tensor, when it is not sound."""

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            with open(path, "rb") as file:
                self.size = os.fstat(file.fileno()).st_size
                if self.size < 8:
                    raise ModelError(f"{path} is not a safetensors file: {self.size} bytes")
                # A private mapping may be written to, which torch wants of a buffer; nobody does.
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
        self._entries: dict[str, tuple[torch.dtype, int, int]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._parse()

    def dtype(self, name: str) -> torch.dtype:
        """Of a tensor as the file has it."""
        return self._entries[name][0]

    def read_into(self, name: str, out: torch.Tensor) -> None:
        dtype, start, nbytes = self._entries[name]
        if nbytes == 0:
            return
        raw = torch.frombuffer(self._data, dtype=torch.uint8, count=nbytes, offset=start)
        if start % dtype.itemsize:
            raw = raw.clone()
        out.copy_(raw.view(dtype).view(self.shapes[name]))
        del raw
        release_pages(self._data, start, nbytes)

    def _parse(self) -> None:
        (length,) = struct.unpack_from("<Q", self._data, 0)
        if length > min(self.size - 8, _MAX_HEADER):
            raise ModelError(f"{self.path} is truncated or corrupt: its header claims {length} of {self.size} bytes")
        try:
            header = json.loads(self._data[8 : 8 + length])
        except (ValueError, RecursionError) as error:
            raise ModelError(f"{self.path} is corrupt: its header is not JSON ({error})") from error
        if not isinstance(header, dict):
            raise ModelError(f"{self.path} is corrupt: its header is a {type(header).__name__}")
        for name, entry in header.items():
            if name != "__metadata__":
                self._add(name, entry, 8 + length)

    def _add(self, name: str, entry: Any, base: int) -> None:
        try:
            kind, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
            sound = all(isinstance(n, int) and n >= 0 for n in [*shape, begin, end])
        except (KeyError, TypeError, ValueError):
            sound = False
        if not sound:
            raise ModelError(f"{self.path} is corrupt: the entry of tensor {name!r} is {str(entry)[:100]}")
        if kind not in _DTYPES:
            raise ModelError(f"{self.path}: tensor {name!r} has the unsupported dtype {kind!r}")
        count = 1
        for n in shape:
            count *= n
        if end - begin != count * _DTYPES[kind].itemsize:
            raise ModelError(f"{self.path} is corrupt: tensor {name!r} of shape {shape} has {end - begin} bytes")
        if base + end > self.size:
            raise ModelError(
                f"{self.path} is truncated: tensor {name!r} ends at byte {base + end}, the file has {self.size}"
            )
        self._entries[name] = (_DTYPES[kind], base + begin, end - begin)
        self.shapes[name] = tuple(shape)
