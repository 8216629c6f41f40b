"""The machine's limits: memory read bandwidth (GB/s) and matrix rate (GFLOP/s), measured with the simplest loops.

Everything that a bench prints is a share of these, taken in the same process and minute.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def seconds(run: Callable[[], object], *, threads: int = 0, least: float = 0.02, tries: int = 15) -> float:
    """The best over `tries` of the mean time of a call, each try lasting about `least` seconds.

    The best, not the median: it is compared with what the machine can do, and other processes only ever add to it.
    With `threads` 1 the calling thread's processor time counts, which is next to free of what else runs.
    """
    clock = time.thread_time if threads == 1 else time.perf_counter
    run()
    start = clock()
    run()
    count = max(1, int(least / max(1e-7, clock() - start)))
    means = []
    for _ in range(tries):
        start = clock()
        for _ in range(count):
            run()
        means.append((clock() - start) / count)
    return min(means)


def read_bandwidth(kernels) -> float:
    """GB/s of all threads reading 256 MiB once; the best of some passes, since a limit is what can be reached."""
    return kernels.measure_read(256 << 20, 20)


def matrix_rate(kernels, dtype: torch.dtype) -> float:
    """GFLOP/s of all threads issuing the multiply-accumulate instruction that the products use, from registers."""
    code = 1 if dtype is torch.bfloat16 else 0
    operations = kernels.measure_matrix(code, 100_000)
    time_each = seconds(lambda: kernels.measure_matrix(code, 100_000), threads=kernels.threads)
    return operations / time_each / 1e9
