"""L1: rotary position embedding, both pairings, partial rotation, in place on strided inputs."""

from __future__ import annotations

import torch

from enginecore.testing import references
from enginecore.testing.case import Case, CaseContext
from enginecore.testing.cases.attention import DTYPES

SHAPES = {"h64": (64, 64, 4, 2), "h46": (46, 46, 3, 1), "h80_partial_32": (80, 32, 5, 5), "h128": (128, 128, 8, 2)}


def table(rotary_dim: int, positions: int = 257) -> torch.Tensor:
    """float32 [P, N]: N/2 cosines, then N/2 sines."""
    frequency = 10000 ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    angle = torch.arange(positions, dtype=torch.float64)[:, None] * frequency
    return torch.cat([torch.cos(angle), torch.sin(angle)], dim=1).to(torch.float32)


def rotate(name: str, dtype: str, interleaved: bool) -> Case:
    head_size, rotary_dim, heads, kv_heads = SHAPES[name]

    def run(ctx: CaseContext) -> None:
        op = ctx.require_op("rotary_embedding", dtype)
        tokens = 19
        fused = ctx.normal(tokens, (heads + 2 * kv_heads) * head_size, dtype=dtype)
        query = fused[:, : heads * head_size].unflatten(1, (heads, head_size))
        key = fused[:, heads * head_size : (heads + kv_heads) * head_size].unflatten(1, (kv_heads, head_size))
        rest = fused[:, (heads + kv_heads) * head_size :].clone()
        positions = torch.tensor([0, 256, *(ctx.integer(0, 256) for _ in range(tokens - 2))])
        cos_sin = table(rotary_dim)
        expected = [references.rotary_embedding(positions, x, cos_sin, interleaved) for x in (query, key)]
        out = op(positions.to(ctx.device), query, key, cos_sin.to(ctx.device), interleaved)
        ctx.backend.synchronize()
        for what, got, held, wanted in zip(("query", "key"), out, (query, key), expected, strict=True):
            ctx.close(got, wanted, dtype, f"rotated {what}")
            ctx.close(held, wanted, dtype, f"the {what} that was to be rotated in place")
        same = torch.equal(fused[:, (heads + kv_heads) * head_size :], rest)
        ctx.check(same, "memory beside the query and key was changed")

    pairing = "interleaved" if interleaved else "neox"
    return Case(1, "rotary_embedding", f"{name}_{pairing}[{dtype}]", run)


def cases() -> list[Case]:
    return [rotate(name, dtype, pairing) for name in SHAPES for dtype in DTYPES for pairing in (False, True)]
