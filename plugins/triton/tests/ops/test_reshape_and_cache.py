"""Writes into the cache: each format bit for bit, padding, and neighbours left alone."""

from __future__ import annotations

import pytest
import torch
from enginecore_triton.ops.reshape_and_cache import reshape_and_cache

from plugins.triton.tests.paged import write

KV_HEADS, SIZE, BLOCK = 3, 40, 16
SLOTS = torch.tensor([35, -1, 0, 16, 47, -1])


def blank(dtype: torch.dtype) -> torch.Tensor:
    shape = (3, 2, KV_HEADS, BLOCK, SIZE) if dtype != torch.int8 else (3, 2, KV_HEADS, BLOCK * (SIZE + 4))
    cache = torch.empty(shape, dtype=dtype)
    cache.view(torch.uint8).fill_(0xFF)
    return cache


def keys_and_values(dtype: torch.dtype, spread: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Slices of a fused projection, strided over tokens."""
    fused = torch.randn(len(SLOTS), 3 * KV_HEADS, SIZE, generator=torch.Generator().manual_seed(1)) * spread
    fused = fused.to(dtype)
    return fused[:, KV_HEADS : 2 * KV_HEADS], fused[:, 2 * KV_HEADS :]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kv", [torch.float32, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_every_byte(dtype: torch.dtype, kv: torch.dtype) -> None:
    key, value = keys_and_values(dtype)
    cache, expected = blank(kv), blank(kv)
    ones = torch.ones(KV_HEADS) if kv.itemsize == 1 else None
    reshape_and_cache(key, value, cache, SLOTS, ones, ones)
    keep = SLOTS >= 0
    for side, states in enumerate((key, value)):
        write(expected[:, side], states[keep], SLOTS[keep], SIZE)
    assert torch.equal(cache.view(torch.uint8), expected.view(torch.uint8))


def test_int8_scales_each_token_and_head() -> None:
    key, value = keys_and_values(torch.float32)
    key[3, 1] = 0.0
    cache = blank(torch.int8)
    reshape_and_cache(key, value, cache, SLOTS)
    codes, scales = cache.split([BLOCK * SIZE, BLOCK * 4], dim=3)
    codes = codes.unflatten(3, (BLOCK, SIZE))
    scales = scales.contiguous().view(torch.float32)
    for token, slot in enumerate(SLOTS.tolist()):
        for side, states in enumerate((key, value)) if slot >= 0 else ():
            block, place = divmod(slot, BLOCK)
            got = codes[block, side, :, place].float() * scales[block, side, :, place].unsqueeze(-1)
            step = states[token].abs().amax(-1, keepdim=True) / 127
            assert ((got - states[token]).abs() <= step / 2 * 1.001).all()
    assert (codes[1, 0, :, 1:] == -1).all(), "slots that nobody wrote"


@pytest.mark.parametrize(
    ("kv", "largest"), [(torch.float8_e4m3fn, 448.0), (torch.float8_e5m2, 57344.0)], ids=["e4m3", "e5m2"]
)
def test_fp8_rounds_as_torch_does_and_saturates(kv: torch.dtype, largest: float) -> None:
    """All magnitudes, denormals and ties included."""
    exact = torch.arange(256, dtype=torch.uint8).view(kv).float()
    exact = exact[exact.isfinite()]
    ties = (exact[:-1] + exact[1:]) / 2
    spread = torch.randn(4000, generator=torch.Generator().manual_seed(2)) * torch.logspace(-9, 4, 4000)
    numbers = torch.cat([exact, ties, spread, torch.tensor([largest, 1e9, -1e9, torch.inf, -torch.inf])])
    numbers = torch.cat([numbers, torch.zeros(-len(numbers) % 64)]).view(1, -1, 64)
    cache = torch.zeros(1, 2, numbers.shape[1], 8, 64, dtype=kv)
    ones = torch.ones(numbers.shape[1])
    reshape_and_cache(numbers, -numbers, cache, torch.tensor([3]), ones, ones)
    expected = numbers[0].clamp(-largest, largest).to(kv)
    assert torch.equal(cache[0, 0, :, 3].float(), expected.float())
    assert torch.equal(cache[0, 1, :, 3].float(), -expected.float())


def test_nan_stays_visible_in_fp8() -> None:
    nan = torch.full((1, 1, 16), torch.nan)
    cache, one = torch.zeros(1, 2, 1, 8, 16, dtype=torch.float8_e5m2), torch.ones(1)
    reshape_and_cache(nan, nan, cache, torch.tensor([0]), one, one)
    assert cache[0, :, 0, 0].float().isnan().all()
