"""Two ways to run a step's model: our layers over a backend's kernels, or a backend's own whole-model runtime."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from enginecore.device import AttentionMetadata, Backend, ModelRuntime, RuntimeBatch
from enginecore.layers.lora import RowSlots
from enginecore.models.loader import Model
from enginecore.runner.transfers import Transfers


@dataclass(frozen=True)
class LateTokens:
    """Ids of `batch.token_ids` that only the device knows: at the places `index` [X] stand those that `last_S` has for
    `slots` [X]. All on the device."""

    index: torch.Tensor
    slots: torch.Tensor
    last_S: torch.Tensor

    def put_into(self, token_ids_T: torch.Tensor) -> None:
        token_ids_T.index_copy_(0, self.index, self.last_S[self.slots])


class StepModel(Protocol):
    def execute(self, batch: RuntimeBatch, late: LateTokens | None = None) -> torch.Tensor:
        """float32 logits [R, V] of `batch.logits_indices`, or int64 token ids [R] already chosen. `late` is given only
        where steps are planned ahead."""

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy KV block src to block dst for each (src, dst)."""

    def step_seconds(self) -> float | None:
        """How long the last step takes on a device whose time is modelled, None on any other."""

    @property
    def replayed(self) -> bool:
        """Whether the last step was the replay of a captured graph."""


class PagedModel:
    """A loaded model with its KV caches on a backend."""

    replayed = False

    def __init__(
        self, model: Model, backend: Backend, kv_caches: list[torch.Tensor], rows: RowSlots | None = None
    ) -> None:
        """`rows`: which adapter each row of a step has, where the model has adapters."""
        assert backend.attention is not None
        self._model = model
        self._attention = backend.attention
        #: How a step's arrays come to the device.
        self.transfers = Transfers(backend.torch_device())
        self._kv_caches = kv_caches
        self._rows = rows
        #: Reads the model from its files again and makes its caches; None where that cannot be had.
        self.reload: Callable[[], tuple[Model, list[torch.Tensor]]] | None = None

    @property
    def adapting(self) -> bool:
        """Whether the step that comes has rows with adapters: no graph was captured of such a step."""
        return self._rows is not None and self._rows.active

    @property
    def model(self) -> Model:
        return self._model

    def exchange(self, model: Model, kv_caches: list[torch.Tensor]) -> None:
        """Take another copy of the model. The list of caches stays the same object: others look into it, too."""
        self._model, self._kv_caches[:] = model, kv_caches

    def drop(self) -> None:
        """Let go of the model; nothing may be computed until `exchange`."""
        del self._model

    @property
    def kv_caches(self) -> list[torch.Tensor]:
        return self._kv_caches

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        self._attention.copy_blocks(self._kv_caches, pairs)

    def execute(self, batch: RuntimeBatch, late: LateTokens | None = None) -> torch.Tensor:
        query_start_loc, seq_lens, block_table, slot_mapping, token_ids_T, positions_T, logits_indices_R = (
            self.transfers.send(
                batch.query_start_loc,
                batch.seq_lens,
                batch.block_table,
                batch.slot_mapping,
                batch.token_ids,
                batch.positions,
                batch.logits_indices,
            )
        )
        metadata = AttentionMetadata(
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            block_table=block_table,
            slot_mapping=slot_mapping,
            max_query_len=int(np.diff(batch.query_start_loc).max()),
            max_seq_len=int(batch.seq_lens.max()),
        )
        if late is not None:
            late.put_into(token_ids_T)
        return self.forward(token_ids_T, positions_T, self._attention.build_metadata(metadata), logits_indices_R)

    def forward(
        self,
        token_ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        metadata: AttentionMetadata,
        logits_indices_R: torch.Tensor,
    ) -> torch.Tensor:
        """The step itself, on tensors of the device: float32 logits [R, V]."""
        return self._model.forward(token_ids_T, positions_T, metadata, self._kv_caches, logits_indices_R)

    def step_seconds(self) -> float | None:
        return None


class RuntimeModel:
    """A backend that runs whole models itself."""

    replayed = False

    def __init__(self, runtime: ModelRuntime) -> None:
        self._runtime = runtime

    def execute(self, batch: RuntimeBatch, late: LateTokens | None = None) -> torch.Tensor:
        assert late is None, "a runtime is given token ids that the host knows"
        return torch.from_numpy(self._runtime.execute(batch))

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        self._runtime.copy_blocks(pairs)

    def step_seconds(self) -> float | None:
        seconds: float | None = self._runtime.step_seconds()
        return seconds


def runtime_copies_blocks(runtime: ModelRuntime) -> bool:
    """Whether a runtime implements the optional `copy_blocks`."""
    return type(runtime).copy_blocks is not ModelRuntime.copy_blocks
