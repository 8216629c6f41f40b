"""Unsupported unless claimed, and every reason is given."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace

import pytest
from enginecore.device import AttentionQuery, Capabilities, Verdict, VerdictStatus, check_attention

QUERY = AttentionQuery(dtype="bfloat16", kv_dtype="bfloat16", head_size=64, num_heads=9, num_kv_heads=3, block_size=16)
WIDE = Capabilities(
    dtypes=frozenset({"bfloat16"}),
    kv_dtypes=frozenset({"bfloat16"}),
    block_sizes=frozenset({16}),
    head_size_range=(32, 256, 32),
    max_gqa_ratio=4,
)


def test_nothing_is_supported_unless_claimed() -> None:
    reasons = check_attention(Capabilities(), QUERY)
    for word in ("dtype bfloat16", "KV cache dtype", "block size 16", "head size 64", "GQA ratio 3"):
        assert any(word in reason for reason in reasons), word
    assert check_attention(WIDE, QUERY) == []


def test_an_unknown_feature_is_refused_on_the_plugins_behalf() -> None:
    query = replace(QUERY, features=frozenset({"sliding_window", "telepathy"}))
    assert check_attention(replace(WIDE, features=frozenset({"sliding_window"})), query) == [
        "features not supported: telepathy"
    ]


@pytest.mark.parametrize(("size", "fits"), [(32, True), (256, True), (48, False), (288, False), (80, True)])
def test_head_sizes_by_range_or_by_list(size: int, fits: bool) -> None:
    assert replace(WIDE, head_size_list=frozenset({80})).supports_head_size(size) is fits


@pytest.mark.parametrize(("heads", "kv_heads", "word"), [(8, 3, "multiple"), (8, 1, "ratio 8"), (8, 0, "multiple")])
def test_head_counts(heads: int, kv_heads: int, word: str) -> None:
    (reason,) = check_attention(WIDE, replace(QUERY, num_heads=heads, num_kv_heads=kv_heads))
    assert word in reason


def test_no_gqa_claimed_still_allows_equal_heads() -> None:
    assert check_attention(replace(WIDE, max_gqa_ratio=0), replace(QUERY, num_heads=4, num_kv_heads=4)) == []


def test_verdicts() -> None:
    assert Verdict.of([]).status is VerdictStatus.SUPPORTED
    assert Verdict.of([], verified=False).status is VerdictStatus.UNVERIFIED and Verdict.of([], verified=False)
    refused = Verdict.of(["a", "b"])
    assert not refused and refused.reasons == ("a", "b")


def test_claims_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        WIDE.max_gqa_ratio = 8  # type: ignore[misc]
