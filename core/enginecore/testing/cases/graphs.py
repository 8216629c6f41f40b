"""L3: captured graphs replay what eager execution computes, within the memory they were given."""

from __future__ import annotations

import torch

from enginecore.device import GraphKey, GraphRunner, GraphSupport
from enginecore.testing.case import Case, CaseContext
from enginecore.testing.cases.paged import Paged, Setting

BUDGET = 2**30
KEYS = [GraphKey(tokens, tokens, 1) for tokens in (1, 2, 4, 8)]


def require_graphs(ctx: CaseContext) -> GraphRunner:
    graphs = ctx.backend.graphs
    if graphs is None:
        ctx.unsupported("backend.graphs is None: every step runs eagerly")
    if ctx.backend.capabilities.graph_support is GraphSupport.NEVER:
        ctx.unsupported("graph_support is NEVER")
    assert graphs is not None
    return graphs


def plan_is_a_choice(ctx: CaseContext) -> None:
    graphs = require_graphs(ctx)
    planned = graphs.plan(list(KEYS), BUDGET)
    ctx.check(set(planned) <= set(KEYS), f"plan() made up keys: {planned}")
    ctx.check(len(set(planned)) == len(planned), f"plan() repeats keys: {planned}")
    ctx.check(graphs.plan(list(KEYS), 0) == [], "plan() with a budget of 0 bytes must choose nothing")


def replay_equals_eager(ctx: CaseContext) -> None:
    """The same graph twice, its inputs changed in between."""
    graphs = require_graphs(ctx)
    key = KEYS[2]
    inputs = {"x": ctx.normal(4, 96), "weight": ctx.normal(96, 96)}

    def fn(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ weight) + x

    handle = graphs.capture(key, fn, inputs)
    for turn in range(2):
        inputs["x"].copy_(ctx.normal(4, 96))
        out = graphs.replay(handle)
        ctx.backend.synchronize()
        ctx.close(out, fn(**inputs).double(), "float32", f"replay {turn}", op="graphs")
    held = graphs.memory_bytes()
    ctx.check(0 <= held <= BUDGET, f"the graphs hold {held} bytes of {BUDGET}")
    graphs.release()
    ctx.check(graphs.memory_bytes() == 0, "release() must give all memory back")


def attention_replays(ctx: CaseContext) -> None:
    """A decode step captured, then replayed on other sequences through the same tensors."""
    graphs = require_graphs(ctx)
    paged = Paged(ctx, Setting())
    size = paged.block_size
    first, second = ([paged.sequence(1, n) for n in (size + 1, 2 * size - 1, 3, size)] for _ in range(2))
    paged.fill(first)
    paged.fill(second)
    query, metadata = paged.make_query(4, strided=False), paged.metadata(first)
    handle = graphs.capture(KEYS[2], lambda query: paged.forward(query, metadata), {"query": query})
    paged.judge(graphs.replay(handle), query, first, "replay on the captured batch")
    fresh = paged.metadata(second)
    for name in ("block_table", "seq_lens", "slot_mapping"):
        getattr(metadata, name).copy_(getattr(fresh, name))
    query.copy_(paged.make_query(4))
    out = graphs.replay(handle)
    ctx.backend.synchronize()
    paged.judge(out, query, second, "replay on another batch")


def cases() -> list[Case]:
    checks = (plan_is_a_choice, replay_equals_eager, attention_replays)
    return [Case(3, "graphs", check.__name__, check) for check in checks]
