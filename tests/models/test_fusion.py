"""The fused decoder beyond parity, which test_bridge.py holds it to: rows of logits, and when it steps aside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from enginecore.device import AttentionMetadata
from enginecore.models.fusion import FUSED_CLASSES, why_not_fused
from enginecore.models.inspect import inspect_meta
from enginecore.models.loader import Model, load_model
from enginecore.models.store import ModelFiles, resolve_model

from tests.models.tiny import KINDS, make_tiny, tiny_tokens, write_tiny
from tests.models.torch_backend import Paged, TorchBackend


def meta(kind: str, **settings: Any) -> Any:
    files = ModelFiles("tiny", "/nowhere", "safetensors", make_tiny(kind, **settings).config.to_dict())
    return inspect_meta(files, "float32")


@pytest.mark.parametrize("kind", list(KINDS))
def test_only_known_classes_are_fused(kind: str) -> None:
    shape, model = meta(kind)
    assert (why_not_fused(model, shape.calls) is None) == (shape.model_class in FUSED_CLASSES)


def test_what_keeps_a_known_class_from_being_fused() -> None:
    shape, model = meta("llama", hidden_act="relu")
    assert why_not_fused(model, shape.calls) == "activation 'relu' has no fused form"
    shape, model = meta("llama")
    assert "one for each layer" in str(why_not_fused(model, shape.calls[:-1]))
    model.model.layers[1].self_attn.add_module("extra", torch.nn.Identity())
    assert "has the parts" in str(why_not_fused(model, shape.calls))


def one_step(model: Model, tokens: list[int], wanted: list[int]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    backend = TorchBackend()
    paged = Paged(model, backend, num_blocks=8, block_size=16)
    count = len(tokens)
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor([0, count], dtype=torch.int32),
        seq_lens=torch.tensor([count], dtype=torch.int32),
        block_table=torch.tensor([[3, 1]], dtype=torch.int32),
        slot_mapping=torch.tensor([(48 if i < 16 else 0) + i for i in range(count)]),
        max_query_len=count,
        max_seq_len=count,
    )
    logits = model.forward(
        torch.tensor(tokens), torch.arange(count), metadata, paged.caches, torch.tensor(wanted, dtype=torch.int64)
    )
    return logits, paged.caches


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("wanted", [[], [19], [0, 7, 19], [5, 5], [3, 2, 1], list(range(20)), list(range(19, -1, -1))])
def test_logits_come_for_the_rows_that_are_wanted(wanted: list[int], fuse: bool, tmp_path: Path) -> None:
    oracle = write_tiny(tmp_path, "qwen3")
    tokens = tiny_tokens(20)
    model = load_model(resolve_model(str(tmp_path)), backend=TorchBackend(), dtype="float32", fuse=fuse)
    logits, caches = one_step(model, tokens, wanted)
    assert logits.dtype == torch.float32
    assert logits.shape == (len(wanted), model.vocab_size)
    with torch.inference_mode():
        expected = oracle(torch.tensor([tokens])).logits[0][torch.tensor(wanted, dtype=torch.int64)]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    # Whatever is wanted, the keys and values of every layer are written, and of nothing else.
    for cache in caches:
        assert torch.isfinite(cache[3]).all()
        assert torch.isfinite(cache[1, :, :4]).all()
        assert torch.isnan(cache[1, :, 4:]).all()
        assert torch.isnan(cache[0]).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["llama_tied", "gpt_oss"])
def test_half_precision_stays_close(kind: str, dtype: str, tmp_path: Path) -> None:
    write_tiny(tmp_path, kind)
    files, tokens = resolve_model(str(tmp_path)), tiny_tokens(30)
    exact = Paged(load_model(files, backend=TorchBackend(), dtype="float32"), TorchBackend()).step({"a": tokens})
    for fuse in (True, False):
        model = load_model(files, backend=TorchBackend(), dtype=dtype, fuse=fuse)
        assert model.weight_bytes == model.shape.weight_bytes
        got = Paged(model, TorchBackend()).step({"a": tokens})
        assert got.dtype == torch.float32
        error = (got - exact).norm() / exact.norm()
        assert error < (0.1 if kind == "gpt_oss" else 0.03), (fuse, error)


def test_positions_beyond_those_of_the_config_can_be_prepared(tmp_path: Path) -> None:
    oracle = write_tiny(tmp_path, "llama", max_position_embeddings=16)
    tokens = tiny_tokens(40)
    model = load_model(resolve_model(str(tmp_path)), backend=TorchBackend(), dtype="float32", max_model_len=64)
    with torch.inference_mode():
        expected = oracle(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(Paged(model, TorchBackend()).step({"a": tokens}), expected, atol=1e-4, rtol=1e-4)
