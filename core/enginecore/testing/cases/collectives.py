"""L4: collectives. The contract hands a kit one process, so these hold the group of one rank to its identities."""

from __future__ import annotations

import torch

from enginecore.device import Communicator
from enginecore.testing.case import Case, CaseContext


def require_collectives(ctx: CaseContext) -> Communicator:
    if ctx.backend.collectives is None:
        ctx.unsupported("backend.collectives is None: one device only")
    assert ctx.backend.collectives is not None
    return ctx.backend.collectives


def one_rank_identities(ctx: CaseContext) -> None:
    group = require_collectives(ctx)
    for shape in ((7,), (4, 6)):
        x = ctx.normal(*shape)
        results = {
            "all_reduce": group.all_reduce(x.clone()),
            "all_gather": group.all_gather(x.clone(), 0),
            "reduce_scatter": group.reduce_scatter(x.clone(), 0),
            "broadcast": group.broadcast(x.clone(), 0),
        }
        ctx.backend.synchronize()
        for name, result in results.items():
            ctx.check(torch.equal(result, x), f"{name} over one rank must return its input, for shape {shape}")
    group.barrier()


def dtypes_survive(ctx: CaseContext) -> None:
    group = require_collectives(ctx)
    for dtype in sorted(ctx.backend.capabilities.dtypes):
        x = ctx.normal(33, dtype=dtype)
        out = group.all_reduce(x.clone())
        ctx.check(out.dtype == x.dtype and torch.equal(out, x), f"all_reduce changed {dtype} values over one rank")


def cases() -> list[Case]:
    return [Case(4, "collectives", check.__name__, check) for check in (one_rank_identities, dtypes_survive)]
