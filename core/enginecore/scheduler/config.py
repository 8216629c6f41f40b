"""What a scheduler is told once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from enginecore.kvcache.eviction import Evictor


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """`long_prefill_token_threshold` 0 means no cap a sequence; `watermark` is the share of blocks that admission
    leaves free for running sequences to grow into. `copies_blocks` says whether plans may ask for copies of blocks.
    `tenant_cache_floor` and `tenant_cache_cap` are shares of the blocks that a tenant's cached prefixes keep, and may
    take. `speculates`: whoever runs the plans guesses tokens. `max_loras` adapters may be in one batch (0: whoever runs
    the plans does not ask which)."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_blocks: int
    block_size: int
    prefix_caching: bool = True
    policy: Literal["fcfs", "priority", "fair"] = "fcfs"
    tenant_weights: tuple[tuple[str, float], ...] = ()
    tenant_cache_floor: float = 0.0
    tenant_cache_cap: float = 1.0
    long_prefill_token_threshold: int = 0
    watermark: float = 0.01
    seed: int = 0
    copies_blocks: bool = True
    max_loras: int = 0
    speculates: bool = False


def evictor_of(config: SchedulerConfig) -> Evictor:
    """The rule by which cached blocks go when blocks are needed."""
    cap = int(config.tenant_cache_cap * config.num_blocks)
    return Evictor(int(config.tenant_cache_floor * config.num_blocks), cap if cap < config.num_blocks else None)
