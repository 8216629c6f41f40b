"""Scales of cached keys and values in a checkpoint: which are taken, what is refused, when they are looked at."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from enginecore.errors import ModelError, UnsupportedError
from enginecore.models.loader import load_model
from enginecore.models.store import resolve_model
from safetensors.torch import load_file, save_file

from tests.models.tiny import write_tiny
from tests.models.torch_backend import Paged, TorchBackend

_CONFIG = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {}}
_FIRST = "model.layers.0.self_attn."


def write(folder: Path, scales: dict[str, Any]) -> str:
    write_tiny(folder, "llama", num_hidden_layers=1)
    file = folder / "model.safetensors"
    made = {_FIRST + name: torch.tensor(value) for name, value in scales.items()}
    save_file(load_file(file) | made, file)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": _CONFIG}))
    return str(folder)


def load(path: str, kv_dtype: str | None, backend: Any) -> Any:
    return load_model(resolve_model(path), backend=backend, dtype="float32", kv_dtype=kv_dtype)


def test_one_for_all_heads_or_one_for_each(tmp_path: Path) -> None:
    path, backend, seen = write(tmp_path, {"k_proj.k_scale": 0.5, "v_scale": [0.25, 2.0]}), TorchBackend(), []
    plain = backend.attention

    class Scaled(type(plain)):  # type: ignore[misc]
        def with_kv_scales(self, key_scales_K: torch.Tensor, value_scales_K: torch.Tensor) -> Any:
            seen.append((key_scales_K.tolist(), value_scales_K.tolist()))
            return plain

    backend.attention = Scaled()
    model = load(path, "float8_e4m3fn", backend)
    assert seen == [([0.5, 0.5], [0.25, 2.0])] and model.scaled_layers == 1
    assert load(path, "float32", backend).scaled_layers == 0 and len(seen) == 1, "only fp8 has use for them"
    Paged(model, backend).step({"a": [3, 4, 5]})


@pytest.mark.parametrize(
    ("scales", "reason"),
    [
        ({"k_scale": 0.5, "v_scale": [1.0, 2.0, 3.0]}, "3 scales for 2 key-value heads"),
        ({"k_scale": 0.5, "v_scale": 0.0}, r"v_scale' is not positive: \[0.0\]"),
        ({"k_scale": float("nan"), "v_scale": 1.0}, "not positive"),
        ({"k_scale": 0.5}, "layer 0 of .* has scales of k alone"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path: Path, scales: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        load(write(tmp_path, scales), "float8_e4m3fn", TorchBackend())


def test_a_device_that_takes_no_scales(tmp_path: Path) -> None:
    path = write(tmp_path, {"k_scale": 0.5, "v_scale": 0.5})
    with pytest.raises(UnsupportedError, match="does not take"):
        load(path, "float8_e5m2", TorchBackend())
    assert load(path, None, TorchBackend()).scaled_layers == 0
