"""An encoder's states over the kernels, on the host's tensors, under the interpreter, are transformers'."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from enginecore.pooling import PoolingParams

from plugins.triton.tests.interpreted import make
from tests.models import test_pooling

TEXTS = [list(range(2, 21)), [5], [2, 60, 61, 3]]


def test_attention_to_both_sides_over_a_scratch_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wide = {**test_pooling.BERT, "hidden_size": 64, "num_hidden_layers": 1}  # heads of 16, the least that there is
    monkeypatch.setitem(test_pooling.CONFIGS, "bert", wide)
    oracle = test_pooling.save("bert", tmp_path)
    runner, _ = test_pooling.runner_of(tmp_path, backend=make())
    for ids, states in zip(TEXTS, test_pooling.run(runner, TEXTS, PoolingParams(task="token_embed")), strict=True):
        with torch.inference_mode():
            expected = oracle(torch.tensor([ids])).last_hidden_state[0]
        assert np.allclose(states, expected.numpy(), atol=1e-5)
