"""Helpers of the launchers. A kernel runs on the device that its tensors live on; nothing here names one."""

from __future__ import annotations

from typing import Any

from enginecore_triton.configs import Config

_NO_CONFIG = Config()


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def power_of_two(n: int, least: int = 1) -> int:
    """The smallest power of two that is at least `n` and `least`."""
    return max(least, 1 << max(0, n - 1).bit_length())


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, config: Config | None = None, **constants: Any) -> None:
    """Run `kernel` over `grid`; an empty grid is no launch. The config's constants and options come last."""
    if all(grid):
        kernel[grid](*args, **constants, **(config or _NO_CONFIG).keywords)
