"""Safetensors files: sound ones, broken ones, and checkpoints that do not fit their model."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from enginecore.errors import ModelError
from enginecore.models.loader import load_model
from enginecore.models.safetensors_loader import SafetensorsFile
from enginecore.models.store import resolve_model
from safetensors.torch import load_file, save_file

from tests.models.tiny import tiny_tokens, write_tiny
from tests.models.torch_backend import Paged, TorchBackend

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.bool]


def load(path: Path, **options: Any) -> Any:
    return load_model(resolve_model(str(path)), backend=TorchBackend(), dtype="float32", **options)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_equal_what_was_saved(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {
        "matrix": (torch.arange(12).reshape(3, 4) % 2).to(dtype),
        "vector": torch.ones(3, dtype=dtype),
        "scalar": torch.ones((), dtype=dtype),
        "empty": torch.empty((0, 4), dtype=dtype),
    }
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    file = SafetensorsFile(str(tmp_path / "x.safetensors"))
    assert file.shapes == {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        out = torch.full(tensor.shape, 7, dtype=torch.float32)
        file.read_into(name, out)
        assert torch.equal(out, tensor.float())


def test_odd_offsets_are_read(tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    header += b" " * (3 - len(header) % 4)
    path = tmp_path / "odd.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + struct.pack("<2f", 1.5, -2.5))
    out = torch.empty(2)
    SafetensorsFile(str(path)).read_into("a", out)
    assert out.tolist() == [1.5, -2.5]


def test_every_truncation_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.ones(4), "b": torch.ones(2)}, path)
    data = path.read_bytes()
    for size in range(len(data)):
        path.write_bytes(data[:size])
        with pytest.raises(ModelError, match=r"x\.safetensors"):
            SafetensorsFile(str(path))


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"[1]", "is a list"),
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b'{"a": 3}', "entry of tensor 'a'"),
        (b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}', "entry of tensor 'a'"),
        (b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}', "entry of tensor 'a'"),
        (b'{"a": {"dtype": "Q4", "shape": [1], "data_offsets": [0, 4]}}', "unsupported dtype 'Q4'"),
        (b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}', r"shape \[2\] has 4 bytes"),
        (b'{"a": {"dtype": "F32", "shape": [99], "data_offsets": [0, 396]}}', "is truncated: tensor 'a'"),
    ],
)
def test_broken_headers(header: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    with pytest.raises(ModelError, match=message):
        SafetensorsFile(str(path))


def test_shards_are_read_and_missing_ones_named(tmp_path: Path) -> None:
    oracle = write_tiny(tmp_path, "llama", max_shard_size="60KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 2
    tokens = tiny_tokens(20)
    backend = TorchBackend()
    got = Paged(load(tmp_path), backend).step({"a": tokens})
    torch.testing.assert_close(got, oracle(torch.tensor([tokens])).logits[0].detach(), atol=1e-4, rtol=1e-4)
    shards[1].write_bytes(shards[1].read_bytes()[:-10])
    with pytest.raises(ModelError, match=f"{shards[1].name} is truncated: tensor"):
        load(tmp_path)
    shards[1].unlink()
    with pytest.raises(ModelError, match=f"{shards[1].name} is missing"):
        load(tmp_path)


@pytest.mark.parametrize("fuse", [True, False])
def test_checkpoints_that_do_not_fit(fuse: bool, tmp_path: Path) -> None:
    write_tiny(tmp_path, "llama")
    path = tmp_path / "model.safetensors"
    sound = load_file(path)
    name = "model.layers.1.mlp.up_proj.weight"

    def expect(tensors: dict[str, torch.Tensor], message: str) -> None:
        save_file(tensors, path)
        with pytest.raises(ModelError, match=message):
            load(tmp_path, fuse=fuse)

    without = {key: value for key, value in sound.items() if key != name}
    expect(without, rf"model\.safetensors: tensor '{name}' is missing")
    expect({**sound, name: torch.ones(5, 64)}, rf"tensor '{name}' has the shape \(5, 64\), the model needs \(96, 64\)")
    expect({**sound, "model.extra.weight": torch.ones(1)}, "'model.extra.weight' is not a part of LlamaForCausalLM")
    save_file({**sound, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}, path)
    load(tmp_path, fuse=fuse)


@pytest.mark.parametrize("fuse", [True, False])
def test_tied_weights_exist_once(fuse: bool, tmp_path: Path) -> None:
    oracle = write_tiny(tmp_path, "llama_tied")
    model = load(tmp_path, fuse=fuse)
    assert model.weight_bytes == sum(p.nbytes for p in oracle.parameters()) == model.shape.weight_bytes
    # Some checkpoints hold the tied head besides.
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, path)
    assert load(tmp_path, fuse=fuse).weight_bytes == model.weight_bytes


def test_a_checkpoint_of_the_base_model_is_understood(tmp_path: Path) -> None:
    """Weights saved from the inner model lack the "model." in front."""
    oracle = write_tiny(tmp_path, "llama_tied")
    path = tmp_path / "model.safetensors"
    save_file({name.removeprefix("model."): tensor for name, tensor in load_file(path).items()}, path)
    tokens = tiny_tokens(10)
    got = Paged(load(tmp_path), TorchBackend()).step({"a": tokens})
    torch.testing.assert_close(got, oracle(torch.tensor([tokens])).logits[0].detach(), atol=1e-4, rtol=1e-4)


def test_pickled_weights_need_leave_and_run_nothing(tmp_path: Path) -> None:
    oracle = write_tiny(tmp_path, "llama")
    (tmp_path / "model.safetensors").unlink()
    path = tmp_path / "pytorch_model.bin"
    torch.save(oracle.state_dict(), path)
    with pytest.raises(ModelError, match="pickled"):
        resolve_model(str(tmp_path))
    files = resolve_model(str(tmp_path), allow_pickle=True)
    model = load_model(files, backend=TorchBackend(), dtype="float32")
    tokens = tiny_tokens(10)
    got = Paged(model, TorchBackend()).step({"a": tokens})
    torch.testing.assert_close(got, oracle(torch.tensor([tokens])).logits[0].detach(), atol=1e-4, rtol=1e-4)

    sentinel = tmp_path / "sentinel"
    torch.save({"x": _Payload(sentinel)}, path)
    with pytest.raises(ModelError, match=r"pytorch_model\.bin: torch's weights-only loader refused"):
        load_model(files, backend=TorchBackend(), dtype="float32")
    assert not sentinel.exists()


class _Payload:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)
