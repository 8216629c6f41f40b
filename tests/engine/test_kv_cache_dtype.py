"""The setting of what keys and values are kept in: from the command line's name to the config, or a refusal."""

from __future__ import annotations

import pytest
from enginecore.config import KV_CACHE_DTYPES, EngineArgs
from enginecore.engine.build import plan_engine
from enginecore.errors import ParameterError, UnsupportedError


def test_names_are_torch_dtypes() -> None:
    import torch

    assert all(isinstance(getattr(torch, name), torch.dtype) for name in KV_CACHE_DTYPES.values())
    with pytest.raises(ParameterError, match=r"kv_cache_dtype must be auto, bfloat16, .*fp8_e5m2, got 'int7'"):
        EngineArgs(kv_cache_dtype="int7")


def test_what_the_device_lacks_is_refused_before_weights_are_read(smollm2: object) -> None:
    with pytest.raises(UnsupportedError, match="cannot run") as refusal:
        plan_engine(
            EngineArgs(device="cpu", dtype="float32", kv_cache_dtype="float16", num_blocks=64, max_model_len=64)
        )
    assert any("KV cache dtype float16 is not one of" in reason for reason in refusal.value.reasons)
    assert refusal.value.fix == "try --kv-cache-dtype auto"


def test_a_runtime_that_keeps_its_own_cache_is_not_told_how(smollm2: object) -> None:
    with pytest.raises(UnsupportedError, match="keeps its KV cache to itself"):
        plan_engine(EngineArgs(device="sim", dtype="float32", kv_cache_dtype="int8"))
    assert plan_engine(EngineArgs(device="sim", dtype="float32")).config.kv_cache_dtype == ""


def test_auto_is_the_dtype_of_activations(smollm2: object) -> None:
    ready = plan_engine(EngineArgs(device="cpu", dtype="float32", num_blocks=64, max_model_len=64))
    assert ready.config.kv_cache_dtype == "float32"
