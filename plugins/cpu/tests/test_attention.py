"""Paged attention against float64, on a cache whose unwritten slots are NaN."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from enginecore.device import AttentionMetadata, AttentionParams, KVCacheSpec

_spec = importlib.util.spec_from_file_location("cpu_reference", Path(__file__).with_name("reference.py"))
reference = importlib.util.module_from_spec(_spec)
sys.modules["cpu_reference"] = reference
_spec.loader.exec_module(reference)
Case = reference.Case

#: With int8 the kernels round queries and weights to 16 bits, a hundredth of what the cache's own bytes have lost.
TOLERANCE = {"float32": 3e-6, "bfloat16": 1.5e-2, "int8": 3e-4}
MIXED = [(0, 1), (0, 16), (15, 1), (16, 1), (17, 3), (0, 40), (300, 1), (250, 21), (513, 2)]


KV_DTYPES = ["int8", "float8_e4m3fn", "float8_e5m2"]


def check(backend, case: Case) -> None:
    built = reference.build(backend, case)
    expected = reference.attention_reference(built)
    out = backend.attention.forward(built.query, built.cache, built.metadata, built.params)
    assert out.shape == built.query.shape and out.dtype == built.query.dtype
    tolerance = max(TOLERANCE[case.dtype], TOLERANCE.get(case.kv_dtype, 0))
    torch.testing.assert_close(out[: len(expected)].double(), expected, rtol=tolerance, atol=tolerance)


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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("block_size", [8, 16, 64])
@pytest.mark.parametrize("params", [{}, {"sliding_window": 100}], ids=str)
@pytest.mark.parametrize("kv_dtype", [None, "int8", "float8_e4m3fn"])
def test_result_does_not_depend_on_chunking_or_company(native_backend, dtype, kv_dtype, block_size, params):
    """One prompt of 700 tokens: whole, in chunks, token by token, alone and beside others: the same bits."""
    attention = native_backend.attention
    length, heads, kv_heads, size = 700, 6, 2, 64
    built = reference.build(
        native_backend,
        Case([(0, length), (90, 1), (0, 5)], heads, kv_heads, size, block_size, dtype, kv_dtype, params=params, seed=5),
    )
    whole = attention.forward(built.query, built.cache, built.metadata, built.params)[:length]
    for step in (1, 7, 256, 333):
        begins = range(0, length, step) if step > 1 else range(0, length, 37)
        for begin in begins:
            end = min(length, begin + step)
            metadata = type(built.metadata)(
                query_start_loc=torch.tensor([0, end - begin], dtype=torch.int32),
                seq_lens=torch.tensor([end], dtype=torch.int32),
                block_table=built.metadata.block_table[:1],
                slot_mapping=torch.zeros(end - begin, dtype=torch.int64),
                max_query_len=end - begin,
                max_seq_len=end,
            )
            part = attention.forward(built.query[begin:end], built.cache, metadata, built.params)
            assert torch.equal(part, whole[begin:end]), (step, begin)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "change",
    [
        {"head_size": 46, "strided": True, "padding": 3}, {"num_heads": 9, "num_kv_heads": 3, "block_size": 8},
        {"head_size": 128, "block_size": 32}, {"head_size": 33, "block_size": 8}, {"head_size": 256, "num_heads": 14},
        {"params": {"sliding_window": 20}}, {"params": {"sliding_window": 300}, "block_size": 8},
        {"params": {"soft_cap": 5.0, "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}}, {"params": {"causal": False}},
        {"params": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625])}},
    ],
    ids=str,
)  # fmt: skip
def test_caches_of_bytes(backend, dtype, kv_dtype, change):
    """Against float64 over what the cache stands for, so that nothing is lost on the way back out of it."""
    check(backend, Case(MIXED, dtype=dtype, kv_dtype=kv_dtype, **{"seed": 4, **change}))


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_every_code_and_every_size_of_number(backend, kv_dtype):
    """Values from far below to far above what a byte holds, each by itself: attention over one token gives it back."""
    gen = torch.Generator().manual_seed(0)
    power = torch.randint(-24, 20, (64, 2, 64), generator=gen)
    value = torch.randn(64, 2, 64, generator=gen) * 2.0**power
    if kv_dtype != "int8":  # halfway between neighbours, too: ties go to the even one
        codes = torch.arange(128, dtype=torch.uint8).view(getattr(torch, kv_dtype)).float()
        codes = codes[codes.isfinite()]
        middle = (codes[1:] + codes[:-1]) / 2
        value.view(-1)[: len(codes)], value.view(-1)[512 : 512 + len(middle)] = codes, -middle
    spec = KVCacheSpec(num_layers=1, num_kv_heads=2, head_size=64, dtype=kv_dtype, block_size=16)
    (cache,) = backend.memory.allocate_kv(backend.attention.kv_cache_layout(spec), 64, 1)
    cache.view(torch.uint8).fill_(0xFF)
    backend.attention.reshape_and_cache(value, value, cache, torch.arange(64) * 16)
    metadata = AttentionMetadata(
        query_start_loc=torch.arange(65, dtype=torch.int32), seq_lens=torch.ones(64, dtype=torch.int32),
        block_table=torch.arange(64, dtype=torch.int32)[:, None], slot_mapping=torch.arange(64) * 16,
        max_query_len=1, max_seq_len=1,
    )  # fmt: skip
    params = AttentionParams(scale=0.0, num_heads=2, num_kv_heads=2, head_size=64)
    out = backend.attention.forward(torch.zeros(64, 2, 64), cache, metadata, params)
    torch.testing.assert_close(out, reference.kept_as(value, kv_dtype), rtol=1e-6, atol=0)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_a_nan_stays_with_its_token(backend, kv_dtype):
    """A token's NaN is not made a number: who sees it gets it, and another sequence does not."""
    built = reference.build(backend, Case([(0, 40), (0, 9)], dtype="float32", kv_dtype=kv_dtype))
    value = torch.full((1, 2, 64), float("nan"))
    slot = int(built.metadata.block_table[0, 2]) * 16 + 7
    backend.attention.reshape_and_cache(value, value, built.cache, torch.tensor([slot]))
    out = backend.attention.forward(built.query, built.cache, built.metadata, built.params)
    assert out[39].isnan().all() and out[40:].isfinite().all()


@pytest.mark.parametrize("block_size", [8, 16])
def test_many_short_decodes(native_backend, block_size):
    """So many items that each thread claims its next one early and fetches that one's keys meanwhile."""
    lengths = [*range(1, 36), 255, 256, 257, 300, 511, 513]
    check(native_backend, Case([(n - 1, 1) for n in lengths], 9, 3, 64, block_size, "bfloat16"))


def test_broken_tables_are_refused(native_backend):
    built = reference.build(native_backend, Case([(40, 1)]))
    forward = native_backend.attention.forward
    for field, value, error in (
        ("block_table", torch.tensor([[0, 1, 99]], dtype=torch.int32), IndexError),
        ("block_table", torch.tensor([[0, -1, 1]], dtype=torch.int32), IndexError),
        ("block_table", torch.tensor([[0, 1]], dtype=torch.int32), ValueError),
        ("query_start_loc", torch.tensor([0, 2], dtype=torch.int32), ValueError),
        ("query_start_loc", torch.tensor([1, 1], dtype=torch.int32), ValueError),
        ("query_start_loc", torch.tensor([0, 1]), TypeError),
    ):
        fields = {**vars(built.metadata), field: value}
        with pytest.raises(error):
            forward(built.query, built.cache, type(built.metadata)(**fields), built.params)
