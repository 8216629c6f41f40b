"""Prefix matches that end inside a block: cached blocks by the block that they follow.

A hash finds a block only when all its tokens agree. This index also knows the tokens of each cached block, under the
identity of the block before it, so that a prompt that leaves a known one in the middle of a block can copy that block
and go on from the token where they part. The identity before carries salt and adapter: nothing is found across them.

An entry is valid while its block still has the identity that it was noted with, which is checked when it is found.
There is one for each block of the pool at most, and a lookup looks at the `MAX_LOOKED_AT` newest entries only.
"""

from __future__ import annotations

from enginecore.kvcache.block_pool import BlockPool

#: Blocks that follow the same prefix and are compared: lookups stay cheap when thousands share a system prompt.
MAX_LOOKED_AT = 8
_ID_BYTES = 4


class PartialIndex:
    """Cached blocks of `pool` and their tokens, as unsigned 32-bit ids in a row. `note` each block when it gets its
    identity."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        #: Identity before -> block -> (identity, tokens), in the order of noting.
        self._followers: dict[bytes, dict[int, tuple[bytes, bytes]]] = {}
        self._parent_of: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._parent_of)

    def note(self, block: int, parent: bytes, block_hash: bytes, tokens: bytes) -> None:
        """A full block got its identity. What the block held before is forgotten."""
        self._drop(block)
        self._parent_of[block] = parent
        self._followers.setdefault(parent, {})[block] = (block_hash, tokens)

    def find(self, parent: bytes, tokens: bytes) -> tuple[int, int]:
        """(block, how many of its first tokens are those of `tokens`) of the best follower of `parent` that is cached;
        (-1, 0) when there is none."""
        followers = self._followers.get(parent)
        if not followers:
            return -1, 0
        best, most, stale = -1, 0, []
        for looked_at, (block, (block_hash, known)) in enumerate(reversed(followers.items())):
            if looked_at == MAX_LOOKED_AT or most == len(tokens):
                break
            if self._pool.hash_of(block) != block_hash:
                stale.append(block)
            elif known[: most + _ID_BYTES] == tokens[: most + _ID_BYTES]:  # it agrees further than the best so far
                best, most = block, _agreement(known, tokens, most)
        for block in stale:
            self._drop(block)
        return best, most // _ID_BYTES

    def clear(self) -> None:
        self._followers.clear()
        self._parent_of.clear()

    def _drop(self, block: int) -> None:
        parent = self._parent_of.pop(block, None)
        if parent is not None:
            followers = self._followers[parent]
            del followers[block]
            if not followers:
                del self._followers[parent]


def _agreement(known: bytes, tokens: bytes, count: int) -> int:
    """Bytes of the first tokens that agree, at least `count`."""
    limit = min(len(known), len(tokens))
    while count < limit and known[count : count + _ID_BYTES] == tokens[count : count + _ID_BYTES]:
        count += _ID_BYTES
    return count
