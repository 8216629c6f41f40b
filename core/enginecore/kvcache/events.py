"""Changes of the prefix index as events, in the order in which they happened. No transport here.

Hashes go out as the low 64 bits of the block's sha256 chain, which is the same in every process: two servers that hold
the same tokens under the same salt tell the same number.
"""

from __future__ import annotations

import msgspec

from enginecore.kvcache.block_pool import BlockObserver


class KVCacheEvent(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    """As msgpack, an array whose first member is the class's name."""


class BlockStored(KVCacheEvent):
    """Consecutive full blocks of one sequence. `parent_block_hash` is None where they begin it."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[int]


class AllBlocksCleared(KVCacheEvent):
    """Nothing that was stored before can be found any more."""


def short_hash(block_hash: bytes) -> int:
    return int.from_bytes(block_hash[-8:], "big")


class EventRecorder:
    """Collects events between two calls of `take`. Passes what the pool says on to `then`."""

    def __init__(self, block_size: int, then: BlockObserver) -> None:
        self._block_size = block_size
        self._then = then
        self._events: list[KVCacheEvent] = []

    def stored(self, block: int, block_hash: bytes) -> None:
        self._then.stored(block, block_hash)

    def removed(self, block: int, block_hash: bytes) -> None:
        self._then.removed(block, block_hash)
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved):
            last.block_hashes.append(short_hash(block_hash))
        else:
            self._events.append(BlockRemoved([short_hash(block_hash)]))

    def cleared(self) -> None:
        self._then.cleared()
        self._events.append(AllBlocksCleared())

    def blocks_stored(self, hashes: list[bytes], parent: bytes | None, token_ids: list[int]) -> None:
        """Blocks that can be found from now on, with their tokens, which `stored` is not told."""
        before = None if parent is None else short_hash(parent)
        shorts = [short_hash(block_hash) for block_hash in hashes]
        self._events.append(BlockStored(shorts, before, token_ids, self._block_size))

    def take(self) -> list[KVCacheEvent]:
        """What happened since the last call."""
        events, self._events = self._events, []
        return events
