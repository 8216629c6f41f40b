"""L1: a weight that is packed once and multiplied many times."""

from __future__ import annotations

import torch

from enginecore.testing import references
from enginecore.testing.case import Case, CaseContext, FalseClaim
from enginecore.testing.cases.attention import DTYPES
from enginecore.testing.cases.made_up import Draw, made_up

#: (output features, input features)
SHAPES = {"square": (64, 64), "odd": (47, 46), "single_output": (1, 96), "wide": (1536, 576), "tall": (96, 1537)}
ROWS = (1, 2, 5, 16, 33)


def packed(name: str, dtype: str, bias: bool) -> Case:
    outputs, inputs = SHAPES[name]

    def run(ctx: CaseContext) -> None:
        pack = ctx.require_op("pack_linear", dtype)
        weight = ctx.normal(outputs, inputs, dtype=dtype, scale=inputs**-0.5)
        bias_O = ctx.normal(outputs, dtype=dtype) if bias else None
        original = weight.clone()
        linear = pack(weight, bias_O)
        ctx.check(linear.out_features == outputs, f"out_features is {linear.out_features}, the weight has {outputs}")
        ctx.check(linear.in_features == inputs, f"in_features is {linear.in_features}, the weight has {inputs}")
        ctx.check(linear.nbytes > 0, f"nbytes is {linear.nbytes}")
        for count in ROWS:
            x = ctx.normal(count, inputs, dtype=dtype)
            y = linear(x)
            ctx.backend.synchronize()
            ctx.check(y.dtype == x.dtype, f"the result is {y.dtype}, the input {x.dtype}")
            ctx.close(y, references.linear(x, original, bias_O), dtype, f"{count} rows")
        wide = ctx.normal(9, inputs + 11, dtype=dtype)
        x = wide[:, 5 : 5 + inputs]
        ctx.close(linear(x), references.linear(x, original, bias_O), dtype, "rows that are slices of wider ones")

    return Case(1, "pack_linear", f"{name}{'_bias' if bias else ''}[{dtype}]", run)


def rows_of_the_weight(dtype: str) -> Case:
    """`rows` serves a tied embedding: it must return the weight's rows, repeated and in any order."""

    def run(ctx: CaseContext) -> None:
        pack = ctx.require_op("pack_linear", dtype)
        weight = ctx.normal(131, 96, dtype=dtype)
        original = weight.clone()
        linear = pack(weight, None)
        ids = torch.tensor([0, 130, 7, 7, 64, 1], device=ctx.device)
        rows = linear.rows(ids)
        ctx.check(rows.shape == (6, 96), f"rows of 6 ids have shape {tuple(rows.shape)}, not (6, 96)")
        ctx.close(rows, references.f64(original)[ids.cpu()], dtype, "rows of the weight", slack=1e-2)

    return Case(1, "pack_linear", f"rows[{dtype}]", run)


def batch_invariance(dtype: str) -> Case:
    """A row's product has the same bits among however many others."""

    def run(ctx: CaseContext) -> None:
        pack = ctx.require_op("pack_linear", dtype)
        if not ctx.backend.capabilities.batch_invariant:
            ctx.unsupported("batch_invariant is not claimed")
        for outputs, inputs in SHAPES.values():
            linear = pack(ctx.normal(outputs, inputs, dtype=dtype, scale=inputs**-0.5), None)
            x = ctx.normal(130, inputs, dtype=dtype)
            together = linear(x)
            for count in (1, 2, 5, 16, 33, 64):
                if not torch.equal(linear(x[7 : 7 + count]), together[7 : 7 + count]):
                    raise FalseClaim(
                        f"batch_invariant is claimed, but {count} rows of {inputs} inputs by {outputs} outputs differ "
                        "from the same among 130"
                    )

    return Case(1, "pack_linear", f"batch_invariance[{dtype}]", run)


def shapes_made_up(ctx: CaseContext) -> None:
    dtypes = [dtype for dtype in DTYPES if dtype in ctx.backend.capabilities.dtypes]

    def attempt(draw: Draw) -> None:
        ctx.rng.manual_seed(0)
        dtype, outputs, inputs = draw.choice(dtypes), draw.integer(1, 200), draw.integer(1, 200)
        rows = draw.integer(1, 40)
        pack = ctx.require_op("pack_linear", dtype)
        weight, x = ctx.normal(outputs, inputs, dtype=dtype), ctx.normal(rows, inputs, dtype=dtype)
        expected = references.linear(x, weight, None)
        ctx.close(pack(weight, None)(x), expected, dtype, f"[{rows}, {inputs}] by [{outputs}, {inputs}] {dtype}")

    made_up(attempt, examples=25)


def cases() -> list[Case]:
    found = [packed(name, dtype, bias) for name in SHAPES for dtype in DTYPES for bias in (False, True)]
    found += [case(dtype) for case in (rows_of_the_weight, batch_invariance) for dtype in DTYPES]
    return [*found, Case(1, "pack_linear", "shapes_made_up", shapes_made_up)]
