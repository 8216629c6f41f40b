"""What a device can do. Frozen, keyword-only, and unsupported unless claimed."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class VerdictStatus(str, Enum):
    SUPPORTED = "supported"
    UNSUPPORTED = "unsupported"
    UNVERIFIED = "unverified"


@dataclass(frozen=True)
class Verdict:
    """The answer to "can you run this?": a status and every reason, not the first."""

    status: VerdictStatus
    reasons: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self.status is not VerdictStatus.UNSUPPORTED

    @classmethod
    def of(cls, reasons: list[str], *, verified: bool = True) -> Verdict:
        if reasons:
            return cls(VerdictStatus.UNSUPPORTED, tuple(reasons))
        return cls(VerdictStatus.SUPPORTED if verified else VerdictStatus.UNVERIFIED)


class GraphSupport(str, Enum):
    """Which batches a device can capture and replay as a graph."""

    NEVER = "never"
    UNIFORM_SINGLE_TOKEN_DECODE = "uniform_single_token_decode"
    UNIFORM_BATCH = "uniform_batch"
    ALWAYS = "always"


class ShapePolicy(str, Enum):
    DYNAMIC = "dynamic"
    BUCKETS = "buckets"
    STATIC = "static"


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """Claims of a backend. An empty tuple or False means "no".

    Sizes: `block_sizes` in tokens; `head_sizes` in elements, as an inclusive (low, high, multiple_of) range or an
    explicit tuple in `head_size_list`; `max_gqa_ratio` is query heads over key-value heads, 0 for no GQA.
    `features` holds optional feature strings ("sliding_window", "soft_cap", "sinks", "alibi", "non_causal",
    "cross_attention", "mla"). A feature that is not in it is refused by the core on the plugin's behalf.
    `batch_invariant`: a token's results have the same bits whatever else is in its step and however its sequence is cut
    into steps. The core then guesses tokens by default, since that changes no answer.
    `asynchronous`: a step's work goes on after the calls that gave it to the device have returned, in their order; then
    `Backend.event` tells where it is and `MemoryManager.host_alloc_pinned` gives memory that copies need not wait for.
    The core plans the next step meanwhile, and gives it to the device before it asks for the result of the last.
    `max_world_size` is the largest group of ranks; `ranks_share_device`: several of them may use one device.
    """

    dtypes: frozenset[str] = frozenset()
    kv_dtypes: frozenset[str] = frozenset()
    quantizations: frozenset[str] = frozenset()
    block_sizes: frozenset[int] = frozenset()
    head_size_range: tuple[int, int, int] | None = None
    head_size_list: frozenset[int] = frozenset()
    max_gqa_ratio: int = 0
    features: frozenset[str] = frozenset()
    graph_support: GraphSupport = GraphSupport.NEVER
    shape_policy: ShapePolicy = ShapePolicy.DYNAMIC
    pinned_host: bool = False
    unified_memory: bool = False
    per_process_accounting: bool = False
    batch_invariant: bool = False
    asynchronous: bool = False
    max_world_size: int = 1
    ranks_share_device: bool = False
    isa: tuple[str, ...] = field(default=())

    def supports_head_size(self, head_size: int) -> bool:
        if head_size in self.head_size_list:
            return True
        if self.head_size_range is None:
            return False
        low, high, multiple = self.head_size_range
        return low <= head_size <= high and head_size % multiple == 0


@dataclass(frozen=True, kw_only=True)
class AttentionQuery:
    """One kind of attention layer that a model needs. dtypes are torch names without the prefix ("bfloat16")."""

    dtype: str
    kv_dtype: str
    head_size: int
    num_heads: int
    num_kv_heads: int
    block_size: int
    features: frozenset[str] = frozenset()


def check_attention(capabilities: Capabilities, query: AttentionQuery) -> list[str]:
    """All reasons why `capabilities` cannot serve `query`; empty when it can."""
    reasons = []
    if query.dtype not in capabilities.dtypes:
        reasons.append(f"dtype {query.dtype} is not one of {sorted(capabilities.dtypes)}")
    if query.kv_dtype not in capabilities.kv_dtypes:
        reasons.append(f"KV cache dtype {query.kv_dtype} is not one of {sorted(capabilities.kv_dtypes)}")
    if query.block_size not in capabilities.block_sizes:
        reasons.append(f"block size {query.block_size} is not one of {sorted(capabilities.block_sizes)}")
    if not capabilities.supports_head_size(query.head_size):
        allowed = capabilities.head_size_range or sorted(capabilities.head_size_list)
        reasons.append(f"head size {query.head_size} is outside {allowed}")
    if query.num_kv_heads <= 0 or query.num_heads % query.num_kv_heads:
        reasons.append(f"{query.num_heads} query heads are not a multiple of {query.num_kv_heads} key-value heads")
    elif query.num_heads // query.num_kv_heads > max(1, capabilities.max_gqa_ratio):
        ratio = query.num_heads // query.num_kv_heads
        reasons.append(f"GQA ratio {ratio} is above {max(1, capabilities.max_gqa_ratio)}")
    unknown = sorted(query.features - capabilities.features)
    if unknown:
        reasons.append("features not supported: " + ", ".join(unknown))
    return reasons
