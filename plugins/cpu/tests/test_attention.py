"""Paged attention against float64, on a cache whose unwritten slots are NaN."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

_spec = importlib.util.spec_from_file_location("cpu_reference", Path(__file__).with_name("reference.py"))
reference = importlib.util.module_from_spec(_spec)
sys.modules["cpu_reference"] = reference
_spec.loader.exec_module(reference)
Case = reference.Case

TOLERANCE = {"float32": 3e-6, "bfloat16": 1.5e-2}
MIXED = [(0, 1), (0, 16), (15, 1), (16, 1), (17, 3), (0, 40), (300, 1), (250, 21), (513, 2)]


def check(backend, case: Case) -> None:
    built = reference.build(backend, case)
    expected = reference.attention_reference(built)
    out = backend.attention.forward(built.query, built.cache, built.metadata, built.params)
    assert out.shape == built.query.shape and out.dtype == built.query.dtype
    torch.testing.assert_close(
        out[: len(expected)].double(), expected, rtol=TOLERANCE[case.dtype], atol=TOLERANCE[case.dtype]
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("head_size", [46, 64, 80, 96, 128, 256])
def test_head_sizes(backend, dtype, head_size):
    check(backend, Case(MIXED, head_size=head_size, dtype=dtype, strided=True, padding=3))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("ratio", [1, 3, 5, 7, 8, 16, 71])
def test_gqa_ratios(backend, dtype, ratio):
    kv_heads = 1 if ratio > 8 else 3
    check(backend, Case([(0, 33), (40, 1), (31, 5)], kv_heads * ratio, kv_heads, dtype=dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 128])
def test_block_edges(backend, dtype, block_size):
    sizes = [block_size - 1, block_size, block_size + 1, 2 * block_size, 255, 256, 257]
    check(backend, Case([(n - 1, 1) for n in sizes], 6, 2, block_size=block_size, dtype=dtype, seed=1))
    check(backend, Case([(0, n) for n in sizes[:4]], 6, 2, block_size=block_size, dtype=dtype, seed=2))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "params",
    [
        {"sliding_window": 1},
        {"sliding_window": 20},
        {"sliding_window": 300},
        {"soft_cap": 5.0},
        {"causal": False},
        {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
        {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625])},
        {"soft_cap": 20.0, "sliding_window": 64, "sinks": torch.ones(4)},
    ],
    ids=str,
)
def test_features(backend, dtype, params):
    check(backend, Case(MIXED, dtype=dtype, params=params, seed=3))


def test_odd_head_size(backend):
    check(backend, Case([(0, 19), (33, 1)], head_size=33, dtype="bfloat16"))
    check(backend, Case([(0, 19), (33, 1)], head_size=33, dtype="float32"))


def test_empty_sequences_and_batch(backend):
    check(backend, Case([(5, 0), (0, 7), (3, 0), (20, 1)]))
    check(backend, Case([(5, 0)]))


def test_output_argument(backend):
    built = reference.build(backend, Case([(3, 5), (0, 2)]))
    out = torch.empty(built.query.shape)
    result = backend.attention.forward(built.query, built.cache, built.metadata, built.params, out)
    assert result.data_ptr() == out.data_ptr()
    torch.testing.assert_close(out.double(), reference.attention_reference(built), rtol=3e-6, atol=3e-6)


def test_inference_tensors(backend):
    with torch.inference_mode():
        check(backend, Case([(3, 5), (40, 1)], dtype="bfloat16"))


def test_slot_outside_the_cache_is_refused(backend):
    built = reference.build(backend, Case([(0, 4)]))
    key = torch.zeros(1, 2, 64)
    for slot in (built.cache.shape[0] * 16, 1 << 40):
        with pytest.raises((ValueError, IndexError), match="slot"):
            backend.attention.reshape_and_cache(key, key, built.cache, torch.tensor([slot]))


def test_copy_and_swap_blocks(backend):
    built = reference.build(backend, Case([(0, 40)]))
    cache = built.cache
    cache.copy_(torch.randn(cache.shape))
    other = cache.clone()
    before = cache.clone()
    backend.attention.copy_blocks([cache, other], [(0, 2), (1, 3)])
    for each in (cache, other):
        assert torch.equal(each[2], before[0]) and torch.equal(each[3], before[1]) and torch.equal(each[4], before[4])
    host = torch.zeros_like(cache)
    backend.attention.swap_blocks([cache], [host], [(1, 0), (4, 5)])
    assert torch.equal(host[0], cache[1]) and torch.equal(host[5], cache[4]) and not host[1].any()
    with pytest.raises((ValueError, IndexError)):
        backend.attention.copy_blocks([cache], [(0, cache.shape[0])])
