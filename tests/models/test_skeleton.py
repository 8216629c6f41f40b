"""Skeletons beside transformers' own classes: the same names, sizes, calls and rotary angles, or no skeleton."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from enginecore.models.fusion import _ACTIVATIONS, FUSED_CLASSES, rotary_table, why_not_fused
from enginecore.models.inspect import inspect_meta
from enginecore.models.loader import load_model
from enginecore.models.skeleton import ACTIVATIONS, FAMILIES, Skeleton, build_skeleton
from enginecore.models.store import ModelFiles, resolve_model
from safetensors.torch import load_file, save_file

from tests.models.tiny import KINDS, make_tiny, write_tiny
from tests.models.torch_backend import TorchBackend

SIZES = {"vocab_size": 90, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 5, "num_attention_heads": 6,
         "max_position_embeddings": 512}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip

#: As configs are written by hand, by older versions of the library and from GGUF files: entries missing, entries null.
WRITTEN: dict[str, dict[str, Any]] = {
    "llama_bare": {"model_type": "llama"},
    "llama_old_rope": {"model_type": "llama", "rope_theta": 500000, "rope_scaling": LLAMA3, "head_dim": None},
    "llama_linear": {"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 2.5}, "pretraining_tp": 1},
    "llama_gqa": {"model_type": "llama", "num_key_value_heads": 2, "head_dim": 46, "tie_word_embeddings": True,
                  "attention_bias": True, "mlp_bias": True, "hidden_act": "gelu", "rms_norm_eps": 1e-5},
    "mistral_bare": {"model_type": "mistral", "num_key_value_heads": 3},
    "mistral_no_window": {"model_type": "mistral", "num_key_value_heads": 3, "sliding_window": None, "rope_theta": 1e6},
    "qwen2_null_heads": {"model_type": "qwen2", "num_key_value_heads": None, "sliding_window": 8},
    "qwen2_windows": {"model_type": "qwen2", "num_key_value_heads": 3, "use_sliding_window": True, "sliding_window": 7,
                      "max_window_layers": 2, "head_dim": 10, "attention_bias": True, "mlp_bias": False},
    "qwen3_kinds": {"model_type": "qwen3", "num_key_value_heads": 1, "attention_bias": True, "use_sliding_window": True,
                    "layer_types": ["full_attention", "sliding_attention"] * 2 + ["full_attention"]},
    "smollm3_bare": {"model_type": "smollm3", "num_key_value_heads": 2, "pad_token_id": 0},
    "smollm3_windows": {"model_type": "smollm3", "num_key_value_heads": 2, "pad_token_id": None,
                        "use_sliding_window": True,
                        "sliding_window": 9, "no_rope_layers": [1, 0, 0, 1, 1], "tie_word_embeddings": False},
}  # fmt: skip


def files_of(config: dict[str, Any]) -> ModelFiles:
    return ModelFiles("tiny", "/nowhere", "safetensors", config)


def angles(model: Any) -> torch.Tensor:
    weights: Any = SimpleNamespace(device=torch.device("cpu"), checkpoint=SimpleNamespace(rope_factors=lambda: None))
    return rotary_table(model, weights, 300)


def assert_same(config: dict[str, Any], dtype: str) -> None:
    shape, model = inspect_meta(files_of(config), dtype)
    bare_shape, bare = inspect_meta(files_of(config), dtype, skeleton=True)
    assert isinstance(bare, Skeleton)
    assert why_not_fused(model, shape.calls) is None
    assert bare_shape == shape
    wanted = {name: (tensor.shape, tensor.dtype, tensor.device) for name, tensor in model.state_dict().items()}
    assert {name: (tensor.shape, tensor.dtype, tensor.device) for name, tensor in bare.state_dict().items()} == wanted
    assert bare.all_tied_weights_keys == (model.all_tied_weights_keys or {})
    for ours, theirs in zip(bare.model.layers, model.model.layers, strict=True):
        assert ours.self_attn.use_rope == bool(getattr(theirs.self_attn, "use_rope", True))
    assert bare.config.rms_norm_eps == model.config.rms_norm_eps
    assert bare.config.hidden_act == model.config.hidden_act
    assert torch.equal(angles(bare), angles(model))


@pytest.mark.parametrize("name", list(WRITTEN))
def test_a_skeleton_is_what_transformers_makes_of_a_config(name: str) -> None:
    assert_same({**SIZES, **WRITTEN[name]}, "bfloat16")


@pytest.mark.parametrize("kind", list(KINDS))
def test_configs_that_transformers_writes_give_the_same_or_no_skeleton(kind: str) -> None:
    config = make_tiny(kind).config.to_dict()
    if config["model_type"] in FAMILIES:
        assert_same(config, "float32")
    else:
        assert build_skeleton(config, "float32") is None


@pytest.mark.parametrize("model_type", list(FAMILIES))
def test_defaults_are_those_of_transformers(model_type: str) -> None:
    from transformers import CONFIG_MAPPING

    theirs = CONFIG_MAPPING[model_type]()
    family = FAMILIES[model_type]
    assert family.model_class in FUSED_CLASSES
    for name, value in family.defaults.items():
        own = getattr(CONFIG_MAPPING[model_type], name)
        assert own == value, name
    assert theirs.rope_parameters == {"rope_theta": family.theta, "rope_type": "default"}


def test_the_activations_are_those_of_the_fused_decoder() -> None:
    assert frozenset(_ACTIVATIONS) == ACTIVATIONS


@pytest.mark.parametrize(
    "changed",
    [
        {"model_type": "gemma2"},
        {"model_type": None},
        {"some_new_entry": 1},
        {"auto_map": {"AutoModelForCausalLM": "modeling.Model"}},
        {"quantization_config": {"quant_method": "awq"}},
        {"hidden_size": "48"},
        {"hidden_size": None},
        {"num_hidden_layers": 0},
        {"num_hidden_layers": True},
        {"num_attention_heads": 5},
        {"num_key_value_heads": 4},
        {"head_dim": 7},
        {"rms_norm_eps": None},
        {"hidden_act": "relu"},
        {"tie_word_embeddings": "yes"},
        {"attention_bias": None},
        {"pretraining_tp": 2},
        {"is_encoder_decoder": True},
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}},
        {"rope_scaling": {"rope_type": "linear"}},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}},
        {"rope_scaling": [1]},
        {"rope_theta": None},
        {"sliding_window": 8},
    ],
)
def test_what_is_not_written_down_is_left_to_transformers(changed: dict[str, Any]) -> None:
    assert build_skeleton({**SIZES, "model_type": "llama"}, "float32") is not None
    assert build_skeleton({**SIZES, "model_type": "llama", **changed}, "float32") is None


def test_a_checkpoint_with_names_of_its_own_loads_by_transformers_renamings(tmp_path: Path) -> None:
    """One of the bare decoder, whose tensors lack the prefix."""
    write_tiny(tmp_path, "llama_tied")
    file = tmp_path / "model.safetensors"
    tensors = {name.removeprefix("model."): tensor for name, tensor in load_file(file).items()}
    save_file(tensors, file)
    model = load_model(resolve_model(str(tmp_path)), backend=TorchBackend(), dtype="float32")
    assert model.fused
