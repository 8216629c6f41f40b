"""Sleep on a device that has no way of moving weights aside: they are dropped and read again."""

from __future__ import annotations

import weakref
from pathlib import Path

import pytest
from enginecore.config import EngineArgs
from enginecore.engine.client import InprocClient
from enginecore.errors import ModelError, UnsupportedError

from tests.engine.accelerated import run
from tests.models.tiny import tiny_tokens, write_tiny

PROMPTS = [tiny_tokens(n, seed=n) for n in (5, 40)]


def test_level_2_on_the_cpu(tmp_path: Path) -> None:
    write_tiny(tmp_path, "llama")
    args = EngineArgs(
        model=str(tmp_path), device="cpu", dtype="float32", num_blocks=32, max_num_seqs=4, kv_host_memory=2**22
    )
    client = InprocClient(args)
    model = client._engine.executor._worker._worker.model
    paged = getattr(model, "paged", model)
    right = run(client, PROMPTS, name="a")
    caches, weights = paged.kv_caches, weakref.ref(paged.model)
    with pytest.raises(UnsupportedError, match="level 2 drops them"):
        client.call("sleep", 1)
    assert not client.call("is_sleeping") and run(client, PROMPTS, name="b") == right
    client.call("sleep", 2)
    assert weights() is None and caches == [] and client.call("is_sleeping")
    files = tmp_path / "model.safetensors"
    files.rename(tmp_path / "gone")
    with pytest.raises(ModelError):
        client.call("wake_up")
    (tmp_path / "gone").rename(files)
    client.call("wake_up")
    assert len(caches) == 3 and caches is paged.kv_caches, "host memory copies from and to the new caches"
    assert run(client, PROMPTS, name="c") == right
    assert client.step().stats.lifted_tokens > 0, "what host memory kept was used"
    client.shutdown()
