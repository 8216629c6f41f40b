"""What is known of a model before its weights are read, and what is refused then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from enginecore.device import AttentionQuery, KVCacheSpec
from enginecore.errors import ModelError, UnsupportedError
from enginecore.models.inspect import ModelShape, default_dtype, inspect_model
from enginecore.models.store import ModelFiles, resolve_model

from tests.models.tiny import KINDS, make_tiny, write_tiny


def config_of(kind: str, **settings: Any) -> dict[str, Any]:
    return make_tiny(kind, **settings).config.to_dict()


def files(config: dict[str, Any]) -> ModelFiles:
    return ModelFiles("tiny", "/nowhere/tiny", "safetensors", config)


def inspect(kind: str, dtype: str = "float32", **settings: Any) -> ModelShape:
    return inspect_model(files(config_of(kind, **settings)), dtype)


@pytest.mark.model
def test_the_real_model(smollm2: str) -> None:
    shape = inspect_model(resolve_model(smollm2), "bfloat16")
    assert (shape.vocab_size, shape.hidden_size, shape.num_layers, shape.max_positions) == (49152, 576, 30, 8192)
    assert shape.num_parameters == 134_515_008
    assert shape.weight_bytes == 2 * shape.num_parameters
    assert [(call.layer, call.call) for call in shape.calls] == [(i, 0) for i in range(30)]
    assert shape.kv_specs(16) == [
        KVCacheSpec(num_layers=30, num_kv_heads=3, head_size=64, dtype="bfloat16", block_size=16)
    ]
    assert shape.attention_queries(16) == [
        AttentionQuery(dtype="bfloat16", kv_dtype="bfloat16", head_size=64, num_heads=9, num_kv_heads=3, block_size=16)
    ]


@pytest.mark.parametrize("kind", list(KINDS))
def test_no_weights_are_needed(kind: str) -> None:
    shape = inspect(kind)
    assert len(shape.calls) == 3
    assert shape.vocab_size == 160
    assert shape.max_positions == 128


def test_attention_settings_are_those_of_the_calls() -> None:
    gemma = inspect("gemma2").calls
    assert [call.sliding_window for call in gemma] == [8, None, 8]
    assert {call.soft_cap for call in gemma} == {5.0}
    assert gemma[0].scale == pytest.approx(32**-0.5)
    assert [call.sliding_window for call in inspect("qwen2_window").calls] == [None, 8, 8]
    assert {call.sliding_window for call in inspect("mistral").calls} == {8}
    assert all(call.has_sinks for call in inspect("gpt_oss").calls)
    features = {query.features for query in inspect("gpt_oss").attention_queries(16)}
    assert features == {frozenset({"sinks", "sliding_window"}), frozenset({"sinks"})}


def test_kv_dtype_may_differ() -> None:
    shape = inspect("llama")
    assert shape.kv_specs(16, "bfloat16")[0].dtype == "bfloat16"
    assert shape.attention_queries(16, "bfloat16")[0].kv_dtype == "bfloat16"
    assert shape.attention_queries(16)[0].kv_dtype == "float32"


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "t5", "vocab_size": 32}, "encoder-decoder"),
        ({"model_type": "vit"}, "'vit' is not a text-generation model"),
        ({"model_type": "mamba", "vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1}, "attention"),
        ({"model_type": "llama", "quantization_config": {"quant_method": "gptq"}}, "quantised with 'gptq'"),
    ],
)
def test_models_that_are_refused(config: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        inspect_model(files(config), "float32")


def test_length_dependent_rotary_scaling_is_refused() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(UnsupportedError, match="'dynamic' depends on the longest text"):
        inspect_model(files({**config_of("llama"), "rope_parameters": rope}), "float32")


def test_all_reasons_come_at_once() -> None:
    config = {
        **config_of("llama"),
        "quantization_config": {"quant_method": "awq"},
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    }
    with pytest.raises(UnsupportedError) as caught:
        inspect_model(files(config), "float32")
    assert len(caught.value.reasons) == 2
    assert caught.value.exit_code == 8


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "names no model_type"),
        ({"model_type": "no-such-type"}, "no-such-type"),
        ({"model_type": "llama", "num_attention_heads": "many"}, "config.json"),
        ({"model_type": "llama", "hidden_size": 65, "num_attention_heads": 4}, "not a multiple"),
    ],
)
def test_configs_that_make_no_sense(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        inspect_model(files(config), "float32")
    assert "\n" not in str(caught.value)


def test_the_dtype_that_a_config_names() -> None:
    assert default_dtype({"torch_dtype": "bfloat16"}) == "bfloat16"
    assert default_dtype({"dtype": "torch.float16"}) == "float16"
    assert default_dtype({"text_config": {"dtype": "float32"}}) == "float32"
    assert default_dtype({"dtype": "float8"}) is None
    assert default_dtype({}) is None


def test_mixed_page_shapes_give_one_spec_each(tmp_path: Path) -> None:
    write_tiny(tmp_path, "llama")
    shape = inspect_model(resolve_model(str(tmp_path)), "float32")
    calls = (shape.calls[0], shape.calls[1].__class__(**{**vars(shape.calls[1]), "head_size": 32}), shape.calls[2])
    mixed = ModelShape(**{**vars(shape), "calls": calls})
    assert [(spec.head_size, spec.num_layers) for spec in mixed.kv_specs(16)] == [(16, 2), (32, 1)]
