"""Other libraries for attention: taken only where they are installed and measured to be faster."""

from __future__ import annotations

import json
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
from enginecore.device import AttentionMetadata, AttentionParams
from enginecore_cuda.providers import PROVIDERS, TABLE, chosen, installed

PARAMS = AttentionParams(scale=0.5, num_heads=4, num_kv_heads=2, head_size=16)


def plant(monkeypatch: pytest.MonkeyPatch, name: str, **functions: Any) -> None:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    for key, function in functions.items():
        setattr(module, key, function)
    monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    """Both libraries, as recorders of what they are called with."""
    calls: dict[str, dict[str, Any]] = {}

    def flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
        calls["flash"] = {"key": key, "value": value, **options}
        return query + 1

    def decode(query: torch.Tensor, cache: torch.Tensor, workspace: torch.Tensor, *args: Any, **options: Any) -> Any:
        calls["flashinfer"] = {"cache": cache, "args": args, **options}
        return options["out"].copy_(query + 2)

    plant(monkeypatch, "flash_attn_interface", flash_attn_with_kvcache=flash)
    plant(monkeypatch, "flashinfer")
    plant(monkeypatch, "flashinfer.decode", trtllm_batch_decode_with_kv_cache=decode)
    return calls


def metadata(tokens: int) -> AttentionMetadata:
    return AttentionMetadata(
        query_start_loc=torch.tensor([0, tokens]),
        seq_lens=torch.tensor([20]),
        block_table=torch.tensor([[0, 1]]),
        slot_mapping=torch.zeros(tokens, dtype=torch.int64),
        max_query_len=tokens,
        max_seq_len=20,
    )


def test_nothing_is_chosen_that_was_not_measured(libraries: Any) -> None:
    assert set(installed()) == set(PROVIDERS)
    assert isinstance(json.loads(TABLE.read_text()), dict)
    assert chosen("sm_90", {}) == {} and chosen("sm_80", {"sm_90": {"flashinfer": {"decode": 2.0}}}) == {}


def test_the_fastest_is_chosen_for_each_phase(libraries: Any) -> None:
    table = {"sm_90": {"flash_attn_interface": {"decode": 1.2, "prefill": 1.3}, "flashinfer": {"decode": 1.5}}}
    found = chosen("sm_90", table)
    assert {phase: type(provider).__name__ for phase, provider in found.items()} == {
        "decode": "FlashInfer",
        "prefill": "FlashAttention3",
    }
    assert chosen("sm_90", {"sm_90": {"flash_attn_interface": {"prefill": 1.02, "decode": None}}}) == {}


def test_a_library_that_is_missing_or_broken_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    table = {"sm_90": {"flash_attn_interface": {"decode": 2.0}, "flashinfer": {"decode": 3.0}}}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert chosen("sm_90", table) == {}
    monkeypatch.undo()
    plant(monkeypatch, "flashinfer")
    plant(monkeypatch, "flashinfer.decode")  # of a version that has no such function
    assert "flashinfer" not in installed() and "cannot be used" in caplog.text


def test_calls_go_to_the_library_over_the_same_cache(libraries: dict[str, dict[str, Any]]) -> None:
    pytest.importorskip("triton")
    from enginecore_cuda.attention import ProvidedAttention
    from enginecore_triton import DeviceDescription
    from enginecore_triton.attention_backend import TRITON_CAPABILITIES

    table = {"sm_90": {"flash_attn_interface": {"prefill": 1.3}, "flashinfer": {"decode": 1.5}}}
    attention = ProvidedAttention(DeviceDescription(), TRITON_CAPABILITIES, chosen("sm_90", table))
    cache = torch.randn(3, 2, 2, 16, 16, dtype=torch.bfloat16)  # [blocks, 2, K, block_size, D]
    query = torch.zeros(1, 4, 16, dtype=torch.bfloat16)
    out = attention.forward(query, cache, metadata(1), PARAMS)
    assert float(out.float().mean()) == 2 and libraries["flashinfer"]["cache"] is cache
    assert libraries["flashinfer"]["kv_layout"] == "HND" and libraries["flashinfer"]["bmm1_scale"] == 0.5
    query = torch.zeros(5, 4, 16, dtype=torch.bfloat16)
    out = torch.empty_like(query)
    assert attention.forward(query, cache, metadata(5), PARAMS, out) is out and float(out.float().mean()) == 1
    told = libraries["flash"]
    assert torch.equal(told["key"], cache[:, 0].transpose(1, 2)) and told["window_size"] == (-1, -1)
    assert torch.equal(told["value"], cache[:, 1].transpose(1, 2)) and told["max_seqlen_q"] == 5


def test_what_a_library_does_not_compute_stays_with_the_kernels(libraries: Any) -> None:
    found = installed()
    sinks = AttentionParams(scale=1.0, num_heads=4, num_kv_heads=2, head_size=16, sinks=torch.zeros(4))
    capped = AttentionParams(scale=1.0, num_heads=4, num_kv_heads=2, head_size=16, soft_cap=5.0)
    assert all(provider.refuses(sinks, torch.bfloat16) for provider in found.values())
    assert all(provider.refuses(PARAMS, torch.float32) for provider in found.values())
    assert found["flashinfer"].refuses(capped, torch.bfloat16)
    assert not found["flash_attn_interface"].refuses(capped, torch.bfloat16)
