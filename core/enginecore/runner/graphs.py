"""Captured steps: which batch sizes, their static inputs, and the choice at each step of a graph or eager execution.

Every backend with `graphs` gets this; what it must do is in `enginecore.device.graphs`. Only steps of few tokens a
sequence are replayed: prompts vary in length, and a decode step is where the host costs most beside the device. The
graphs are of one token a sequence; where a sequence has guesses, each is a row of its own over the same blocks, which
sees what those before it write in the same layer.

Shape suffixes: N sequences of the largest captured size, B block-table width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from enginecore.device import AttentionBackend, AttentionMetadata, Backend, GraphKey, GraphSupport, RuntimeBatch
from enginecore.runner.model import LateTokens, PagedModel

#: Sizes above are run eagerly: a step of that many sequences keeps a device busy longer than the host.
LARGEST = 512
#: Sequences with more tokens in a step share what they read of the cache in an eager one.
MOST_EACH = 8


def decode_sizes(max_rows: int) -> list[int]:
    """Batch sizes to capture: 1, 2, 4, then every eighth, up to `max_rows` or LARGEST."""
    top = min(max_rows, LARGEST)
    return [size for size in (1, 2, 4, *range(8, top, 8)) if size < top] + [top]


@dataclass(frozen=True)
class GraphPlan:
    """What shall be captured within `budget_bytes`. No keys: every step runs eagerly, and `reason` says why."""

    keys: tuple[GraphKey, ...] = ()
    budget_bytes: int = 0
    reason: str = ""


def plan_graphs(
    backend: Backend, max_rows: int, activation_bytes: Callable[[int], int], *, enforce_eager: bool = False
) -> GraphPlan:
    """The graphs to reserve memory for, of steps with up to `max_rows` rows. `activation_bytes` estimates what a step
    of so many tokens needs."""
    if enforce_eager:
        return GraphPlan(reason="graphs are switched off (enforce_eager)")
    if backend.graphs is None:
        return GraphPlan(reason="the device's plugin captures no graphs")
    if backend.capabilities.graph_support is GraphSupport.NEVER:
        return GraphPlan(reason="the device's graph support is 'never'")
    sizes = backend.graphs.sizes(max_rows) or decode_sizes(max_rows)
    keys = tuple(GraphKey(size, size, 1, activation_bytes=activation_bytes(size)) for size in sizes)
    return GraphPlan(keys, max(key.activation_bytes for key in keys) + len(keys) * backend.graphs.bytes_each)


class GraphedModel:
    """A paged model whose steps of one token a sequence replay graphs, as far as `capture` could make them.

    `sizes` are the captured batch sizes, smallest first; `failure` says why there are not all that were planned.
    """

    def __init__(self, model: PagedModel, backend: Backend, plan: GraphPlan, table_width: int, max_len: int) -> None:
        assert backend.graphs is not None and backend.attention is not None
        self._model, self._backend, self._graphs = model, backend, backend.graphs
        self._plan, self._width, self._max_len = plan, table_width, max_len
        self._handles: dict[int, tuple[Any, Callable[[], None] | None]] = {}
        self.sizes: list[int] = []
        self.failure: str | None = None
        self.replayed = False

    @property
    def paged(self) -> PagedModel:
        return self._model

    def release(self) -> None:
        """Give the graphs up; steps run eagerly until `capture` is called again."""
        self._handles.clear()
        self.sizes = []
        self._graphs.release()

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def capture(self) -> None:
        """Capture what the backend plans to, within the budget; a failure ends it and leaves what there is."""
        try:
            wanted = {key.num_seqs: key for key in self._plan.keys}
            keys = [key for key in self._graphs.plan(list(self._plan.keys), self._plan.budget_bytes)
                    if wanted.get(key.num_seqs) == key]  # fmt: skip
            if not keys:
                raise RuntimeError(f"the plugin plans no graph within {self._plan.budget_bytes} bytes")
            self._inputs = StaticInputs(self._backend, max(key.num_seqs for key in keys), self._width)
            self._capture_within_budget(keys)
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}" if not isinstance(error, RuntimeError) else str(error)
        self.sizes = sorted(self._handles)
        if not self.sizes:
            self._graphs.release()

    def _capture_within_budget(self, keys: list[GraphKey]) -> None:
        """Graphs cannot be given back one by one: when one is too many, all are, and those before it made again."""
        budget = self._plan.budget_bytes
        for count, key in enumerate(keys):
            self._capture(key)
            held = self._graphs.memory_bytes()
            if held <= budget:
                continue
            self._handles.clear()
            self._graphs.release()
            for again in keys[:count]:
                self._capture(again)
            raise RuntimeError(
                f"{count + 1} of {len(keys)} planned graphs hold {held} bytes, {budget} are reserved for all"
            )

    def _capture(self, key: GraphKey) -> None:
        assert self._backend.attention is not None
        size, attention = key.num_seqs, self._backend.attention
        inputs = self._inputs.beginning(size)
        common = AttentionMetadata(
            query_start_loc=inputs["query_start_loc"],
            seq_lens=inputs["seq_lens"],
            block_table=inputs["block_table"],
            slot_mapping=inputs["slot_mapping"],
            max_query_len=1,
            max_seq_len=self._max_len,
        )
        metadata = attention.build_metadata(common)
        refresh = _refresher(attention, common, metadata)

        def step(token_ids: torch.Tensor, positions: torch.Tensor, logits_indices: torch.Tensor, **_: Any) -> Any:
            return self._model.forward(token_ids, positions, metadata, logits_indices)

        if self._graphs.needs_warm_up:
            step(**inputs)
            self._backend.synchronize()
        self._handles[size] = self._graphs.capture(key, step, inputs), refresh

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        self._model.copy_blocks(pairs)

    def step_seconds(self) -> float | None:
        return None

    def execute(self, batch: RuntimeBatch, late: LateTokens | None = None) -> torch.Tensor:
        count = len(batch.token_ids)
        size = next((size for size in self.sizes if size >= count), None)
        few = len(batch.seq_lens) == count or _only_guesses(batch)
        self.replayed = size is not None and few and not self._model.adapting
        if size is None or not self.replayed:
            return self._model.execute(batch, late)
        if len(batch.seq_lens) != count:
            batch = token_by_token(batch)
        self._inputs.fill(batch, size)
        if late is not None:
            late.put_into(self._inputs.token_ids)
        handle, refresh = self._handles[size]
        if refresh is not None:
            refresh()
        logits_NV: torch.Tensor = self._graphs.replay(handle)
        wanted = batch.logits_indices
        if len(wanted) == count and np.array_equal(wanted, np.arange(count)):
            return logits_NV[:count]
        return logits_NV[self._model.transfers.send(wanted)[0]]


def _only_guesses(batch: RuntimeBatch) -> bool:
    """Whether a token is sampled after each one of the step, and no sequence has many."""
    each = int(np.diff(batch.query_start_loc).max())
    return len(batch.logits_indices) == len(batch.token_ids) and each <= MOST_EACH


def token_by_token(batch: RuntimeBatch) -> RuntimeBatch:
    """The same step with a row for each token, which attends to what stands before it."""
    rows_T = np.repeat(np.arange(len(batch.seq_lens)), np.diff(batch.query_start_loc))
    return replace(
        batch,
        query_start_loc=np.arange(len(rows_T) + 1, dtype=np.int32),
        seq_lens=(batch.positions + 1).astype(np.int32),
        block_table=batch.block_table[rows_T],
        request_ids=[batch.request_ids[row] for row in rows_T.tolist()] if batch.request_ids else [],
    )


def _refresher(
    attention: AttentionBackend, common: AttentionMetadata, metadata: AttentionMetadata
) -> Callable[[], None] | None:
    """What renews `metadata` before a replay; None where it is the static tensors and nothing else."""
    if type(attention).refresh_metadata is not AttentionBackend.refresh_metadata:
        return partial(attention.refresh_metadata, metadata)
    names = ("query_start_loc", "seq_lens", "block_table", "slot_mapping")
    same = all(getattr(metadata, name).data_ptr() == getattr(common, name).data_ptr() for name in names)
    if metadata.state is not None or not same:
        raise RuntimeError(f"{type(attention).__name__}.build_metadata adds to the metadata and refresh_metadata, "
                           "which would renew it before a replay, is not implemented")  # fmt: skip
    return None


class StaticInputs:
    """The tensors that graphs read, at addresses that never change, and the host memory that they are filled from.

    As they are made, all rows are padding: token 0 at position 0 of a sequence of one token, not written (slot -1).
    """

    def __init__(self, backend: Backend, size: int, width: int) -> None:
        device, pinned = backend.torch_device(), backend.memory.host_alloc_pinned
        names = {
            "token_ids": torch.int64,
            "positions": torch.int64,
            "slot_mapping": torch.int64,
            "seq_lens": torch.int32,
        }
        padding = {"slot_mapping": -1, "seq_lens": 1}
        self._rows = {
            name: torch.full((size,), padding.get(name, 0), dtype=dtype, device=device) for name, dtype in names.items()
        }
        self._table_NB = torch.zeros((size, width), dtype=torch.int32, device=device)
        self._constants = {
            "query_start_loc": torch.arange(size + 1, dtype=torch.int32, device=device),
            "logits_indices": torch.arange(size, dtype=torch.int64, device=device),
        }
        # A table is as wide as its longest sequence: it travels packed and is spread out on the device.
        self._packed = torch.zeros(size * width, dtype=torch.int32, device=device)
        self._host = {name: pinned((size,), dtype) for name, dtype in names.items()}
        self._host_table = pinned((size * width,), torch.int32)
        #: Where the device's memory is the host's, it is written to as it is.
        self._in_place = self._host_table.device == self._packed.device
        if self._in_place:
            self._host = self._rows
        self._padding = padding
        self._sent = backend.event()
        self._sent.record()

    @property
    def token_ids(self) -> torch.Tensor:
        """[N]"""
        return self._rows["token_ids"]

    def beginning(self, size: int) -> dict[str, torch.Tensor]:
        """The inputs of a graph for `size` sequences."""
        return {
            **{name: tensor[:size] for name, tensor in self._rows.items()},
            "block_table": self._table_NB[:size],
            "query_start_loc": self._constants["query_start_loc"][: size + 1],
            "logits_indices": self._constants["logits_indices"][:size],
        }

    def fill(self, batch: RuntimeBatch, size: int) -> None:
        """The rows of `batch`, then padding up to `size`."""
        self._sent.synchronize()  # the last transfer has read the host's memory
        count, width = batch.block_table.shape
        for name, tensor in self._rows.items():
            host = self._host[name]
            values = host.numpy()
            values[:count] = getattr(batch, name)
            values[count:size] = self._padding.get(name, 0)
            if not self._in_place:
                tensor[:size].copy_(host[:size], non_blocking=True)
        if self._in_place:
            table = self._table_NB.numpy()
            table[:count, :width] = batch.block_table
            table[count:size, 0] = 0
            return
        packed = self._host_table[: count * width]
        packed.numpy()[:] = batch.block_table.reshape(-1)
        self._packed[: count * width].copy_(packed, non_blocking=True)
        self._table_NB[:count, :width].copy_(self._packed[: count * width].view(count, width))
        # Block 0 always exists; what stands further right in a row of padding is never read.
        self._table_NB[count:size, :1].zero_()
        self._sent.record()
