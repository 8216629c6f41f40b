"""The bridge and the fused decoder against transformers' eager attention, on tiny random models of many kinds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from enginecore.models.loader import Model, load_model
from enginecore.models.store import resolve_model

from tests.models.tiny import KINDS, tiny_tokens, write_tiny
from tests.models.torch_backend import Paged, TorchBackend

FUSED = {
    "llama",
    "llama_tied",
    "llama_bias",
    "llama3_rope",
    "mistral",
    "qwen2",
    "qwen2_window",
    "qwen3",
    "smollm3",
    "phi3",
    "phi3_partial",
}


def run_in_chunks(model: Model, backend: TorchBackend, texts: dict[str, list[int]]) -> dict[str, torch.Tensor]:
    """Logits of every token: two sequences that advance unevenly, in chunks and then token by token."""
    paged = Paged(model, backend)
    logits: dict[str, list[torch.Tensor]] = {name: [] for name in texts}
    done = dict.fromkeys(texts, 0)
    for sizes in ((7, 3), (1, 9), (5, 1), (1, 1), (1, 1), (60, 60)):
        batch = {}
        for (name, tokens), size in zip(texts.items(), sizes, strict=True):
            if done[name] < len(tokens):
                batch[name] = tokens[done[name] : done[name] + size]
        out = paged.step(batch)
        for name, rows in zip(batch, out.split([len(tokens) for tokens in batch.values()]), strict=True):
            logits[name].append(rows)
            done[name] += len(rows)
    return {name: torch.cat(rows) for name, rows in logits.items()}


@pytest.mark.parametrize("kind", list(KINDS))
def test_logits_equal_those_of_transformers(kind: str, tmp_path: Path) -> None:
    oracle = write_tiny(tmp_path, kind)
    texts = {"a": tiny_tokens(31, seed=1), "b": tiny_tokens(26, seed=2)}
    with torch.inference_mode():
        expected = {name: oracle(torch.tensor([tokens])).logits[0] for name, tokens in texts.items()}
    backend = TorchBackend()
    for fuse in (False, True) if kind in FUSED else (True,):
        model = load_model(resolve_model(str(tmp_path)), backend=backend, dtype="float32", fuse=fuse)
        assert model.fused == (fuse and kind in FUSED)
        got = run_in_chunks(model, backend, texts)
        for name in texts:
            torch.testing.assert_close(got[name], expected[name], atol=1e-4, rtol=1e-4)
