"""Block tables of sequences: prefix match, growth, fork with copy-on-write, release.

A sequence's table maps token position p to block `blocks[p // block_size]`, slot `p % block_size`:

    tokens   0 ........ 15 | 16 ....... 31 | 32 .. 37
    blocks   [7] shared    | [3] shared    | [9] own, 6 of 16 slots hold a token
    hashes   h0            | h1            | none until it is full
"""

from __future__ import annotations

from dataclasses import dataclass, field

from enginecore.kvcache.block_pool import BlockPool
from enginecore.kvcache.hashing import block_hashes, token_bytes
from enginecore.kvcache.partial import PartialIndex


@dataclass
class BlockTable:
    """The blocks of one sequence. `hashes` are identities of its full blocks so far, `root` the chain's parent.

    `num_published` full blocks have been offered to the prefix index. `may_share_tail` is set by a fork: writes must
    check whether the block they go to has another owner. `epoch` is the manager's at the time the blocks were taken.
    """

    root: bytes
    blocks: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    num_published: int = 0
    may_share_tail: bool = False
    epoch: int = 0
    tenant: str = ""


class KVCacheManager:
    """Hands out blocks of one pool to sequences. Counts prefix-cache queries and hits in tokens."""

    def __init__(self, pool: BlockPool, block_size: int, *, prefix_caching: bool) -> None:
        self.pool = pool
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.queries = 0
        self.hits = 0
        self._epoch = 0
        #: For matches that end inside a block. None where caching is off.
        self.partial = PartialIndex(pool) if prefix_caching and block_size > 1 else None

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def match(self, table: BlockTable, token_ids: list[int]) -> int:
        """Tokens at the start of `token_ids` whose blocks are cached. The last token never counts: it must be computed
        to have something to sample from. When it ends a cached block, the block is shared with the others all the same,
        and the token is computed without being written. Takes nothing; `attach` does."""
        if not self.prefix_caching:
            return 0
        if not table.hashes:
            table.hashes = block_hashes(table.root, token_ids, self.block_size)
        limit = self.num_shared(len(token_ids) - 1)
        lookup, found = self.pool.lookup, 0
        for block_hash in table.hashes[:limit]:
            if lookup(block_hash) is None:
                break
            found += 1
        return min(found * self.block_size, len(token_ids) - 1)

    def num_shared(self, num_tokens: int) -> int:
        """Whole blocks that a sequence shares when it takes over `num_tokens` computed tokens: all full ones, and that
        in which only the last token is missing, which is then computed without being written."""
        return (num_tokens + 1) // self.block_size if self.block_size > 1 else num_tokens

    def match_tail(self, table: BlockTable, token_ids: list[int], num_tokens: int) -> tuple[int, int]:
        """(block, number) of a cached block that begins with the next tokens after `num_tokens` matched ones, and how
        many, the last of `token_ids` aside; (-1, 0) where that is less than a quarter of a block, which is not worth a
        copy. Takes nothing."""
        size, least = self.block_size, -(-self.block_size // 4)
        end = min(len(token_ids) - 1, num_tokens + size)
        if self.partial is None or num_tokens % size or end - num_tokens < least:
            return -1, 0
        parent = table.hashes[num_tokens // size - 1] if num_tokens else table.root
        block, count = self.partial.find(parent, token_bytes(token_ids[num_tokens:end]))
        return (block, count) if count >= least else (-1, 0)

    def note(self, table: BlockTable, index: int, tokens: bytes) -> None:
        """The table's block `index` has just got its identity and holds these tokens (see `token_bytes`)."""
        if self.partial is not None:
            parent = table.hashes[index - 1] if index else table.root
            self.partial.note(table.blocks[index], parent, table.hashes[index], tokens)

    def attach(self, table: BlockTable, num_tokens: int, needed_blocks: int) -> bool:
        """Start a table with `num_tokens` matched tokens and fresh blocks up to `needed_blocks` in all; False (and
        nothing taken) when the pool has too few."""
        shared = [self.pool.lookup(block_hash) for block_hash in table.hashes[: self.num_shared(num_tokens)]]
        blocks = [block for block in shared if block is not None]
        self.pool.share(blocks)
        fresh = self.pool.allocate(needed_blocks - len(blocks))
        if fresh is None:
            self.pool.release(reversed(blocks))
            return False
        table.blocks = blocks + fresh
        table.num_published = len(blocks)
        table.epoch = self._epoch
        return True

    def can_attach(self, table: BlockTable, num_tokens: int, needed_blocks: int, spare: int) -> bool:
        """Whether `attach` would leave at least `spare` blocks. Matched blocks that nobody uses count as taken."""
        matched = table.hashes[: self.num_shared(num_tokens)]
        revived = 0
        for block_hash in matched:
            block = self.pool.lookup(block_hash)
            if block is not None and self.pool.is_cached_free(block):
                revived += 1
        return needed_blocks - len(matched) + revived + spare <= self.pool.num_free

    def can_attach_fork(self, num_tokens: int, needed_blocks: int, spare: int) -> bool:
        """Whether `attach_fork` would leave at least `spare` blocks."""
        return needed_blocks - self.num_shared(num_tokens) + spare <= self.pool.num_free

    def attach_fork(
        self, table: BlockTable, source: BlockTable, num_tokens: int, needed_blocks: int
    ) -> list[tuple[int, int]] | None:
        """Start a table with the first `num_tokens` tokens of a sequence in use: its full blocks shared (see
        `num_shared`), the partial last one to be copied, because both sequences will write there. Fresh blocks up to
        `needed_blocks` in all.

        Returns the (source, new) pairs that the device must copy; None (and nothing taken) when the pool has too few.
        """
        full = self.num_shared(num_tokens)
        fresh = self.pool.allocate(needed_blocks - full)
        if fresh is None:
            return None
        shared = source.blocks[:full]
        self.pool.share(shared)
        table.blocks = shared + fresh
        table.num_published = full
        table.epoch = source.epoch
        return [(source.blocks[full], fresh[0])] if num_tokens > full * self.block_size else []

    def count_query(self, num_tokens: int, num_hit: int) -> None:
        if self.prefix_caching:
            self.queries += num_tokens
            self.hits += num_hit

    def grow(self, table: BlockTable, needed_blocks: int) -> list[int] | None:
        """Blocks added so that the table has `needed_blocks`; None when the pool has too few."""
        fresh = self.pool.allocate(needed_blocks - len(table.blocks))
        if fresh is not None:
            table.blocks += fresh
        return fresh

    def publishes(self, table: BlockTable) -> bool:
        """Whether the table's new full blocks may be found by others: not when they were begun before a `reset`."""
        return self.prefix_caching and table.epoch == self._epoch

    def reset(self) -> int:
        """Forget every cached prefix; returns how many blocks were forgotten.

        Sequences keep their blocks, but what they have computed so far, and what builds on it, is not offered.
        """
        self._epoch += 1
        if self.partial is not None:
            self.partial.clear()
        return self.pool.reset_cache()

    def publish(self, table: BlockTable, new_token_ids: list[int], num_computed: int) -> list[int]:
        """Offer full, computed blocks to the prefix index. `new_token_ids` are the tokens of the full blocks that
        `table.hashes` does not cover yet. Returns the indices of those that were not there before."""
        if not self.publishes(table):
            return []
        if new_token_ids:
            parent = table.hashes[-1] if table.hashes else table.root
            table.hashes += block_hashes(parent, new_token_ids, self.block_size)
        full = num_computed // self.block_size
        set_hash, blocks, hashes = self.pool.set_hash, table.blocks, table.hashes
        stored = [i for i in range(table.num_published, full) if set_hash(blocks[i], hashes[i], table.tenant)]
        table.num_published = max(table.num_published, full)
        return stored

    def fork(self, table: BlockTable) -> BlockTable:
        """A second sequence with the same tokens: all blocks shared, the partial last one included."""
        self.pool.share(table.blocks)
        table.may_share_tail = True
        return BlockTable(
            table.root,
            list(table.blocks),
            list(table.hashes),
            table.num_published,
            may_share_tail=True,
            epoch=table.epoch,
            tenant=table.tenant,
        )

    def make_writable(self, table: BlockTable, first: int, last: int) -> list[tuple[int, int, int]] | None:
        """Before tokens at positions `first` to `last` are written: replace each block there that has another owner.

        Returns (index in the table, source block, new block) for each, to be copied by the device before the step;
        None when the pool has too few blocks (nothing changed).
        """
        if not table.may_share_tail:
            return []
        shared = [
            i
            for i in range(first // self.block_size, min(last // self.block_size + 1, len(table.blocks)))
            if self.pool.ref_count(table.blocks[i]) > 1
        ]
        fresh = self.pool.allocate(len(shared))
        if fresh is None:
            return None
        copies = []
        for i, new in zip(shared, fresh, strict=True):
            copies.append((i, table.blocks[i], new))
            self.pool.release([table.blocks[i]])
            table.blocks[i] = new
        behind = table.blocks[last // self.block_size + 1 :]
        table.may_share_tail = any(self.pool.ref_count(block) > 1 for block in behind)
        return copies

    def free(self, table: BlockTable) -> None:
        """Release all blocks; full ones that were published stay in the prefix index until evicted."""
        self.pool.release(reversed(table.blocks))
        table.blocks = []
        table.num_published = 0
        table.may_share_tail = False
