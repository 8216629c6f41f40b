"""The tensors of a GGUF file under transformers' names, dequantised in slices straight into place.

llama.cpp's converter turns the rows of each q and k head from (first half, second half) into pairs; `_unpermute` undoes
that. Weights of one dimension are stored as they are.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from enginecore.errors import ModelError
from enginecore.models.gguf_config import ROPE_FACTORS, architecture, hf_config, hf_name
from enginecore.models.gguf_reader import GGML_TYPES, GGUFFile, GGUFTensorInfo
from enginecore.ops.blocks import UNPACKED, unpack_blocks
from enginecore.ops.quantized import SCHEMES, QuantizedWeight

#: float32 bytes that one slice dequantises to: it stays in a core's cache, and it bounds what loading needs besides.
_SLICE_BYTES = 1 << 20

_PLAIN = {0: "<f4", 1: "<f2", 28: "<f8"}


class GGUFTensors:
    """A TensorSource over one GGUF file."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._file = GGUFFile(path)
        self._permuted = architecture(self._file).permuted
        self._config = hf_config(self._file)
        self._infos: dict[str, GGUFTensorInfo] = {}
        for name, info in self._file.tensors.items():
            if name == ROPE_FACTORS:
                continue
            target = hf_name(name)
            if target is None:
                raise ModelError(f"{path}: tensor {name!r} is not known for this architecture")
            self._infos[target] = info
        # torch and numpy let go of the interpreter lock, so slices are worked out side by side.
        self._pool = ThreadPoolExecutor(max(1, torch.get_num_threads()), thread_name_prefix="gguf")
        self.shapes = {name: info.shape for name, info in self._infos.items()}

    def read_into(self, name: str, out: torch.Tensor) -> None:
        info = self._infos[name]
        heads = self._heads(name)
        if heads is None:
            self._fill(info, out)
            return
        rows = torch.empty(info.shape, dtype=torch.float32)
        self._fill(info, rows)
        out.copy_(_unpermute(rows, heads))

    def read_quantized(self, name: str, dtype: torch.dtype) -> QuantizedWeight | None:
        """The blocks of a matrix, rows in the model's order; None when its type has no scheme of ours."""
        info = self._infos[name]
        scheme = GGML_TYPES[info.ggml_type][0].lower()
        if scheme not in SCHEMES or len(info.shape) != 2:
            return None
        data_OB = torch.from_numpy(np.array(self._file.data(info))).view(info.shape[0], -1)
        heads = self._heads(name)
        if heads is not None:
            data_OB = _unpermute(data_OB, heads)
        self._file.release(info)
        return QuantizedWeight(scheme, data_OB, info.shape[1], dtype)

    def rope_factors(self) -> torch.Tensor | None:
        """Divisors of the rotary frequencies, float32 [head size / 2]; None when the file has none."""
        info = self._file.tensors.get(ROPE_FACTORS)
        if info is None:
            return None
        factors = torch.empty(info.shape, dtype=torch.float32)
        self._fill(info, factors)
        return factors

    def _heads(self, name: str) -> int | None:
        if self._permuted and ".self_attn.q_proj." in name:
            return int(self._config["num_attention_heads"])
        if self._permuted and ".self_attn.k_proj." in name:
            return int(self._config["num_key_value_heads"])
        return None

    def _fill(self, info: GGUFTensorInfo, out: torch.Tensor) -> None:
        rows = info.shape[0] if len(info.shape) > 1 else 1
        data = self._file.data(info).reshape(rows, -1)
        out_rows = out.view(rows, -1)
        step = max(1, _SLICE_BYTES // (out_rows.shape[1] * 4))

        def fill(start: int) -> None:
            values = _values(data[start : start + step], info.ggml_type, self.path, info.name)
            out_rows[start : start + step].copy_(values.view(-1, out_rows.shape[1]))

        for _ in self._pool.map(fill, range(0, rows, step)):  # draws the exceptions out, too
            pass
        self._file.release(info)


def _values(raw: np.ndarray, ggml_type: int, path: str, name: str) -> torch.Tensor:
    """Rows of raw bytes as numbers, row after row, in memory of their own."""
    if ggml_type in _PLAIN:
        return torch.from_numpy(np.array(raw.view(_PLAIN[ggml_type])))
    scheme = GGML_TYPES[ggml_type][0].lower()
    if scheme in UNPACKED:
        return unpack_blocks(scheme, torch.from_numpy(np.array(raw)).view(-1, SCHEMES[scheme][2]))
    from gguf.quants import dequantize  # torch is loaded where this runs, so the import is cheap by comparison

    try:
        return torch.from_numpy(np.asarray(dequantize(raw, ggml_type)))  # type: ignore[arg-type]
    except NotImplementedError as error:
        raise ModelError(f"{path}: tensor {name!r} is in a quantised form that cannot be read: {error}") from error


def _unpermute(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """From pairs (0, d/2), (1, d/2 + 1)... within each head back to first half, second half. Any trailing shape."""
    half = rows.shape[0] // heads // 2
    return rows.view(heads, half, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)
