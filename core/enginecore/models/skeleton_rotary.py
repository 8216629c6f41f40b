"""Rotary frequencies of well-known decoders, as transformers computes them: plain, linear, and Llama 3's scaling.

Sources: RoFormer (arXiv 2104.09864); linear interpolation (arXiv 2306.15595); Llama 3.1's reference code for the third,
which divides long wavelengths by a factor, leaves short ones and blends in between.

Shape suffixes: P positions, N rotary dimensions, F = N / 2 frequencies.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

#: kind -> the entries that it has besides rope_type and rope_theta.
_ENTRIES = {
    "default": frozenset[str](),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
}


def rotary_settings(
    config: dict[str, Any], theta: float, max_positions: int, need: Callable[[bool], None]
) -> dict[str, Any]:
    """The rotary entries of a config.json as one dict with rope_type and rope_theta. `theta` is the architecture's own;
    `need` is told what must hold."""
    old, new = config.get("rope_scaling"), config.get("rope_parameters")
    need(not (old and new))
    given = old or new or {}
    need(isinstance(given, dict))
    kind = given.get("rope_type", given.get("type", "default"))
    need(isinstance(kind, str) and kind in _ENTRIES)
    names = _ENTRIES[kind]
    need(set(given) <= names | {"rope_type", "type", "rope_theta"})
    base = given.get("rope_theta", config.get("rope_theta", theta))
    values = {name: given.get(name) for name in names}
    if "original_max_position_embeddings" in names:
        values["original_max_position_embeddings"] = given.get("original_max_position_embeddings", max_positions)
    need(all(type(value) in (int, float) and value > 0 for value in [base, *values.values()]))
    return {"rope_type": kind, "rope_theta": base, **values}


class Rotary(nn.Module):  # type: ignore[misc]
    """As transformers' rotary modules: called, it gives cosines and sines of positions, each half twice."""

    def __init__(self, settings: dict[str, Any], size: int) -> None:
        super().__init__()
        self._settings, self._size = settings, size
        self.register_buffer("inv_freq", torch.empty(size // 2, dtype=torch.float32, device="meta"), persistent=False)

    def fill(self) -> None:
        """Compute `inv_freq` in place, once it has memory."""
        self.inv_freq.copy_(frequencies(self._settings, self._size))

    def forward(self, like: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """position_ids [1, P] -> two of [1, P, N] in the dtype of `like`."""
        angles_1PF = position_ids[..., None].float() * self.inv_freq
        angles_1PN = torch.cat((angles_1PF, angles_1PF), dim=-1)
        return angles_1PN.cos().to(like.dtype), angles_1PN.sin().to(like.dtype)


def frequencies(settings: dict[str, Any], size: int) -> torch.Tensor:
    """float32 [F] for heads of `size`."""
    plain_F = 1.0 / (settings["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float32) / size))
    if settings["rope_type"] == "linear":
        return plain_F / settings["factor"]
    if settings["rope_type"] == "llama3":
        return _llama3(plain_F, settings)
    return plain_F


def _llama3(plain_F: torch.Tensor, settings: dict[str, Any]) -> torch.Tensor:
    factor, positions = settings["factor"], settings["original_max_position_embeddings"]
    low, high = settings["low_freq_factor"], settings["high_freq_factor"]
    waves_F = 2 * math.pi / plain_F
    long_F, short_F = waves_F > positions / low, waves_F < positions / high
    scaled_F = torch.where(long_F, plain_F / factor, plain_F)
    share_F = (positions / waves_F - low) / (high - low)
    blended_F = (1 - share_F) * scaled_F / factor + share_F * scaled_F
    return torch.where(long_F | short_F, scaled_F, blended_F)
