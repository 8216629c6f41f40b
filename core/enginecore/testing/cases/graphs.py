"""L3: captured graphs replay what eager execution computes, on whatever stands in their inputs, within their memory."""

from __future__ import annotations

import numpy as np
import torch

from enginecore.device import AttentionMetadata, GraphKey, GraphRunner, GraphSupport, RuntimeBatch
from enginecore.runner.graphs import GraphedModel, GraphPlan
from enginecore.testing.case import Case, CaseContext, FalseClaim
from enginecore.testing.cases.memory import SLACK
from enginecore.testing.cases.paged import Paged, PagedSequence, Setting
from enginecore.testing.support import baseline_query

BUDGET = 2**30
SIZES = (1, 2, 4, 8)
KEYS = [GraphKey(tokens, tokens, 1) for tokens in SIZES]


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
    inputs = {"x": ctx.normal(4, 96), "weight": ctx.normal(96, 96)}

    def fn(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ weight) + x

    fn(**inputs)
    handle = graphs.capture(KEYS[2], fn, inputs)
    for turn in range(2):
        inputs["x"].copy_(ctx.normal(4, 96))
        out = graphs.replay(handle)
        ctx.backend.synchronize()
        ctx.close(out, fn(**inputs).double(), "float32", f"replay {turn}", op="graphs")
    held = graphs.memory_bytes()
    ctx.check(0 <= held <= BUDGET, f"the graphs hold {held} bytes of {BUDGET}")
    graphs.release()
    ctx.check(graphs.memory_bytes() == 0, "release() must give all memory back")


def sizes_stay_apart(ctx: CaseContext) -> None:
    """Several sizes over the beginnings of one buffer, replayed in turn: each computes its own rows as they are now."""
    graphs = require_graphs(ctx)
    x, weight = ctx.normal(SIZES[-1], 64), ctx.normal(64, 64)
    handles = {}
    for key in graphs.plan(list(KEYS), BUDGET):
        rows = {"x": x[: key.num_tokens]}
        torch.tanh(rows["x"] @ weight)
        handles[key] = graphs.capture(key, lambda x: torch.tanh(x @ weight), rows)
    ctx.check(handles, f"plan() chooses none of {len(KEYS)} small graphs for {BUDGET} bytes")
    for turn in range(2):
        for key, handle in sorted(handles.items()):
            x.copy_(ctx.normal(SIZES[-1], 64))
            out = graphs.replay(handle)
            ctx.backend.synchronize()
            expected = torch.tanh(x[: key.num_tokens].double() @ weight.double())
            ctx.check(out.shape == expected.shape, f"the graph of {key.num_tokens} rows returned {tuple(out.shape)}")
            ctx.close(out, expected, "float32", f"turn {turn}, {key.num_tokens} rows", op="graphs", slack=10)
    graphs.release()


def attention_replays(ctx: CaseContext) -> None:
    """A decode step captured, then replayed on other sequences through the same tensors."""
    graphs = require_graphs(ctx)
    paged = Paged(ctx, Setting())
    size, attention, (params, _) = paged.block_size, ctx.attention, paged.params()
    first, second = ([paged.sequence(1, n) for n in (size + 1, 2 * size - 1, 3, size)] for _ in range(2))
    paged.fill(first)
    paged.fill(second)
    query, metadata = paged.make_query(4, strided=False), paged.metadata(first)

    def step(query: torch.Tensor) -> torch.Tensor:
        return attention.forward(query, paged.caches[0], metadata, params)

    step(query)
    ctx.backend.synchronize()
    handle = graphs.capture(KEYS[2], step, {"query": query})
    out = graphs.replay(handle)
    ctx.backend.synchronize()
    paged.judge(out, query, first, "replay on the captured batch")
    fresh = paged.metadata(second)
    for name in ("block_table", "seq_lens", "slot_mapping"):
        getattr(metadata, name).copy_(getattr(fresh, name))
    attention.refresh_metadata(metadata)
    query.copy_(paged.make_query(4))
    out = graphs.replay(handle)
    ctx.backend.synchronize()
    paged.judge(out, query, second, "replay on another batch")


class OneLayer:
    """A model of one attention layer whose queries, keys and values are rows of tables, in the place of a real one."""

    #: No row has an adapter.
    adapting = False

    def __init__(self, paged: Paged) -> None:
        self.paged, setting = paged, paged.setting
        ctx, size = paged.ctx, setting.head_size
        self.query_VHD = ctx.normal(64, setting.num_heads, size, dtype=setting.dtype)
        self.key_VKD = ctx.normal(64, setting.num_kv_heads, size, dtype=setting.dtype)
        self.value_VKD = ctx.normal(64, setting.num_kv_heads, size, dtype=setting.dtype)
        self.params = paged.params()[0]

    def forward(
        self, ids_T: torch.Tensor, positions_T: torch.Tensor, metadata: AttentionMetadata, indices_R: torch.Tensor
    ) -> torch.Tensor:
        attention, cache = self.paged.ctx.attention, self.paged.caches[0]
        attention.reshape_and_cache(self.key_VKD[ids_T], self.value_VKD[ids_T], cache, metadata.slot_mapping)
        out_THD = attention.forward(self.query_VHD[ids_T], cache, metadata, self.params)
        return out_THD.flatten(1)[indices_R]

    def execute(self, batch: RuntimeBatch) -> torch.Tensor:
        raise AssertionError(f"a step of {len(batch.seq_lens)} sequences was not replayed")


def decode_steps_replay(ctx: CaseContext) -> None:
    """What the engine does: sizes captured at start-up, steps padded to the next one, keys and values written by the
    graph. Block 0, which padding stands in, must not change."""
    require_graphs(ctx)
    paged = Paged(ctx, Setting.from_query(baseline_query(ctx.backend.capabilities)), num_blocks=96)
    paged.free.remove(0)
    model, size, longest = OneLayer(paged), paged.block_size, 6 * paged.block_size
    graphed = GraphedModel(model, ctx.backend, GraphPlan(tuple(KEYS), BUDGET), 6, longest)  # type: ignore[arg-type]
    graphed.capture()
    ctx.check(graphed.failure is None, f"captured {graphed.sizes} of {list(SIZES)}: {graphed.failure}")
    for lengths in (
        (size + 1, 2 * size, 3),
        (1, 5 * size + 2, size, 2, size - 1, 4, 9, 3 * size),
        (7,),
        (2, 3, 4, 5, 6),
    ):
        seqs = [paged.sequence(1, length) for length in lengths]
        _decode(ctx, paged, model, graphed, seqs)
        paged.free = ctx.permutation(paged.num_blocks)
        paged.free.remove(0)
    paged.check_unwritten()
    assert ctx.backend.graphs is not None
    ctx.backend.graphs.release()


def _decode(ctx: CaseContext, paged: Paged, model: OneLayer, graphed: GraphedModel, seqs: list[PagedSequence]) -> None:
    cached = [PagedSequence(seq.blocks, seq.seq_len - 1, seq.seq_len - 1) for seq in seqs if seq.seq_len > 1]
    if cached:
        paged.fill(cached)
    ids = torch.tensor([ctx.integer(0, 63) for _ in seqs])
    slots = paged.step_slots(seqs)
    table = np.zeros((len(seqs), max(len(seq.blocks) for seq in seqs)), np.int32)
    for row, seq in zip(table, seqs, strict=True):
        row[: len(seq.blocks)] = seq.blocks
    lens = np.array([seq.seq_len for seq in seqs], np.int32)
    batch = RuntimeBatch(
        token_ids=ids.numpy(),
        positions=(lens - 1).astype(np.int64),
        query_start_loc=np.arange(len(seqs) + 1, dtype=np.int32),
        seq_lens=lens,
        block_table=table,
        slot_mapping=np.array(slots, np.int64),
        logits_indices=np.arange(len(seqs), dtype=np.int64),
    )
    with torch.inference_mode():  # as the runner's steps are
        out = graphed.execute(batch)
    ctx.backend.synchronize()
    ids = ids.to(ctx.device)
    query, key, value = model.query_VHD[ids], model.key_VKD[ids], model.value_VKD[ids]
    paged.logical[0].write(key, value, torch.tensor(slots))
    paged.written |= {slot // paged.block_size for slot in slots}
    what = f"a step of {len(seqs)} sequences in the graph of {min(s for s in graphed.sizes if s >= len(seqs))}"
    paged.judge(out.view(query.shape), query, seqs, what)


def memory_within_plan(ctx: CaseContext) -> None:
    """What plan() chooses for a budget holds no more than that, and memory_bytes() is what the device's books say."""
    graphs = require_graphs(ctx)
    width = 2048
    x, weight = ctx.normal(SIZES[-1] * 64, width), ctx.normal(width, width)
    keys = [GraphKey(size, size, 1, activation_bytes=2 * 64 * size * width * 4) for size in SIZES]

    def step(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ weight) @ weight

    def capture(budget: int) -> int:
        planned = graphs.plan(list(keys), budget)
        for key in planned:
            graphs.capture(key, step, {"x": x[: 64 * key.num_tokens]})
        held = graphs.memory_bytes()
        told = f"plan() chose {len(planned)} graphs for a budget of {budget} bytes, and they hold {held}"
        ctx.check(held <= budget, told)
        return held

    step(x)
    ctx.backend.synchronize()
    before = ctx.memory.process_used_bytes()
    held = capture(BUDGET)
    grown = ctx.memory.process_used_bytes() - before
    if ctx.backend.capabilities.per_process_accounting and grown > held + SLACK:
        raise FalseClaim(f"memory_bytes() says that the graphs hold {held} bytes; the books grew by {grown}")
    graphs.release()
    for budget in (held, held // 2):
        capture(budget)
        graphs.release()


def cases() -> list[Case]:
    checks = (
        plan_is_a_choice, replay_equals_eager, sizes_stay_apart, attention_replays, decode_steps_replay,
        memory_within_plan,
    )  # fmt: skip
    return [Case(3, "graphs", check.__name__, check) for check in checks]
