"""Changes of the prefix index as events, in the order in which they happened. No transport here.

The classes, their members and the order of these are vLLM's (`vllm/distributed/kv_events.py`); what readers make of
them is taken from llm-d's (`llm-d-kv-cache`, `pkg/kvevents`): members at the end may be missing or unknown, a hash is a
number of 64 bits, a parent of 0 or nil begins a chain, and a BlockStored without tokens says that blocks known from
before are in another `medium` too.

Hashes go out as the low 64 bits of the block's sha256 chain, which is the same in every process: two servers that hold
the same tokens under the same salt tell the same number.
"""

from __future__ import annotations

import msgspec

from enginecore.kvcache.block_pool import BlockObserver


class KVCacheEvent(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    """As msgpack, an array whose first member is the class's name."""


#: Where a block is: on the device, whatever it is, or in host memory.
DEVICE, HOST = "GPU", "CPU"


class BlockStored(KVCacheEvent):
    """Consecutive full blocks of one sequence. `parent_block_hash` is None where they begin it.

    `extra_keys` has an entry for each block, None or a list of strings that are as much a part of its identity as the
    tokens are; readers add them to the keys that they compute, so that what is under a salt is no match for what is
    not. The string is derived from the salt and does not tell it.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = DEVICE
    lora_name: str | None = None
    extra_keys: list[list[str] | None] | None = None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[int]
    medium: str | None = DEVICE


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
        self._removed(block_hash, DEVICE)

    def _removed(self, block_hash: bytes, medium: str) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved) and last.medium == medium:
            last.block_hashes.append(short_hash(block_hash))
        else:
            self._events.append(BlockRemoved([short_hash(block_hash)], medium))

    def host_changed(self, block_hash: bytes, there: bool) -> None:
        """A block has come into host memory, or has left it."""
        if not there:
            self._removed(block_hash, HOST)
            return
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockStored) and last.medium == HOST:
            last.block_hashes.append(short_hash(block_hash))
        else:
            self._events.append(BlockStored([short_hash(block_hash)], None, [], self._block_size, medium=HOST))

    def cleared(self) -> None:
        self._then.cleared()
        self._events.append(AllBlocksCleared())

    def blocks_stored(
        self, hashes: list[bytes], parent: bytes | None, token_ids: list[int], *, adapter: str | None = None,
        adapter_id: int | None = None, salted_root: bytes | None = None,
    ) -> None:  # fmt: skip
        """Blocks that can be found from now on, with what `stored` is not told: their tokens, the adapter's name and
        which load of it, and the chain's root where it is under a salt."""
        before = None if parent is None else short_hash(parent)
        shorts = [short_hash(block_hash) for block_hash in hashes]
        extra: list[list[str] | None] | None = None
        if salted_root is not None and parent is None:
            extra = [[salted_root.hex()[:32]], *([None] * (len(hashes) - 1))]
        self._events.append(
            BlockStored(shorts, before, token_ids, self._block_size, adapter_id, lora_name=adapter, extra_keys=extra)
        )

    def take(self) -> list[KVCacheEvent]:
        """What happened since the last call."""
        events, self._events = self._events, []
        return events
