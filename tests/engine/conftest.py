"""A model that is a configuration only: the simulated device does not read weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 1000, "max_position_embeddings": 512,
    "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1,
    "intermediate_size": 8, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture(scope="session")
def config_only(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("models") / "config-only"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "model.safetensors").write_bytes(b"")
    return str(folder)
