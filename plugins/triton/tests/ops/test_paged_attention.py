"""Both attention kernels and the merge, over block edges, shuffled tables and unused blocks that hold NaN."""

from __future__ import annotations

import pytest
import torch
from enginecore.testing import nmse
from enginecore_triton import DeviceDescription
from enginecore_triton.ops import paged_decode, paged_prefill
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.triton.tests.paged import Batch

LIMIT = {"float32": 1e-10, "float16": 1e-6}
DECODE = [(1, 1), (1, 15), (1, 16), (1, 17), (1, 63), (1, 64), (1, 65), (1, 260)]
MIXED = [(17, 17), (1, 70), (7, 22), (1, 1), (9, 40)]
SINKS, SLOPES = torch.tensor([0.5, -2.0, 3.0, 0.0]), torch.tensor([0.5, 0.25, 0.1, 0.9])


def check(batch: Batch, limit: float) -> None:
    out, expected = batch.run(), batch.expected()
    assert nmse(out, expected) < limit
    # A wrong row must not drown among right ones.
    assert ((out.double() - expected).square().mean((1, 2)) / expected.square().mean()).max() < 50 * limit


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("pairs", [DECODE, MIXED], ids=["decode", "mixed"])
def test_plain(dtype: str, pairs: list[tuple[int, int]]) -> None:
    check(Batch(pairs, dtype=dtype), LIMIT[dtype])


@pytest.mark.parametrize("multiprocessors", [1, 1000])
def test_parts_of_a_context_and_one_whole_agree(multiprocessors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    merged = []
    monkeypatch.setattr(paged_decode, "merge_parts", lambda *a: merged.append(a[0].shape[3]) or MERGE(*a))
    check(Batch([(1, 513), (1, 3), (1, 128)], multiprocessors=multiprocessors), LIMIT["float32"])
    assert merged == ([] if multiprocessors == 1 else [5])


MERGE = paged_decode.merge_parts


@pytest.mark.parametrize(
    "features",
    [
        {"sliding_window": 1},
        {"sliding_window": 35},
        {"soft_cap": 2.0},
        {"sinks": SINKS},
        {"alibi_slopes": SLOPES},
        {"causal": False},
        {"sliding_window": 150, "sinks": SINKS, "soft_cap": 5.0, "alibi_slopes": SLOPES},
    ],
    ids=lambda features: "+".join(features),
)
@pytest.mark.parametrize("pairs", [[(1, 200), (1, 17)], [(9, 40), (1, 60)]], ids=["decode", "mixed"])
def test_features(features: dict, pairs: list[tuple[int, int]]) -> None:
    check(Batch(pairs, **features), LIMIT["float32"])


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"),
    [(2, 2, 80), (6, 2, 128), (7, 1, 96), (5, 1, 256), (71, 1, 16), (4, 4, 46), (16, 1, 112)],
)
def test_head_sizes_and_groups(heads: int, kv_heads: int, size: int) -> None:
    check(Batch([(1, 40), (9, 21), (5, 5)], heads=heads, kv_heads=kv_heads, size=size), LIMIT["float32"])


@pytest.mark.parametrize("block_size", [8, 32, 128])
def test_block_sizes(block_size: int) -> None:
    check(Batch([(1, 130), (40, 140), (2, 9)], block_size=block_size), LIMIT["float32"])


@pytest.mark.parametrize("queries", [2, 3, 5, 8])
def test_several_tokens_of_each_sequence_are_decoded_at_once(queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from enginecore_triton import attention_backend

    monkeypatch.setattr(attention_backend, "paged_prefill", None)
    check(Batch([(queries, 300), (1, 40), (queries, queries)], sliding_window=200), LIMIT["float32"])


@pytest.mark.parametrize(("kv", "limit"), [("float8_e4m3fn", 5e-3), ("float8_e5m2", 2e-2), ("int8", 1e-3)])
@pytest.mark.parametrize("pairs", [[(1, 200), (1, 17)], [(33, 40), (1, 300), (3, 3)]], ids=["decode", "mixed"])
def test_quantised_caches(kv: str, limit: float, pairs: list[tuple[int, int]]) -> None:
    check(Batch(pairs, kv=kv), limit)
    check(Batch(pairs, kv=kv, dtype="float16", block_size=64), limit)


def test_scales_of_an_fp8_cache_are_each_heads_own() -> None:
    """Keys and values a thousand times too small for the format need them."""
    scales = torch.tensor([1e-3, 2e-3]), torch.tensor([4e-3])
    batch = Batch([(1, 40), (9, 30)], kv="float8_e4m3fn", scales=scales)
    slots = torch.nonzero(batch.logical.key[:, 0, 0].isfinite()).flatten()
    key, value = (side[slots].float() * 1e-3 for side in (batch.logical.key, batch.logical.value))
    batch.store(key, value, slots, *scales)
    check(batch, 5e-3)


@settings(max_examples=4, deadline=None)
@given(data=st.data())
def test_shapes_made_up(data: st.DataObject) -> None:
    block_size = data.draw(st.sampled_from([8, 16, 64]))
    kv_heads, group = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 9))
    lengths = data.draw(st.lists(st.integers(1, 100), min_size=1, max_size=4))
    pairs = [(data.draw(st.sampled_from([1, length, (length + 1) // 2])), length) for length in lengths]
    size = data.draw(st.sampled_from([16, 40, 64, 72]))
    window = data.draw(st.sampled_from([None, 1, 17]))
    shape = {"heads": kv_heads * group, "kv_heads": kv_heads, "size": size, "block_size": block_size}
    check(Batch(pairs, **shape, sliding_window=window), LIMIT["float32"])


@pytest.mark.parametrize(
    ("pair", "features"),
    [
        ((17, 150), {}),
        ((9, 130), {"causal": False, "alibi_slopes": SLOPES}),
        ((20, 170), {"sliding_window": 80, "sinks": SINKS}),
        ((34, 70), {"soft_cap": 3.0, "sinks": SINKS}),
    ],
    ids=["prefix", "non-causal", "window and sinks", "cap and sinks"],
)
def test_a_lone_prompt_in_parts(pair: tuple[int, int], features: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    merged = []
    monkeypatch.setattr(paged_prefill, "merge_parts", lambda *a: merged.append(a[0].shape[3]) or MERGE(*a))
    monkeypatch.setattr(paged_prefill, "LEAST_PART", 64)
    check(Batch([pair], multiprocessors=1000, **features), LIMIT["float32"])
    assert merged == [-(-pair[1] // 64)]


def test_how_many_parts_a_prompt_has() -> None:
    h200 = DeviceDescription(multiprocessors=132)

    def parts(tokens: int, kv_heads: int, longest: int) -> int:
        return paged_prefill.parts_for_prompt(-(-tokens // 32) * kv_heads, longest, h200)  # 4 heads to 1, 128 rows

    assert parts(2048, 8, 2048) == parts(288, 8, 32768) == 1, "half of the device has work"
    assert parts(100, 8, 32768) == 4 and parts(32, 1, 32768) == 16, "the next turn of a chat"
    assert parts(100, 8, 600) == 2, "a short context is not worth it"


def test_how_many_parts() -> None:
    h200 = DeviceDescription(multiprocessors=132)

    def parts(sequences: int, longest: int) -> int:
        return paged_decode.parts_for(sequences, 8, longest, 8, 2, h200)

    assert parts(1, 100) == 1, "nothing to cut"
    assert 8 * parts(1, 100_000) >= 132, "one long context fills the device"
    assert 1 <= parts(64, 4096) <= 4 and parts(4096, 4096) == 1, "enough sequences need no parts"
    assert parts(1, 10**6) <= 64
