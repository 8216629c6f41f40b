"""L1: gated activations."""

from __future__ import annotations

from enginecore.testing import references
from enginecore.testing.case import Case, CaseContext
from enginecore.testing.cases.attention import DTYPES

SHAPES = {"one": (1, 64), "odd": (7, 94), "wide": (33, 3072), "tiny": (3, 2)}
KINDS = {"silu_and_mul": "silu", "gelu_and_mul": "gelu", "gelu_tanh_and_mul": "gelu_tanh"}


def activation(op_name: str, name: str, dtype: str) -> Case:
    def run(ctx: CaseContext) -> None:
        shape = SHAPES[name]
        op = ctx.require_op(op_name, dtype)
        x = ctx.normal(*shape, dtype=dtype, scale=4.0)
        x[0, 0], x[-1, 0] = 30.0, -30.0
        expected = references.activate_and_mul(KINDS[op_name], x)
        out = op(x)
        ctx.backend.synchronize()
        ctx.check(out.dtype == x.dtype, f"the result is {out.dtype}, the input {x.dtype}")
        ctx.close(out, expected, dtype, op_name)

    return Case(1, op_name, f"{name}[{dtype}]", run)


def cases() -> list[Case]:
    return [activation(op, name, dtype) for op in KINDS for name in SHAPES for dtype in DTYPES]
