"""L1: rms_norm and its fusion with the residual sum."""

from __future__ import annotations

import torch

from enginecore.testing import references
from enginecore.testing.case import Case, CaseContext
from enginecore.testing.cases.attention import DTYPES
from enginecore.testing.cases.made_up import Draw, made_up

SHAPES = {"one": (1, 64), "odd": (7, 46), "wide": (33, 576), "large": (5, 4097), "tiny": (3, 1)}


def _inputs(ctx: CaseContext, shape: tuple[int, ...], dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    return ctx.normal(*shape, dtype=dtype, scale=3.0), ctx.normal(shape[-1], dtype=dtype)


def rms_norm(name: str, shape: tuple[int, int], dtype: str) -> Case:
    def run(ctx: CaseContext) -> None:
        op = ctx.require_op("rms_norm", dtype)
        x, weight = _inputs(ctx, shape, dtype)
        before = x.clone()
        out = op(x, weight, 1e-5)
        ctx.backend.synchronize()
        ctx.check(out.dtype == x.dtype, f"the result is {out.dtype}, the input {x.dtype}")
        ctx.close(out, references.rms_norm(before, weight, 1e-5), dtype, "rms_norm")

    return Case(1, "rms_norm", f"{name}[{dtype}]", run)


def strided_rows(ctx: CaseContext) -> None:
    """Rows that are slices of wider ones; what lies between them is not touched."""
    op = ctx.require_op("rms_norm", "float32")
    wide = ctx.normal(9, 200)
    before, weight = wide.clone(), ctx.normal(64)
    out = op(wide[:, 70:134], weight, 1e-6)
    ctx.backend.synchronize()
    ctx.close(out, references.rms_norm(before[:, 70:134], weight, 1e-6), "float32", "rms_norm of strided rows")
    ctx.check(torch.equal(wide[:, :70], before[:, :70]), "elements before the rows were changed")
    ctx.check(torch.equal(wide[:, 134:], before[:, 134:]), "elements after the rows were changed")


def leading_shape(ctx: CaseContext) -> None:
    """[T, H, D], as the norms of queries and keys have it, from a slice of the fused projection."""
    op = ctx.require_op("rms_norm", "float32")
    fused = ctx.normal(11, 6 * 32)
    x, weight = fused[:, 32:160].unflatten(1, (4, 32)), ctx.normal(32)
    expected = references.rms_norm(x, weight, 1e-6)
    out = op(x, weight, 1e-6)
    ctx.check(out.shape == x.shape, f"shape {tuple(out.shape)} for an input of {tuple(x.shape)}")
    ctx.close(out, expected, "float32", "rms_norm of [T, H, D]")


def extreme_rows(ctx: CaseContext) -> None:
    """A row of zeros stays zero (eps), a row of thousands does not overflow."""
    op = ctx.require_op("rms_norm", "float16" if "float16" in ctx.backend.capabilities.dtypes else "float32")
    dtype = "float16" if "float16" in ctx.backend.capabilities.dtypes else "float32"
    x, weight = ctx.normal(3, 256, dtype=dtype), ctx.normal(256, dtype=dtype)
    x[0], x[1] = 0.0, x[1] * 9000
    expected = references.rms_norm(x, weight, 1e-6)
    ctx.close(op(x, weight, 1e-6), expected, dtype, "rms_norm of rows of zeros and of thousands")


def fused(name: str, shape: tuple[int, int], dtype: str) -> Case:
    def run(ctx: CaseContext) -> None:
        op = ctx.require_op("fused_add_rms_norm", dtype)
        x, weight = _inputs(ctx, shape, dtype)
        residual = ctx.normal(*shape, dtype=dtype)
        expected, expected_sum = references.fused_add_rms_norm(x, residual, weight, 1e-5)
        out, total = op(x, residual, weight, 1e-5)
        ctx.backend.synchronize()
        ctx.close(total, expected_sum, dtype, "the sum with the residual")
        ctx.close(out, expected, dtype, "the norm of the sum")

    return Case(1, "fused_add_rms_norm", f"{name}[{dtype}]", run)


def shapes_made_up(ctx: CaseContext) -> None:
    dtypes = [dtype for dtype in DTYPES if dtype in ctx.backend.capabilities.dtypes]

    def attempt(draw: Draw) -> None:
        ctx.rng.manual_seed(0)
        dtype, shape = draw.choice(dtypes), (draw.integer(1, 40), draw.integer(1, 700))
        op = ctx.require_op("rms_norm", dtype)
        x, weight = _inputs(ctx, shape, dtype)
        expected = references.rms_norm(x, weight, 1e-5)
        ctx.close(op(x, weight, 1e-5), expected, dtype, f"rms_norm of {shape} {dtype}")

    made_up(attempt, examples=25)


def cases() -> list[Case]:
    kinds = (rms_norm, fused)
    found = [make(name, shape, dtype) for make in kinds for name, shape in SHAPES.items() for dtype in DTYPES]
    extra = (strided_rows, leading_shape, extreme_rows, shapes_made_up)
    return found + [Case(1, "rms_norm", check.__name__, check) for check in extra]
