"""Norms, rotary, activations (GB/s of what they must read and write) and sampling (time a row).

python plugins/cpu/bench/bench_ops.py
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
from enginecore.device import BackendContext
from enginecore_cpu.backend import CpuBackend
from limits import seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=None)
    backend = CpuBackend(BackendContext(device="cpu", num_threads=parser.parse_args().threads))
    get = lambda name: backend.ops.get(name).run  # noqa: E731
    print(f"{backend.capabilities.isa[0]}, {backend.num_threads} threads, bfloat16")
    for rows in (1, 32, 512):
        x, residual, weight = (
            torch.randn(rows, 576).bfloat16(),
            torch.zeros(rows, 576).bfloat16(),
            torch.ones(576).bfloat16(),
        )
        wide, fused = torch.randn(rows, 3072).bfloat16(), torch.randn(rows, 15, 64).bfloat16()
        positions, table = torch.arange(rows), torch.randn(2048, 64)
        query, key, _ = fused.split([9, 3, 3], 1)
        rotate = partial(get("rotary_embedding"), positions, query, key, table, False)
        cases = [
            ("rms_norm 576", partial(get("rms_norm"), x, weight, 1e-5), 2 * x.nbytes),
            ("fused_add_rms_norm 576", partial(get("fused_add_rms_norm"), x, residual, weight, 1e-5), 4 * x.nbytes),
            ("silu_and_mul 1536", partial(get("silu_and_mul"), wide), wide.nbytes * 3 // 2),
            ("rotary 9+3 heads of 64", rotate, 2 * 12 * 128 * rows),
        ]
        for name, run, size in cases:
            time = seconds(run, threads=backend.num_threads)
            print(f"{name:26} {rows:4} rows: {time * 1e6:7.1f} us, {size / time / 1e9:6.1f} GB/s")
    settings = {
        "greedy": (0.0, 0, 1.0, 0.0),
        "temperature": (1.0, 0, 1.0, 0.0),
        "top_k 50": (0.8, 50, 1.0, 0.0),
        "top_p 0.9": (1.0, 0, 0.9, 0.0),
        "top_k 50, top_p 0.9": (0.8, 50, 0.9, 0.0),
        "min_p 0.05": (1.0, 0, 1.0, 0.05),
    }
    for vocab in (49152, 262144):
        for rows in (1, 32):
            # Shaped like a language model's: a few likely tokens over a long tail.
            logits = torch.randn(rows, vocab) * 2.5
            logits[:, :20] += 8
            uniform = torch.rand(rows, dtype=torch.float64)
            for name, values in settings.items():
                temperature, top_p, min_p = (torch.full((rows,), values[i]) for i in (0, 2, 3))
                top_k = torch.full((rows,), values[1], dtype=torch.int64)
                draw = partial(get("sample"), logits, temperature, top_k, top_p, min_p, uniform)
                time = seconds(draw, threads=backend.num_threads, tries=5) * 1e6
                print(f"sample {name:20} vocabulary {vocab:6}, {rows:2} rows: {time:8.1f} us, {time / rows:7.1f} a row")


if __name__ == "__main__":
    main()
