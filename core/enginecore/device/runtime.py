"""The whole-model part of the contract (an optional slot): for accelerators that compile models and for `sim`.

A backend with a runtime runs the model itself; scheduling, cache bookkeeping, sampling policy and outputs stay the
core's.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from enginecore.device.contract import Contract, optional

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """The model as a runtime sees it: its name, its configuration as plain data, and the sizes the core settled on.

    `num_blocks` is 0 as long as it is not settled, which is when `memory_plan` is asked.
    """

    name: str
    config: dict[str, Any]
    dtype: str
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    num_blocks: int
    block_size: int
    max_num_batched_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class RuntimeMemory:
    """Bytes on the device: of the weights, of everything else that the largest step needs, and of one KV block."""

    weight_bytes: int
    activation_bytes: int
    block_bytes: int


@dataclass(frozen=True, kw_only=True)
class RuntimeBatch:
    """One step for a `ModelRuntime`, as host arrays.

    token_ids [T], positions [T], query_start_loc [S + 1], seq_lens [S], block_table [S, B], slot_mapping [T];
    logits_indices [R]: tokens whose logits are wanted; request_ids names the S sequences.
    """

    token_ids: np.ndarray
    positions: np.ndarray
    query_start_loc: np.ndarray
    seq_lens: np.ndarray
    block_table: np.ndarray
    slot_mapping: np.ndarray
    logits_indices: np.ndarray
    request_ids: list[str] = field(default_factory=list)


class ModelRuntime(Contract):
    @abstractmethod
    def load(self, spec: ModelSpec, weights: Any) -> None: ...

    @abstractmethod
    def execute(self, batch: RuntimeBatch) -> np.ndarray:
        """float32 logits [R, vocab] for `batch.logits_indices`, or int64 token ids [R] already chosen."""

    @optional
    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Optional. Copy KV block src to block dst for each (src, dst), before the next `execute`. The core asks only a
        runtime that implements it; with others a sequence recomputes what it cannot share whole."""
        raise NotImplementedError("this runtime does not copy blocks")

    @optional
    def export_block(self, block: int) -> bytes:
        """Optional. The bytes of one KV block, as many for each, for the tiers below the device. Called after `load`,
        from a thread of its own, while `execute` may be writing other blocks. The core keeps blocks in host memory and
        on disk only for a runtime that implements this and `import_block`."""
        raise NotImplementedError("this runtime does not give out blocks")

    @optional
    def import_block(self, block: int, data: bytes) -> None:
        """Optional. Make a KV block what `export_block` gave."""
        raise NotImplementedError("this runtime does not take blocks")

    @abstractmethod
    def memory_bytes(self) -> int: ...

    @optional
    def model_config(self, name: str) -> dict[str, Any] | None:
        """Optional. The config.json of a model that this runtime brings itself, as plain data; None when it has none of
        that name, and the core looks for files."""
        return None

    @optional
    def memory_plan(self, spec: ModelSpec) -> RuntimeMemory | None:
        """Optional. What `spec` will take, before it is loaded: the core then sizes the cache from its memory budget.
        None when blocks cost nothing that counts."""
        return None

    @optional
    def step_seconds(self) -> float | None:
        """Optional. On a device that is a model of one, how long the last step takes there (0 before the first): the
        engine's clock spends it. None on a device whose steps take the time they take."""
        return None
