"""GGUF weights under transformers' names: exact against the library's own reading, and right end to end."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from enginecore.errors import ModelError
from enginecore.models.gguf_weights import GGUFTensors
from enginecore.models.loader import load_model
from enginecore.models.quantization import SIMPLER
from enginecore.models.store import resolve_model

from tests.models.tiny import make_tiny, tiny_tokens
from tests.models.tiny_gguf import write_gguf
from tests.models.torch_backend import Paged, TorchBackend
from tests.ops.test_kquants import random_weight


@pytest.mark.model
def test_every_tensor_of_the_real_model_equals_transformers_reading(smollm2: str) -> None:
    from transformers import AutoModelForCausalLM, GgufConfig

    folder, name = os.path.split(smollm2)
    oracle = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    expected = oracle.state_dict()
    tensors = GGUFTensors(smollm2)
    assert set(tensors.shapes) == set(expected) - {"lm_head.weight"}
    for key, shape in tensors.shapes.items():
        out = torch.empty(shape)
        tensors.read_into(key, out)
        assert torch.equal(out, expected[key]), key


@pytest.mark.parametrize(
    ("kind", "arch"),
    [("llama", "llama"), ("llama_tied", "llama"), ("llama3_rope", "llama"), ("qwen2", "qwen2"), ("qwen3", "qwen3")],
)
@pytest.mark.parametrize("fuse", [True, False])
def test_tiny_files_give_the_logits_of_their_model(kind: str, arch: str, fuse: bool, tmp_path: Path) -> None:
    oracle = make_tiny(kind)
    path = tmp_path / "tiny.gguf"
    write_gguf(path, oracle, arch)
    backend = TorchBackend()
    model = load_model(resolve_model(str(path)), backend=backend, dtype="float32", fuse=fuse)
    tokens = tiny_tokens(40)
    with torch.inference_mode():
        expected = oracle(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(Paged(model, backend).step({"a": tokens}), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("quant", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", "BF16"])
def test_quantised_matrices_equal_the_library_s_dequantisation(quant: str, tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType[quant]
    oracle = make_tiny("qwen2")
    path = tmp_path / "tiny.gguf"
    write_gguf(path, oracle, "qwen2", quant=kind)
    tensors = GGUFTensors(str(path))
    name = "model.layers.1.mlp.up_proj.weight"
    out = torch.empty(tensors.shapes[name])
    tensors.read_into(name, out)
    data = oracle.state_dict()[name].numpy()
    assert torch.equal(out, torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(data, kind), kind)))


@pytest.mark.parametrize("quant", ["Q4_K", "Q6_K"])
def test_k_quants_are_served_in_simpler_blocks(quant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library cannot write K-quants: their blocks are drawn. A model over them gives the logits of their values."""
    kind, scheme = gguf.GGMLQuantizationType[quant], quant.lower()

    def drawn(data: np.ndarray, _: object) -> np.ndarray:
        weight = random_weight(scheme, *data.shape)
        return weight.data_OB.numpy()

    monkeypatch.setattr(gguf.quants, "quantize", drawn)
    path = tmp_path / "tiny.gguf"
    write_gguf(path, make_tiny("llama", hidden_size=256, intermediate_size=512), "llama", quant=kind)
    monkeypatch.undo()
    backend = TorchBackend()
    backend.capabilities = replace(backend.capabilities, quantizations=frozenset({SIMPLER[scheme]}))
    logits = [
        Paged(load_model(resolve_model(str(path)), backend=backend, dtype="float32", quantization=how), backend).step(
            {"a": tiny_tokens(9)}
        )
        for how in ("gguf", None)
    ]
    error = (logits[0] - logits[1]).pow(2).mean() / logits[1].var()
    assert 0 < float(error) < 1e-2  # they differ by rounding, and by no more


@pytest.mark.parametrize(
    ("extra", "message"), [({"llama.expert_count": 8}, "experts"), ({"split.count": 2}, "one of 2 parts")]
)
def test_what_cannot_be_served_is_refused(extra: dict[str, int], message: str, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, make_tiny("llama"), "llama", extra=extra)
    with pytest.raises(ModelError, match=message):
        resolve_model(str(path))


def test_an_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, make_tiny("llama"), "falcon")
    with pytest.raises(ModelError, match="'falcon' is not supported"):
        resolve_model(str(path))
