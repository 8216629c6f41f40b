"""Four-bit weights out of each format against an unpacking in plain Python and float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from enginecore.errors import ModelError
from enginecore.ops import int4

I, O = 64, 16  # noqa: E741


class Made:
    """A random layer: codes, zeros, scales, the group of each input, and its weight [O, I] in float64."""

    def __init__(self, group: int, *, symmetric: bool = False, act_order: bool = False, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        groups = I // group
        self.codes_IO = rng.integers(0, 16, (I, O))
        self.zeros_GO = np.full((groups, O), 8) if symmetric else rng.integers(0, 16, (groups, O))
        self.scales_GO = rng.uniform(0.5, 1.5, (groups, O)).astype(np.float16)
        self.g_idx = np.arange(I) // group
        if act_order:
            self.g_idx = rng.permutation(self.g_idx)
        scales_IO = self.scales_GO.astype(np.float64)[self.g_idx]
        self.weight_OI = ((self.codes_IO - self.zeros_GO[self.g_idx]) * scales_IO).T


def words(codes: np.ndarray, axis: int, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Packs eight along `axis`, nibble i from place order[i], one number at a time."""
    codes = np.moveaxis(codes, axis, -1)
    out = np.zeros((*codes.shape[:-1], codes.shape[-1] // 8), np.uint32)
    for where in np.ndindex(out.shape):
        for nibble, place in enumerate(order):
            out[where] |= np.uint32(int(codes[(*where[:-1], 8 * where[-1] + place)]) << (4 * nibble))
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(out, -1, axis)).view(np.int32))


def exact(weight: int4.Int4Weight) -> np.ndarray:
    return weight.dequantize(torch.float64).numpy()


@pytest.mark.parametrize("group", [16, 32, I])
def test_awq(group: int) -> None:
    made = Made(group)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    weight = int4.from_awq(
        words(made.codes_IO, 1, order), words(made.zeros_GO, 1, order), torch.from_numpy(made.scales_GO), torch.float32
    )
    assert weight.group_size == group and (weight.in_features, weight.out_features) == (I, O)
    assert np.array_equal(exact(weight), made.weight_OI)
    assert weight.dequantize().dtype == torch.float32


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("offset", [0, 1])
def test_gptq(act_order: bool, offset: int) -> None:
    made = Made(16, act_order=act_order)
    stored = (made.zeros_GO - offset) % 16
    weight = int4.from_gptq(
        words(made.codes_IO, 0),
        words(stored, 1),
        torch.from_numpy(made.scales_GO),
        torch.from_numpy(made.g_idx.astype(np.int32)),
        torch.float32,
        zero_offset=offset,
    )
    assert (weight.permutation_I is not None) is act_order
    assert np.array_equal(exact(weight), made.weight_OI)


@pytest.mark.parametrize("symmetric", [False, True])
def test_packed(symmetric: bool) -> None:
    made = Made(32, symmetric=symmetric, act_order=True)
    weight = int4.from_packed(
        words(made.codes_IO.T, 1),
        torch.from_numpy(np.ascontiguousarray(made.scales_GO.T)),
        None if symmetric else words(np.ascontiguousarray(made.zeros_GO.T), 0),
        torch.from_numpy(made.g_idx),
        torch.bfloat16,
    )
    assert np.array_equal(exact(weight), made.weight_OI)


def test_a_group_index_without_meaning_is_left_out() -> None:
    made = Made(16)
    arrays = words(made.codes_IO, 0), None, torch.from_numpy(made.scales_GO)
    for g_idx in (None, torch.full((I,), -1), torch.arange(I) // 16):
        assert int4.from_gptq(*arrays, g_idx, torch.float32).permutation_I is None


def test_layers_are_joined_where_their_groups_agree() -> None:
    one, two = (_gptq(Made(16, seed=seed)) for seed in (1, 2))
    joined = int4.join([one, two])
    assert joined is not None
    assert np.array_equal(exact(joined), np.concatenate([exact(one), exact(two)]))
    assert int4.join([one, _gptq(Made(16, act_order=True))]) is None
    assert int4.join([one, _gptq(Made(32))]) is None
    plain = int4.from_gptq(words(Made(16).codes_IO, 0), None, one.scales_GO, None, torch.float32)
    mixed = int4.join([one, plain])
    assert mixed is not None and np.array_equal(exact(mixed), np.concatenate([exact(one), exact(plain)]))


def _gptq(made: Made) -> int4.Int4Weight:
    arrays = words(made.codes_IO, 0), words((made.zeros_GO - 1) % 16, 1), torch.from_numpy(made.scales_GO)
    return int4.from_gptq(*arrays, torch.from_numpy(made.g_idx), torch.float32)


def test_packing_undoes_unpacking() -> None:
    words_WO = torch.randint(-(2**31), 2**31 - 1, (4, 6), dtype=torch.int32)
    assert torch.equal(int4.pack_rows(int4.unpack_rows(words_WO)), words_WO)


def test_what_does_not_fit_is_refused() -> None:
    made = Made(16)
    codes, scales = words(made.codes_IO, 0), torch.from_numpy(made.scales_GO)
    with pytest.raises(ModelError, match="qzeros"):
        int4.from_gptq(codes, words(made.zeros_GO[:2], 1), scales, None, torch.float32)
    with pytest.raises(ModelError, match="3 groups"):
        int4.from_gptq(codes, None, scales[:3], None, torch.float32)
    with pytest.raises(ModelError, match="g_idx"):
        int4.from_gptq(codes, None, scales, torch.full((I,), 4), torch.float32)
    with pytest.raises(ModelError, match="uneven"):
        int4.from_gptq(codes, None, scales, torch.zeros(I, dtype=torch.int64), torch.float32)


def test_blocks_hold_the_same_values_but_for_half_precision() -> None:
    torch.manual_seed(3)
    words_WO, zeros_GO = int4.pack_rows(torch.randint(0, 16, (128, 20))), torch.randint(0, 16, (2, 20)).to(torch.uint8)
    weight = int4.Int4Weight(words_WO, torch.rand(2, 20) / 10, zeros_GO, 64, torch.float32)
    blocks = int4.as_blocks(weight)
    assert blocks is not None and blocks.scheme == "q4_1" and blocks.data_OB.shape == (20, 4 * 20)
    torch.testing.assert_close(blocks.dequantize(), weight.dequantize(), atol=2e-3, rtol=2e-3)
    assert int4.as_blocks(replace(weight, permutation_I=torch.arange(128))) is None
    assert int4.as_blocks(replace(weight, group_size=8)) is None
