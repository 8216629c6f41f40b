"""Models as a roofline sees them: the matrices of a layer and the size of a token in the cache, from a config.json.

Three configurations are ours to give by name, so that a simulation needs no files; any other comes as a config.json.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from enginecore.errors import ModelError, UnsupportedError

#: The fields of each model's own config.json that decide its sizes.
MODELS: dict[str, dict[str, Any]] = {
    # Zhang et al., "OPT: Open Pre-trained Transformer Language Models" (2022), table 1; facebook/opt-13b.
    "opt-13b": {
        "model_type": "opt", "hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 40,
        "ffn_dim": 20480, "vocab_size": 50272, "max_position_embeddings": 2048, "tie_word_embeddings": True,
        "torch_dtype": "float16",
    },
    # Llama Team, "The Llama 3 Herd of Models" (2024), table 3; meta-llama/Meta-Llama-3-8B and -70B.
    "llama-3-8b": {
        "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 8192,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    },
    "llama-3-70b": {
        "model_type": "llama", "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64,
        "num_key_value_heads": 8, "intermediate_size": 28672, "vocab_size": 128256, "max_position_embeddings": 8192,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    },
}  # fmt: skip

#: Architectures whose feed-forward part has two matrices; the others have a gate beside them.
_UNGATED = frozenset({"opt", "gpt_neox", "gptj", "gpt_bigcode", "bloom", "falcon", "phi", "starcoder2"})
#: Fields of architectures whose cost this arithmetic does not describe.
_UNKNOWN = {
    "num_experts": "experts", "num_local_experts": "experts", "n_routed_experts": "experts",
    "kv_lora_rank": "latent attention", "ssm_state_size": "recurrent state", "linear_num_key_heads": "linear attention",
}  # fmt: skip
_ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """A weight matrix: each token's row of `inputs` numbers becomes one of `outputs` numbers."""

    inputs: int
    outputs: int

    @property
    def size(self) -> int:
        return self.inputs * self.outputs


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A decoder with full attention in each layer. `itemsize` is bytes of a weight, an activation, a cached number."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    layer: tuple[Matrix, ...]
    head: Matrix
    tied: bool
    itemsize: int

    @property
    def weight_bytes(self) -> int:
        """Matrices and embeddings; norms and biases are left out (under 0.1%)."""
        layers = self.num_layers * sum(matrix.size for matrix in self.layer)
        return self.itemsize * (layers + self.head.size * (1 if self.tied else 2))

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token, over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_size * self.itemsize

    @property
    def widest(self) -> int:
        """Most numbers that one matrix of a layer reads and writes for a token."""
        return max(matrix.inputs + matrix.outputs for matrix in self.layer)


def model_shape(name: str, config: dict[str, Any], dtype: str) -> ModelShape:
    """From a config.json as plain data. Raises ModelError for a size that is missing, UnsupportedError for an
    architecture that costs something else than dense layers and full attention."""
    strange = sorted({what for field, what in _UNKNOWN.items() if config.get(field)})
    if strange:
        raise UnsupportedError(
            f"the simulated device has no arithmetic for {name}",
            reasons=tuple(f"it models dense layers with full attention, not {what}" for what in strange),
        )
    hidden, num_heads = _size(name, config, "hidden_size"), _size(name, config, "num_attention_heads")
    inner = _size(name, config, "intermediate_size", "ffn_dim")
    head_size = config.get("head_dim") or hidden // num_heads
    num_kv_heads = config.get("num_key_value_heads") or num_heads
    q, kv = num_heads * head_size, num_kv_heads * head_size
    up = inner if config.get("model_type") in _UNGATED else 2 * inner
    return ModelShape(
        num_layers=_size(name, config, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        layer=(
            Matrix(inputs=hidden, outputs=q + 2 * kv),
            Matrix(inputs=q, outputs=hidden),
            Matrix(inputs=hidden, outputs=up),
            Matrix(inputs=inner, outputs=hidden),
        ),
        head=Matrix(inputs=hidden, outputs=_size(name, config, "vocab_size")),
        tied=bool(config.get("tie_word_embeddings", False)),
        itemsize=_ITEMSIZE[dtype],
    )


def _size(name: str, config: dict[str, Any], *names: str) -> int:
    for field in names:
        value = config.get(field)
        if type(value) is int and value > 0:
            return value
    raise ModelError(f"the config.json of {name} has no usable {' or '.join(names)}, which the simulated device needs")


def named_config(name: str) -> dict[str, Any] | None:
    """The configuration of one of our models, or of a config.json that `name` is the path of; None otherwise."""
    if name in MODELS:
        return dict(MODELS[name])
    path = Path(name).expanduser()
    if path.suffix != ".json":
        return None
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read the configuration {name}: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{name} must hold a JSON object, found {type(config).__name__}")
    return config
