"""A bounds-checked, memory-mapped reader of GGUF files, versions 2 and 3. No torch.

    "GGUF" | version u32 | tensor count u64 | key count u64 | (key string, type u32, value)... |
    (tensor name, dimension count u32, dimensions u64..., type u32, offset u64)... | padding | tensor data

A string is a length (u64) and its bytes. Nothing is trusted: every length is compared with what is left of the file
before anything is allocated, and each error names the field and its offset. Arrays stay in the file until asked for.
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from enginecore.errors import ModelError

_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")

#: GGUF value type -> numpy dtype; 8 is a string, 9 an array.
_SCALARS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8",
            12: "<f8"}  # fmt: skip
_STRING, _ARRAY = 8, 9

#: ggml type -> (name, elements in a block, bytes of a block)
GGML_TYPES = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136), 24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4),
    27: ("I64", 1, 8), 28: ("F64", 1, 8), 29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17),
}  # fmt: skip

_MAX_NAME, _MAX_DIMENSIONS, _MAX_KEYS, _MAX_TENSORS = 1 << 16, 8, 1 << 16, 1 << 20


@dataclass(frozen=True)
class GGUFTensorInfo:
    """`shape` is outermost first, as torch has it; `offset` is from the start of the file."""

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class _Array:
    """An array that is still in the file."""

    item_type: int
    count: int
    offset: int


class GGUFFile:
    """Metadata and tensor table of one file. Raises ModelError when the file is not sound."""

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            with open(path, "rb") as file:
                self.size = os.fstat(file.fileno()).st_size
                if self.size < 24:
                    raise ModelError(f"{path} is not a GGUF file: {self.size} bytes")
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
        self._values: dict[str, Any] = {}
        self.tensors: dict[str, GGUFTensorInfo] = {}
        self._parse()

    def get(self, key: str, default: Any = None) -> Any:
        """A metadata value; arrays become lists (strings) or numpy arrays (numbers)."""
        value = self._values.get(key, default)
        if not isinstance(value, _Array):
            return value
        if value.item_type == _STRING:
            return [raw.decode("utf-8", "replace") for raw in self.raw_strings(key)]
        return np.frombuffer(self._data, _SCALARS[value.item_type], value.count, value.offset).copy()

    def raw_strings(self, key: str) -> list[bytes]:
        """A string array as bytes; empty when the key is missing or is something else."""
        array = self._values.get(key)
        if not isinstance(array, _Array) or array.item_type != _STRING:
            return []
        data, at, length_at = self._data, array.offset, _U64.unpack_from
        out = []
        for _ in range(array.count):
            end = at + 8 + length_at(data, at)[0]
            out.append(data[at + 8 : end])
            at = end
        return out

    def array_length(self, key: str) -> int:
        array = self._values.get(key)
        return array.count if isinstance(array, _Array) else 0

    def keys(self) -> list[str]:
        return list(self._values)

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def data(self, info: GGUFTensorInfo) -> np.ndarray:
        """The raw bytes of a tensor, as a read-only view of the mapping."""
        return np.frombuffer(self._data, np.uint8, info.nbytes, info.offset)

    def release(self, info: GGUFTensorInfo) -> None:
        """Tell the system that the pages of this tensor are not needed any more."""
        release_pages(self._data, info.offset, info.nbytes)

    # -- parsing ------------------------------------------------------------------------------------------------

    def _bad(self, what: str, at: int) -> ModelError:
        return ModelError(f"{self.path} is corrupt or truncated: {what} at byte {at} of {self.size}")

    def _u32(self, at: int, what: str) -> int:
        if at + 4 > self.size:
            raise self._bad(f"the file ends inside {what}", at)
        return int(_U32.unpack_from(self._data, at)[0])

    def _u64(self, at: int, what: str) -> int:
        if at + 8 > self.size:
            raise self._bad(f"the file ends inside {what}", at)
        return int(_U64.unpack_from(self._data, at)[0])

    def _name(self, at: int, what: str) -> tuple[str, int]:
        length = self._u64(at, what)
        if length > _MAX_NAME or at + 8 + length > self.size:
            raise self._bad(f"{what} claims {length} bytes", at)
        try:
            return self._data[at + 8 : at + 8 + length].decode("utf-8"), at + 8 + length
        except UnicodeDecodeError:
            raise self._bad(f"{what} is not UTF-8", at) from None

    def _parse(self) -> None:
        if self._data[:4] != b"GGUF":
            raise ModelError(f"{self.path} is not a GGUF file: it starts with {self._data[:4]!r}")
        self.version = self._u32(4, "the version")
        if self.version not in (2, 3):
            other = " (a big-endian file)" if self.version in (2 << 24, 3 << 24) else ""
            raise ModelError(f"{self.path}: GGUF version {self.version}{other} is not supported, only 2 and 3")
        num_tensors, num_keys = self._u64(8, "the tensor count"), self._u64(16, "the key count")
        if num_tensors > _MAX_TENSORS or num_keys > _MAX_KEYS:
            raise self._bad(f"{num_tensors} tensors and {num_keys} keys are announced", 8)
        at = 24
        for index in range(num_keys):
            at = self._parse_value(at, index)
        infos = []
        for index in range(num_tensors):
            info, at = self._parse_tensor(at, index)
            infos.append(info)
        self._place(infos, at)

    def _parse_value(self, at: int, index: int) -> int:
        start = at
        key, at = self._name(at, f"key {index}")
        if key in self._values:
            raise self._bad(f"key {key!r} appears twice", start)
        kind, at = self._u32(at, f"the type of {key!r}"), at + 4
        if kind == _STRING:
            length = self._u64(at, f"the value of {key!r}")
            if at + 8 + length > self.size:
                raise self._bad(f"the value of {key!r} claims {length} bytes", at)
            self._values[key] = self._data[at + 8 : at + 8 + length].decode("utf-8", "replace")
            return at + 8 + length
        if kind == _ARRAY:
            return self._parse_array(key, at)
        if kind not in _SCALARS:
            raise self._bad(f"{key!r} has the unknown type {kind}", at)
        dtype = np.dtype(_SCALARS[kind])
        if at + dtype.itemsize > self.size:
            raise self._bad(f"the file ends inside the value of {key!r}", at)
        self._values[key] = np.frombuffer(self._data, dtype, 1, at)[0].item()
        return at + dtype.itemsize

    def _parse_array(self, key: str, at: int) -> int:
        item_type, count = self._u32(at, f"the item type of {key!r}"), self._u64(at + 4, f"the length of {key!r}")
        at += 12
        if item_type in _SCALARS:
            end = at + count * np.dtype(_SCALARS[item_type]).itemsize
        elif item_type == _STRING:
            if count > (self.size - at) // 8:
                raise self._bad(f"{key!r} claims {count} strings", at)
            end = self._skip_strings(key, at, count)
        else:
            raise self._bad(f"{key!r} is an array of unsupported type {item_type}", at)
        if end > self.size:
            raise self._bad(f"{key!r} claims {count} items", at)
        self._values[key] = _Array(item_type, count, at)
        return end

    def _skip_strings(self, key: str, at: int, count: int) -> int:
        data, length_at = self._data, _U64.unpack_from
        try:
            for _ in range(count):
                at += 8 + length_at(data, at)[0]
        except (struct.error, OverflowError, ValueError):
            raise self._bad(f"the file ends inside the strings of {key!r}", min(at, self.size)) from None
        return at

    def _parse_tensor(self, at: int, index: int) -> tuple[GGUFTensorInfo, int]:
        start = at
        name, at = self._name(at, f"the name of tensor {index}")
        num_dimensions, at = self._u32(at, f"the dimension count of {name!r}"), at + 4
        if num_dimensions > _MAX_DIMENSIONS:
            raise self._bad(f"tensor {name!r} claims {num_dimensions} dimensions", start)
        dimensions = [self._u64(at + 8 * i, f"the dimensions of {name!r}") for i in range(num_dimensions)]
        at += 8 * num_dimensions
        kind, offset = self._u32(at, f"the type of {name!r}"), self._u64(at + 4, f"the offset of {name!r}")
        if kind not in GGML_TYPES:
            raise ModelError(f"{self.path}: tensor {name!r} has ggml type {kind}, which is not supported")
        type_name, per_block, block_bytes = GGML_TYPES[kind]
        count = 1
        for dimension in dimensions:
            count *= dimension
            if not 0 < count <= 1 << 50:
                raise self._bad(f"tensor {name!r} claims the dimensions {dimensions}", start)
        if dimensions and dimensions[0] % per_block:
            raise self._bad(f"tensor {name!r} of type {type_name} has rows of {dimensions[0]} elements", start)
        info = GGUFTensorInfo(name, tuple(reversed(dimensions)), kind, offset, count // per_block * block_bytes)
        return info, at + 12

    def _place(self, infos: list[GGUFTensorInfo], at: int) -> None:
        alignment = self._values.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1) or alignment > 1 << 20:
            raise self._bad(f"general.alignment is {alignment!r}", at)
        start = (at + alignment - 1) // alignment * alignment
        for info in infos:
            if info.name in self.tensors:
                raise self._bad(f"tensor {info.name!r} appears twice", at)
            if info.offset % alignment:
                raise self._bad(f"tensor {info.name!r} has the unaligned offset {info.offset}", at)
            offset = start + info.offset
            if offset + info.nbytes > self.size:
                raise self._bad(f"tensor {info.name!r} needs {info.nbytes} bytes", offset)
            self.tensors[info.name] = GGUFTensorInfo(info.name, info.shape, info.ggml_type, offset, info.nbytes)


def release_pages(mapping: mmap.mmap, offset: int, nbytes: int) -> None:
    """Drop the whole pages of a range from this process, so that a file being read does not count as memory twice."""
    page = mmap.PAGESIZE
    first, last = (offset + page - 1) // page * page, (offset + nbytes) // page * page
    if last > first and hasattr(mapping, "madvise") and hasattr(mmap, "MADV_DONTNEED"):
        mapping.madvise(mmap.MADV_DONTNEED, first, last - first)
