"""Batches for the simulated runtime, built as a runner would."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from enginecore.device import ModelSpec, RuntimeBatch

VOCAB = 1000


def spec(num_blocks: int = 32, block_size: int = 16, max_model_len: int = 256) -> ModelSpec:
    return ModelSpec(
        name="scripted", config={}, dtype="float32", vocab_size=VOCAB, max_model_len=max_model_len, max_num_seqs=8,
        num_blocks=num_blocks, block_size=block_size,
    )  # fmt: skip


@dataclass(frozen=True)
class Part:
    """Tokens `start` to `end` of one sequence, whose blocks are `blocks`. `wanted`: positions whose logits count."""

    tokens: list[int]
    blocks: list[int]
    start: int
    end: int
    wanted: tuple[int, ...] | None = None


def batch(parts: list[Part], block_size: int = 16) -> RuntimeBatch:
    positions = np.concatenate([np.arange(part.start, part.end) for part in parts])
    starts = np.cumsum([0] + [part.end - part.start for part in parts])
    block_table = np.full((len(parts), max(len(part.blocks) for part in parts)), -1, dtype=np.int32)
    for row, part in zip(block_table, parts, strict=True):
        row[: len(part.blocks)] = part.blocks
    owner = np.repeat(np.arange(len(parts)), np.diff(starts))
    wanted = [
        starts[i] + position - part.start
        for i, part in enumerate(parts)
        for position in (part.wanted if part.wanted is not None else (part.end - 1,))
    ]
    return RuntimeBatch(
        token_ids=np.concatenate([np.array(part.tokens[part.start : part.end], dtype=np.int64) for part in parts]),
        positions=positions,
        query_start_loc=starts.astype(np.int32),
        seq_lens=np.array([part.end for part in parts], dtype=np.int32),
        block_table=block_table,
        slot_mapping=block_table[owner, positions // block_size].astype(np.int64) * block_size + positions % block_size,
        logits_indices=np.array(wanted, dtype=np.int64),
        request_ids=[str(i) for i in range(len(parts))],
    )
