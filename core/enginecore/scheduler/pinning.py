"""The scheduler's part that keeps prefixes cached for a time, for operators and for requests that ask for it."""

from __future__ import annotations

from typing import Any

from enginecore.kvcache import BlockPool, block_hashes, root_hash
from enginecore.scheduler.sequence import Sequence
from enginecore.scheduler.sharing import Sharing

#: What the names of pins that requests make begin with.
OF_REQUEST = "prefix-"


def prefix_name(token_ids: list[int], cache_salt: str | None) -> str:
    """What an operator's pin of a prefix is called: the same for the same prefix."""
    whole = block_hashes(root_hash(cache_salt), token_ids, len(token_ids)) if token_ids else [root_hash(cache_salt)]
    return f"pin-{whole[0].hex()[:32]}"


class Pinning(Sharing):
    """A base of `Scheduler`, which owns what is named here."""

    pool: BlockPool

    def pin(
        self, name: str, token_ids: list[int], seconds: float, cache_salt: str | None = None,
        adapter: tuple[str, int] | None = None,
    ) -> dict[str, Any] | None:  # fmt: skip
        """Keep the full blocks of a prefix for so long, from now on; they need not be computed yet. Under a name that
        is known already the time begins anew. None when too many blocks are pinned."""
        hashes = block_hashes(root_hash(cache_salt, adapter), token_ids, self.config.block_size)
        ends = self.journal.clock() + seconds
        if not self.pool.pin(name, hashes, ends):
            return None
        return self._told(name)

    def unpin(self, name: str) -> bool:
        """End a pin at once; False when there is none of that name."""
        self.pool.expire_pins(self.journal.clock())
        return self.pool.unpin(name)

    def list_pins(self) -> list[dict[str, Any]]:
        """The pins there are, those that end first before others."""
        self.pool.expire_pins(self.journal.clock())
        return [self._told(pin.name) for pin in self.pool.pins.all()]

    def _told(self, name: str) -> dict[str, Any]:
        pin = self.pool.pins.get(name)
        assert pin is not None
        cached = sum(self.pool.lookup(block_hash) is not None for block_hash in pin.hashes)
        return {
            "id": name,
            "tokens": len(pin.hashes) * self.config.block_size,
            "blocks": len(pin.hashes),
            "cached_blocks": cached,
            "seconds_left": max(0.0, pin.ends - self.journal.clock()),
        }

    def _pin_prefix(self, sequence: Sequence) -> None:
        """What an admitted request asks to be kept. When too much is pinned already, it is cached like all else."""
        wanted = sequence.request.pin_prefix
        if wanted is None or not self.config.prefix_caching:
            return
        table, size = sequence.table, self.config.block_size
        count = min(wanted[0], sequence.num_prompt) // size
        if not table.hashes:
            table.hashes = block_hashes(table.root, sequence.token_ids, size)
        if count > 0 and wanted[1] > 0:
            name = OF_REQUEST + table.hashes[count - 1].hex()[:32]
            self.pool.pin(name, table.hashes[:count], self.journal.clock() + wanted[1], sequence.tenant)
